"""`Blocks`: a shuffle that keeps together what lies together on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from paddle_shard.core.checks import check_count
from paddle_shard.plan.order import (
    Fingerprint,
    Indices,
    Order,
    Ordering,
    groups_by_key,
)
from paddle_shard.plan.parts import choose_num_parts
from paddle_shard.plan.shuffle import Permutation, permutation

TABLE = 8192
"""Positions of a window that are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Ordering):
    """A shuffle for data on disk: whole blocks in random order, and their samples mixed a few blocks at a time.

    A full shuffle opens another block for almost every sample. Here, the epoch's random order of the blocks is
    cut into equal parts. Each data rank reads its parts one `window` after the other, and only the samples of
    a window are mixed. `BlockOrder` states the guarantees.

    Attributes:
        size: Consecutive samples that lie together on disk: a chunk, a page, a row group. At least 1.
        window: Blocks whose samples are mixed, at least 1. More blocks mix better; a reader should keep that many open.

    Examples:
        >>> Blocks(size=512)
        Blocks(size=512, window=8)
    """

    name = "blocks"

    size: int = 1024
    window: int = 8

    def __post_init__(self) -> None:
        for name, meaning in (
            (
                "size",
                "samples in a block on disk, or the data set's block_size",
            ),
            ("window", "blocks that are mixed"),
        ):
            count = check_count(
                f"Blocks: {name}", getattr(self, name), meaning=meaning
            )
            object.__setattr__(self, name, count)

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """Return the order of an epoch; a loader calls it.

        Args:
            length: Number of samples.
            seed: Seed of the run.
            epoch: The epoch, any int.
            width: Rows of a micro-batch.
        """
        return _block_order(length, self, width, seed, epoch)

    def fingerprint(
        self, *, num_data_ranks: int, accumulation: int
    ) -> Fingerprint:
        """Return what a saved state stores about the order; a loader calls it.

        Args:
            num_data_ranks: Not used: the order does not depend on it.
            accumulation: Micro-batches in a global batch.
        """
        return {
            "block_size": self.size,
            "window": self.window,
            "accumulation": accumulation,
        }

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> Blocks:
        """Return the `Blocks` of a saved state; a loader calls it.

        Args:
            fingerprint: See `fingerprint`.
        """
        return cls(size=fingerprint["block_size"], window=fingerprint["window"])

    def for_dataset(self, dataset: Any) -> Blocks:
        """Return a `Blocks` with the block size of a data set on disk; a loader calls it.

        Args:
            dataset: The data set; its `block_size` is used if it has one.

        Raises:
            ArgumentError: Its `block_size` is not an int >= 1.
        """
        size = getattr(dataset, "block_size", self.size)
        return Blocks(size=size, window=self.window)


