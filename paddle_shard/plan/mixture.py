"""The order of a mixture: which source is at each position of a run, and which of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import index as int_of
from typing import Any

import numpy as np

from paddle_shard.core.checks import check_count
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.order import (
    Fingerprint,
    Indices,
    Order,
    Ordering,
    groups_by_key,
)
from paddle_shard.plan.shuffle import Permutation, permutation
from paddle_shard.plan.weights import Segment, interleave

MAX_SOURCES = 1 << 12
"""Most sources of a mixture."""
MAX_LENGTH = 1 << 40
"""Most samples of one source."""
ROUNDS = 1 << 9
"""Number of epochs of a source whose ids differ."""
_MARK = 1 << 61
NEVER = 1 << 62
"""Position of a draw that is not made."""
MAX_DRAWS = 1 << 50
"""Most samples of a run."""


# An id has, from its highest bit: a mark, the source's epoch modulo 512, the source, the index in the source. So a
# sample that is selected again in the same epoch of the mixture has another id, and other random numbers.


def is_sample_id(index: int) -> bool:
    """Return whether an index is the id of a source's sample, not a position of the mixture."""
    return index >= _MARK


def source_and_index(sample: int) -> tuple[int, int]:
    """Return the number of the source, and the index in it, of a sample's id."""
    return (sample >> 40) % MAX_SOURCES, sample % MAX_LENGTH


