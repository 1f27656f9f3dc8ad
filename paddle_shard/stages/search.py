"""When does a stage that drops samples give up on an endless part?"""

from __future__ import annotations

from paddle_shard.errors import ArgumentError
from paddle_shard.stages.opening import Opening

FEWEST = 1000
"""Least number of samples to try: a random function may drop all samples of a few rounds of a short part."""


class Search:
    """Counts the samples of a part that a stage has dropped since it last kept one.

    If a stage drops all samples of whole rounds of an endless source, it would drop those of the next rounds, too, and
    would read forever.
    """

    def __init__(self, opening: Opening, part: int, name: str) -> None:
        self._opening, self._part, self._name = opening, part, name
        self._dropped = self._began = 0

    def kept(self) -> None:
        """Restart the count."""
        self._dropped = 0

    def dropped(self) -> None:
        """Count a dropped sample.

        Raises:
            ArgumentError: Whole rounds were dropped.
        """
        rounds = self._opening.rounds[self._part]
        if self._dropped == 0:
            self._began = rounds
        self._dropped += 1
        if self._dropped >= FEWEST and rounds > self._began + 2:  # two of them whole
            raise ArgumentError(
                f"{self._name}: none of the last {self._dropped} samples of part {self._part} of "
                f"{self._opening.num_parts} gave a result. The part has no end, and whole rounds of its source gave no "
                "result. Keep some samples of every part, or use fewer parts (num_parts=)."
            )
