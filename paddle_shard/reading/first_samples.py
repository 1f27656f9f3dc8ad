"""Which samples of a stream show what is usual, for all readers alike?"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from paddle_shard.reading.chunk import Dispatched
from paddle_shard.reading.skipping import TRIED
from paddle_shard.stages.opening import Opening, Unreadable, leave_sample
from paddle_shard.stages.repeat import Repeat, in_rounds
from paddle_shard.stages.stage import Stage

_COMPARED, _PARTS = 16, 4
"""Samples that are compared, and parts that they come from, if the parts have so many."""


def opened_with_first(
    stage: Stage, opening: Opening, times: int | None
) -> tuple[list[Iterator[tuple[int, Any]]], dict[int, list[Any]]]:
    """Open parts, and look at the stream's first samples if errors are skipped.

    All readers look at the same samples, whichever parts they hold: the first ones of some parts, spread evenly over
    all. If the pass begins with them, they come from its own reading, since a stream may not be readable twice.

    Args:
        stage: What is opened.
        opening: Of the reader's parts.
        times: As for `in_rounds`.

    Returns:
        The parts as of `in_rounds`, and the first samples: none where errors are not skipped, or where a stream that
        can be opened once only is resumed.
    """
    if not opening.skip_errors:
        return in_rounds(stage, opening, times), {}
    if opening.skip or _repeats(stage):
        again = replace(opening, skip=0, state=None, rounds=Counter(), seen=leave_sample)
        return in_rounds(stage, opening, times), {} if stage.once else _read(_opened(stage, again), opening.num_parts)
    parts = _opened(stage, opening)
    first = _read(parts, opening.num_parts)
    mine = {part: chain(first.get(part, ()), parts[part]) for part in opening.parts}
    return in_rounds(stage, opening, times, mine), first


def first_of_dispatched(stage: Stage, opening: Opening, dispatched: Dispatched) -> list[Any]:
    """Return the same samples of a stream that the main process reads, after the stages that follow the dispatch."""
    if not dispatched.first:
        return []
    first: dict[int, list[Any]] = pickle.loads(dispatched.first)
    given = {part: iter(samples) for part, samples in first.items()}
    parts = stage.open(replace(opening, parts=tuple(first), skip=0, state=None, rounds=Counter(), dispatched=given))
    return [*chain(*parts)]


def _repeats(stage: Stage) -> bool:
    """True if the stream opens itself again, for all parts at once; it would keep samples that nobody reads."""
    return any(isinstance(one, Repeat) for one in stage.line())


def _opened(stage: Stage, opening: Opening) -> dict[int, Iterator[Any]]:
    """Open all parts, those of the reader first. A part is read only when it is asked for a sample."""
    every = tuple(dict.fromkeys([*opening.parts, *range(opening.num_parts)]))
    return dict(zip(every, stage.open(replace(opening, parts=every)), strict=True))


def _read(parts: dict[int, Iterator[Any]], num_parts: int) -> dict[int, list[Any]]:
    """Read the first samples of four parts, or of more if those have too few samples that can be read."""
    spread = [num_parts * number // _PARTS for number in range(_PARTS)]
    of_each, missing = -(-_COMPARED // min(_PARTS, num_parts)), _COMPARED
    first: dict[int, list[Any]] = {}
    for part in dict.fromkeys([*spread, *range(num_parts)]):
        left = min(of_each, missing)
        if not left:
            break
        mine = first[part] = list[Any]()
        for sample in islice(parts[part], TRIED):
            mine.append(sample)
            if not isinstance(sample, Unreadable):
                left, missing = left - 1, missing - 1
                if not left:
                    break
    return first