@dataclass(frozen=True)
class Mixing(Ordering):
    """The order of a mixture: which source is at each position, and which of its samples.

    A run is one sequence over all its epochs. Each source has epochs of its own: after as many draws as it has samples,
    each was selected once, and the next epoch of the source begins in another order. The sequence of a segment is a
    `WeightedInterleave`, so each source is within 1 - 1/(2n-2) samples of its share of the segment. Over several
    segments, these bounds add up.
    """

    name = "mixture"
    drawn_by = "the mixture"

    names: tuple[str, ...]
    """Names of the sources, in a fixed order. The key of a source's order depends on its name."""
    lengths: tuple[int, ...]
    """Number of samples of each source."""
    segments: tuple[Segment, ...]
    """One or more; the first begins at 0."""
    is_shuffled: bool = True
    """True if each source is shuffled; False: each is read from its first sample to its last."""

    def order(
        self, length: int, seed: int, epoch: int, width: int
    ) -> MixtureOrder:
        """Return the order of an epoch of the mixture.

        Args:
            length: Samples of an epoch of the mixture.
            seed: Seed of the run.
            epoch: The epoch, 0 or more.
            width: Not used.

        Raises:
            ArgumentError: The run would have more than 2^50 samples.
        """
        check_count("epoch", epoch, 0, MAX_DRAWS // length - 1)
        return MixtureOrder(self, seed, epoch * length, length)

    def padding_from(self, epoch: int, length: int) -> int:
        """Return where the epoch's last segment begins, or else the epoch: padding has the weights of the end."""
        first = epoch * length
        last = self.draws.segment_at(first + length - 1)
        return max(0, self.segments[last].first - first)

    def fingerprint(
        self, *, num_data_ranks: int, accumulation: int
    ) -> Fingerprint:
        """Return what the order depends on."""
        mixture = {
            "sources": list(self.names),
            "lengths": list(self.lengths),
            "shuffled": self.is_shuffled,
            "segments": [
                [first, list(weights)] for first, weights in self.segments
            ],
        }
        return {"mixture": mixture}

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> Mixing:
        """See `Ordering`."""
        mixture = fingerprint["mixture"]
        return cls(
            tuple(mixture["sources"]),
            tuple(mixture["lengths"]),
            tuple(
                Segment(first, tuple(weights))
                for first, weights in mixture["segments"]
            ),
            mixture["shuffled"],
        )

    def numbers_of(self, sample: Any) -> tuple[int, int]:
        """Return the number of the source, and the index in it, of a sample that a user names.

        Args:
            sample: (name of its source, index in the source).

        Raises:
            ArgumentError: There is no such sample.
        """
        try:
            name, index = sample
            source = self.names.index(name)
            range(self.lengths[source]).index(int_of(index))
        except (TypeError, ValueError):
            sizes = dict(zip(self.names, self.lengths, strict=True))
            raise ArgumentError(
                "sample of a mixture must be (name of a source, index in it), on the command line name:index, "
                f"got {sample!r}; the sources have {sizes} samples."
            ) from None
        return source, int(index)

    def named(self, sample: int) -> tuple[str, int]:
        """Return the sample of an id as a user names it: the reverse of `numbers_of`.

        Args:
            sample: Its id.
        """
        source, index = source_and_index(sample)
        return self.names[source], index

    @cached_property
    def draws(self) -> Draws:
        """The draws of the run. Kept in the value, whose hash takes long with a thousand sources."""
        return Draws(self.segments)


class Draws:
    """The source at each position of a run, and how often it was selected before, for weights that change."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        """Set up; a sequence is only computed as far as it is needed.

        Args:
            segments: The segments of the run; the first begins at 0.
        """
        self._segments = segments
        self._sequences = [interleave(segment.weights) for segment in segments]
        self._firsts = np.array(
            [segment.first for segment in segments], np.int64
        )
        self._counts_before = [np.zeros(len(segments[0].weights), np.int64)]
        """Number of samples of each source before each segment, as far as needed."""

    def _before(self, number: int) -> Indices:
        """Return how often each source was selected before a segment."""
        # Not computed at the start: it costs the sequence up to the segment, which a run may never reach.
        for segment in range(len(self._counts_before) - 1, number):
            length = int(self._firsts[segment + 1] - self._firsts[segment])
            counts = self._sequences[segment].counts(length)
            self._counts_before.append(self._counts_before[segment] + counts)
        return self._counts_before[number]

    def segment_at(self, position: int) -> int:
        """Return the number of the segment that holds a position of the run."""
        return int(np.searchsorted(self._firsts, position, side="right")) - 1

    def counts(self, position: int) -> Indices:
        """Return how often each source is selected before a position of the run: int64[number of sources]."""
        number = self.segment_at(position)
        first = self._segments[number].first
        return self._before(number) + self._sequences[number].counts(
            position - first
        )

    def sources_at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return, for each position of the run, its source and how often the source was selected before."""
        if len(self._segments) == 1:
            return self._sequences[0].sources_at(positions)
        numbers = np.searchsorted(self._firsts, positions, side="right") - 1
        sources = np.empty_like(positions)
        draws = np.empty_like(positions)
        for chosen, [number] in groups_by_key(numbers):
            places = positions[chosen] - self._firsts[number]
            sources[chosen], counts = self._sequences[number].sources_at(places)
            draws[chosen] = counts + self._before(number)[sources[chosen]]
        return sources, draws

    def positions(self, source: int, draws: Indices) -> Indices:
        """Return the position of the run of each draw of a source: int64; `NEVER` if it is not made."""
        positions = np.full(len(draws), NEVER)
        begins = [
            self._before(segment)[source]
            for segment in range(len(self._segments))
        ]
        numbers = np.searchsorted(begins, draws, side="right") - 1
        for chosen, [number] in groups_by_key(numbers):
            first, weights = self._segments[number]
            if weights[source]:
                draws_in_segment = draws[chosen] - begins[number]
                places = self._sequences[number].inverse(
                    source, draws_in_segment
                )
                positions[chosen] = first + places
        return positions


class MixtureOrder(Order):
    """The order of one epoch of a mixture. Its entries are ids of samples, not numbers below the epoch's length."""

    def __init__(
        self, mixing: Mixing, seed: int, first: int, length: int
    ) -> None:
        """Set up the order.

        Args:
            mixing: The mixture's sources and weights.
            seed: Seed of the run.
            first: Position of the run at which the epoch begins.
            length: Samples of the epoch.
        """
        super().__init__(length)
        self.mixing = mixing
        self._seed = seed
        self._first = first
        self._lengths = np.array(mixing.lengths, np.int64)

    def __call__(self, positions: Indices) -> Indices:
        """Return the id of the sample at each position of the epoch: int64, same shape."""
        positions_of_run = positions.reshape(-1) + self._first
        sources, draws = self.mixing.draws.sources_at(positions_of_run)
        epochs, indices = np.divmod(draws, self._lengths[sources])
        if self.mixing.is_shuffled:
            for chosen, key in groups_by_key(sources, epochs):
                indices[chosen] = self._permutation(*key)(indices[chosen])
        ids = _MARK + (epochs % ROUNDS << 52) + (sources << 40) + indices
        return ids.reshape(positions.shape)

    def _permutation(self, source: int, epoch: int) -> Permutation:
        """Return the order of a source's epoch."""
        name = self.mixing.names[source]
        length = self.mixing.lengths[source]
        return permutation(length, "source", name, self._seed, epoch)

    def occurrences(self, source: int, index: int) -> list[int]:
        """Return the positions in the epoch at which a sample is delivered, in ascending order.

        Args:
            source: The number of its source.
            index: Its index in the source.
        """
        run = self.mixing.draws
        length = self.mixing.lengths[source]
        begin = int(run.counts(self._first)[source])
        end = int(run.counts(self._first + self.length)[source])
        draws = []
        for epoch in range(begin // length, -(-end // length)):
            place = index
            if self.mixing.is_shuffled:
                order = self._permutation(source, epoch)
                place = int(order.inverse(np.array(index)))
            draws.append(epoch * length + place)
        in_epoch = [draw for draw in draws if begin <= draw < end]
        positions = run.positions(source, np.array(in_epoch, np.int64))
        return list((positions - self._first).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Samples of one source that a run has used."""

    drawn: int
    """Samples that were drawn, also in earlier epochs of the mixture."""
    share: float
    """Share of all samples that were drawn."""
    weight: float
    """The share that the present weights ask for."""
    epochs: int
    """Epochs of the source that were begun."""


def drawn_of(mixing: Mixing, position: int) -> Mapping[str, Drawn]:
    """Return what was drawn of each source before a position of the run, by name."""
    counts = mixing.draws.counts(position).tolist()
    segment = mixing.draws.segment_at(max(0, position - 1))
    weights = mixing.segments[segment].weights
    period = sum(weights)
    return {
        name: Drawn(
            drawn=count,
            share=count / max(1, position),
            weight=weight / period,
            epochs=-(-count // length),
        )
        for name, length, count, weight in zip(
            mixing.names, mixing.lengths, counts, weights, strict=True
        )
    }
