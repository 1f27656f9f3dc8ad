"""`Recorder`: what a running loader writes into its record. A failure to write never stops the run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.state import LoaderState
from paddle_shard.run.record_lines import FORMAT, append

_ELSEWHERE = ("fingerprint", "sampler", "data", "checksum")
"""Fields of a state that other lines have, or that do not tell what was delivered."""
_BEGINNING = b'{"after": ""'
_FIX = "Give a file in a folder that exists, on a disk with space, or leave record out."


def position(state: LoaderState) -> dict[str, Any]:
    """Return what a line holds of a state."""
    return {
        "state": {
            name: value
            for name, value in state.to_dict().items()
            if name not in _ELSEWHERE
        }
    }


class Recorder:
    """Appends the lines of one loader."""

    def __init__(self, path: Any, facts: Mapping[str, Any]) -> None:
        """Write the first line.

        Args:
            path: The file. The record of an earlier job is continued.
            facts: What is known when the run begins: JSON-able.

        Raises:
            ArgumentTypeError: `path` is no path.
            ArgumentError: It cannot be written, or is a file of something else.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(
                f"record must be the path of a file, got {type(path).__name__}: {path!r}."
            )
        self.path = os.path.abspath(path)
        self._pending: deque[dict[str, Any]] = deque()
        self._is_busy = False
        self._has_failed = False
        self._job = ""
        try:
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    if not _BEGINNING.startswith(file.read(len(_BEGINNING))):
                        raise ArgumentError(
                            f"record={self.path!r} is a file, but no record of paddle_shard. Choose another name."
                        )
            self._job = self._append("begin", {"format": FORMAT, **facts})
        except ArgumentError:
            raise
        except (OSError, ValueError) as error:
            # a ValueError: its name has a null byte
            raise ArgumentError(
                f"record={self.path!r} cannot be written ({error}). {_FIX}"
            ) from error

    def note(self, kind: str, **facts: Any) -> None:
        """Write a line; if that is impossible, warn once and write no more.

        Args:
            kind: What has happened.
            facts: The other fields of the line: JSON-able.
        """
        self._pending.append({"line": kind, **facts})
        # A signal's handler may save the state while a line is written: the interrupted call writes this one, too.
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._pending and not self._has_failed:
                line = self._pending.popleft()
                self._append(line.pop("line"), {"job": self._job, **line})
        except OSError as error:
            self._has_failed = True
            warn_once(
                "record=%r cannot be written any more (%s). The run continues without it.",
                self.path,
                str(error),
            )
        finally:
            self._is_busy = False

    def _append(self, kind: str, facts: Mapping[str, Any]) -> str:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        digest, num_removed = append(
            self.path, {"line": kind, "time": now, **facts}
        )
        if num_removed:
            warn_once(
                "record=%r: a crash had cut its last line. The %d bytes were taken off.",
                self.path,
                num_removed,
            )
        return digest
