"""Batches of samples of like lengths, in an order that can be resumed anywhere."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.core.checks import check_count
from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.order import Indices
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation

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
        """Take note of the lengths.

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
        self._lengths = np.asarray(
            lengths
            if isinstance(lengths, Sequence) or hasattr(lengths, "__array__")
            else []
        )
        if (
            self._lengths.ndim != 1
            or self._lengths.dtype.kind not in "iu"
            or not len(self._lengths)
        ):
            raise ArgumentError(
                f"lengths must be an array of ints or a list, one for each sample, got {type(lengths).__name__} of "
                f"{self._lengths.dtype}, shape {list(self._lengths.shape)}. Make it once, for instance "
                "[len(sample) for sample in dataset], and keep it in a file."
            )
        if int(self._lengths.min()) < 0:
            raise ArgumentError(
                f"lengths must be 0 or more, got {int(self._lengths.min())}."
            )
        if (batch_size is None) == (max_tokens is None):
            raise ArgumentError(
                f"give either batch_size or max_tokens, got batch_size={batch_size} and max_tokens={max_tokens}."
            )
        sizes = {
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "window": window,
            "multiple_of": multiple_of,
        }
        for name, value in sizes.items():
            if value is not None:
                check_count(name, value)
        if batch_size is not None and batch_size % multiple_of:
            raise ArgumentError(
                f"batch_size={batch_size} must be a multiple of multiple_of={multiple_of}."
            )
        unit = batch_size or multiple_of
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        """The epoch that the next iteration serves; `set_epoch` sets it."""
        self._max_tokens = max_tokens
        self._multiple_of = multiple_of
        self._window = -(-window // unit) * unit
        self._seed = seed
        self._position = (0, 0)
        """Window, and batch in it, of the next batch."""
        self._num_batches: dict[int, int] = {}
        """Number of batches of an epoch in which they hold tokens, once it was asked for."""
        self._settings = {
            **sizes,
            "window": self._window,
            "seed": seed,
            "drop_last": drop_last,
        }
        """What the order depends on, besides the epoch and the lengths."""

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
            for number, batch in enumerate(self._batches(self.epoch, window)):
                if window > first_window or number >= first_batch:
                    self._position = (window, number + 1)
                    yield batch.tolist()
        self.set_epoch(self.epoch + 1)

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        checksum = zlib.crc32(np.ascontiguousarray(self._lengths, np.int64).data)
        return {
            **self._settings,
            "lengths": f"{len(self._lengths)}, CRC {checksum:08x}",
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on: JSON-able."""
        window, batch = self._position
        settings = dict(self._fingerprint)
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "window": window,
            "batch": batch,
            "settings": settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Args:
            state: A result of `state_dict`.

        Raises:
            StateError: It is not such a state, or is of a sampler with other lengths or settings.
        """
        own = self.state_dict()
        if (
            not isinstance(state, Mapping)
            or set(state) != set(own)
            or state["version"] != VERSION
        ):
            raise StateError(
                f"state must be what BucketBatchSampler.state_dict() returned, got {state!r}."
            )
        saved = state["settings"]
        changes = [
            f"{name}: saved {saved.get(name)}, now {value}"
            for name, value in own["settings"].items()
            if saved.get(name) != value
        ]
        if changes:
            raise StateError(
                f"state is of a BucketBatchSampler with another order ({', '.join(changes)}), so its position holds "
                "other samples here. Give it the same lengths and settings, or begin a new epoch without this state."
            )
        self.epoch = state["epoch"]
        self._position = (state["window"], state["batch"])

    def _batches(self, epoch: int, window: int) -> list[Indices]:
        """Return the batches of a window, in their order."""
        begin = window * self._window
        positions = np.arange(
            begin, min(begin + self._window, len(self._lengths)), dtype=np.int64
        )
        samples = Permutation(
            len(self._lengths), derive_key("buckets", self._seed, epoch, size=64)
        )(positions)
        batches = self._cut(samples[np.argsort(self._lengths[samples], kind="stable")])
        short = []
        if len(batches[-1]) % (
            self.batch_size or self._multiple_of
        ):  # only in the last window
            short = [batches.pop()]
        if batches:
            key = derive_key("bucket batches", self._seed, epoch, window, size=64)
            order = Permutation(len(batches), key)(
                np.arange(len(batches), dtype=np.int64)
            )
            batches = [batches[number] for number in order]
        return batches if self.drop_last else batches + short

    def _cut(self, samples: Indices) -> list[Indices]:
        """Cut samples, sorted by their lengths, into batches."""
        batches = []
        lengths = self._lengths[samples].astype(np.int64)
        begin = 0
        while begin < len(samples):
            end = begin + (
                self.batch_size or self._num_samples_of_tokens(lengths[begin:])
            )
            batches.append(samples[begin:end])
            begin = end
        return batches

    def _num_samples_of_tokens(self, lengths: npt.NDArray[np.int64]) -> int:
        """Return how many of the next samples, sorted by their lengths, are a batch of at most `max_tokens`."""
        assert self._max_tokens is not None
        # A batch of n samples has n times the length of its last one.
        most = int(
            np.count_nonzero(
                lengths * np.arange(1, len(lengths) + 1) <= self._max_tokens
            )
        )
        return max(self._multiple_of, most // self._multiple_of * self._multiple_of)
