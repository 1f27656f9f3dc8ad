"""How quick and how small are the steps of a pass, and what suits such steps?"""

from __future__ import annotations

import math
import time

QUICK = 0.001
"""Seconds of a step below which some microseconds count: a message to a worker, a thread, a look at a clock."""

_TRIALS = 3
"""Reads after which it is known whether reading is quick."""
_KEPT = 0.8
"""Weight of the earlier steps in the mean; the newest step has the rest."""

_CACHED, _SENT, _HELD = 256 << 10, 1 << 20, 8 << 20
"""Bytes that stay in the cache while they are read one after the other; that stay there until they are delivered; and
that may be held ahead where the ranks need longer to agree."""
_AGREED_AHEAD, _SEEN_AHEAD = 0.02, 0.0005
"""Seconds of steps that are read ahead, so that a round of the agreement is over when half of them are needed: it takes
up to some milliseconds on a busy host. And where ranks see on a table how far the others are: they differ by that."""
_FEWEST, _MOST = 2, 32
"""Steps that are read ahead of quick ones, at least and at most."""


class Pace:
    """The seconds and bytes of a step, as they have been seen so far; all decisions that follow from them are here.

    Attributes:
        seconds: From one step to the next, lately; infinite while that is not known.
        num_bytes: Of the newest step.
        quickest_read: The shortest time in which a step was read and placed by the thread that counts it.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.seconds = self.quickest_read = math.inf
        self.num_bytes = self._reads = 0
        self._looked = (0, 0.0)

    def look(self, step: int, num_bytes: int) -> None:
        """Look at the clock before a step. The time before the first step is not counted.

        Args:
            step: Number of the step; steps may be left out.
            num_bytes: Size of a step; 0 if that is not known.
        """
        (before, since), now = self._looked, time.perf_counter()
        self._looked = (step, now)
        if before == 0 or step == before or not num_bytes:
            return
        took, kept = (now - since) / (step - before), _KEPT ** (step - before)
        self.seconds = kept * self.seconds + (1 - kept) * took if self.seconds < math.inf else took
        self.num_bytes = num_bytes

    def has_read(self, seconds: float) -> None:
        """Note how long a step took to be read and placed."""
        self._reads += 1
        self.quickest_read = min(self.quickest_read, seconds)

    @property
    def quick(self) -> bool:
        """True if steps follow each other quickly."""
        return self.seconds < QUICK

    @property
    def reads_known(self) -> bool:
        """True if enough was read to tell how long reading takes."""
        return self._reads >= _TRIALS

    @property
    def reads_quickly(self) -> bool:
        """True if a step is read so quickly that a thread for it would cost more than it saves."""
        return self.reads_known and self.quickest_read < QUICK

    def stays_cached(self, count: int) -> bool:
        """Return True if a number of steps fit into the cache together."""
        return count * self.num_bytes <= _CACHED

    def requests_at_once(self, num_bytes: int, most: int) -> int:
        """Return how many requests a worker is sent in one message.

        Args:
            num_bytes: Size of the answer to one request.
            most: Largest number to return.
        """
        fit = max(1, min(most, _SENT // max(num_bytes, 1)))
        return fit if self.quick else 1

    def steps_ahead(self, least: int, *, on_table: bool = False) -> int:
        """Return how many steps to read ahead so that quick ones do not wait for the agreement.

        Args:
            least: Smallest number to return, except for quick steps on a table.
            on_table: True if no rounds are needed.
        """
        return steps_ahead(least, self.seconds, self.num_bytes, on_table=on_table)


def steps_ahead(least: int, step_seconds: float, num_bytes: int, *, on_table: bool = False) -> int:
    """Return how many steps of a duration and size to read ahead; see `Pace.steps_ahead`.

    Examples:
        >>> steps_ahead(2, 0.0002, 1000), steps_ahead(2, 0.0002, 1 << 20), steps_ahead(2, 0.05, 1000)
        (32, 8, 2)
        >>> steps_ahead(8, 0.0002, 1 << 20, on_table=True)
        2
    """
    seconds, held = (_SEEN_AHEAD, _SENT) if on_table else (_AGREED_AHEAD, _HELD)
    if on_table and step_seconds < QUICK:
        least = min(least, _FEWEST)
    wanted = 2 * math.ceil(seconds / max(step_seconds, 1e-6))
    return max(least, min(wanted, held // max(num_bytes, 1), _MOST))
