"""Batches of samples of like lengths, in an order that can be resumed anywhere."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.core.checks import check_count, check_lengths
from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.order import Indices
from paddle_shard.plan.shuffle import permutation

VERSION = 2


class BucketBatchSampler:
    """Batches of samples of like lengths, for data that is padded to the longest sample of its batch.

    The samples are shuffled by (seed, epoch). Each window of them is sorted by length and cut into batches, which are
    then shuffled. So every sample is drawn once an epoch, and a batch holds lengths of one window that follow each
    other. A resume costs O(1): only the window of the position is computed. Give it to a `paddle.io.DataLoader` as its
    `batch_sampler`; all ranks draw alike from it, and each takes its rows.

    Examples:
        >>> sampler = BucketBatchSampler([5, 1, 4, 2, 6, 3], batch_size=2)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 4], [1, 3], [2, 5]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any],
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        window: int = 8192,
        multiple_of: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Store the lengths.

        Args:
            lengths: The length of each sample.
            batch_size: Samples of a batch: of the global batch, over all data ranks.
            max_tokens: Instead of `batch_size`: most tokens of a batch, padding included. A sample that is longer than
                this is a batch of its own, with `multiple_of - 1` others at most.
            window: Samples that are sorted together, rounded up to whole batches. A larger window leaves less padding;
                a smaller one mixes more.
            multiple_of: Batches hold a multiple of so many samples, except for the last one of the epoch, which the
                loader's `tail` pads or drops. Use the number of data ranks with `max_tokens`.
            seed: Seed of the order.
            drop_last: True to leave out the last batch of the epoch if it is not full.

        Raises:
            ArgumentError: An argument is out of range, or both sizes or none are given.
        """
        self._lengths = check_lengths(lengths)
        if (batch_size is None) == (max_tokens is None):
            raise ArgumentError(
                f"give either batch_size or max_tokens, got batch_size={batch_size} and max_tokens={max_tokens}."
            )
        name = "batch_size" if max_tokens is None else "max_tokens"
        check_count(name, max_tokens if batch_size is None else batch_size)
        check_count("window", window)
        unit = batch_size or check_count("multiple_of", multiple_of)
        if unit % multiple_of:
            raise ArgumentError(
                f"batch_size={batch_size} must be a multiple of multiple_of={multiple_of}."
            )
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        """The epoch that the next iteration serves; `set_epoch` sets it."""
        self._max_tokens = max_tokens
        self._window = -(-window // unit) * unit
        self._seed = seed
        self._position = (0, 0)
        """Window, and batch in it, of the next batch."""
        self._num_batches: dict[int, int] = {}
        """Number of batches of an epoch whose batches are measured in tokens, once it was computed."""
        self._unit = unit
        """A batch holds a multiple of so many samples, but for the last one of the epoch."""
        self._settings = {
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "window": self._window,
            "multiple_of": multiple_of,
            "seed": seed,
            "drop_last": drop_last,
        }
        """The settings on which the order depends, besides the epoch and the lengths."""

    def __deepcopy__(self, memo: dict[int, Any]) -> BucketBatchSampler:
        """Return a copy with a position of its own; the lengths, which never change, are shared."""
        return copy.copy(self)

    @property
    def num_samples(self) -> int:
        """Number of samples whose lengths are known."""
        return len(self._lengths)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins at its first batch.

        Args:
            epoch: 0 or more.
        """
        self.epoch = int(epoch)
        self._position = (0, 0)

    def __len__(self) -> int:
        """Return the number of batches of the epoch."""
        if self.batch_size is not None:
            full, rest = divmod(len(self._lengths), self.batch_size)
            return full + (rest > 0 and not self.drop_last)
        if self.epoch not in self._num_batches:
            self._num_batches = {
                self.epoch: sum(
                    len(self._batches(self.epoch, window))
                    for window in self._windows(0)
                )
            }
        return self._num_batches[self.epoch]

    def _windows(self, first: int) -> range:
        return range(first, -(-len(self._lengths) // self._window))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches from the present position on; the next iteration serves the next epoch."""
        first_window, first_batch = self._position
        for window in self._windows(first_window):
            batches = self._batches(self.epoch, window)
            for number in range(first_batch, len(batches)):
                self._position = (window, number + 1)
                yield batches[number].tolist()
            first_batch = 0
        self.set_epoch(self.epoch + 1)

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        checksum = zlib.crc32(
            np.ascontiguousarray(self._lengths, np.int64).data
        )
        lengths = f"{len(self._lengths)}, CRC {checksum:08x}"
        return {**self._settings, "lengths": lengths}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on: JSON-able."""
        window, batch = self._position
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "window": window,
            "batch": batch,
            "settings": dict(self._fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Args:
            state: A result of `state_dict`.

        Raises:
            StateError: It is not such a state, or is of a sampler with other lengths or settings.
        """
        order = {"version": VERSION, "settings": self._fingerprint}
        if not isinstance(state, Mapping) or not order.items() <= state.items():
            raise StateError(
                f"state must be of a BucketBatchSampler with {order}, got {state!r}. Give it the lengths and settings "
                "of that sampler, or begin a new epoch without this state."
            )
        self.epoch = state["epoch"]
        self._position = (state["window"], state["batch"])

    def _batches(self, epoch: int, window: int) -> list[Indices]:
        """Return the batches of a window, in their order."""
        num_samples = len(self._lengths)
        begin = window * self._window
        end = min(begin + self._window, num_samples)
        order = permutation(num_samples, "buckets", self._seed, epoch)
        samples = order(np.arange(begin, end))
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        batches = self._cut(samples)
        # Only the last window has a batch that is not full. It stays the last one.
        short = [batches.pop()] if len(batches[-1]) % self._unit else []
        if batches:
            purpose = ("bucket batches", self._seed, epoch, window)
            mixed = permutation(len(batches), *purpose)(np.arange(len(batches)))
            batches = [batches[number] for number in mixed]
        return batches if self.drop_last else batches + short

    def _cut(self, samples: Indices) -> list[Indices]:
        """Cut samples, sorted by their lengths, into batches."""
        batches = []
        lengths = self._lengths[samples].astype(np.int64)
        while len(samples):
            num = self._unit
            if self._max_tokens is not None:
                # A batch of n samples has n times the length of its last one.
                sizes = lengths * np.arange(1, len(lengths) + 1)
                most = int(np.count_nonzero(sizes <= self._max_tokens))
                num = max(num, most - most % num)
            batches.append(samples[:num])
            samples = samples[num:]
            lengths = lengths[num:]
        return batches
