"""Which sample of which source is at a position of a mixture, and which id does it have?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import numpy as np

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.order import Indices, Order, Ordering
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation, Permutations
from paddle_shard.plan.weights import Chairman, Segment, chairman

MAX_SOURCES = 1 << 12
"""Most sources of a mixture."""
MAX_LENGTH = 1 << 40
"""Most samples of one source."""
ROUNDS = 1 << 9
"""Number of epochs of a source whose ids differ."""
_MARK = 1 << 61
MAX_DRAWS = 1 << 50
"""Most samples of a run."""


# An id has, from its highest bit: a mark, the source's epoch modulo 512, the source, the index in the source.


def sample_ids(sources: Indices, epochs: Indices, indices: Indices) -> Indices:
    """Return the ids of samples: int64, as many as there are sources.

    An id holds the source's epoch, modulo 512, beside the source and the index. So a sample that is drawn again in the
    same epoch of the mixture has another id, and other random numbers.
    """
    return _MARK + ((epochs % ROUNDS) << 52) + (sources << 40) + indices


def is_sample_id(index: int) -> bool:
    """Return whether an index is the id of a source's sample, and not a position of the mixture."""
    return index >= _MARK


def source_and_index(sample: Any) -> tuple[Any, Any]:
    """Return the number of the source, and the index in it, of a sample's id, or of an array of ids."""
    return (sample >> 40) % MAX_SOURCES, sample % MAX_LENGTH


def without_epoch(samples: Indices) -> Indices:
    """Return ids without the epoch of their source; ids of other data sets as they are."""
    return np.where(samples >= _MARK, samples & ~np.int64((ROUNDS - 1) << 52), samples)


