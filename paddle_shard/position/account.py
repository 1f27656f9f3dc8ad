"""What has this process delivered since its run began, through all of its iterators?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.comm.agreeing import gather_of
from paddle_shard.errors import PeerLostError
from paddle_shard.plan.certificate import (
    Account,
    Certificate,
    Leg,
    certify,
    expected_of_plan,
    folded,
    skipped_of_plan,
)
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.mixture_ids import source_and_index
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import LoaderState
from paddle_shard.position.progress import Mark, PassProgress

_CHUNK = 1 << 16


class _Epoch(NamedTuple):
    known: tuple[Leg, ...] = ()
    """Legs from a saved state, or from the last certificate."""
    own: tuple[Leg, ...] = ()
    """Legs that closed passes have delivered since then."""
    passes: tuple[tuple[PassProgress, Mark], ...] = ()
    """The other passes. Each has a mark: where it was at the last certificate, or when it was added."""
    end: int | None = None
    """The position at which the user's sampler has ended; None if no pass has seen it."""

    def settled(self) -> _Epoch:
        """Return the same entry, with the closed passes replaced by their legs."""
        closed = [(progress, mark) for progress, mark in self.passes if progress.closed]
        if not closed:
            return self
        own = folded([*self.own, *(leg for progress, mark in closed for leg in progress.legs(mark))])
        passes = tuple(entry for entry in self.passes if not entry[0].closed)
        return _Epoch(self.known, tuple(own), passes, self.seen_end())

    def seen_end(self) -> int | None:
        """Return the position at which the newest pass to end has ended; None if no end is known."""
        return next((progress.samples for progress, _ in reversed(self.passes) if progress.ended), self.end)


class Delivered:
    """The account of this process, with one entry for each epoch.

    An entry is replaced in one assignment. A pass counts what it delivers in one assignment, too. So a signal handler
    that saves the state finds a batch as a whole or not at all.
    """

    def __init__(self, place: tuple[int, int] | None, loaded: LoaderState | None = None) -> None:
        """Begin the account.

        Args:
            place: (data rank, number of data ranks) of this process; None if it holds none of the data.
            loaded: The state that the run resumes from. It says what was delivered before.
        """
        self._place = place
        self._epochs: dict[int, _Epoch] = {}
        self._open: set[int] = set()
        if loaded is not None:
            legs = (Leg(*row) for row in loaded.certificate)
            known = tuple(leg for leg in legs if leg.epoch == loaded.epoch)
            self._epochs[loaded.epoch] = _Epoch(known, end=loaded.samples if loaded.ended else None)

    def count(self, progress: PassProgress) -> None:
        """Count what a pass delivers from now on. Of closed passes only the legs are kept."""
        for epoch in sorted(self._open):
            self._epochs[epoch] = self._epochs[epoch].settled()
        found = self._epochs.get(progress.epoch, _Epoch())
        self._epochs[progress.epoch] = found._replace(passes=(*found.passes, (progress, progress.mark())))
        # This is last, since a signal handler may raise at any line, and each epoch in `_open` must have an entry.
        self._open = {epoch for epoch in self._open if self._epochs[epoch].passes} | {progress.epoch}

    def account(self, epoch: int) -> Account:
        """Return what this process knows about the deliveries of an epoch."""
        found = self._epochs.get(epoch, _Epoch())
        own = folded([*found.own, *(leg for progress, mark in found.passes for leg in progress.legs(mark))])
        return Account(self._place, found.known, own)

    def legs(self, epoch: int) -> tuple[Leg, ...]:
        """Return the same as legs, for a saved state."""
        _, known, own = self.account(epoch)
        return tuple(folded([*known, *own]))

    def end(self, epoch: int) -> int | None:
        """Return the position at which the user's sampler has ended; None if no pass has seen it."""
        return self._epochs.get(epoch, _Epoch()).seen_end()

    def replace(self, epoch: int, known: list[Leg]) -> None:
        """Replace the legs of this rank by the legs of all ranks."""
        found = self._epochs.get(epoch, _Epoch())
        passes = tuple((progress, progress.mark()) for progress, _ in found.passes)
        self._epochs[epoch] = _Epoch(tuple(known), (), passes, found.end)


def gathered(said: Any, ranks: tuple[int, ...], timeout: float, call: str) -> list[Any]:
    """Return what each of some ranks says, this one included, as JSON values; collective over them.

    Raises:
        PeerLostError: Another rank has not made the call.
    """
    try:
        return [json.loads(one) for one in gather_of(ranks, json.dumps(said).encode(), timeout)]
    except PeerLostError as lost:
        lost.args = (f"{call}: every rank of the meshes must call it, at the same step. {lost}",)
        raise


def proof(
    accounts: list[Account], epoch: int, plan: ShardPlan | None, skips: Skips, end: int | None, drawn_by: str
) -> Certificate:
    """Return what the accounts of all ranks prove of an epoch.

    Args:
        accounts: The accounts.
        epoch: The epoch.
        plan: Its order; None if a sampler of the user's own decides it.
        skips: What the user leaves out.
        end: The position at which the sampler has ended; None if no pass has seen it.
        drawn_by: The sampler's name.
    """
    if plan is None:
        return certify(accounts, epoch, end, None, drawn_by)
    expected, skipped = expected_of_plan(plan, epoch, skips), skipped_of_plan(plan, epoch, skips)
    found = certify(accounts, epoch, plan.num_served, expected, num_samples=plan.num_samples, skipped=skipped)
    if not isinstance(plan.ordering, Mixing):
        return found
    names = plan.ordering.names
    if skips.concerns(epoch):
        counts = np.zeros(len(names), np.int64)
        for start in range(0, plan.num_served, _CHUNK):
            kept = skips.kept(plan, epoch, start, min(start + _CHUNK, plan.num_served))
            counts += np.bincount(source_and_index(kept)[0], minlength=len(names))
    else:
        first = plan.ordering.first_position(epoch, plan.num_samples)
        counts = plan.ordering.counts(first + plan.num_served) - plan.ordering.counts(first)
    return replace(found, sources=dict(zip(names, counts.tolist(), strict=True)))