class BlockOrder(Order):
    """A bijection of [0, n): blocks in the order of a permutation, cut into P parts, mixed within windows.

    Row r of every whole micro-batch of `width` rows comes from part r // (width / P), and each part is read
    from its beginning to its end. So if batches are whole and D data ranks divide P, they share at most D - 1
    blocks: those that a border between two data ranks cuts. Every other block is opened by one data rank,
    during one window of one part. (A border cuts another block in each epoch, always at the same place.)
    P is the largest divisor of `width` up to 64 and the number of blocks. It does not depend on the mesh.

    A position belongs to a place. Places number the samples of the blocks end to end, in the random order of the
    blocks, and are cut into parts. The place of a position is mixed with the others of its window and part. The
    mixed place determines the block, and the sample in it.

    The setup time does not depend on n. At most 2 P tables of 8192 numbers are kept, for any size of a window:
    8 MB for 64 parts.
    """

    def __init__(
        self,
        num_samples: int,
        blocks: Blocks,
        width: int,
        seed: int,
        epoch: int,
    ) -> None:
        """Set up the order of an epoch.

        Args:
            num_samples: n, in [1, 2^62].
            blocks: The size of a block, and how many blocks are mixed.
            width: Rows of a micro-batch; the order depends on it.
            seed: Seed of the run.
            epoch: The epoch, any int.
        """
        super().__init__(num_samples)
        self._seed = seed
        self._epoch = epoch
        # With K whole rows of `width` = P * c positions and a rest, a part has K * c places and its share of the rest.
        parts = choose_num_parts(width, -(-num_samples // blocks.size))
        rows, rest = divmod(num_samples, width)
        self.num_parts = parts
        self.width = width
        self._share = width // parts
        self._whole = rows * width
        self._in_rows = rows * self._share
        # [part]: start of its share of the rest, counted from the start of the rest; P + 1 numbers
        borders = np.arange(parts + 1)
        self._rests = borders * rest // parts
        self._starts = borders * self._in_rows + self._rests
        # Each slot holds a block; the short last block may be in any of them.
        self._size = min(blocks.size, num_samples)
        self._num_blocks = -(-num_samples // self._size)
        self._window = min(blocks.window, self._num_blocks)
        self._blocks = permutation(self._num_blocks, "blocks", seed, epoch)
        last_block = np.array(self._num_blocks - 1)
        self._short = int(self._blocks.inverse(last_block))
        self._gap = self._num_blocks * self._size - num_samples
        # From here on, blocks after the short one begin `gap` places earlier than slot * size.
        self._short_end = (self._short + 1) * self._size - self._gap
        self._table = lru_cache(maxsize=2 * parts)(self._draw)

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position: int64, same shape."""
        flat = positions.reshape(-1)
        row, column = np.divmod(flat, self.width)
        part = column // self._share
        place = row * self._share + column % self._share
        late = np.flatnonzero(flat >= self._whole)
        if late.size:
            beyond = flat[late] - self._whole
            part[late] = np.searchsorted(self._rests, beyond, side="right") - 1
            place[late] = self._in_rows + beyond - self._rests[part[late]]
        place += self._starts[part]
        window, offset = self._offsets(part, place)
        table, place_in_table = np.divmod(offset, TABLE)
        samples: Indices = np.empty_like(place)
        for chosen, key in groups_by_key(part, window, table):
            samples[chosen] = self._table(*key)[place_in_table[chosen]]
        return samples.reshape(positions.shape)

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample: int64, same shape."""
        block, within = np.divmod(samples.reshape(-1), self._size)
        mixed = self._start(self._blocks.inverse(block)) + within
        ends_before = np.searchsorted(self._starts, mixed, side="right")
        part = ends_before.astype(np.int64) - 1
        window, offset = self._offsets(part, mixed)
        place = mixed - offset
        for chosen, key in groups_by_key(part, window):
            place[chosen] += self._mixing(*key)[1].inverse(offset[chosen])
        place -= self._starts[part]
        row, column = np.divmod(place, self._share)
        early = row * self.width + part * self._share + column
        late = self._whole + self._rests[part] + place - self._in_rows
        positions = np.where(place < self._in_rows, early, late)
        return positions.reshape(samples.shape)

    def between(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop)."""
        # No more than is needed: with small blocks, each needs a table of its own.
        return self(np.arange(start, stop))

    def _start(self, slot: Indices) -> Indices:
        """Return the first place of each slot."""
        is_after_short = slot > self._short
        return slot * self._size - self._gap * is_after_short

    def _slot(self, places: Indices) -> Indices:
        """Return the slot of each place."""
        is_after_short = places >= self._short_end
        return (places + self._gap * is_after_short) // self._size

    def _offsets(
        self, part: Indices, place: Indices
    ) -> tuple[Indices, Indices]:
        """Return the window of each place, and the offset of the place in the window, which is cut to the part."""
        window = self._slot(place) // self._window
        first_of_window = self._start(window * self._window)
        first = np.maximum(first_of_window, self._starts[part])
        return window, place - first

    def _mixing(self, part: int, window: int) -> tuple[int, Permutation]:
        """Return the first place of a window that lies in a part, and the order of its places there."""
        slots = np.array([window, window + 1]) * self._window
        places = self._start(np.minimum(slots, self._num_blocks))
        first, end = np.clip(places, *self._starts[part : part + 2]).tolist()
        purpose = ("window", self._seed, self._epoch, part, window)
        return first, permutation(end - first, *purpose)

    def _draw(self, part: int, window: int, number: int) -> Indices:
        """Return one table of a window's samples, in their mixed order."""
        first, mixing = self._mixing(part, window)
        stop = min((number + 1) * TABLE, mixing.length)
        places = first + mixing(np.arange(number * TABLE, stop))
        slots = self._slot(places)
        # A block has many places here: each is computed once.
        distinct, numbers = np.unique(slots, return_inverse=True)
        return (
            self._blocks(distinct)[numbers] * self._size
            + places
            - self._start(slots)
        )


_block_order = lru_cache(maxsize=4)(BlockOrder)
"""Kept, with the tables that were computed last."""
