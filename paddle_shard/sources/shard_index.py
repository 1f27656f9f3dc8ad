"""How many samples does each shard have, and at which bytes do they begin?"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.files import decompressed, open_file
from paddle_shard.sources.names import base_name, is_remote, local_path, shown
from paddle_shard.sources.shards import RECOUNT
from paddle_shard.sources.tars import TarHeaders, TarSamples

VERSION = 1
EVERY = 64
"""Number of samples for which one byte offset is kept."""
MOST = 128
"""Most byte offsets that are kept for a file that is counted without an index. Longer files have sparser offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """The index entry of a shard."""

    samples: int
    size: int
    """Size in bytes; the key "bytes" in the index file."""
    starts: tuple[int, ...] = ()
    """Bytes at which samples 0, `every`, 2 * `every`, ... begin; empty if the file is compressed as a whole."""
    every: int = EVERY

    def before(self, sample: int) -> tuple[int, int]:
        """Return the last known byte where a sample at or before `sample` begins, and how many samples lie between."""
        if not self.starts:
            return 0, sample
        at = min(sample // self.every, len(self.starts) - 1)
        return self.starts[at], sample - at * self.every


def entry_of(starts: Iterable[int], size: Callable[[], int], *, packed: bool, most: int | None = None) -> ShardEntry:
    """Count the samples of a file.

    Args:
        starts: The byte at which each sample begins.
        size: Returns the file's size in bytes; called at the end.
        packed: True if the file is compressed, so that no sample can be found by its byte.
        most: Most byte offsets to keep, an even number; None: no limit.
    """
    kept: list[int] = []
    number, every = 0, EVERY
    for number, start in enumerate(starts, 1):
        if (number - 1) % every:
            continue
        if len(kept) == most:
            kept, every = kept[::2], 2 * every
        kept.append(start)
    return ShardEntry(samples=number, size=size(), starts=() if packed else tuple(kept), every=every)


def index_shard(name: str, most: int | None = None) -> ShardEntry:
    """Count the samples of a tar. A local, uncompressed tar is counted by its headers, any other is read to its end.

    Args:
        name: Path or URL of the tar.
        most: See `entry_of`.

    Raises:
        Exception: Whatever reading raises, if the tar cannot be read to its end.
    """
    opened, size = open_file(name)
    with opened, decompressed(opened) as file:
        packed = file is not opened
        if not packed and not is_remote(name):
            with open(local_path(name), "rb", buffering=0) as headers:  # with a buffer, each header would fill it
                return entry_of(_starts(TarHeaders(headers, name)), lambda: size or 0, packed=False, most=most)
        samples = TarSamples(file, name, 0, None)
        return entry_of(_starts(samples), lambda: opened.tell() if size is None else size, packed=packed, most=most)


def _starts(samples: TarSamples) -> Iterator[int]:
    start = 0
    for _ in samples:
        yield start
        start = samples.next_start


def write_index(path: str, entries: Mapping[str, ShardEntry]) -> None:
    """Write an index; an existing file of that name is replaced atomically."""
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
        path: Path or URL of the index.
        names: Paths or URLs of the shards. The index contains only the last pieces of such names.

    Raises:
        StateError: The file is not an index, or has another version.
        ArgumentError: The index cannot be opened or lacks a shard, or two shards have the same last piece.
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
    """Refuse shards that an index could not distinguish."""
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
