"""Mixing of several data sets with an index, each with its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from paddle_shard.core.checks import check_count
from paddle_shard.data.arrays import NO_REPEAT, IndexedData, check_indexed
from paddle_shard.data.packed import Packed
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.mixture import (
    MAX_DRAWS,
    MAX_LENGTH,
    MAX_SOURCES,
    Mixing,
    is_sample_id,
    source_and_index,
)
from paddle_shard.plan.order import Fingerprint, Ordering
from paddle_shard.plan.orders import Sequential, Shuffled
from paddle_shard.plan.weights import (
    num_positions_to_read,
    schedule_of,
    shares_of,
)

Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
"""Weights of a mixture: name -> a number, or a list of (first sample, such a dict)."""


class Mixture:
    """Several data sets with an index, read as one: each is drawn as often as its weight says, at any moment.

    After every prefix of the run, each of n sources has been drawn within 1 - 1/(2n-2) samples of its share: there is
    no drift, and no randomness in which source is drawn. (Tijdeman, "The chairman assignment problem", 1980.) Inside a
    source, each sample is drawn once before any is drawn again. A source that is used up begins its own next epoch, in
    another order if the loader shuffles. All of it is a function of (seed, position): a run resumes exactly on another
    mesh, with another batch size or number of workers.

    Give it to a `paddle.io.DataLoader` like any data set. `shuffle=True` shuffles each source; `shuffle=False` reads
    each in its own order. Index k of the mixture itself is what is at position k of the first epoch, unshuffled.

    Examples:
        >>> mixture = Mixture({"web": ["w0", "w1", "w2", "w3"], "code": ["c0", "c1"]}, weights={"web": 2, "code": 1})
        >>> len(mixture), [mixture[k] for k in range(6)]
        (6, ['w0', 'c0', 'w1', 'w2', 'c1', 'w3'])
    """

    def __init__(
        self,
        sources: Mapping[str, IndexedData],
        weights: Weights | None = None,
        *,
        num_samples: int | None = None,
        stop: Literal["first", "all"] = "first",
    ) -> None:
        """Store the sources; only their lengths are read.

        Args:
            sources: Name -> data set with `__len__` and `__getitem__`, at most 4096 of them.
            weights: Name -> a number >= 0; they need not sum to 1. A number like 0.7 is taken as 7/10. Shares that need
                a period of more than 2^20 samples are rounded, by less than 2^-20 each; a smaller one is still drawn
                once in 2^20, which the largest pay for. Weights that change are a list such as
                `[(0, {...}), (1_000_000, {...})]`: from which sample of the run each holds. A source without a weight
                has the weight 0, so a source may join later. A resumed run may have a longer list, with entries behind
                its position. None: the lengths of the sources.
            num_samples: Samples of an epoch; weights that change need it. None: `stop` decides. It is not an end: the
                next epoch of the mixture goes on where the sources are.
            stop: "first": an epoch ends when the share of the first source has reached its length; that source has
                been read in full by then. "all": when every source's share has.

        Raises:
            ArgumentTypeError: A source is not a data set with an index, or an argument has another type.
            ArgumentError: A source is empty, the weights do not fit the sources, or `num_samples` is missing.
        """
        check_mixture("Mixture", sources, stop)
        self.sources = dict(sources)
        """The data sets, by name."""
        self._names = tuple(sources)
        self._lengths = lengths = tuple(
            _length(name, source) for name, source in sources.items()
        )
        if weights is None:
            weights = dict(zip(self._names, lengths, strict=True))
        self.segments = schedule_of("Mixture", self._names, weights)
        """The stretches of the run with the same weights."""
        if num_samples is None:
            if len(self.segments) > 1:
                raise ArgumentError(
                    "Mixture: weights that change need num_samples, the samples of an epoch."
                )
            num_samples = num_positions_to_read(
                self.segments[0].weights, lengths, every=stop == "all"
            )
        self._num_samples = check_count(
            "Mixture: num_samples", num_samples, most=MAX_DRAWS
        )
        self._first_epoch = self.ordering(Sequential()).order(
            self._num_samples, 0, 0, 1
        )

    def __len__(self) -> int:
        return self._num_samples

    def __repr__(self) -> str:
        shares = shares_of(self._names, self.segments)
        return f"Mixture({shares}; {self._num_samples} samples in an epoch)"

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Args:
            index: Its id in a loader's order, or a position of the first epoch.
        """
        name, number = self.sample_name(index)
        return self.sources[name][number]

    def sample_name(self, index: int) -> tuple[str, int]:
        """Return (source, index in the source) of a sample, which errors and logs show.

        Args:
            index: What `__getitem__` takes.
        """
        index = int(index)
        if not is_sample_id(index):
            if not -self._num_samples <= index < self._num_samples:
                raise IndexError(
                    f"index {index} is out of range for a mixture with {self._num_samples} samples"
                )
            position = np.array([index % self._num_samples], np.int64)
            index = int(self._first_epoch(position)[0])
        source, number = source_and_index(index)
        return self._names[source], number

    def fingerprint(self) -> Fingerprint:
        """Return what the samples of packed sources depend on, by source, for a saved state: JSON-able."""
        return {
            name: source.fingerprint()
            for name, source in self.sources.items()
            if isinstance(source, Packed)
        }

    def ordering(self, inner: Ordering) -> Mixing:
        """Return the order of the mixture; a loader calls it.

        Args:
            inner: The order of each source.

        Raises:
            ArgumentError: Sources cannot be in that order.
        """
        if not isinstance(inner, Sequential | Shuffled):
            raise ArgumentError(
                f"shuffle={inner.name!r}: the sources of a Mixture are shuffled (True) or read in their own order "
                f"(False), got {inner!r}."
            )
        return Mixing(
            self._names,
            self._lengths,
            self.segments,
            isinstance(inner, Shuffled),
        )


DROPPED_OF_MIXTURE = (
    "tail='drop': the last %d samples of each epoch of the Mixture are drawn, but not delivered, so what is delivered "
    "may drift from the weights. Give a num_samples that the batch size divides, or tail='pad'."
)


def check_mixture(what: str, sources: Any, stop: str) -> None:
    """Check the arguments of both kinds of mixtures; `what` names the one.

    Raises:
        ArgumentTypeError: The sources are not a dict with names.
        ArgumentError: There are none or too many, or `stop` is unknown.
    """
    if not isinstance(sources, Mapping):
        raise ArgumentTypeError(
            f"{what}: sources must be a dict, name -> source, got {type(sources).__name__}: {sources!r:.100}. "
            "Give each a name: {'web': ..., 'code': ...}."
        )
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ArgumentError(
            f"{what}: there must be 1 to {MAX_SOURCES} sources, got {len(sources)}."
        )
    for name in sources:
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"{what}: the name of a source must be a str, got {name!r}."
            )
    if stop not in ("first", "all"):
        raise ArgumentError(
            f"{what}: stop must be 'first' or 'all', got {stop!r}."
        )


def _length(name: str, source: Any) -> int:
    streams = "Streams are mixed by paddle_shard.Stream.mixture."
    length = check_indexed(f"Mixture: source {name!r}", source, streams)
    if not 1 <= length <= MAX_LENGTH:
        raise ArgumentError(
            f"Mixture: source {name!r} must have 1 to 2^40 samples, got {length}. {NO_REPEAT}"
        )
    return length
