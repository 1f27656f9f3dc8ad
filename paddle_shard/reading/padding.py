"""What fills the rows for which a part has no samples?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from paddle_shard.reading.skipping import TRIED
from paddle_shard.stages.stage import Opening, Stage, Stated, Unreadable

_NOTHING = object()


class Padding:
    """Fills missing rows of a part with its own first sample, or with that of the lowest part that has one.

    Samples that cannot be read are passed over. So the choice depends on the order alone, not on which reader holds
    which parts, nor on where the pass began. The first samples that a pass reads are kept. If it begins later, and for
    other readers' parts, the stream is opened again.
    """

    def __init__(self, stage: Stage, opening: Opening) -> None:
        """Set up; nothing is opened yet.

        Args:
            stage: The stage that opens the parts.
            opening: The opening of the pass.
        """
        self._stage = stage
        self._opening = replace(opening, skip=0, state=None)
        self._from_beginning = opening.skip == 0
        self._most = TRIED if stage.endless else None
        self._num_noted: Counter[int] = Counter()
        self._first: dict[int, Any] = {}

    def note(self, part: int, samples: Sequence[Any], *, ended: bool) -> None:
        """Note the samples of a part that the pass has read next, and whether the part has ended after them."""
        if not self._from_beginning or part in self._first:
            return
        left = None if self._most is None else max(0, self._most - self._num_noted[part])
        self._num_noted[part] += len(samples)
        first = next(_readable(samples[:left]), _NOTHING)
        if ended or first is not _NOTHING:
            self._first[part] = first

    def of(self, part: int) -> Any:
        """Return the sample that fills a part's rows.

        Raises:
            LookupError: Every part is empty, or none of its samples can be read.
        """
        for candidate in (part, *range(self._opening.num_parts)):
            if candidate not in self._first:
                opening = replace(self._opening, parts=(candidate,), rounds=Counter())
                opened = self._stage.open(opening)[0]
                self._first[candidate] = next(_readable(islice(opened, self._most)), _NOTHING)
            if self._first[candidate] is not _NOTHING:
                return self._first[candidate]
        raise LookupError("every part is empty, or none of its samples can be read")


def _readable(samples: Iterable[Any]) -> Iterator[Any]:
    for sample in samples:
        found = sample.sample if isinstance(sample, Stated) else sample
        if not isinstance(found, Unreadable):
            yield found
