"""How has the order of a run changed since it began?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from paddle_shard.errors import StateError
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.segments import Segment
from paddle_shard.plan.shard_plan import ShardPlan


@dataclass(frozen=True, slots=True)
class History:
    """The changes of a run's data and weights: as little as makes every position's sample known.

    A change holds from a position on. What was drawn before it stays as it was, so the run can be replayed.
    """

    lengths: tuple[tuple[int, int], ...] = ()
    """(first epoch, samples of an epoch from there on); empty if the length never changed."""
    segments: tuple[Segment, ...] = ()
    """All segments of a mixture; empty if they are those of the data set."""

    def plan(self, plan: ShardPlan) -> ShardPlan:
        """Return a plan with the changes of the run, but for the length of each epoch."""
        if not isinstance(plan.ordering, Mixing) or not (self.segments or self.lengths):
            return plan
        segments = self.segments or plan.ordering.segments
        return replace(plan, shuffle=replace(plan.ordering, segments=segments, lengths=self.lengths))

    def length(self, length: int, epoch: int) -> int:
        """Return the samples of an epoch, if they are `length` where nothing has changed."""
        found = [samples for first, samples in self.lengths if first <= epoch]
        return found[-1] if found else length

    def first_sample(self, length: int, epoch: int) -> int:
        """Return the sample of the run with which an epoch begins, if `length` is that of epochs without changes."""
        return sum(self.length(length, one) for one in range(epoch)) if self.lengths else epoch * length

    def to_json(self) -> dict[str, Any] | None:
        """Return the history for a saved state; None if nothing has changed."""
        if not (self.lengths or self.segments):
            return None
        segments = [[segment.first, list(segment.parts), list(segment.lengths)] for segment in self.segments]
        return {"lengths": [list(entry) for entry in self.lengths], "segments": segments}

    @classmethod
    def from_json(cls, saved: Any) -> History:
        """Return the history of a saved state.

        Raises:
            StateError: It is damaged.
        """
        if saved is None:
            return cls()
        try:
            lengths = tuple((_count(first), _count(samples, 1)) for first, samples in saved["lengths"])
            segments = tuple(
                Segment(_count(first), tuple(map(_count, parts)), tuple(map(_count, sizes)))
                for first, parts, sizes in saved["segments"]
            )
            firsts = [segment.first for segment in segments]
            epochs = [first for first, _ in lengths]
            widths = {len(values) for segment in segments for values in (segment.parts, segment.lengths)}
            fine = all(one < other for values in (firsts, epochs) for one, other in pairwise(values))
            fine &= all(values[0] == 0 for values in (firsts, epochs) if values) and len(widths) <= 1
            fine &= all(any(segment.parts) for segment in segments)
        except (KeyError, TypeError, ValueError):
            fine = False
        if not fine:
            raise StateError(f"state is damaged: history is {saved!r}.")
        return cls(lengths, segments)


def _count(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(value)
    return value


def packed_override(state: Any, now: Mapping[str, Any], override: Collection[str]) -> Collection[str]:
    """Return the fields that may differ, with "packed" if the packed sources of a mixture are those of the state.

    Args:
        state: The saved state.
        now: Fingerprint of the loader.
        override: Fields that may differ, by the user.

    Raises:
        StateError: Rows that an epoch has delivered hold other documents now.
    """
    saved = state.get("fingerprint") if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping) or saved.get("packed") == now.get("packed"):
        return override
    then, here = saved.get("packed") or {}, now.get("packed") or {}
    if "mixture" in now and "mixture" in override:
        changed = [name for name in then if name in here and then[name] != here[name]]
        if changed:
            raise StateError(
                f"the sources {changed} are packed into other rows than those of the state, so their epochs cannot be "
                "continued. Give them under new names, and the old ones as None with the weight 0."
            )
        return [*override, "packed"]
    if "packed" in override and state.get("samples"):
        raise StateError(
            "override=['packed']: the documents are packed into other rows than those of the state, so the epoch that "
            "was begun cannot be continued: documents would be lost and repeated. Load a state from the end of an "
            "epoch."
        )
    return override


def grown(saved: Mapping[str, Any], history: History, plan: ShardPlan, epoch: int, samples: int) -> History:
    """Return the history of a run that resumes with data that has grown, or with other sources or weights.

    The epoch that was begun ends with the old length; the next one has the new length. A mixture has the sources and
    weights of the data set from the saved position on.

    Args:
        saved: Fingerprint of the saved state.
        history: Its history.
        plan: The plan of the data as it is now.
        epoch: Epoch of the state.
        samples: Samples of the epoch that were delivered.

    Raises:
        StateError: The old order cannot be continued with this data.
    """
    before, now = int(saved["num_samples"]), plan.num_samples
    then = history.length(before, epoch)
    first_new = epoch + (samples > 0)
    lengths = history.lengths or ((0, before),)
    if then != now:
        kept = tuple(entry for entry in lengths if entry[0] < first_new)
        lengths = (*kept, (first_new, now))
    lengths = lengths if len(lengths) > 1 or lengths[0][1] != now else ()
    if not isinstance(plan.ordering, Mixing):
        if samples and now < then:
            raise StateError(
                f"override=['num_samples']: the data had {then} samples and has {now} now, in the middle of epoch "
                f"{epoch}. Only data that has grown can be continued; begin a new epoch, without this state."
            )
        return History(lengths)
    mixture = saved["mixture"]
    old = mixture["sources"]
    if list(plan.ordering.names[: len(old)]) != old:
        raise StateError(
            f"override=['mixture']: the state's sources are {old}, this mixture's {list(plan.ordering.names)}. Name "
            "the old ones first, in their order, and new ones after them. A source that is gone is given as None, with "
            "the weight 0."
        )
    lengths_now = plan.ordering.segments[-1].lengths
    for name, was, has in zip(old, mixture["segments"][-1]["lengths"], lengths_now, strict=False):
        if 0 < has < was:
            raise StateError(
                f"override=['mixture']: the source {name!r} had {was} samples and has {has} now. Only data that has "
                "grown can be continued; a source that is gone is given as None, with the weight 0, and may come back "
                "under another name."
            )
    more = (0,) * (len(plan.ordering.names) - len(old))
    segments = history.segments or tuple(
        Segment(entry["from"], tuple(entry["weights"]), tuple(entry["lengths"])) for entry in mixture["segments"]
    )
    at = Mixing(tuple(old), segments, lengths=history.lengths).first_position(epoch, then) + samples
    past = [
        Segment(segment.first, segment.parts + more, segment.lengths + more)
        for segment in segments
        if segment.first < at
    ]
    return History(lengths, (*past, *from_position(plan.ordering.segments, at)))


def from_position(segments: Sequence[Segment], at: int) -> list[Segment]:
    """Return the segments from a position of the run on, the first of which begins there."""
    begun = [segment for segment in segments if segment.first <= at][-1:]
    return [replace(segment, first=at) for segment in begun] + [segment for segment in segments if segment.first > at]


def switched(mixing: Mixing, at: int, parts: tuple[int, ...]) -> tuple[Segment, ...]:
    """Return the segments of a mixture with other weights from a position of the run on."""
    lengths = mixing.segments[mixing.segment_at(at)].lengths
    past = [segment for segment in mixing.segments if segment.first < at]
    return (*past, Segment(at, parts, lengths))
