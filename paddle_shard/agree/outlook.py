"""What does one rank know about the next steps of a pass, and what follows from the knowledge of all ranks?"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

FAIL, END, OK, CLOSED = range(4)
"""A rank reports one of these about the first step that it has not promised; at the same step, the least wins."""

NEVER = 2**60
REPORT_LIMIT = 64 * 1024
_CUT = b"\n[cut: a report holds 64 KB]"
_LAYOUT = struct.Struct("<qqqqqq")


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

    def pack(self) -> bytes:
        """Return everything, with a long report cut, for a gather."""
        cut = self.report if len(self.report) <= REPORT_LIMIT else self.report[: REPORT_LIMIT - len(_CUT)] + _CUT
        return self.pack_numbers() + cut

    def pack_numbers(self) -> bytes:
        """Return everything except the report, in `SIZE` bytes that `unpack` takes."""
        return _LAYOUT.pack(self.tag, self.step, self.kind, self.exhausted, self.delivered, self.read)

    @classmethod
    def unpack(cls, payload: bytes) -> Outlook:
        """Return the outlook that was packed."""
        tag, step, kind, exhausted, delivered, read = _LAYOUT.unpack_from(payload)
        return cls(tag, step, kind, exhausted, delivered, read, payload[SIZE:])


WIDTH, SIZE = len(Outlook().vector()), _LAYOUT.size


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
