"""Progress of the epoch iterators of a run: their positions, and what they have delivered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.plan.certificate import (
    DRAWN,
    Account,
    Delivered,
    Owner,
    Total,
    added,
    minus,
    plus,
    total_of,
)
from paddle_shard.plan.shard_plan import Segments
from paddle_shard.plan.skips import Ranges, without
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Ids, Step, as_ids

_MOST_RECENT = 256
"""Delivered batches whose samples are kept until they are added to the totals, all at once."""

numbers = count(1)
"""Numbers iterators, and what is compared with them, in the order in which they begin."""


class _Delivery(NamedTuple):
    """One delivered batch."""

    ids: Ids
    """Samples in this process's slice, without padding."""
    num_unread: int
    """Samples of the slice that could not be read."""
    drawn: Ids
    """Samples that the user's sampler drew for all ranks."""
    num_positions: int
    """Positions of the order that the batch, and the skipped steps before it, hold."""


class Position(NamedTuple):
    """The position of an iterator, and its deliveries. It is replaced as a whole."""

    samples: int
    steps: int
    ended: bool
    sampler: Any
    """State of the user's own sampler after the newest batch."""
    totals: Mapping[Owner, Total] = MappingProxyType({})
    """Totals of the deliveries that are not in `recent`."""
    recent: Any = None
    """(newest delivery, those before it in the same form), or None: a list that grows by one assignment."""
    num_recent: int = 0


class IteratorProgress:
    """The position of one iterator over an epoch."""

    def __init__(
        self,
        start: LoaderState,
        segments: Segments,
        owner: Owner | None,
        num_steps: int | None,
        *,
        skipped: Ranges = (),
        counts_draws: bool = False,
    ) -> None:
        """Begin at a position.

        Args:
            start: The state at which the iterator begins.
            segments: (first position, batch size) of each stretch of the epoch.
            owner: The owner of this process's deliveries; None if they are not counted.
            num_steps: Steps of the whole epoch; None if they are only known at its end.
            skipped: Positions of the epoch that its skipped steps hold; empty if an order of the user's decides.
            counts_draws: True if the user's sampler draws the samples of all data ranks.
        """
        self.start = start
        self.epoch = start.epoch
        self.number = next(numbers)
        self.closed = False
        """True if the iterator delivers no more."""
        self.finished = False
        """True if it has come to its end."""
        self.delivered_at = 0.0
        """When the newest batch was handed to the user, by `time.perf_counter`; 0.0: none was."""
        self._segments = segments
        self._owner = owner
        self._num_steps = num_steps
        self._skipped = skipped
        self._counts_draws = counts_draws
        self.position = Position(
            start.samples, start.steps, start.ended, start.sampler
        )
        """The position. A signal handler that saves the state finds a batch as a whole or not at all."""

    def deliver(self, step: Step, ids: Ids, num_unread: int) -> None:
        """Count one more delivered batch, and the skipped steps before it: one value, one assignment.

        Args:
            step: The step.
            ids: Samples in this process's slice of the batch, without padding.
            num_unread: Number of samples of the slice that could not be read.
        """
        skipped_steps, skipped_samples = step.skipped
        drawn, sampler_state, ended = step.sampler
        steps = self.position.steps + skipped_steps + 1
        if ended is None:
            ended = steps == self._num_steps
        num_positions = skipped_samples + step.num_positions
        delivery = _Delivery(ids, num_unread, drawn, num_positions)
        self._move(delivery, steps, sampler_state, ended=ended)

    def end(self, skipped_steps: int, skipped_samples: int) -> None:
        """Count the skipped steps after the last delivered batch."""
        delivery = _Delivery((), 0, (), skipped_samples)
        steps = self.position.steps + skipped_steps
        self._move(delivery, steps, self.position.sampler, ended=True)

    def _move(
        self,
        delivery: _Delivery,
        steps: int,
        sampler_state: Any,
        *,
        ended: bool,
    ) -> None:
        before = self.position
        if before.num_recent >= _MOST_RECENT:
            before = self._settled(before)
        self.position = Position(
            before.samples + delivery.num_positions,
            steps,
            ended,
            sampler_state,
            before.totals,
            (delivery, before.recent),
            before.num_recent + 1,
        )

    def _settled(self, position: Position) -> Position:
        """Return a position with its recent deliveries added to the totals."""
        recent: list[_Delivery] = []
        older = position.recent
        while older is not None:
            delivery, older = older
            recent.append(delivery)
        if not recent:
            return position
        totals = dict(position.totals)
        if self._owner is not None:
            expected = sum(
                len(entry.ids) + entry.num_unread for entry in recent
            )
            total = _total((entry.ids for entry in recent), expected)
            totals[self._owner] = plus(totals.get(self._owner, Total()), total)
        if self._counts_draws:
            expected = sum(entry.num_positions for entry in recent)
            total = _total((entry.drawn for entry in recent), expected)
            totals[DRAWN] = plus(totals.get(DRAWN, Total()), total)
        return position._replace(totals=totals, recent=None, num_recent=0)

    def fold(self) -> Position:
        """Add the recent deliveries to the totals; return the position."""
        position = self.position
        folded = self._settled(position)
        # else a handler has delivered, or another thread
        if self.position is position:
            self.position = folded
        return folded

    def account(self, since: Position) -> Account:
        """Return the deliveries since an earlier, folded position of the iterator."""
        position = self.fold()
        if position.samples == since.samples:
            return {}
        # What this iterator skips, another may deliver.
        once = tuple(without(since.samples, position.samples, self._skipped))
        return {
            owner: Delivered(
                once, (), minus(total, since.totals.get(owner, Total()))
            )
            for owner, total in position.totals.items()
        }

    def state(self) -> LoaderState:
        """Return the position as a state, without what the whole run knows."""
        position = self.position
        begun = tuple(
            segment
            for segment in self._segments
            if segment[0] < position.samples
        )
        return replace(
            self.start,
            samples=position.samples,
            steps=position.steps,
            ended=position.ended,
            sampler=position.sampler,
            segments=begun or self._segments[:1],
            certificate={},
        )


def _total(batches: Iterable[Ids], expected: int) -> Total:
    """Return the total of the samples of some batches; they are hashed at once."""
    ids = [
        np.empty(0, np.int64),
        *(as_ids(batch) for batch in batches if len(batch)),
    ]
    return total_of(np.concatenate(ids), expected)


class EpochDeliveries(NamedTuple):
    """The deliveries of an epoch that this process knows of. It is replaced in one assignment."""

    loaded: Account = MappingProxyType({})
    """Those of a saved state, or of the last certificate."""
    since: Account = MappingProxyType({})
    """Those of closed iterators since then."""
    iterators: tuple[tuple[IteratorProgress, Position], ...] = ()
    """The other iterators, and the position of each at the last certificate, or at its beginning."""
    end: int | None = None
    """The position at which the user's sampler has ended; None if no iterator has seen it."""

    def settled(self, *, open_too: bool = False) -> EpochDeliveries:
        """Return the same, with the closed iterators, or all, added to `since`."""
        accounts = []
        others = []
        end = self.end
        for entry in self.iterators:
            progress, since = entry
            # Read once: the garbage collector may close an iterator at any moment.
            if open_too or progress.closed:
                accounts.append(progress.account(since))
            else:
                others.append(entry)
            if progress.position.ended:
                end = progress.position.samples
        if not accounts:
            return self
        return EpochDeliveries(
            self.loaded, added(self.since, *accounts), tuple(others), end
        )

    @property
    def account(self) -> Account:
        """All deliveries that are settled."""
        return added(self.loaded, self.since)
