"""The saved state: the position of a run, and the checks with which it may be resumed."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paddle_shard.errors import StateError
from paddle_shard.plan.certificate import Account, account_from_json, account_to_json
from paddle_shard.plan.shard_plan import Stretches
from paddle_shard.plan.shuffle import VERSION as ORDER_VERSION
from paddle_shard.plan.skips import counted, without

VERSION = 7
"""Version of the layout of a saved state; no other is read."""
DATA = "data"
"""Name in `override` with which a state is resumed with other data."""
_OTHER_SAMPLES = {DATA, "mixture", "num_samples", "packed", "seed", "stream"}
"""Names that, in `override`, give an index another sample or file, or a sample other random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """A position of a run, in delivered samples. JSON can hold it, in less than 1 KB."""

    epoch: int = 0
    """The epoch."""
    samples: int = 0
    """Real samples of the epoch that were delivered; prefetched samples do not count."""
    steps: int = 0
    """Batches of the epoch that were delivered."""
    steps_before: int = 0
    """Steps of the run before this epoch."""
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
    data: Mapping[str, Any] | None = None
    """The identity of the data; None if it is not known. See `inputs.identity`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON, `paddle.save` or a checkpoint."""
        return sealed(
            {
                "version": VERSION,
                **{name: getattr(self, name) for name in _READ},
                "segments": [list(segment) for segment in self.segments],
                "certificate": account_to_json(self.certificate),
                "data": None if self.data is None else dict(self.data),
                "fingerprint": {"order_version": ORDER_VERSION, **self.fingerprint},
            }
        )

    @classmethod
    def from_dict(
        cls,
        saved: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        override: Collection[str] = (),
    ) -> LoaderState:
        """Read a saved state for a loader.

        Args:
            saved: The result of `to_dict`, which may have been written to JSON and read again.
            fingerprint: Fingerprint of the loader that is to resume.
            override: Fields of the fingerprint that may differ.

        Raises:
            StateError: `saved` is not such a state, has another version, or has a different fingerprint; the text
                names the field and both values.
        """
        if not isinstance(saved, Mapping) or "version" not in saved:
            what = (
                f"a dict of {sorted(map(str, saved))}"
                if isinstance(saved, Mapping)
                else type(saved).__name__
            )
            raise StateError(
                f"state must be what the loader's state_dict() returned, got {what}."
            )
        if isinstance(override, str) or not isinstance(override, Collection):
            way = (
                f" Write override=[{override!r}]." if isinstance(override, str) else ""
            )
            raise StateError(
                f"override must be a list of names, got {override!r}.{way}"
            )
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
        if all(
            saved["checksum"] != sealed(saved, with_sampler=covered)["checksum"]
            for covered in (True, False)
        ):
            raise StateError(
                "state is damaged: its content is not that of its checksum. It was changed since it was saved; load "
                "the file again, or an older state."
            )
        found: dict[str, Any] = {}
        for name, read in _READ.items():
            try:
                found[name] = read(saved[name])
            except (KeyError, TypeError, ValueError):
                raise StateError(
                    f"state is damaged: {name} is {saved[name]!r}."
                ) from None
        state = cls(**found)
        state._check_segments()
        if _OTHER_SAMPLES & set(override):
            state = replace(state, data=None)
        state._check_same_run(saved["fingerprint"], fingerprint, override)
        return state

    def _check_same_run(
        self,
        saved: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        override: Collection[str],
    ) -> None:
        """Reject a saved fingerprint that differs from the loader's where `override` does not allow it."""
        try:
            then = _before_position(saved, self)
        except (IndexError, KeyError, TypeError, ValueError):
            raise StateError(f"state is damaged: fingerprint is {saved!r}.") from None
        now = _before_position({"order_version": ORDER_VERSION, **fingerprint}, self)
        different = [
            name for name in sorted({*now, *then}) if now.get(name) != then.get(name)
        ]
        if (
            "num_parts" in different
        ):  # with another number of parts, each part holds other samples
            raise StateError(
                f"state is of a stream in {then.get('num_parts')} parts, but this one is cut into "
                f"{now.get('num_parts')}, which hold other samples. Give it in_parts({then.get('num_parts')}), and a "
                "batch size that it divides; num_parts cannot be overridden."
            )
        if "data_rank" in different and None not in (
            then.get("data_rank"),
            now.get("data_rank"),
        ):
            raise StateError(
                f"state is of data rank {then['data_rank']}, but this rank reads as data rank {now['data_rank']}. The "
                "data is split already, and each rank's sampler stands where it stands: save the state on every rank, "
                "and load that. (Checkpoints does so.)"
            )
        names = {*now, *then, DATA}
        if unknown := sorted(set(override) - names):
            raise StateError(
                f"override names {unknown}; the fingerprint has {sorted(names)}."
            )
        differing = [name for name in different if name not in override]
        if differing:
            words = {}
            if "stream" in differing and None not in (
                then.get("stream"),
                now.get("stream"),
            ):
                words["stream"] = _stream_difference(then["stream"], now["stream"])
            if "mixture" in differing and None not in (
                then.get("mixture"),
                now.get("mixture"),
            ):
                words["mixture"] = _mixture_difference(then["mixture"], now["mixture"])
            changes = ", ".join(
                f"{name}: {words.get(name) or f'saved {_shown(then, name)}, now {_shown(now, name)}'}"
                for name in differing
            )
            if changed := [
                name for name in differing if _has_schedule(name, then, now)
            ]:
                changes += (
                    f". A resumed run may change a schedule ({', '.join(changed)}) only after the position of the "
                    f"state: step {self.steps_before + self.steps}, sample {_sample_of_run(self)} of the run"
                )
            if "num_samples" in differing and "mixture" in now:
                changes += ". The weights decide the length of an epoch unless Mixture has num_samples="
            anyway = (
                f"to resume anyway, call load_state_dict(state, override={differing})."
            )
            raise StateError(
                f"state is of another run ({changes}). Give the loader its old arguments; or, {anyway}"
            )

    def _check_segments(self) -> None:
        """Refuse a state whose counts contradict each other."""
        segments, samples = self.segments, self.samples
        if not segments:  # batches may be of any size
            return
        firsts = [*(first for first, _ in segments), samples]
        if firsts != sorted(firsts):
            raise StateError(
                f"state is damaged: segments is {segments!r}, for {samples} samples."
            )
        stretches = Stretches(segments, samples)
        steps = stretches.num_full + (stretches.rest > 0)
        if firsts[0] != 0 or steps != self.steps:
            raise StateError(
                f"state is damaged: {samples} samples in batches of {segments!r} make {steps} steps, not {self.steps}."
            )

    def continued(self, batch_size: int) -> tuple[tuple[int, int], ...]:
        """Return the segments of the epoch if it resumes from here with this batch size."""
        kept = tuple(segment for segment in self.segments if segment[0] < self.samples)
        if (
            kept and kept[-1][1] == batch_size and not self.ended
        ):  # else another tail would drop its last batch
            return kept
        return (*kept, (self.samples, batch_size))


