"""What is a loader's position in its run, what was changed before it, and can a saved position be resumed?

`LoaderState` is the record of a run: the saved state is its JSON. `History` is the part of it that says what was
changed, and where.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paddle_shard.errors import StateError
from paddle_shard.plan.certificate import Account, account_from_json, account_to_json
from paddle_shard.plan.mixture import Mixing, first_sample, segments_of
from paddle_shard.plan.shard_plan import ShardPlan, Stretches
from paddle_shard.plan.shuffle import VERSION as ORDER_VERSION
from paddle_shard.plan.skips import Skips, counted
from paddle_shard.plan.weights import Segment

VERSION = 6
"""Version of the layout of a saved state; no other is read."""


DATA = "data"
"""Is named in `override` to resume with data that holds something else."""
OTHER_SAMPLES = {DATA, "mixture", "num_samples", "packed", "seed", "stream"}
"""Names that, in `override`, give an index another sample or file, or a sample other random numbers."""


@dataclass(frozen=True, slots=True)
class History:
    """What was changed in a run, and where: as little as makes every position's sample known.

    A change of data or weights holds from a position on. What was drawn before it stays as it was, so the run can be
    replayed.
    """

    lengths: tuple[tuple[int, int], ...] = ()
    """(first epoch, samples of an epoch from there on); empty if the length never changed."""
    segments: tuple[Segment, ...] = ()
    """All segments of a mixture; empty if they are those of the data set."""
    skips: Skips = field(default_factory=Skips)
    """What the user leaves out."""

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

    def to_json(self) -> dict[str, Any] | None:
        """Return the history for a saved state; None if nothing has changed."""
        if self == History():
            return None
        skips = {"stretches": self.skips.stretches, "samples": self.skips.samples}
        found = json.dumps({"lengths": self.lengths, "segments": self.segments, "skips": skips})
        return dict(json.loads(found))  # without tuples: a state must be equal to what comes back from JSON

    @classmethod
    def from_json(cls, saved: Any) -> History:
        """Return the history of a saved state; a KeyError, TypeError or ValueError if it is damaged."""
        if saved is None:
            return cls()
        lengths = tuple((counted(first), counted(samples, 1)) for first, samples in saved["lengths"])
        segments = tuple(
            Segment(counted(first), tuple(map(counted, parts)), tuple(map(counted, sizes)))
            for first, parts, sizes in saved["segments"]
        )
        for firsts in ([segment.first for segment in segments], [first for first, _ in lengths]):
            if firsts[:1] not in ([], [0]) or firsts != sorted(set(firsts)):
                raise ValueError(firsts)
        widths = {len(values) for segment in segments for values in segment[1:]}
        if len(widths) > 1 or not all(any(segment.parts) for segment in segments):
            raise ValueError(segments)
        return cls(lengths, segments, Skips.checked(**saved["skips"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """A position of a run, in delivered samples. JSON can hold it, in less than 1 KB, or 3 KB of a stream of files."""

    epoch: int = 0
    """The epoch."""
    samples: int = 0
    """Real samples of the epoch that were delivered; prefetched samples do not count."""
    steps: int = 0
    """Batches of the epoch that were delivered."""
    ended: bool = False
    """True if the epoch's last batch was delivered. Resuming from here yields nothing, then the next epoch."""
    segments: tuple[tuple[int, int], ...] = ()
    """(first sample, batch size) for each stretch of the epoch that was served with one batch size."""
    sampler: Mapping[str, Any] | None = None
    """State of the user's own sampler after the last delivered batch."""
    certificate: Account = field(default_factory=dict)
    """Deliveries of the epoch so far."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Values that the order depends on."""
    history: History = field(default_factory=History)
    """What was changed since the run began."""
    data: Mapping[str, Any] | None = None
    """What the data holds, by which a resumed run finds out that it has the same; None: that is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON, `paddle.save` or a checkpoint."""
        return sealed(
            {
                "version": VERSION,
                **{name: getattr(self, name) for name in _READ},
                "segments": [list(segment) for segment in self.segments],
                "certificate": account_to_json(self.certificate),
                "fingerprint": {"order_version": ORDER_VERSION, **self.fingerprint},
                "history": self.history.to_json(),
            }
        )

    @classmethod
    def from_dict(
        cls,
        saved: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        override: Collection[str] = (),
        explain: Callable[[Any], str] = lambda saved: "",
    ) -> LoaderState:
        """Read a saved state for a loader.

        Args:
            saved: The result of `to_dict`, which may have been written to JSON and read again.
            fingerprint: Fingerprint of the loader that is to resume.
            override: Fields of the fingerprint that may differ.
            explain: Says in words how a stream differs from the fingerprint of another; "" if it cannot.

        Raises:
            StateError: `saved` is not such a state, has another version, or has a different fingerprint; the text
                names the field and both values.
        """
        if not isinstance(saved, Mapping) or "version" not in saved:
            what = f"a dict of {sorted(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
            raise StateError(f"state must be what the loader's state_dict() returned, got {what}.")
        if isinstance(override, str) or not isinstance(override, Collection):
            way = f" Write override=[{override!r}]." if isinstance(override, str) else ""
            raise StateError(f"override must be a list of names, got {override!r}.{way}")
        if saved.get("version") != VERSION:
            raise StateError(
                f"state has version {saved.get('version')!r}, but this paddle_shard reads version {VERSION} only. Load "
                "it with the version that saved it."
            )
        wanted = set(cls().to_dict())
        if set(saved) != wanted:
            raise StateError(
                f"state is damaged: missing {sorted(wanted - set(saved))}, unknown {sorted(set(saved) - wanted)}."
            )
        if all(saved["checksum"] != sealed(saved, with_sampler=covered)["checksum"] for covered in (True, False)):
            raise StateError(
                "state is damaged: its content is not that of its checksum. It was changed since it was saved; load "
                "the file again, or an older state."
            )
        found: dict[str, Any] = {}
        for name, read in _READ.items():
            try:
                found[name] = read(saved[name])
            except (KeyError, TypeError, ValueError):
                raise StateError(f"state is damaged: {name} is {saved[name]!r}.") from None
        state = cls(**found)
        state._check_segments()
        now, then = {"order_version": ORDER_VERSION, **fingerprint}, dict(saved["fingerprint"])
        if OTHER_SAMPLES & set(override):
            state = replace(state, data=None)
        override = _packed_override(saved, fingerprint, override)
        different = [name for name in sorted({*now, *then}) if now.get(name) != then.get(name)]
        if "num_parts" in different:  # with another number of parts, each part holds other samples
            raise StateError(
                f"state is of a stream in {then.get('num_parts')} parts, but this one is cut into "
                f"{now.get('num_parts')}, which hold other samples. Give it in_parts({then.get('num_parts')}), and a "
                "batch size that it divides; num_parts cannot be overridden."
            )
        if "data_rank" in different and None not in (then.get("data_rank"), now.get("data_rank")):
            raise StateError(
                f"state is of data rank {then['data_rank']}, but this rank reads as data rank {now['data_rank']}. The "
                "data is split already, and each rank's sampler stands where it stands: save the state on every rank, "
                "and load that. (Checkpoints does so.)"
            )
        names = {*now, *then, DATA}
        if unknown := sorted(set(override) - names):
            raise StateError(f"override names {unknown}; the fingerprint has {sorted(names)}.")
        differing = [name for name in different if name not in override]
        if differing:
            words = {"stream": explain(then.get("stream"))} if "stream" in differing else {}
            changes = ", ".join(
                f"{name}: {words.get(name) or f'saved {then.get(name)!r}, now {now.get(name)!r}'}" for name in differing
            )
            anyway = f"to resume anyway, call load_state_dict(state, override={differing})."
            if lost := _bound(state, then, now):  # an override would be refused
                anyway = lost
            raise StateError(f"state is of another run ({changes}). Give the loader its old arguments; or, {anyway}")
        return state

    def _check_segments(self) -> None:
        """Refuse a state whose counts contradict each other."""
        segments, samples = self.segments, self.samples
        if not segments:  # batches may be of any size
            return
        firsts = [*(first for first, _ in segments), samples]
        if firsts != sorted(firsts):
            raise StateError(f"state is damaged: segments is {segments!r}, for {samples} samples.")
        stretches = Stretches(segments, samples)
        steps = stretches.num_full + (stretches.rest > 0)
        if firsts[0] != 0 or steps != self.steps:
            raise StateError(
                f"state is damaged: {samples} samples in batches of {segments!r} make {steps} steps, not {self.steps}."
            )

    def continued(self, batch_size: int) -> tuple[tuple[int, int], ...]:
        """Return the segments of the epoch if it resumes from here with this batch size."""
        kept = tuple(segment for segment in self.segments if segment[0] < self.samples)
        if kept and kept[-1][1] == batch_size and not self.ended:  # else another tail would drop its last batch
            return kept
        return (*kept, (self.samples, batch_size))


