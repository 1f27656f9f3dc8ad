"""What is a loader's position in its run, and can a saved position be resumed?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.shuffle import VERSION as ORDER_VERSION

VERSION = 2
"""Version of the layout of a saved state. Version 1 had no history, and is read as well."""

_COUNTS = ("epoch", "samples", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """A position of a run, in delivered samples. JSON can hold it, in less than 1 KB."""

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
    certificate: tuple[tuple[Any, ...], ...] = ()
    """Deliveries of the epoch so far, as rows of `plan.certificate.Leg`."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Values that the order depends on."""
    history: Mapping[str, Any] | None = None
    """The changes of the order since the run began; see `plan.history.History`. None: there were none."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON, `paddle.save` or a checkpoint."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "samples": self.samples,
            "steps": self.steps,
            "ended": self.ended,
            "segments": [list(segment) for segment in self.segments],
            "sampler": self.sampler,
            "certificate": [list(leg) for leg in self.certificate],
            "fingerprint": {"order_version": ORDER_VERSION, **self.fingerprint},
            "history": self.history,
        }

    @classmethod
    def from_dict(
        cls, saved: Mapping[str, Any], fingerprint: Mapping[str, Any], override: Collection[str] = ()
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
        if not isinstance(saved, Mapping):
            raise StateError(f"state must be what state_dict() returned, got {type(saved).__name__}.")
        if saved.get("version") not in (1, VERSION):
            raise StateError(
                f"state has version {saved.get('version')!r}, but this paddle_shard reads the versions 1 and {VERSION} "
                "only. Load it with the version that saved it."
            )
        if saved["version"] == 1:
            saved = {"history": None, **saved}
        wanted = set(cls().to_dict())
        if set(saved) != wanted:
            raise StateError(
                f"state is damaged: missing {sorted(wanted - set(saved))}, unknown {sorted(set(saved) - wanted)}."
            )
        for name in _COUNTS:
            value = saved[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise StateError(f"state is damaged: {name} must be an int >= 0, got {value!r}.")
        _check_shape(saved)
        now, then = {"order_version": ORDER_VERSION, **fingerprint}, dict(saved["fingerprint"])
        different = [name for name in sorted({*now, *then}) if now.get(name) != then.get(name)]
        if "num_parts" in different:  # with another number of parts, each part holds other samples
            raise StateError(
                f"state is of a stream in {then.get('num_parts')} parts, but this one is cut into "
                f"{now.get('num_parts')}, which hold other samples. Give num_parts={then.get('num_parts')}, and a "
                "batch size that it divides; num_parts cannot be overridden."
            )
        if unknown := sorted(set(override) - {*now, *then}):
            raise StateError(f"override names {unknown}; the fingerprint has {sorted({*now, *then})}.")
        differing = [name for name in different if name not in override]
        if differing:
            changes = ", ".join(f"{name}: saved {then.get(name)!r}, now {now.get(name)!r}" for name in differing)
            raise StateError(
                f"state is of another run ({changes}). Give the loader its old arguments; or, to resume anyway, "
                f"call load_state_dict(state, override={differing})."
            )
        return cls(
            **{name: saved[name] for name in _COUNTS},
            ended=saved["ended"],
            segments=tuple((int(first), int(size)) for first, size in saved["segments"]),
            sampler=saved["sampler"],
            certificate=tuple(tuple(leg) for leg in saved["certificate"]),
            fingerprint=dict(fingerprint),
            history=saved["history"],
        )

    def continued(self, batch_size: int) -> tuple[tuple[int, int], ...]:
        """Return the segments of the epoch if it resumes from here with this batch size."""
        kept = tuple(segment for segment in self.segments if segment[0] < self.samples)
        if kept and kept[-1][1] == batch_size:
            return kept
        return (*kept, (self.samples, batch_size))


def checked_epoch(epoch: Any) -> int:
    """Return an epoch.

    Raises:
        ArgumentError: It is none.
    """
    if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
        raise ArgumentError(f"epoch must be an int >= 0, got {epoch!r}.")
    return int(epoch)


def _check_shape(saved: Mapping[str, Any]) -> None:
    """Refuse a state whose fields have wrong types or contradict each other."""
    fine = {
        "ended": isinstance(saved["ended"], bool),
        "fingerprint": isinstance(saved["fingerprint"], Mapping),
        "segments": _rows_of(saved["segments"], 2),
        "certificate": _rows_of(saved["certificate"], 9),
    }
    for name, right in fine.items():
        if not right:
            raise StateError(f"state is damaged: {name} is {saved[name]!r}.")
    segments, samples, steps = saved["segments"], saved["samples"], 0
    ends = [*(first for first, _ in segments[1:]), samples][: len(segments)]
    for (first, size), end in zip(segments, ends, strict=True):
        if not (size > 0 and 0 <= first <= end):
            raise StateError(f"state is damaged: segments is {segments!r}, for {samples} samples.")
        steps += -(-(end - first) // size)
    if segments and (segments[0][0] != 0 or steps != saved["steps"]):
        raise StateError(
            f"state is damaged: {samples} samples in batches of {segments!r} make {steps} steps, not {saved['steps']}."
        )


def _rows_of(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(row, list | tuple)
        and len(row) == length
        and all(isinstance(number, int) and not isinstance(number, bool) for number in row)
        for row in value
    )
