"""What stands in the rows that a part has no samples for?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paddle_shard.plan.opening import Opening, Stage, Stated, Unreadable

_NOTHING = object()

Spare = dict[int, list[Any]]
"""For some parts, their first samples."""


class Padding:
    """A part's own first sample; for a part without any, that of the lowest part that has one.

    So it depends on the order alone: not on who holds which parts, nor on where the pass began. The first samples of a
    pass are kept; where it begins later, and for other readers' parts, the stream is opened again.
    """

    def __init__(self, stage: Stage, opening: Opening, *, dealt: bool = False) -> None:
        """Open nothing yet.

        Args:
            stage: What opens the parts.
            opening: Of the pass.
            dealt: The stage reads nothing by itself: samples have to be given.
        """
        self._stage, self._dealt = stage, dealt
        self._opening = replace(opening, skip=0, state=None)
        self._from_beginning = opening.skip == 0
        self._first: dict[int, Any] = {}
        self._given: Spare = {}

    def note(self, part: int, samples: Sequence[Any], *, ended: bool) -> None:
        """Look at what the pass has read next of a part, and whether that is its end."""
        if not self._from_beginning or part in self._first:
            return
        first = next(_readable(samples), _NOTHING)
        if ended or first is not _NOTHING:
            self._first[part] = first

    def give(self, spare: Mapping[int, Sequence[Any]]) -> None:
        """Take the first samples of some parts, as the stage is to be dealt them."""
        for part, samples in spare.items():
            self._given.setdefault(part, []).extend(samples)

    def candidates(self, part: int) -> Iterator[tuple[int, Any]]:
        """Yield (part, sample) of what can stand in a part's rows; the first does."""
        for candidate in (part, *range(self._opening.num_parts)):
            if candidate not in self._first:
                yield from ((candidate, sample) for sample in self._opened(candidate))
            elif self._first[candidate] is not _NOTHING:
                yield candidate, self._first[candidate]

    def of(self, part: int) -> Any:
        """Return what stands in a part's rows.

        Raises:
            LookupError: No part has a sample.
        """
        for _, sample in self.candidates(part):
            return sample
        raise LookupError("every part is empty")

    def _opened(self, part: int) -> Iterator[Any]:
        opening = replace(self._opening, parts=(part,), rounds=Counter())
        if self._dealt:
            opening = replace(opening, dealt={part: iter(self._given.get(part, ()))})
        for sample in _readable(self._stage.open(opening)[0]):
            self._first.setdefault(part, sample)
            yield sample
        if not self._dealt:
            self._first.setdefault(part, _NOTHING)


def _readable(samples: Iterable[Any]) -> Iterator[Any]:
    for sample in samples:
        found = sample.sample if isinstance(sample, Stated) else sample
        if not isinstance(found, Unreadable):
            yield found
