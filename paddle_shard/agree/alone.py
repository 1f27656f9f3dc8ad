"""What is the agreement of a rank that is alone?"""

from __future__ import annotations

from paddle_shard.errors import AgreedFailure


class AloneAgreement:
    """The agreement of a rank with itself. It never waits, and it needs no prefetch.

    It has the methods of `Agreement` that a pass calls.
    """

    on_table = False
    reads_on = 0

    def __init__(self) -> None:
        """Start at step 0."""
        self.prefetch = 0
        self._announced, self._failed = 0, False
        self._open = True
        self._notes: dict[int, bytes] = {}

    def wanted(self, step: int) -> int:
        """Return how many steps should be announced before `step` is asked for: that step, if there is one."""
        return step + 1 if self._open else self._announced

    def deliver(self, step: int) -> bool:
        """Return whether a step may be delivered.

        Raises:
            AgreedFailure: Reading it failed.
        """
        if step < self._announced:
            return True
        if self._failed:
            failure = AgreedFailure(f"Reading step {step} failed.")
            failure.step, failure.reports = step, ()
            raise failure
        return False

    def announce_ok(self, steps: int = 1) -> None:
        """Announce that the next step, or the next `steps`, can be served."""
        if self._open:
            self._announced += steps

    def announce_exhausted(self) -> None:
        """Announce that there are no real rows from the next step on: the pass ends before it."""
        self._open = False

    def announce_end(self) -> None:
        """Announce that the next step cannot be served."""
        self._open = False

    def announce_failure(self, report: bytes) -> None:
        """Announce that reading the next step failed."""
        if self._open:
            self._open, self._failed = False, True

    def note(self, payload: bytes) -> None:
        """Store a note about the step that is announced next."""
        self._notes[self._announced] = payload

    def take_notes(self, step: int) -> list[tuple[int, bytes]]:
        """Return (rank, note) of a step; a rank that is alone has the number 0."""
        found = self._notes.pop(step, None)
        return [] if found is None else [(0, found)]

    def note_read(self, digest: int) -> None:
        """Do nothing: there is no other rank to compare with."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
