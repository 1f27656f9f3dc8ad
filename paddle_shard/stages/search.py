"""When does a stage that drops samples give up on an endless part?"""

from __future__ import annotations

from paddle_shard.errors import ArgumentError
from paddle_shard.stages.opening import Opening

FEWEST = 1000
"""Samples that are tried at least: a random function may drop all of a few rounds of a short part."""


class Search:
    """Counts what a stage has dropped of a part since it kept a sample.

    Where all that whole rounds of an endless source yield was dropped, the next would be, too: it would read for ever.
    """

    def __init__(self, opening: Opening, part: int, name: str) -> None:
        self._opening, self._part, self._name = opening, part, name
        self._dropped = self._began = 0

    def kept(self) -> None:
        """Begin anew."""
        self._dropped = 0

    def dropped(self) -> None:
        """Count a sample.

        Raises:
            ArgumentError: Nothing was kept of whole rounds.
        """
        rounds = self._opening.rounds[self._part]
        if self._dropped == 0:
            self._began = rounds
        self._dropped += 1
        if self._dropped >= FEWEST and rounds > self._began + 2:  # two of them whole
            raise ArgumentError(
                f"{self._name}: nothing came of {self._dropped} samples in a row of part {self._part} of "
                f"{self._opening.num_parts}, which has no end: whole rounds of its source hold nothing for it. Keep "
                "some samples of every part, or use fewer parts (num_parts=)."
            )
