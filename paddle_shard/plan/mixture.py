"""Which sample of which source is at a position of a mixture, and which id does it have?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.order import Indices, Order, Ordering
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation, Permutations
from paddle_shard.plan.weights import Segment, chairman

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


def sample_ids(sources: Any, epochs: Any, indices: Any) -> Any:
    """Return the id of a sample; or of many, if arrays are given: int64, as many as there are sources.

    An id holds the source's epoch, modulo 512, beside the source and the index. So a sample that is drawn again in the
    same epoch of the mixture has another id, and other random numbers.
    """
    return _MARK + ((epochs % ROUNDS) << 52) + (sources << 40) + indices


def is_sample_id(index: Any) -> Any:
    """Return whether an index, or each of an array, is the id of a source's sample, not a position of the mixture."""
    return index >= _MARK


def source_and_index(sample: Any) -> tuple[Any, Any]:
    """Return the number of the source, and the index in it, of a sample's id, or of an array of ids."""
    return (sample >> 40) % MAX_SOURCES, sample % MAX_LENGTH


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
    """One or more; the first begins at 0. All have the same lengths of the sources."""
    shuffles: bool = True
    """True if each source is shuffled; False: each is read from its first sample to its last."""

    # Ordering

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
        # The order that was asked for last is kept. It is read once: threads may ask for different orders.
        kept, first = self._kept.get("order"), self.first_position(epoch, length)
        if kept is not None and (kept.seed, kept.first, kept.length) == (
            seed,
            first,
            length,
        ):
            return kept
        # Epochs of a source continue in the next epoch of the mixture, so their permutations are handed on.
        handed_on = kept.many if kept is not None and kept.seed == seed else None
        many = handed_on or Permutations(len(self.names), partial(self.key, seed))
        order = self._kept["order"] = MixtureOrder(self, seed, many, first, length)
        return order

    def key(self, seed: int, source: int, epoch: int) -> bytes:
        """Return the key of the order of a source's epoch."""
        return derive_key("source", self.names[source], seed, epoch, size=64)

    def padding_from(self, epoch: int, length: int) -> int:
        """Return where the epoch's last segment begins, or else the epoch: padding has the weights of the end."""
        first = self.first_position(epoch, length)
        return max(
            0, self.segments[self.draws.segment_at(first + length - 1)].first - first
        )

    def fingerprint(self, *, num_data_ranks: int, accumulation: int) -> dict[str, Any]:
        """Return what the order depends on."""
        segments = [[segment.first, list(segment.parts)] for segment in self.segments]
        lengths = list(self.segments[0].lengths)
        sources = list(self.names)
        return {
            "mixture": {
                "sources": sources,
                "lengths": lengths,
                "shuffled": self.shuffles,
                "segments": segments,
            }
        }

    def numbers_of(self, sample: Any) -> tuple[int, int]:
        """Return the number of the source, and the index in it, of a sample that a user names.

        Args:
            sample: (name of its source, index in the source).

        Raises:
            ArgumentError: There is no such sample.
        """
        fine = (
            isinstance(sample, tuple | list)
            and len(sample) == 2
            and sample[0] in self.names
        )
        source, index = (self.names.index(sample[0]), sample[1]) if fine else (0, None)
        most = self.segments[0].lengths[source]
        if not isinstance(index, int | np.integer) or not 0 <= index < most:
            raise ArgumentError(
                "sample of a mixture must be (name of a source, index in it), such as "
                f"{(self.names[0], 0)}, got {sample!r}; the sources are {list(self.names)}"
                + (f", and {self.names[source]!r} has {most} samples." if fine else ".")
            )
        return source, int(index)

    def named(self, sample: int) -> tuple[str, int]:
        """Return the sample of an id as a user names it: the reverse of `numbers_of`.

        Args:
            sample: Its id.
        """
        source, index = source_and_index(sample)
        return self.names[source], index

    # The run

    def first_position(self, epoch: int, length: int) -> int:
        """Return the position of the run at which an epoch of the mixture begins.

        Args:
            epoch: The epoch.
            length: Samples of an epoch.
        """
        return max(0, epoch) * length

    # What was computed once is kept in the value, as its hash takes long with a thousand sources.

    @cached_property
    def draws(self) -> Draws:
        """The draws of the run."""
        return Draws(self.segments)

    @cached_property
    def _kept(self) -> dict[str, MixtureOrder]:
        return {}  # a dict, since the value is frozen