def sealed(state: Mapping[str, Any], *, with_sampler: bool = True) -> dict[str, Any]:
    """Return a state with the CRC of its content, and of what the user's sampler saves, if that is JSON-able."""
    covered = {name: value for name, value in state.items() if name not in ("sampler", "checksum")}
    text = json.dumps(covered, sort_keys=True, default=lambda other: type(other).__name__)
    if with_sampler and state["sampler"] is not None:
        with contextlib.suppress(TypeError, ValueError):  # it may be of any kind
            text += json.dumps(json.loads(json.dumps(state["sampler"])), sort_keys=True)
    return {**state, "checksum": zlib.crc32(text.encode())}


def _checked(kind: Any, value: Any) -> Any:
    """Return the value; a TypeError if it is of another kind."""
    if not isinstance(value, kind):
        raise TypeError(value)
    return value


_READ: dict[str, Callable[[Any], Any]] = {
    "epoch": counted,
    "samples": counted,
    "steps": counted,
    "ended": partial(_checked, bool),
    "segments": lambda rows: tuple((counted(first), counted(size, 1)) for first, size in rows),
    "sampler": partial(_checked, object),
    "certificate": account_from_json,
    "fingerprint": partial(_checked, Mapping),
    "history": History.from_json,
    "data": partial(_checked, Mapping | None),
}
"""Reads each field of a saved state, in their order; what raises a TypeError or a ValueError is damaged."""


