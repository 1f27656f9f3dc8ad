"""What does one rank know of a pass ahead of it, and what follows from what all of them know?"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

FAIL, END, OK, CLOSED = range(4)
"""What a rank says of the first step that it has not promised; at the same step the least one holds."""

NEVER = 2**60
REPORT_LIMIT = 64 * 1024
_CUT = b"\n[cut: a report holds 64 KB]"
_LAYOUT = struct.Struct("<qqqqqq")


@dataclass(slots=True)
class Outlook:
    """One rank's knowledge of one pass. `vector` is what it contributes to a round."""

    tag: int = 0
    """Digest of what the pass is; must be the same on all ranks."""
    step: int = 0
    """Every step before it can be served by this rank."""
    kind: int = OK
    """Of `step`. OK: nothing is known yet. Anything else is final, and nothing follows."""
    exhausted: int = NEVER
    """From this step on there are no real rows here; NEVER while there may be."""
    delivered: int = 0
    read: int = 0
    """What stands for all that was read before the last step that was agreed on; 0 where that need not be the same."""
    report: bytes = b""
    """Of the failure."""
    reads_on: int = 0
    """Further steps that this rank reads before another's end is settled, which shows whether its data goes on."""

    def vector(self) -> list[int]:
        """Return seven values whose minima over the ranks are what `decide` takes."""
        known = self.step - self.reads_on if self.kind == OK else NEVER
        return [4 * self.step + self.kind, -self.exhausted, known, self.tag, -self.tag, self.read, -self.read]

    def pack(self) -> bytes:
        """Return everything, with a long report cut, for a gather."""
        cut = self.report if len(self.report) <= REPORT_LIMIT else self.report[: REPORT_LIMIT - len(_CUT)] + _CUT
        return self.pack_numbers() + cut

    def pack_numbers(self) -> bytes:
        """Return everything but the report, in `SIZE` bytes that `unpack` takes."""
        return _LAYOUT.pack(self.tag, self.step, self.kind, self.exhausted, self.delivered, self.read)

    @classmethod
    def unpack(cls, payload: bytes) -> Outlook:
        """Return what `pack` was given."""
        tag, step, kind, exhausted, delivered, read = _LAYOUT.unpack_from(payload)
        return cls(tag, step, kind, exhausted, delivered, read, payload[SIZE:])


WIDTH, SIZE = len(Outlook().vector()), _LAYOUT.size


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows, on all ranks alike, from the minima of a round."""

    step: int
    """Every step before it may be delivered."""
    kind: int
    """What happens at `step`, for good; OK: that is not decided yet."""
    matches: bool = True
    """Whether all ranks mean the same pass."""
    same: bool = True
    """Whether they have read the same, as far as they should."""


def decide(least: Sequence[int]) -> Decision:
    """Return what the minima of all ranks' vectors decide.

    The answer does not depend on when it is asked, only on what the ranks come to say: the pass ends at the
    first step that any rank cannot serve, and why is settled once every rank has said what it can do there.

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
