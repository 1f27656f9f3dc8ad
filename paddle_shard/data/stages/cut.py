"""Cutting a stream into parts if its source cannot open them, and the default number of parts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import Any
from weakref import ref

from paddle_shard.data.stages.stage import Opening, Stage, Transform
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.parts import choose_num_parts

FAILED_AT = "_paddle_shard_failed_at"
"""Attribute of an exception: (part, position) of the sample that failed before the cut, for any owner of the part."""


def is_cut(stage: Stage) -> bool:
    """Return whether a stage of a stream, given its last one, can open a part by itself, or cuts the stream."""
    return any(one.cuts for one in stage.line())


def cut(stage: Stage) -> Stage:
    """Return the last stage of a stream with a cut right behind its source, unless it is cut already."""
    if is_cut(stage):
        return stage
    source, *transforms = [*stage.line()][::-1]
    made: Stage = Stripe(source)
    for stage in map(copy, transforms):
        stage.upstream, made = made, stage
    return made


class Stripe(Transform):
    """Assigns the samples of one stream to the parts in turns: sample i belongs to part (i // stripe) mod P.

    So a global batch holds the next samples of the stream, in the stream's order. Every reader reads the whole
    stream, runs the stages before the cut, and keeps the samples of the parts that it holds.
    """

    cuts = True

    def __init__(self, upstream: Stage) -> None:
        super().__init__(upstream, "stripe")

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the parts, which share one iterator over the stream."""
        stripes, within = divmod(opening.skip, opening.stripe)
        turns = _Turns(
            self.upstream, opening, stripes * opening.num_parts * opening.stripe
        )
        return [islice(turns.of(part), within, None) for part in opening.parts]

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the lengths of the parts; they differ by less than two stripes."""
        found = self.upstream.lengths(opening.uncut(0))
        if found is None:
            return None
        turns, rest = divmod(found[0], opening.num_parts * opening.stripe)
        return [
            turns * opening.stripe
            + min(opening.stripe, max(0, rest - part * opening.stripe))
            for part in opening.parts
        ]


class _Turns:
    """One iterator over a stream, from which the parts take their samples; those of other parts are queued."""

    def __init__(self, upstream: Stage, opening: Opening, first: int) -> None:
        uncut = opening.uncut(first)
        self._items, self._at, self._opening = upstream.open(uncut)[0], first, opening
        self._seen = (
            None if opening.round else opening.seen
        )  # readers may reach later rounds at different steps
        # Only the reader of a part keeps its queue alive, so samples that no reader takes do not pile up.
        self._waiting: dict[int, ref[deque[Any]]] = {}

    def of(self, part: int) -> Iterator[Any]:
        mine: deque[Any] = deque()
        self._waiting[part] = ref(
            mine
        )  # now, as another part may be read before this one
        return self._taken(mine)

    def _taken(self, mine: deque[Any]) -> Iterator[Any]:
        while True:
            while not mine:
                if not self._read():
                    return
            while mine:
                yield mine.popleft()

    def _read(self) -> bool:
        """Read the next samples of the stream, those of one stripe, into the queue of their part; False at the end."""
        size = self._opening.stripe
        begin = self._at
        turn, owner = divmod(begin // size, self._opening.num_parts)
        held = self._waiting.get(owner)
        queue = None if held is None else held()
        try:
            for item in islice(self._items, size - begin % size):
                if self._seen is not None:
                    self._seen(self._at, item)
                self._at += 1
                if queue is not None:
                    queue.append(item)
        except Exception as error:
            with contextlib.suppress(Exception):  # the exception allows no attributes
                setattr(error, FAILED_AT, (owner, turn * size + self._at % size))
            raise
        return self._at > begin


def chosen_num_parts(source: Stage, micro_rows: int, num_data_ranks: int) -> int:
    """Return the number of parts of a stream for which the user has chosen none."""
    counted = source.lengths(Opening(parts=(0,), num_parts=1)) is not None
    shards = None if counted else source.num_shards
    if shards is None:  # nothing limits the parts
        return choose_num_parts(micro_rows)
    chosen = choose_num_parts(micro_rows, source.most_even_parts)
    if chosen % num_data_ranks:
        fits = [
            parts
            for parts in range(num_data_ranks, shards + 1, num_data_ranks)
            if micro_rows % parts == 0
        ]
        raise ArgumentError(
            f"in_parts() is missing: {shards} shards that are not counted go evenly into {chosen} parts of a batch of "
            f"{micro_rows} rows, which {num_data_ranks} data ranks do not divide. Ways that work: count the samples "
            "(counts=True; for tars an index file), so that shards are cut in the middle; in_parts(), one of "
            f"{fits or 'none'}, where the tail pads or drops what the parts differ by; more shards; or a stream that "
            "every rank reads whole (Stream.of(...))."
        )
    return chosen