def segments_of(mixture: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Return the segments that the fingerprint of a mixture names."""
    lengths = tuple(mixture["lengths"])
    return tuple(
        Segment(first, tuple(parts), lengths) for first, parts in mixture["segments"]
    )


class Draws:
    """The source that is drawn at each position of a run, and the source's own epoch, for weights that change."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        """Set up; a sequence is only computed as far as it is asked for.

        Args:
            segments: The segments of the run; the first begins at 0.
        """
        self._segments, self._chairmen = (
            segments,
            [chairman(segment.parts) for segment in segments],
        )
        self._firsts = np.array([segment.first for segment in segments], np.int64)
        zero = np.zeros(len(segments[0].lengths), np.int64)
        self._bases = [zero]
        """How often each source was drawn before each segment, as far as it was asked for."""
        self._lengths = np.array(segments[0].lengths, np.int64)

    def _base(self, number: int) -> Indices:
        """Return how often each source was drawn before a segment."""
        # Not computed at the start: it costs the sequence up to the segment, which a run may never reach.
        while len(self._bases) <= number:
            at = len(self._bases) - 1
            length = self._segments[at + 1].first - self._segments[at].first
            self._bases.append(self._bases[at] + self._chairmen[at].counts(length))
        return self._bases[number]

    def segment_at(self, position: int) -> int:
        """Return the number of the segment that holds a position of the run."""
        return int(np.searchsorted(self._firsts, position, side="right")) - 1

    def counts(self, position: int) -> Indices:
        """Return how often each source is drawn before a position of the run: int64[number of sources]."""
        number = self.segment_at(position)
        return self._base(number) + self._chairmen[number].counts(
            position - self._segments[number].first
        )

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return, for some positions of the run, the source of each, and how often it was drawn in the run before."""
        if len(self._firsts) == 1:
            return self._chairmen[0].at(positions)
        numbers = np.searchsorted(self._firsts, positions, side="right") - 1
        sources, draws = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            found, drawn = self._chairmen[number].at(
                positions[chosen] - self._firsts[number]
            )
            sources[chosen], draws[chosen] = found, drawn + self._base(number)[found]
        return sources, draws

    def positions(self, source: int, draws: Indices) -> Indices:
        """Return the position of the run of each draw of a source: int64; -1 if it is never made."""
        found = np.full(len(draws), -1, np.int64)
        for number, segment in enumerate(self._segments):
            if segment.parts[source] == 0:
                continue
            base, last = self._base(number)[source], number + 1 == len(self._segments)
            inside = (draws >= base) & (
                True if last else draws < self._base(number + 1)[source]
            )
            mine = draws[inside] - base
            found[inside] = segment.first + self._chairmen[number].inverse(
                np.full(len(mine), source), mine
            )
        return found

    def epochs(
        self, sources: Indices, draws: Indices
    ) -> tuple[Indices, Indices, Indices]:
        """Return, for some draws, the epoch of the source, its length, and the place in it."""
        lengths = self._lengths[sources]
        epochs, places = np.divmod(draws, lengths)
        return epochs, lengths, places


class MixtureOrder(Order):
    """The order of one epoch of a mixture. Its entries are ids of samples, not numbers below the epoch's length."""

    def __init__(
        self, mixing: Mixing, seed: int, many: Permutations, first: int, length: int
    ) -> None:
        """Set up the order.

        Args:
            mixing: The mixture's sources and weights.
            seed: Seed of the run.
            many: The orders of the sources' epochs, if they are shuffled.
            first: Position of the run at which the epoch begins.
            length: Samples of the epoch.
        """
        super().__init__(length)
        self.mixing, self.seed, self.many, self.first = mixing, seed, many, first

    def __call__(self, positions: Indices) -> Indices:
        """Return the id of the sample at each position of the epoch: int64, same shape."""
        sources, draws = self.mixing.draws.at(positions.reshape(-1) + self.first)
        return self.of_draws(sources, draws).reshape(positions.shape)

    def of_draws(self, sources: Indices, draws: Indices) -> Indices:
        """Return the id of the sample of some draws, each of a source by how often it was drawn in the run before."""
        epochs, lengths, places = self.mixing.draws.epochs(sources, draws)
        indices = (
            self.many(sources, epochs, lengths, places)
            if self.mixing.shuffles
            else places
        )
        found: Indices = sample_ids(sources, epochs, indices)
        return found

    def of_source(self, source: int, first: int, end: int) -> Indices:
        """Return the ids of the samples of the draws [first, end) of a source."""
        draws = np.arange(first, end)
        return self.of_draws(np.full_like(draws, source), draws)

    def inverse(self, samples: Indices) -> Indices:
        """Return the position in the epoch of each id; -1 if the epoch does not deliver it."""
        flat = samples.reshape(-1)
        found = [
            self._found(*source_and_index(sample), (sample >> 52) % ROUNDS)
            for sample in flat.tolist()
        ]
        return np.array([at[0] if at else -1 for at in found], np.int64).reshape(
            samples.shape
        )

    def occurrences(self, source: int, index: int) -> list[int]:
        """Return the positions in the epoch at which a sample is delivered, in ascending order.

        Args:
            source: The number of its source.
            index: Its index in the source.
        """
        return sorted(self._found(source, index))

    def _found(self, source: int, index: int, rounds: int | None = None) -> list[int]:
        """Return the positions of a sample, of all epochs of its source or of those with this number modulo 512."""
        mixing, run = self.mixing, self.mixing.draws
        begin, end = (
            int(run.counts(at)[source]) for at in (self.first, self.first + self.length)
        )
        if begin == end:
            return []
        both = np.full(2, source, np.int64)
        first, last = run.epochs(both, np.array([begin, end - 1], np.int64))[0].tolist()
        length = mixing.segments[0].lengths[source]
        step = 1
        if rounds is not None:  # an id tells the epoch modulo 512 only
            first, step = first + (rounds - first) % ROUNDS, ROUNDS
        draws = []
        for epoch in range(first, last + 1, step):
            begun = epoch * length
            place = index
            if mixing.shuffles:
                order = Permutation(length, mixing.key(self.seed, source, epoch))
                place = int(order.inverse(np.array([index], np.int64))[0])
            if begin <= begun + place < end:
                draws.append(begun + place)
        positions = run.positions(source, np.array(draws, np.int64))
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
    counts = mixing.draws.counts(position)
    segment = mixing.segments[mixing.draws.segment_at(max(0, position - 1))]
    sources = np.arange(len(counts))
    epochs, _, _ = mixing.draws.epochs(sources, np.maximum(counts - 1, 0))
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
