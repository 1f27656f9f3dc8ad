"""How is a part read again when it has ended?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, repeat
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.parts import check_count
from paddle_shard.stages.opening import Opening, leave_sample
from paddle_shard.stages.stage import Stage


class Repeat(Stage):
    """Reads each part several times; if it is shuffled, each time in another order."""

    def __init__(self, upstream: Stage, times: int | None = None) -> None:
        """Set up the stage.

        Args:
            upstream: The stage to repeat.
            times: How often to read; None: without an end.
        """
        if times is not None:
            check_count("times", times)
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._times = upstream, times

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the samples of each part, round after round."""
        return [(item for _, item in items) for items in in_rounds(self._upstream, opening, self._times)]

    @property
    def endless(self) -> bool:
        """True if the parts have no end: `times` is None, or the stage before is endless."""
        return self._times is None or self._upstream.endless

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the number of samples of all rounds; None if there is no end or a length is not known."""
        if self._times is None:
            return None
        total = [0] * len(opening.parts)
        for number in range(self._times):
            one = self._upstream.lengths(_of_round(opening, number, self._times))
            if one is None:
                return None
            total = [a + b for a, b in zip(total, one, strict=True)]
        return total

    def fingerprint(self) -> list[Any]:
        """Add the number of times."""
        return [*self._upstream.fingerprint(), ["repeat", self._times]]


def in_rounds(
    stage: Stage, opening: Opening, times: int | None, first: Mapping[int, Iterator[Any]] | None = None
) -> list[Iterator[tuple[int, Any]]]:
    """Open parts so that each is reopened when it has ended.

    Args:
        stage: The stage to open.
        opening: The opening of the first round; `skip` counts over all rounds.
        times: Number of rounds; None: without an end.
        first: The parts of the first round, if they are already open at their beginning.

    Returns:
        For each part, pairs of the round, from 0, and the sample.
    """
    if times == 1:
        items = stage.open(opening) if first is None else [first[part] for part in opening.parts]
        return [zip(repeat(0), one, strict=False) for one in items]
    opened: dict[int, dict[int, Iterator[Any]]] = {} if first is None else {0: dict(first)}

    def of_round(number: int, part: int) -> Iterator[Any]:
        if number not in opened:  # for all parts at once, so that they read the source only once
            parts = stage.open(_of_round(opening, number, times))
            opened[number] = dict(zip(opening.parts, parts, strict=True))
        items = opened[number].pop(part)
        if not opened[number] and number:
            del opened[number]
        return items

    def rounds(part: int) -> Iterator[tuple[int, Any]]:
        skip = opening.skip
        for number in range(times) if times is not None else count():
            one = replace(_of_round(opening, number, times), parts=(part,))
            lengths = stage.lengths(one)
            if lengths is not None and skip >= lengths[0] > 0:
                skip -= lengths[0]
                continue
            if lengths is not None and skip:
                # This opens each part alone, so `seen` would be called for the same sample once per part.
                items, found, skip = stage.open(replace(one, skip=skip, seen=leave_sample))[0], True, 0
            else:
                items, found = of_round(number, part), False
            for item in items:
                found = True
                if skip:
                    skip -= 1
                else:
                    yield number, item
            if times is not None:
                continue
            # Files may go to other parts in each round: a part has seen the whole source after `num_parts` rounds.
            opening.rounds[part] = (number + 1) // opening.num_parts
            if not found:
                raise ArgumentError(
                    f"part {part} of {opening.num_parts} has no sample to repeat. Use fewer parts "
                    "(num_parts=), or tail='pad' or 'drop'."
                )

    return [rounds(part) for part in opening.parts]


def _of_round(opening: Opening, number: int, times: int | None) -> Opening:
    state = opening.state if number == 0 else None
    return replace(opening, round=opening.round * (times or 1) + number, skip=0, state=state)
