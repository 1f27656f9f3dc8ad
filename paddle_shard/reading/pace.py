"""How quick and how small are the steps of a pass, and what pays off for such steps?"""

from __future__ import annotations

import math
import time

QUICK = 0.001
"""Seconds per step below which a few microseconds matter: a message to a worker, a thread, a look at the clock."""

_TRIALS = 3
"""Number of reads after which it is known whether reading is quick."""
_KEPT = 0.8
"""Share of the earlier estimate that is kept at each further step."""

_CACHED, _SENT, _HELD = 256 << 10, 1 << 20, 8 << 20
"""Bytes that stay in the cache while they are read one after the other; bytes that stay there until they are delivered;
bytes that may be held ahead if the ranks need longer to agree."""
_AGREED_AHEAD, _SEEN_AHEAD = 0.02, 0.0005
"""Seconds of steps to read ahead, so that a round of the agreement is over when half of them are needed: a round takes
up to a few milliseconds on a busy host. The same for ranks that see each other's progress on a table: they differ by
about that."""
_FEWEST, _MOST = 2, 32
"""Fewest steps to read ahead on a table if steps are quick; most steps to read ahead because they are quick."""


class Pace:
    """The seconds and bytes of a step, as measured so far, and all decisions that follow from them.

    Attributes:
        seconds: Recent time from one step to the next; infinite if it is not known yet.
        num_bytes: Bytes of the newest step.
        quickest_read: Shortest time in which a step was read and placed, of those given to `has_read`.
    """

    def __init__(self) -> None:
        """Begin without a measurement."""
        self.seconds = self.quickest_read = math.inf
        self.num_bytes = self._reads = 0
        self._looked = (0, 0.0)

    def look(self, step: int, num_bytes: int) -> None:
        """Look at the clock before a step. Measuring begins with the first look after step 0.

        Args:
            step: Number of the step, from 0; steps may be left out.
            num_bytes: Bytes of a step; 0 if not known.
        """
        (before, since), now = self._looked, time.perf_counter()
        self._looked = (step, now)
        if before == 0 or step == before or not num_bytes:
            return
        took, kept = (now - since) / (step - before), _KEPT ** (step - before)
        self.seconds = kept * self.seconds + (1 - kept) * took if self.seconds < math.inf else took
        self.num_bytes = num_bytes

    def has_read(self, seconds: float) -> None:
        """Note how long it took to read and place a step."""
        self._reads += 1
        self.quickest_read = min(self.quickest_read, seconds)

    @property
    def quick(self) -> bool:
        """True if steps follow each other quickly."""
        return self.seconds < QUICK

    @property
    def reads_known(self) -> bool:
        """True if enough steps were read to tell how long a read takes."""
        return self._reads >= _TRIALS

    @property
    def reads_quickly(self) -> bool:
        """True if a step is read so quickly that a thread for it would cost more than it saves."""
        return self.reads_known and self.quickest_read < QUICK

    def stays_cached(self, count: int) -> bool:
        """Return whether `count` steps fit into the cache together."""
        return count * self.num_bytes <= _CACHED

    def requests_at_once(self, num_bytes: int, most: int) -> int:
        """Return how many requests to send a worker in one message.

        Args:
            num_bytes: Bytes of the answer to one request.
            most: Largest number to return.
        """
        fit = max(1, min(most, _SENT // max(num_bytes, 1)))
        return fit if self.quick else 1

    def steps_ahead(self, least: int, *, on_table: bool = False) -> int:
        """Return how many steps to read ahead so that quick steps do not wait for the agreement.

        Args:
            least: Smallest number to return, except for quick steps on a table.
            on_table: True if ranks see each other's progress on a table, so that no rounds are needed.
        """
        return steps_ahead(least, self.seconds, self.num_bytes, on_table=on_table)


def steps_ahead(least: int, step_seconds: float, num_bytes: int, *, on_table: bool = False) -> int:
    """Return how many steps to read ahead, given their duration and size; see `Pace.steps_ahead`.

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
