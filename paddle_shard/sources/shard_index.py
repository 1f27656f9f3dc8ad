"""How many samples does each shard have, and where do they begin?"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.files import decompressed, open_file
from paddle_shard.sources.names import base_name, shown
from paddle_shard.sources.shards import RECOUNT
from paddle_shard.sources.tars import TarSamples

VERSION = 1
EVERY = 64
"""Of so many samples, the byte of the first is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What is known of a shard."""

    samples: int
    size: int
    """Bytes; "bytes" in the file."""
    starts: tuple[int, ...] = ()
    """Bytes at which samples 0, `EVERY`, 2 * `EVERY`, ... begin; none where it is packed as a whole."""

    def before(self, sample: int) -> tuple[int, int]:
        """Return the last byte known to begin a sample at or before a sample, and how many lie between."""
        if not self.starts:
            return 0, sample
        at = min(sample // EVERY, len(self.starts) - 1)
        return self.starts[at], sample - at * EVERY


def index_shard(name: str) -> ShardEntry:
    """Read a tar to its end and count.

    Raises:
        Exception: Whatever reading it raises, if it cannot be read whole.
    """
    opened, size = open_file(name)
    with opened, decompressed(opened) as file:
        packed = file is not opened
        samples = TarSamples(file, name, 0, None)
        number, starts = 0, []
        start = 0
        for number, _ in enumerate(samples, 1):
            if number % EVERY == 1:
                starts.append(start)
            start = samples.next_start
        if size is None:
            size = opened.tell()
    return ShardEntry(samples=number, size=size, starts=() if packed else tuple(starts))


def write_index(path: str, entries: Mapping[str, ShardEntry]) -> None:
    """Write an index; a file of that name is replaced at once or not at all."""
    shards = {
        name: {"samples": entry.samples, "bytes": entry.size, "starts": list(entry.starts)}
        for name, entry in entries.items()
    }
    text = json.dumps({"version": VERSION, "every": EVERY, "shards": shards}, separators=(",", ":"))
    folder, base = os.path.split(os.path.abspath(path))
    handle, part = tempfile.mkstemp(prefix=f".{base}.", dir=folder)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise


def read_index(path: str, names: Sequence[str]) -> dict[str, ShardEntry]:
    """Return the entries of some shards, by name.

    Args:
        path: A path or URL.
        names: Shards, which the index knows by the last pieces of their names.

    Raises:
        StateError: It is no index, or of another version.
        ArgumentError: It cannot be opened or does not know a shard, or two shards have the same last piece.
    """
    try:
        file, _ = open_file(path)
    except OSError as error:
        raise_if_a_handlers(error)
        raise ArgumentError(f"index={path!r} cannot be read: {error}. Make it: {RECOUNT}.") from error
    with file:
        shards = _parsed(file.read(), path)
    check_base_names(names)
    unknown = [name for name in names if base_name(name) not in shards]
    if unknown:
        listed = ", ".join(base_name(name) for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise ArgumentError(f"index={path!r} does not know {len(unknown)} of the shards: {listed}. Make it: {RECOUNT}.")
    return {name: shards[base_name(name)] for name in names}


def check_base_names(names: Sequence[str]) -> None:
    """Refuse shards that an index could not tell from one another."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(base_name(name), name)
        if other != name:
            raise ArgumentError(
                f"an index knows shards by the last piece of their names, which {shown(other)} and {shown(name)} "
                "share. Rename one."
            )


def _parsed(text: bytes, path: str) -> dict[str, ShardEntry]:
    try:
        found: Any = json.loads(text)
        version = found["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"index={path!r} is not an index of shards ({error!r}). Make it: {RECOUNT}.") from error
    if version != VERSION:
        raise StateError(f"index={path!r} is of version {version!r}, this library reads {VERSION}: {RECOUNT}.")
    try:
        usable = found.get("every") == EVERY
        return {
            name: ShardEntry(
                samples=int(entry["samples"]),
                size=int(entry["bytes"]),
                starts=tuple(int(start) for start in entry.get("starts", ())) if usable else (),
            )
            for name, entry in found["shards"].items()
        }
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        raise StateError(f"index={path!r} is damaged ({error!r}): {RECOUNT}.") from error