def _packed_override(state: Mapping[str, Any], now: Mapping[str, Any], override: Collection[str]) -> Collection[str]:
    """Return the fields that may differ, with "packed" if the packed sources of a mixture are those of the state.

    Args:
        state: The saved state.
        now: Fingerprint of the loader.
        override: Fields that may differ, by the user.

    Raises:
        StateError: Rows that an epoch has delivered hold other documents now.
    """
    then, here = state["fingerprint"].get("packed") or {}, now.get("packed") or {}
    if then == here:
        return override
    if "mixture" in now:
        there = dict(zip(now["mixture"]["sources"], now["mixture"]["segments"][-1]["lengths"], strict=True))
        old = state["fingerprint"].get("mixture", {"sources": []})["sources"]
        changed = [name for name in old if there.get(name) and then.get(name) != here.get(name)]
        if changed and "mixture" in override:
            raise StateError(
                f"the sources {changed} are packed into other rows than those of the state, so their epochs cannot be "
                "continued. Give them under new names, and the old ones as None with the weight 0."
            )
        return override if changed else [*override, "packed"]
    if "packed" in override and state["samples"] and not state["ended"]:
        raise StateError(
            "override=['packed']: the documents are packed into other rows than those of the state, so the epoch that "
            "was begun cannot be continued: documents would be lost and repeated. Load a state from the end of an "
            "epoch."
        )
    return override


def _bound(state: LoaderState, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what else to do if the epoch that was begun cannot be continued with any `override`; "" if it can."""
    if not state.samples or state.ended or "shuffle" not in then or "mixture" in {**then, **now}:
        return ""
    if then.get("packed") != now.get("packed"):
        return "load a state from the end of an epoch: an epoch that was begun needs the same rows."
    if now.get("num_samples", 0) < state.history.length(int(then.get("num_samples", 0)), state.epoch):
        return "begin a new epoch, without this state: one that was begun can be continued with more samples only."
    return ""


# Changes


def grown(saved: Mapping[str, Any], plan: ShardPlan, state: LoaderState) -> History:
    """Return the history of a run that resumes with data that has grown, or with other sources or weights.

    The epoch that was begun ends with the old length; the next one has the new length. A mixture has the sources and
    weights of the data set from the saved position on.

    Args:
        saved: Fingerprint of the saved state.
        plan: The plan of the data as it is now.
        state: The saved state.

    Raises:
        StateError: The old order cannot be continued with this data.
    """
    before, now = int(saved["num_samples"]), plan.num_samples
    history, epoch, samples = state.history, state.epoch, state.samples
    then = history.length(before, epoch)
    first_new = epoch + (samples > 0)  # an epoch that was begun keeps its length
    lengths = tuple(entry for entry in history.lengths or ((0, before),) if entry[0] < first_new)
    if not lengths or lengths[-1][1] != now:
        lengths = (*lengths, (first_new, now))
    if lengths == ((0, now),):
        lengths = ()
    mixing = plan.ordering
    if not isinstance(mixing, Mixing):
        if samples and not state.ended and now < then:
            raise StateError(
                f"override=['num_samples']: the data had {then} samples and has {now} now, in the middle of epoch "
                f"{epoch}. Only data that has grown can be continued; begin a new epoch, without this state."
            )
        return replace(history, lengths=lengths)
    mixture = saved["mixture"]
    if mixture == plan.fingerprint()["mixture"]:  # only the epochs are longer: weights that were switched stay
        return replace(history, lengths=lengths)
    old = mixture["sources"]
    if list(mixing.names[: len(old)]) != old:
        raise StateError(
            f"override=['mixture']: the state's sources are {old}, this mixture's {list(mixing.names)}. Name "
            "the old ones first, in their order, and new ones after them. A source that is gone is given as None, with "
            "the weight 0."
        )
    segments = history.segments or segments_of(mixture)
    for number, (name, has) in enumerate(zip(old, mixing.segments[-1].lengths, strict=False)):
        was = max(segment.lengths[number] for segment in segments)  # also of one that was gone in between
        if 0 < has < was:
            raise StateError(
                f"override=['mixture']: the source {name!r} had {was} samples and has {has} now. Only data that has "
                "grown can be continued; a source that is gone is given as None, with the weight 0, and may come back "
                "under another name."
            )
    more = (0,) * (len(mixing.names) - len(old))
    at = first_sample(history.lengths, before, epoch) + samples
    past = [Segment(first, parts + more, sizes + more) for first, parts, sizes in segments if first < at]
    begun = mixing.segments[mixing.draws.segment_at(at)]._replace(first=at)
    later = [segment for segment in mixing.segments if segment.first > at]
    return replace(history, lengths=lengths, segments=(*past, begun, *later))
