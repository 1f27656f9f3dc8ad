"""The saved state: the position of a run, and the checks with which it may be resumed."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paddle_shard.errors import StateError
from paddle_shard.plan.certificate import (
    Account,
    account_from_json,
    account_to_json,
)
from paddle_shard.plan.order import Fingerprint
from paddle_shard.plan.shard_plan import Segments
from paddle_shard.plan.shuffle import VERSION as ORDER_VERSION

VERSION = 7
"""Version of the layout of a saved state; no other is read."""
DATA = "data"
"""Name in `override` with which a state is resumed with other data."""
_OTHER_SAMPLES = {DATA, "mixture", "num_samples", "packed", "seed", "stream"}
"""Names that, in `override`, give an index another sample or file, or a sample other random numbers."""
_FIXED = {
    "num_parts": "Other parts hold other samples. Give the stream as many with in_parts(), and a batch size that they "
    "divide; num_parts cannot be overridden.",
    "data_rank": "The data is split already, and each rank's sampler has its own position. Save the state on every "
    "rank, and load that. (Checkpoints does so.)",
}
"""Fields of a fingerprint that cannot be overridden, and what to do where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """A position of a run, in delivered samples. JSON can hold it, in less than 1 KB."""

    epoch: int = 0
    """The epoch."""
    samples: int = 0
    """Valid samples of the epoch that were delivered; prefetched samples do not count."""
    steps: int = 0
    """Batches of the epoch that were delivered."""
    steps_before: int = 0
    """Steps of the run before this epoch."""
    ended: bool = False
    """True if the epoch's last batch was delivered. Resuming from here yields nothing, then the next epoch."""
    segments: Segments = ()
    """(first sample, batch size) for each stretch of the epoch that was served with one batch size."""
    sampler: Mapping[str, Any] | None = None
    """State of the user's own sampler after the last delivered batch."""
    certificate: Account = field(default_factory=dict)
    """Deliveries of the epoch so far."""
    fingerprint: Fingerprint = field(default_factory=dict)
    """Values that the order depends on."""
    data: Mapping[str, Any] | None = None
    """The identity of the data; None if it is not known. See `data.identity`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON, `paddle.save` or a checkpoint."""
        return sealed(
            {
                "version": VERSION,
                **{
                    name.name: getattr(self, name.name) for name in fields(self)
                },
                "segments": [list(segment) for segment in self.segments],
                "certificate": account_to_json(self.certificate),
                "data": self.data and dict(self.data),
                "fingerprint": {
                    "order_version": ORDER_VERSION,
                    **self.fingerprint,
                },
            }
        )

    @classmethod
    def from_dict(
        cls,
        saved: Mapping[str, Any],
        fingerprint: Fingerprint,
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
            raise StateError(
                f"state must be what the loader's state_dict() returned, got {saved!r:.120}."
            )
        if isinstance(override, str) or not isinstance(override, Collection):
            raise StateError(
                f"override must be a list of names, got {override!r}."
            )
        if saved["version"] != VERSION:
            raise StateError(
                f"state has version {saved['version']!r}, but this paddle_shard reads version {VERSION} only. Load "
                "it with the version that saved it."
            )
        # The checksum is the check of all fields.
        names = set(cls().to_dict())
        if (
            set(saved) != names
            or saved["checksum"] != sealed(saved)["checksum"]
        ):
            raise StateError(
                "state is damaged: its content is not that of its checksum. It was changed since it was saved; load "
                "the file again, or an older state."
            )
        values = {
            **saved,
            "segments": tuple(map(tuple, saved["segments"])),
            "certificate": account_from_json(saved["certificate"]),
        }
        if _OTHER_SAMPLES & {*override}:
            values["data"] = None
        del values["version"], values["checksum"]
        state = cls(**values)
        state._check_same_run(fingerprint, override)
        return state

    def _check_same_run(
        self, fingerprint: Fingerprint, override: Collection[str]
    ) -> None:
        """Reject a loader whose fingerprint differs from the saved one where `override` does not allow it."""
        then = self._before_position(self.fingerprint)
        now = self._before_position(
            {**fingerprint, "order_version": ORDER_VERSION}
        )
        names = sorted({*now, *then})
        different = [name for name in names if now.get(name) != then.get(name)]
        for name, fix in _FIXED.items():
            if name in different and name in then and name in now:
                raise StateError(
                    f"state has {name}={then[name]}, and this loader {name}={now[name]}. {fix}"
                )
        if unknown := sorted({*override} - {*names, DATA}):
            raise StateError(
                f"override names {unknown}, but may name {[*names, DATA]}."
            )
        different = [name for name in different if name not in override]
        if not different:
            return
        changes = ", ".join(
            f"{name}: saved {_without_digests(then.get(name))}, now {_without_digests(now.get(name))}"
            for name in different
        )
        if "stream" in different:
            changes += ". The stream has other files, data, stages or arguments"
        raise StateError(
            f"state is of another run ({changes}). Give the loader the data and arguments of that run; or, to resume "
            f"anyway, call load_state_dict(state, override={different})."
        )

    def continued(self, batch_size: int) -> Segments:
        """Return the segments of the epoch if it resumes from here with this batch size."""
        kept = tuple(
            (first, size)
            for first, size in self.segments
            if first < self.samples
        )
        # If the epoch has ended, another tail would drop its last batch.
        if kept and kept[-1][1] == batch_size and not self.ended:
            return kept
        return (*kept, (self.samples, batch_size))

    def _before_position(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return a fingerprint with its schedules up to this position; after it they may differ."""
        cut = dict(fingerprint)
        step = self.steps_before + self.steps
        skip_steps = cut.pop("skip_steps", ())
        before = [
            (first, min(end, step)) for first, end in skip_steps if first < step
        ]
        if before:
            cut["skip_steps"] = before
        if "mixture" in cut:
            length = self.fingerprint.get("num_samples", 0)
            position = self.epoch * length + self.samples
            cut["mixture"] = _mixture_before(cut["mixture"], max(1, position))
            packed = cut.get("packed", {})
            cut["packed"] = {
                name: packed[name]
                for name in cut["mixture"]["sources"]
                if name in packed
            }
        # Stages after a mixture have another sample at a position than it has.
        if len(cut.get("stream", ())) == 1:
            cut["stream"] = _stage_before(
                cut["stream"][0], max(1, self.samples)
            )
        return dict(json.loads(json.dumps(cut)))  # without tuples


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the CRC of its content, and of what the user's sampler saves, if that is JSON-able."""
    covered = {
        name: value
        for name, value in state.items()
        if name not in ("sampler", "checksum")
    }
    text = json.dumps(
        covered, sort_keys=True, default=lambda other: type(other).__name__
    )
    if state["sampler"] is not None:
        # it may be of any kind
        with contextlib.suppress(TypeError, ValueError):
            of_sampler = json.loads(json.dumps(state["sampler"]))
            text += json.dumps(of_sampler, sort_keys=True)
    return {**state, "checksum": zlib.crc32(text.encode())}


def _mixture_before(mixture: Fingerprint, position: int) -> Fingerprint:
    segments = [
        segment for segment in mixture["segments"] if segment[0] < position
    ]
    # The last sources may join later.
    count = max(
        number
        for _, weights in segments
        for number, weight in enumerate(weights, 1)
        if weight
    )
    return {
        **mixture,
        "segments": [(first, weights[:count]) for first, weights in segments],
        "sources": mixture["sources"][:count],
        "lengths": mixture["lengths"][:count],
    }


def _stage_before(stage: Any, position: int) -> Any:
    """Return the fingerprint of a stage of a stream; for a mixture, with its weights before a position of the epoch."""
    if not isinstance(stage, list) or stage[:1] != ["mixture"]:
        return stage
    name, stop, firsts, sources = stage
    count = sum(first < position for first in firsts)
    selected = [
        (source, weights[:count], marks)
        for source, weights, marks in sources
        if any(weights[:count])
    ]
    return name, stop, firsts[:count], selected


def _without_digests(value: Any) -> str:
    """Return a value of a fingerprint as text, in which digests are left out."""
    return re.sub(r"'[0-9a-f]{16,}'", "...", repr(value))[:300]
