"""How are samples of like lengths put into one batch, in an order that can be resumed anywhere?"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.checks import check_count
from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError
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
            ArgumentTypeError: `lengths` is no array and no list.
        """
        if not isinstance(lengths, Sequence | np.ndarray) and not hasattr(lengths, "__array__"):
            raise ArgumentTypeError(
                f"lengths must be an array or a list of ints, one for each sample, got {type(lengths).__name__}. Of a "
                "data set, make it once, for instance [len(sample) for sample in dataset], and keep it in a file."
            )
        self._lengths = np.asarray(lengths)
        if self._lengths.ndim != 1 or self._lengths.dtype.kind not in "iu" or not len(self._lengths):
            raise ArgumentError(
                f"lengths must be an array of ints, one for each sample, got {self._lengths.dtype} of shape "
                f"{list(self._lengths.shape)}."
            )
        if int(self._lengths.min()) < 0:
            raise ArgumentError(f"lengths must be 0 or more, got {int(self._lengths.min())}.")
        if (batch_size is None) == (max_tokens is None):
            raise ArgumentError(
                f"give either batch_size or max_tokens, got batch_size={batch_size} and max_tokens={max_tokens}."
            )
        sizes = {"batch_size": batch_size, "max_tokens": max_tokens, "window": window, "multiple_of": multiple_of}
        for name, value in sizes.items():
            if value is not None:
                check_count(name, value)
        if batch_size is not None and batch_size % multiple_of:
            raise ArgumentError(f"batch_size={batch_size} must be a multiple of multiple_of={multiple_of}.")
        unit = batch_size or multiple_of
        window = -(-window // unit) * unit
        self.batch_size, self.drop_last = batch_size, drop_last
        self.epoch = 0
        """The epoch that the next iteration serves; `set_epoch` sets it."""
        self._max_tokens, self._window, self._multiple, self._seed = max_tokens, window, multiple_of, seed
        self._at = (0, 0)
        self._counts: tuple[int, int] | None = None
        self._settings: dict[str, Any] = {**sizes, "window": window, "seed": seed, "drop_last": drop_last}
        """All that the order depends on, besides the epoch."""

    def __deepcopy__(self, memo: dict[int, Any]) -> BucketBatchSampler:
        """Return a copy with a position of its own; the lengths, which never change, are shared."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    @property
    def num_samples(self) -> int:
        """Number of samples whose lengths are known."""
        return len(self._lengths)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins at its first batch.

        Args:
            epoch: 0 or more.
        """
        self.epoch, self._at = int(epoch), (0, 0)

    def __len__(self) -> int:
        """Return the number of batches of the epoch."""
        if self.batch_size is not None:
            full, rest = divmod(len(self._lengths), self.batch_size)
            return full + (rest > 0 and not self.drop_last)
        if self._counts is None or self._counts[0] != self.epoch:
            windows = range(-(-len(self._lengths) // self._window))
            self._counts = self.epoch, sum(len(self._batches(window)) for window in windows)
        return self._counts[1]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches from the present position on; the next iteration serves the next epoch."""
        first, skipped = self._at
        for window in range(first, -(-len(self._lengths) // self._window)):
            batches = self._batches(window)
            for number in range(skipped if window == first else 0, len(batches)):
                self._at = (window, number + 1)
                yield batches[number].tolist()
        self.epoch, self._at = self.epoch + 1, (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on: JSON-able."""
        if "lengths" not in self._settings:  # once, and only if there is a state
            crc = zlib.crc32(np.ascontiguousarray(self._lengths, np.int64).data)
            self._settings["lengths"] = f"{len(self._lengths)}, CRC {crc:08x}"
        place = {"epoch": self.epoch, "window": self._at[0], "batch": self._at[1]}
        return {"version": VERSION, **place, "settings": dict(self._settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Args:
            state: A result of `state_dict`.

        Raises:
            StateError: It is not such a state, or is of a sampler with other lengths or settings.
        """
        mine = self.state_dict()
        fine = isinstance(state, Mapping) and set(state) == set(mine) and state["version"] == VERSION
        if not fine or not all(
            isinstance(state[name], int) and state[name] >= 0 for name in ("epoch", "window", "batch")
        ):
            raise StateError(f"state must be what BucketBatchSampler.state_dict() returned, got {state!r}.")
        was, now = state["settings"], mine["settings"]
        changes = [f"{name}: saved {was.get(name)}, now {now[name]}" for name in now if was.get(name) != now[name]]
        if changes:
            raise StateError(
                f"state is of a BucketBatchSampler with another order ({', '.join(changes)}), so its position holds "
                "other samples here. Give it the same lengths and settings, or begin a new epoch without this state."
            )
        self.epoch, self._at = state["epoch"], (state["window"], state["batch"])

    def _batches(self, window: int) -> list[Indices]:
        """Return the batches of a window, in their order."""
        begin, end = window * self._window, min((window + 1) * self._window, len(self._lengths))
        shuffled = Permutation(len(self._lengths), derive_key("buckets", self._seed, self.epoch, size=64))
        samples = shuffled(np.arange(begin, end, dtype=np.int64))
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        found = self._cut(samples)
        last = [found.pop()] if len(found[-1]) % (self.batch_size or self._multiple) else []  # only of the last window
        key = derive_key("bucket batches", self._seed, self.epoch, window, size=64)
        order = Permutation(len(found), key)(np.arange(len(found), dtype=np.int64)) if found else ()
        return [found[number] for number in order] + ([] if self.drop_last else last)

    def _cut(self, samples: Indices) -> list[Indices]:
        """Cut samples, sorted by their lengths, into batches."""
        if self.batch_size is not None:
            return [samples[at : at + self.batch_size] for at in range(0, len(samples), self.batch_size)]
        assert self._max_tokens is not None
        found, begin, lengths = [], 0, self._lengths[samples]
        while begin < len(samples):
            # A batch of n samples from here has n times the length of its last one.
            tokens = lengths[begin:].astype(np.int64) * np.arange(1, len(samples) - begin + 1)
            most = int(np.searchsorted(tokens, self._max_tokens, "right"))
            size = max(self._multiple, most // self._multiple * self._multiple)
            found.append(samples[begin : begin + size])
            begin += size
        return found