def sealed(state: Mapping[str, Any], *, with_sampler: bool = True) -> dict[str, Any]:
    """Return a state with the CRC of its content, and of what the user's sampler saves, if that is JSON-able."""
    covered = {
        name: value
        for name, value in state.items()
        if name not in ("sampler", "checksum")
    }
    text = json.dumps(
        covered, sort_keys=True, default=lambda other: type(other).__name__
    )
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
    "steps_before": counted,
    "ended": partial(_checked, bool),
    "segments": lambda rows: tuple(
        (counted(first), counted(size, 1)) for first, size in rows
    ),
    "sampler": partial(_checked, object),
    "certificate": account_from_json,
    "fingerprint": partial(_checked, Mapping),
    "data": partial(_checked, Mapping | None),
}
"""Reads each field of a saved state, in their order; what raises a TypeError or a ValueError is damaged."""


# Schedules


def _shown(fingerprint: Mapping[str, Any], name: str) -> str:
    value = fingerprint.get(name)
    return (
        str(list(map(tuple, value))) if name == "skip_steps" and value else repr(value)
    )


def _has_schedule(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether what differs under a name of two fingerprints may be a schedule."""
    if name == "stream":
        return "mixture" in _changed_stages(then.get(name) or [], now.get(name) or [])
    return name in ("mixture", "skip_steps")


def _stages(stream: Sequence[Any]) -> list[str]:
    """Return the names of the stages in the fingerprint of a stream."""
    return [str(mark[0] if isinstance(mark, list) else mark) for mark in stream]


def _changed_stages(then: Sequence[Any], now: Sequence[Any]) -> list[str]:
    """Return the stages that differ between two streams of the same stages; none of other streams."""
    stages = _stages(now)
    if stages != _stages(then):
        return []
    return [
        stage
        for stage, mark, other in zip(stages, then, now, strict=True)
        if mark != other
    ]


def _stream_difference(then: Sequence[Any], now: Sequence[Any]) -> str:
    """Return in words how the fingerprints of two streams differ; their digests would tell a user nothing."""
    changed = _changed_stages(then, now)
    if not changed:
        return f"its stages were {_stages(then)}, and are {_stages(now)} now"
    what = (
        "the sources or their weights"
        if "mixture" in changed
        else "its files, data or arguments"
    )
    return f"{what} are others now, of {', '.join(changed)}"


def _sample_of_run(state: LoaderState) -> int:
    return (
        max(0, state.epoch) * int(state.fingerprint.get("num_samples", 0))
        + state.samples
    )


def _before_position(
    fingerprint: Mapping[str, Any], state: LoaderState
) -> dict[str, Any]:
    """Return a fingerprint with its schedules up to the position of a state; behind that they may differ."""
    cut = dict(fingerprint)
    behind = ((state.steps_before + state.steps, 1 << 62),)
    skip_steps = cut.pop("skip_steps", ())
    if before := [
        kept for first, end in skip_steps for kept in without(first, end, behind)
    ]:
        cut["skip_steps"] = before
    if "mixture" in cut:
        cut["mixture"] = mixture = _mixture_before(
            cut["mixture"], max(1, _sample_of_run(state))
        )
        cut["packed"] = {
            name: rows
            for name, rows in cut.get("packed", {}).items()
            if name in mixture["sources"]
        }
    if (
        len(cut.get("stream", ())) == 1
    ):  # later stages hold another sample at a position than the mixture
        cut["stream"] = [_stage_before(cut["stream"][0], max(1, state.samples))]
    return dict(json.loads(json.dumps(cut)))  # without tuples


def _mixture_before(mixture: Mapping[str, Any], position: int) -> dict[str, Any]:
    segments = [
        (first, parts) for first, parts in mixture["segments"] if first < position
    ]
    # The last sources may join later.
    count = max(
        number for _, parts in segments for number, part in enumerate(parts, 1) if part
    )
    return {
        **mixture,
        "segments": [(first, parts[:count]) for first, parts in segments],
        "sources": mixture["sources"][:count],
        "lengths": mixture["lengths"][:count],
    }


def _mixture_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words how a mixture differs from the saved one."""

    def in_words(mixture: Mapping[str, Any], name: str) -> str:
        if name != "segments":
            return repr(mixture.get(name))
        weights = [
            f"{'/'.join(map(str, parts))} from sample {first}"
            for first, parts in mixture[name]
        ]
        return f"weights {', '.join(weights)}"

    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    return ", ".join(
        f"{name} saved {in_words(then, name)}, now {in_words(now, name)}"
        for name in names
    )


def _stage_before(stage: Any, position: int) -> Any:
    """Return the fingerprint of a stage of a stream; for a mixture, with its weights before a position of the epoch."""
    if not isinstance(stage, list) or stage[:1] != ["mixture"]:
        return stage
    name, stop, firsts, sources = stage
    count = sum(first < position for first in firsts)
    drawn = [
        [source, parts[:count], marks]
        for source, parts, marks in sources
        if any(parts[:count])
    ]
    return [name, stop, firsts[:count], drawn]
