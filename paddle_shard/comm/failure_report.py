"""How does the failure of one rank become the error of all?"""

from __future__ import annotations

import json
from typing import Any

from paddle_shard import errors
from paddle_shard.errors import AgreedFailure, DataReadError

_LONGEST = 10_000
"""Most characters of an error text that are sent to the other ranks."""
_TOLD = ("index", "worker", "step", "epoch", "cause_type")


def report_of(failure: Any) -> bytes:
    """Return the report of a failure that is sent to the other ranks."""
    told = {name: getattr(failure, name, None) for name in _TOLD}
    text = errors.text_of(failure)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... [cut]"
    return json.dumps({"kind": type(failure).__name__, "text": text, **told}, default=repr).encode()


def failure_of_another(failure: AgreedFailure) -> Exception:
    """Return the error of the rank that failed, as every other rank raises it."""
    rank, report = failure.reports[0]
    try:
        told = json.loads(report)
    except ValueError:  # cut off because it was too long
        told = {"kind": "DataReadError", "text": report.decode(errors="replace")}
    text = f"global rank {rank}: {told['text']}"
    kind = getattr(errors, told["kind"], None)
    if kind is not None and kind is not DataReadError:
        found: Exception = kind(text)
        return found
    error = DataReadError(text if kind is DataReadError else f"{told['kind']}: {text}")
    for name in _TOLD:
        value = told.get(name)
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
