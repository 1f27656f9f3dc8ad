"""What does one rank know about the next steps of a pass, and what follows from the knowledge of all ranks?"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

FAIL, END, OK, CLOSED = range(4)
"""A rank reports one of these about the first step that it has not promised; at the same step, the least wins."""

NEVER = 2**60
REPORT_LIMIT = 64 * 1024
PASSES = 64
"""Most passes that are on a progress table at the same time; further open passes use rounds only."""

_CUT = b"\n[cut: a report holds 64 KB]"
_MAX_STEP = 1 << 32
STEPS_TOLD = 2000
"""Most steps whose digests a rank reports if ranks differ: a report holds 64 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the ranks agree on in a pass."""

    label: str = ""
    """Text of `verdict.described` about the data. It must be equal on all ranks; errors name differences."""
    name: str = "the data"
    """Name of the loader, for messages."""
    timeout: float | None = None
    """Seconds for which a rank may be silent while another waits for it; None: the coordinator's."""
    ends_must_agree: bool = False
    """True if ends at different steps are an error."""
    same_data: bool = False
    """True if all ranks read the same data, and give a digest with each step (`Agreement.note_read`)."""
    ends_apart: int | None = None
    """With `same_data`, by how many steps their ends may differ; None: by any number."""
    exit_when_lost: bool = False
    """True if the process ends when a rank is lost while the pass is open."""
    first_step: int = 0
    """The epoch's step with which the pass begins, for messages."""


@dataclass(slots=True)
class Outlook:
    """One rank's knowledge about one pass. `vector` is its contribution to a round."""

    tag: int = 0
    """Digest of the label of the pass; must be the same on all ranks."""
    step: int = 0
    """This rank can serve every step before this one."""
    kind: int = OK
    """Kind of `step`. OK: nothing is known yet. Any other value is final, and no step follows."""
    exhausted: int = NEVER
    """From this step on, this rank has no real rows; NEVER while it may have some."""
    delivered: int = 0
    read: int = 0
    """Digest of all that was read before the last step that was agreed on; 0 if ranks need not read the same data."""
    report: bytes = b""
    """Report of the failure."""
    reads_on: int = 0
    """Extra steps that this rank reads before the end of another rank is settled, to see whether its data continues."""

    def vector(self) -> list[int]:
        """Return seven values; `decide` takes their minima over the ranks."""
        known = self.step - self.reads_on if self.kind == OK else NEVER
        return [4 * self.step + self.kind, -self.exhausted, known, self.tag, -self.tag, self.read, -self.read]

    def told(self) -> list[Any]:
        """Return everything, with a long report cut, as JSON can hold it."""
        cut = self.report if len(self.report) <= REPORT_LIMIT else self.report[: REPORT_LIMIT - len(_CUT)] + _CUT
        # Latin-1 maps any bytes to characters and back, and most reports are ASCII.
        return [self.tag, self.step, self.kind, self.exhausted, self.delivered, self.read, cut.decode("latin-1")]

    @classmethod
    def heard(cls, told: Sequence[Any]) -> Outlook:
        """Return the outlook that another rank has told."""
        tag, step, kind, exhausted, delivered, read, report = told
        return cls(tag, step, kind, exhausted, delivered, read, report.encode("latin-1"))


WIDTH = len(Outlook().vector())


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a round, which follows from the minima; it is the same on all ranks."""

    step: int
    """Every step before this one may be delivered."""
    kind: int
    """Final event at `step`; OK: it is not decided yet."""
    matches: bool = True
    """True if all ranks refer to the same pass."""
    same: bool = True
    """True if all ranks that must read the same data have done so."""


def decide(least: Sequence[int]) -> Decision:
    """Return what the minima of all ranks' vectors decide.

    The result depends only on what the ranks report in the end, not on when it is computed. The pass ends at the first
    step that any rank cannot serve; the reason is decided when every rank has reported what it can do there.

    Examples:
        >>> ahead, ends, fails = Outlook(step=9), Outlook(step=5, kind=END), Outlook(step=5, kind=FAIL)
        >>> def decided(*outlooks):
        ...     return decide([min(column) for column in zip(*(o.vector() for o in outlooks))])
        >>> decided(ahead, ends)
        Decision(step=5, kind=1, matches=True, same=True)
        >>> decided(ahead, ends, fails)
        Decision(step=5, kind=0, matches=True, same=True)
        >>> decided(Outlook(step=5), ends)  # what the first rank will say of step 5 is not known
        Decision(step=5, kind=2, matches=True, same=True)
        >>> decided(Outlook(step=9, exhausted=3), Outlook(step=9, exhausted=6))
        Decision(step=6, kind=1, matches=True, same=True)
    """
    first, negated, known, tag, negated_tag, read, negated_read = least
    if tag != -negated_tag:
        return Decision(0, CLOSED, matches=False)
    if read != -negated_read:
        return Decision(0, CLOSED, same=False)
    if -negated < NEVER:
        first = min(first, 4 * -negated + END)
    step, kind = divmod(first, 4)
    return Decision(step, kind if known > step else OK)


class ProgressTable:
    """The number of steps of a pass that each rank can serve, in memory that all ranks share.

    Reading it costs a fraction of a microsecond, but it tells less than a round: neither why a rank stops, nor its
    notes. A rank's entry is correct whenever it is read, and only grows within a pass.
    """

    def __init__(self, words: MutableSequence[int], rank: int, size: int) -> None:
        """Use the shared memory.

        Args:
            words: `PASSES * size` int64 words, all 0 at first; each word is written as a whole.
            rank: Position of this process among the ranks.
            size: Number of ranks.
        """
        self._words, self._rank, self._size = words, rank, size

    def post(self, number: int, step: int) -> None:
        """Post that this rank can serve every step before `step` of pass `number`."""
        self._words[number % PASSES * self._size + self._rank] = (number + 1) * _MAX_STEP + min(step, _MAX_STEP - 1)

    def least(self, number: int) -> int:
        """Return the number of steps of pass `number` that every rank can serve, as far as the table shows."""
        start, none = number % PASSES * self._size, (number + 1) * _MAX_STEP
        found: Sequence[int] = self._words[start : start + self._size]
        least = min(found)
        return least - none if least >= none and max(found) < none + _MAX_STEP else 0
