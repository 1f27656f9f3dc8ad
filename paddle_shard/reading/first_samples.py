"""Which samples of a stream tell what is usual, the same in every reader?"""

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
"""Number of samples that are compared, and of parts that they come from if these have enough."""


def opened_with_first(
    stage: Stage, opening: Opening, times: int | None
) -> tuple[list[Iterator[tuple[int, Any]]], dict[int, list[Any]]]:
    """Open parts; if errors are skipped, also read the stream's first samples.

    Every reader reads the same first samples, whichever parts it holds: those of some parts, spread evenly over all
    parts. If the pass begins with them, they are taken from it, since the stream may be readable only once.

    Args:
        stage: The stage to open.
        opening: The opening of the reader's parts.
        times: As for `in_rounds`.

    Returns:
        The parts, as from `in_rounds`, and the first samples. There are none if errors are not skipped, or if the
        stream can be opened only once and is resumed or repeats.
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
    """Return the first samples of a stream that the main process reads, as the stages after the dispatch make them."""
    if not dispatched.first:
        return []
    first: dict[int, list[Any]] = pickle.loads(dispatched.first)
    given = {part: iter(samples) for part, samples in first.items()}
    parts = stage.open(replace(opening, parts=tuple(first), skip=0, state=None, rounds=Counter(), dispatched=given))
    return [*chain(*parts)]


def _repeats(stage: Stage) -> bool:
    """True if the stream reopens its parts. It reopens all at once, so parts that nobody reads would stay open."""
    return any(isinstance(one, Repeat) for one in stage.line())


def _opened(stage: Stage, opening: Opening) -> dict[int, Iterator[Any]]:
    """Open all parts, the reader's own first. A part is read only when it is iterated over."""
    every = tuple(dict.fromkeys([*opening.parts, *range(opening.num_parts)]))
    return dict(zip(every, stage.open(replace(opening, parts=every)), strict=True))


def _read(parts: dict[int, Iterator[Any]], num_parts: int) -> dict[int, list[Any]]:
    """Read the first samples of four parts, and of more parts if these have too few readable samples."""
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
