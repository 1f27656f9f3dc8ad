"""How is a stream cut into parts if it is not made of files or other pieces?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import ref

from paddle_shard.plan.handlers import ignoring
from paddle_shard.stages.stage import Opening, Stage, leave_sample

FAILED_AT = "_paddle_shard_failed_at"
"""Attribute of an exception: (part, position) of the sample that failed before the cut, for any owner of the part."""


class Stripe(Stage):
    """Assigns the samples of one stream to the parts in turns: sample i belongs to part (i // stripe) mod P.

    So a global batch holds the next samples of the stream, in the stream's order. Every reader reads the whole
    stream, runs the stages before the cut, and keeps the samples of the parts that it holds.
    """

    def __init__(self, upstream: Stage) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream = upstream

    @property
    def cuts(self) -> bool:
        """True: the stream is cut at this stage."""
        return True

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the parts, which share one iterator over the stream."""
        stripes, within = divmod(opening.skip, opening.stripe)
        at = stripes * opening.num_parts * opening.stripe
        uncut = opening.uncut(at)
        items = self._upstream.open(uncut)[0]
        turns = _Turns(items, at, opening, uncut.rounds if self._upstream.endless else None)
        return [islice(turns.of(part), within, None) for part in opening.parts]

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the lengths of the parts; they differ by less than two stripes."""
        found = self._upstream.lengths(opening.uncut(0))
        if found is None:
            return None
        turns, rest = divmod(found[0], opening.num_parts * opening.stripe)
        return [
            turns * opening.stripe + min(opening.stripe, max(0, rest - part * opening.stripe)) for part in opening.parts
        ]

    def fingerprint(self) -> list[Any]:
        """Add this stage."""
        return [*self._upstream.fingerprint(), ["stripe"]]


class _Turns:
    """One iterator over a stream, from which the parts take their samples; those of other parts are queued."""

    def __init__(self, items: Iterator[Any], at: int, opening: Opening, ended: Mapping[int, int] | None) -> None:
        self._items, self._at = items, at
        self._rounds, self._ended = opening.rounds, ended
        self._stripe, self._num_parts, self._seen = opening.stripe, opening.num_parts, opening.seen
        if opening.round:  # readers may reach later rounds at different steps
            self._seen = leave_sample
        # [part] -> (rounds of the stream before it, sample). Only the reader of a part keeps its queue alive, so
        # samples that no reader takes do not pile up.
        self._waiting: dict[int, ref[deque[tuple[int, Any]]]] = {}

    def _owner(self) -> tuple[int, int]:
        """Return (part, position in it) of the next sample."""
        stripe, within = divmod(self._at, self._stripe)
        turn, part = divmod(stripe, self._num_parts)
        return part, turn * self._stripe + within

    def of(self, part: int) -> Iterator[Any]:
        mine: deque[tuple[int, Any]] = deque()
        self._waiting[part] = ref(mine)
        return self._taken(part, mine)

    def _taken(self, part: int, mine: deque[tuple[int, Any]]) -> Iterator[Any]:
        while True:
            while not mine:
                try:
                    item = next(self._items)
                except StopIteration:
                    return
                except Exception as error:
                    with ignoring(Exception):  # the exception allows no attributes
                        setattr(error, FAILED_AT, self._owner())
                    raise
                owner, _ = self._owner()
                self._seen(self._at, item)
                self._at += 1
                held = self._waiting.get(owner)
                if held is not None and (queue := held()) is not None:
                    queue.append((self._ended[0] if self._ended is not None else 0, item))
            rounds, item = mine.popleft()
            if self._ended is not None:
                self._rounds[part] = rounds
            yield item