@dataclass(frozen=True)
class Mixing(Ordering):
    """The order of a mixture: which source is drawn at each position, and which of its samples.

    A run is one sequence over all its epochs. Each source has epochs of its own: after as many draws as it has samples,
    each was drawn once, and the next epoch of the source begins in another order. The sequence of a segment is a
    `Chairman`, so each source is within 1 - 1/(2n-2) samples of its share of the segment. Over several segments, these
    bounds add up.
    """

    name: ClassVar[bool | str] = "mixture"
    own_ids: ClassVar[bool] = True

    names: tuple[str, ...]
    """Names of the sources, in a fixed order. The key of a source's order depends on its name."""
    segments: tuple[Segment, ...]
    """One or more; the first begins at 0. A source that has grown ends its epoch with the old length."""
    shuffled: bool = True
    """True if each source is shuffled; False: each is read from its first sample to its last."""
    lengths: tuple[tuple[int, int], ...] = ()
    """(first epoch, samples of an epoch from there on), if epochs of the mixture differ in length."""

    # Ordering

    @property
    def shuffles(self) -> bool:  # type: ignore[override]
        """True if each source is shuffled."""
        return self.shuffled

    def order(self, length: int, seed: int, epoch: int, width: int) -> MixtureOrder:
        """Return the order of an epoch of the mixture.

        Args:
            length: Samples of an epoch of the mixture.
            seed: Seed of the run.
            epoch: The epoch, 0 or more.
            width: Not used.

        Raises:
            ArgumentError: The run would have more than 2^50 samples.
        """
        if not 0 <= epoch <= MAX_DRAWS // length - 1:
            raise ArgumentError(
                f"epoch must be in range({MAX_DRAWS // length}) for a mixture with {length} samples in an epoch, "
                f"got {epoch}."
            )
        kept = self._kept
        if kept.get("seed") != seed:
            kept.update(seed=seed, many=Permutations(len(self.names), partial(self.key, seed)))
        if kept.get("asked") != (seed, epoch, length):
            order = MixtureOrder(self, seed, kept["many"], self.first_position(epoch, length), length)
            kept.update(asked=(seed, epoch, length), order=order)
        return cast(MixtureOrder, kept["order"])

    def key(self, seed: int, source: int, epoch: int) -> bytes:
        """Return the key of the order of a source's epoch."""
        return derive_key("source", self.names[source], seed, epoch, size=64)

    def padding_from(self, epoch: int, length: int) -> int:
        """Return where the newest segment begins, if it is in the epoch: a source from before may be gone."""
        first = self.segments[-1].first - self.first_position(epoch, length)
        return first if 0 < first < length else 0

    def fingerprint(self, *, num_data_ranks: int, accumulation: int) -> dict[str, Any]:
        """Return what the order depends on."""
        segments = [
            {"from": segment.first, "weights": list(segment.parts), "lengths": list(segment.lengths)}
            for segment in self.segments
        ]
        return {"mixture": {"sources": list(self.names), "shuffled": self.shuffled, "segments": segments}}

    # The run

    def first_position(self, epoch: int, length: int) -> int:
        """Return the position of the run at which an epoch of the mixture begins.

        Args:
            epoch: The epoch.
            length: Samples of every epoch, unless `lengths` says otherwise.
        """
        if not self.lengths:
            return epoch * length
        ends = [*(first for first, _ in self.lengths[1:]), epoch]
        return sum(
            max(0, min(end, epoch) - first) * samples for (first, samples), end in zip(self.lengths, ends, strict=True)
        )

    def counts(self, position: int) -> Indices:
        """Return how often each source is drawn before a position of the run: int64[number of sources]."""
        number = self.segment_at(position)
        return self._base(number) + self._chairmen[number].counts(position - self.segments[number].first)

    def segment_at(self, position: int) -> int:
        """Return the number of the segment that holds a position of the run."""
        return sum(segment.first <= position for segment in self.segments) - 1

    def draws(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return, for some positions of the run, the source of each, and how often it was drawn in the run before."""
        firsts = np.array([segment.first for segment in self.segments], np.int64)
        if len(firsts) == 1:
            return self._chairmen[0].at(positions)
        numbers = np.searchsorted(firsts, positions, side="right") - 1
        sources, draws = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            found, drawn = self._chairmen[number].at(positions[chosen] - firsts[number])
            sources[chosen], draws[chosen] = found, drawn + self._base(number)[found]
        return sources, draws

    def positions(self, sources: Indices, draws: Indices) -> Indices:
        """Return the position of the run of each draw: int64; -1 if it is never made."""
        found = np.full(len(sources), -1, np.int64)
        for number, segment in enumerate(self.segments):
            base = self._base(number)[sources]
            last = number + 1 == len(self.segments)
            end = None if last else self._base(number + 1)[sources]
            inside = (draws >= base) & (np.array(segment.parts)[sources] > 0)
            inside &= True if end is None else draws < end
            places = self._chairmen[number].inverse(sources[inside], (draws - base)[inside])
            found[inside] = segment.first + places
        return found

    @cached_property
    def source_epochs(self) -> SourceEpochs:
        """Which epoch, and which place in it, each draw of a source is."""
        return SourceEpochs(self.segments, self.counts)

    # What was computed once is kept in the value, as its hash takes long with a thousand sources.

    @cached_property
    def _chairmen(self) -> tuple[Chairman, ...]:
        return tuple(chairman(segment.parts) for segment in self.segments)

    @cached_property
    def _kept(self) -> dict[str, Any]:
        """The order that was asked for last and the permutations of its seed, each with what it was asked with."""
        return {}

    @cached_property
    def _bases(self) -> list[Indices]:
        return [np.zeros(len(self.names), np.int64)]

    def _base(self, number: int) -> Indices:
        """Return how often each source was drawn before a segment."""
        while len(self._bases) <= number:
            at = len(self._bases) - 1
            length = self.segments[at + 1].first - self.segments[at].first
            self._bases.append(self._bases[at] + self._chairmen[at].counts(length))
        return self._bases[number]


class SourceEpochs:
    """Which epoch of its source a draw belongs to, for sources that may grow during a run.

    The epoch that a source has begun when it grows ends with the old length; the next one has the new length.
    """

    def __init__(self, segments: Sequence[Segment], counts: Callable[[int], Indices]) -> None:
        """Set up the layers: the first draw, its epoch and the length of the epochs from there on, for each source.

        Args:
            segments: The segments of the run.
            counts: Returns how often each source is drawn before a position of the run.
        """
        first, *others = segments
        zero = np.zeros(len(first.lengths), np.int64)
        self._layers = [(zero, zero, np.array(first.lengths, np.int64))]
        self._lengths = np.maximum(self._layers[0][2], 1)  # no division by that of a source that is not there
        for segment in others:
            start, epoch, before = self._layers[-1]
            lengths = np.array(segment.lengths, np.int64)
            changed = (lengths != before) & (lengths > 0)  # a source that is gone keeps the length that it had
            if not changed.any():
                continue
            drawn = counts(segment.first) - start
            begun = np.where(before > 0, -(-drawn // np.maximum(before, 1)), 0)  # epochs, also one that is not over
            self._layers.append(
                (
                    np.where(changed, start + begun * before, start),
                    np.where(changed, epoch + begun, epoch),
                    np.where(changed, lengths, before),
                )
            )

    def at(self, sources: Indices, draws: Indices) -> tuple[Indices, Indices, Indices]:
        """Return, for some draws, the epoch of the source, its length, and the place in it."""
        if len(self._layers) == 1:  # each source begins at its first draw
            length = self._lengths.take(sources)
            rounds = draws // length
            return rounds, length, draws - rounds * length
        start, epoch, length = (values[sources] for values in self._layers[-1])
        for layer in self._layers[-2::-1]:
            earlier = draws < start
            if not earlier.any():
                break
            for values, older in zip((start, epoch, length), layer, strict=True):
                values[earlier] = older[sources[earlier]]
        rounds, places = np.divmod(draws - start, np.maximum(length, 1))
        return epoch + rounds, length, places

    def begin(self, source: int, epoch: int) -> tuple[int, int]:
        """Return the first draw of an epoch of a source, and its length; zeros if there is no such epoch."""
        for start, first, length in self._layers[::-1]:
            if epoch >= first[source] and length[source]:
                return int(start[source] + (epoch - first[source]) * length[source]), int(length[source])
        return 0, 0


class MixtureOrder(Order):
    """The order of one epoch of a mixture. Its entries are ids of samples, not numbers below the epoch's length."""

    def __init__(self, mixing: Mixing, seed: int, many: Permutations, first: int, length: int) -> None:
        """Set up the order.

        Args:
            mixing: The mixture's sources and weights.
            seed: Seed of the run.
            many: The orders of the sources' epochs, if they are shuffled.
            first: Position of the run at which the epoch begins.
            length: Samples of the epoch.
        """
        super().__init__(length)
        self.mixing, self.first = mixing, first
        self._seed, self._orders = seed, many if mixing.shuffled else None

    def __call__(self, positions: Indices) -> Indices:
        """Return the id of the sample at each position of the epoch: int64, same shape."""
        flat = positions.reshape(-1)
        sources, draws = self.mixing.draws(flat + self.first)
        epochs, lengths, places = self.mixing.source_epochs.at(sources, draws)
        indices = places if self._orders is None else self._orders(sources, epochs, lengths, places)
        found: Indices = sample_ids(sources, epochs, indices).reshape(positions.shape)
        return found

    def inverse(self, samples: Indices) -> Indices:
        """Return the position in the epoch of each id; -1 if the epoch does not deliver it."""
        flat = samples.reshape(-1)
        found = [self._found(*source_and_index(sample), (sample >> 52) % ROUNDS) for sample in flat.tolist()]
        return np.array([at[0] if at else -1 for at in found], np.int64).reshape(samples.shape)

    def occurrences(self, sample: Any) -> list[int]:
        """Return the positions in the epoch at which a sample is delivered, in ascending order.

        Args:
            sample: (name of its source, index in the source).

        Raises:
            ArgumentError: There is no such sample.
        """
        mixing = self.mixing
        fine = isinstance(sample, tuple | list) and len(sample) == 2 and sample[0] in mixing.names
        most = mixing.segments[-1].lengths[mixing.names.index(sample[0])] if fine else 0
        index = sample[1] if fine else None
        if not isinstance(index, int | np.integer) or not 0 <= index < most:
            raise ArgumentError(
                "sample of a mixture must be (name of a source, index in it), such as "
                f"{(mixing.names[0], 0)}, got {sample!r}; the sources are {list(mixing.names)}."
            )
        source = sample[0]
        return sorted(self._found(mixing.names.index(source), int(index)))

    def _found(self, source: int, index: int, rounds: int | None = None) -> list[int]:
        """Return the positions of a sample, of all epochs of its source or of those with this number modulo 512."""
        mixing, epochs = self.mixing, self.mixing.source_epochs
        begin, end = (int(mixing.counts(at)[source]) for at in (self.first, self.first + self.length))
        if begin == end:
            return []
        both = np.full(2, source, np.int64)
        first, last = epochs.at(both, np.array([begin, end - 1], np.int64))[0].tolist()
        step = 1
        if rounds is not None:
            first, step = first + (rounds - first) % ROUNDS, ROUNDS
        draws = []
        for epoch in range(first, last + 1, step):
            begun, length = epochs.begin(source, epoch)
            if index >= length:  # the source has grown since
                continue
            place = index
            if self._orders is not None:
                order = Permutation(length, mixing.key(self._seed, source, epoch))
                place = int(order.inverse(np.array([index], np.int64))[0])
            if begin <= begun + place < end:
                draws.append(begun + place)
        positions = mixing.positions(np.full(len(draws), source), np.array(draws, np.int64))
        return [position - self.first for position in positions.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a run has drawn of one source."""

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
    counts = mixing.counts(position)
    segment = mixing.segments[mixing.segment_at(max(0, position - 1))]
    sources = np.arange(len(counts))
    epochs, _, _ = mixing.source_epochs.at(sources, np.maximum(counts - 1, 0))
    period = sum(segment.parts)
    return {
        name: Drawn(
            drawn=int(counts[at]),
            share=float(counts[at] / position) if position else 0.0,
            weight=segment.parts[at] / period,
            epochs=int(epochs[at] + 1) if counts[at] else 0,
        )
        for at, name in enumerate(mixing.names)
    }
