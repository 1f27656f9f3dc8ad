"""Cutting a stream into parts if its source cannot open them, and the default number of parts."""

from __future__ import annotations

from collections import deque
from copy import copy
from itertools import islice
from typing import Any

from paddle_shard.data.stages.stage import (
    WHOLE,
    Lengths,
    Opening,
    Samples,
    Stage,
    Transform,
)
from paddle_shard.plan.parts import choose_num_parts

FAILED_AT = "_paddle_shard_failed_at"
"""Attribute of an exception: (part, position) of the sample that failed before the cut, for any owner of the part."""


def is_cut(stage: Stage) -> bool:
    """Return whether a stage of a stream, given its last one, can open a part by itself, or cuts the stream."""
    return any(each.cuts for each in stage.line())


def cut(stage: Stage) -> Stage:
    """Return the last stage of a stream with a cut right behind its source, unless it is cut already."""
    if is_cut(stage):
        return stage
    source, *transforms = [*stage.line()][::-1]
    last: Stage = Stripe(source)
    for transform in map(copy, transforms):
        transform.upstream = last
        last = transform
    return last


class Stripe(Transform):
    """Assigns the samples of one stream to the parts in turns: sample i belongs to part (i // stripe) mod P.

    So a global batch holds the next samples of the stream, in the stream's order. Every reader reads the whole
    stream, runs the stages before the cut, and keeps the samples of the parts that it holds.
    """

    cuts = True
    name = "stripe"

    def open(self, opening: Opening) -> list[Samples]:
        """Return the parts, which share one iterator over the stream."""
        before = opening.origin // opening.num_parts
        stripes, within = divmod(opening.skip - before, opening.stripe)
        first = opening.origin + stripes * opening.num_parts * opening.stripe
        turns = _Turns(self.upstream, opening, first)
        return [islice(turns.of(part), within, None) for part in opening.parts]

    def lengths(self, opening: Opening) -> Lengths:
        """Return the lengths of the parts; they differ by less than two stripes."""
        lengths = self.upstream.lengths(opening.uncut(0))
        if lengths is None:
            return None
        stripe = opening.stripe
        before = opening.origin // opening.num_parts
        num_left = max(0, lengths[0] - opening.origin)
        turns, rest = divmod(num_left, opening.num_parts * stripe)
        return [
            before + turns * stripe + min(stripe, max(0, rest - part * stripe))
            for part in opening.parts
        ]


class _Turns:
    """One iterator over a stream, from which the parts take their samples; those of other parts are queued."""

    def __init__(self, upstream: Stage, opening: Opening, first: int) -> None:
        self._items = upstream.open(opening.uncut(first))[0]
        self._position = first
        self._opening = opening
        # Readers may reach later rounds at different steps.
        self._seen = None if opening.round else opening.seen
        size = opening.stripe
        self._queues: dict[int, deque[Any]] = {
            part: deque() for part in opening.parts
        }
        """The samples of each part that were read and not taken."""
        self._stripes = [
            (queue, slice(part * size, (part + 1) * size))
            for part, queue in self._queues.items()
        ]
        """(queue of a part, where its samples are in a turn)."""

    def of(self, part: int) -> Samples:
        """Yield the samples of a part."""
        queue = self._queues[part]
        while queue or self._read():
            while queue:
                yield queue.popleft()

    def _read(self) -> bool:
        """Read the next turn of the stream, a stripe for each part, into the queues of the parts; False at the end."""
        size = self._opening.stripe
        begin = self._position
        turn: list[Any] = []
        try:
            turn.extend(islice(self._items, self._opening.num_parts * size))
        except Exception as error:
            owner, number = divmod(len(turn), size)
            place = (owner, begin // self._opening.num_parts + number)
            error.__dict__[FAILED_AT] = place
            raise
        self._position += len(turn)
        if self._seen is not None:
            self._seen(begin - self._opening.origin, turn)
        for queue, stripe in self._stripes:
            queue.extend(turn[stripe])
        return len(turn) > 0


def chosen_num_parts(source: Stage, micro_rows: int) -> int:
    """Return the number of parts of a stream for which the user has chosen none."""
    counted = source.lengths(WHOLE) is not None
    return choose_num_parts(micro_rows, None if counted else source.num_shards)
