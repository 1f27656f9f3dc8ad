"""What fills the rows for which a part has no samples?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from paddle_shard.reading.skipping import TRIED
from paddle_shard.stages.opening import Opening, Stated, Unreadable
from paddle_shard.stages.round_robin import RoundRobin
from paddle_shard.stages.stage import Stage

_NOTHING = object()

Spare = dict[int, list[Any]]
"""Part -> its first samples, for some parts; an empty list if the part is known to have none."""


class Padding:
    """Fills missing rows of a part with its own first sample, or with that of the lowest part that has one.

    Samples that cannot be read are passed over. So the choice depends on the order alone, not on which reader holds
    which parts, nor on where the pass began. The first samples that a pass reads are kept. If it begins later, and for
    other readers' parts, the stream is opened again. Of a dispatched stream some samples are given, and it is opened
    only if none of them fits.
    """

    def __init__(self, stage: Stage, opening: Opening) -> None:
        """Set up; nothing is opened yet.

        Args:
            stage: The stage that opens the parts.
            opening: The opening of the pass.
        """
        self._stage, self._source = stage, _before_dispatch(stage)
        self._opening = replace(opening, skip=0, state=None)
        self._from_beginning = opening.skip == 0
        self._most = TRIED if stage.endless else None
        self._num_noted: Counter[int] = Counter()
        self._first: dict[int, Any] = {}
        self._given: Spare = {}

    def note(self, part: int, samples: Sequence[Any], *, ended: bool) -> None:
        """Note the samples of a part that the pass has read next, and whether the part has ended after them."""
        if not self._from_beginning or part in self._first:
            return
        left = None if self._most is None else max(0, self._most - self._num_noted[part])
        self._num_noted[part] += len(samples)
        first = next(_readable(samples[:left]), _NOTHING)
        if ended or first is not _NOTHING:
            self._first[part] = first

    def give(self, spare: Mapping[int, Sequence[Any]]) -> None:
        """Take the first samples of some parts, as they would be dispatched to the stage."""
        for part, samples in spare.items():
            self._given.setdefault(part, []).extend(samples)
            if not samples:
                self._first.setdefault(part, _NOTHING)

    def empty(self) -> list[int]:
        """Return the parts that are known to have no sample."""
        return [part for part, first in self._first.items() if first is _NOTHING]

    def candidates(self, part: int) -> Iterator[tuple[int, Any]]:
        """Yield (part, sample) of the samples that could fill a part's rows; the first one is used."""
        for candidate in (part, *range(self._opening.num_parts)):
            if candidate not in self._first:
                yield from ((candidate, sample) for sample in self._opened(candidate))
            elif self._first[candidate] is not _NOTHING:
                yield candidate, self._first[candidate]

    def of(self, part: int) -> Any:
        """Return the sample that fills a part's rows.

        Raises:
            LookupError: No part has a sample that can be read.
        """
        for _, sample in self.candidates(part):
            return sample
        raise LookupError("every part is empty, or none of its samples can be read")

    def _opened(self, part: int) -> Iterator[Any]:
        for samples in self._readings(part):
            for sample in _readable(islice(samples, self._most)):
                self._first.setdefault(part, sample)
                yield sample
        if self._source is None or self._opening.skip_errors:
            self._first.setdefault(part, _NOTHING)

    def _readings(self, part: int) -> Iterator[Iterator[Any]]:
        """Yield iterators over a part from its beginning: first over the given samples, then over the whole part."""
        opening = replace(self._opening, parts=(part,), rounds=Counter())
        if self._source is None:
            yield self._stage.open(opening)[0]
            return
        if part in self._given:
            yield self._stage.open(replace(opening, dispatched={part: iter(self._given[part])}))[0]
        if part not in self._first and opening.skip_errors:  # the stages after the dispatch fail on all given samples
            dispatched = self._source.open(opening)[0]
            yield self._stage.open(replace(opening, dispatched={part: dispatched}))[0]


def _before_dispatch(stage: Stage) -> Stage | None:
    """Return the stage before the dispatch; None if nothing is dispatched."""
    return next((one.read for one in stage.line() if isinstance(one, RoundRobin)), None)


def _readable(samples: Iterable[Any]) -> Iterator[Any]:
    for sample in samples:
        found = sample.sample if isinstance(sample, Stated) else sample
        if not isinstance(found, Unreadable):
            yield found
