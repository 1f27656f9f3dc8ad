"""Sample counts of files, the bytes where samples begin, and reading a file from one of them on.

A format is a function `samples(file, name, start)`. It yields the samples of an open file, each with the byte where it
begins, so that counting a file and reading it from a sample on are the same code for all formats.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from paddle_shard.data.files import files
from paddle_shard.data.files.host_cache import HostCache, open_through
from paddle_shard.data.files.locks import held
from paddle_shard.data.files.shards import RECOUNT, ShardSource
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.skips import counted

EVERY = 64
"""Number of samples for which one byte offset is kept."""
MOST = 128
"""Most byte offsets that are kept for a file that is counted without an index. Longer files have sparser offsets."""

Samples = Callable[[BinaryIO, str, int], Iterator[tuple[int, Any]]]
"""A format. Called with (open file, its name, a byte where a sample begins, at which the file stands)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What is known of a file that was counted."""

    samples: int
    size: int
    """Size in bytes; the key "bytes" in JSON."""
    starts: tuple[int, ...] = ()
    """Bytes at which samples 0, `every`, 2 * `every`, ... begin; empty if the file is compressed as a whole."""
    every: int

    def before(self, sample: int) -> tuple[int, int]:
        """Return the last known byte where a sample at or before `sample` begins, and how many samples lie between."""
        if not self.starts:
            return 0, sample
        at = min(sample // self.every, len(self.starts) - 1)
        return self.starts[at], sample - at * self.every

    def to_json(self) -> dict[str, Any]:
        """Return the entry as an index file and the kept counts have it."""
        return {
            "samples": self.samples,
            "bytes": self.size,
            "every": self.every,
            "starts": list(self.starts),
        }

    @classmethod
    def from_json(cls, found: Any) -> ShardEntry:
        """Return the entry of an index file or of kept counts.

        Raises:
            TypeError, ValueError, KeyError: It is damaged.
        """
        starts = tuple(map(counted, found.get("starts", ())))
        samples, size, every = (
            counted(found["samples"]),
            counted(found["bytes"]),
            counted(found.get("every", EVERY), 1),
        )
        if max(samples, size, *starts) >= 1 << 63:
            raise ValueError(found)
        return cls(samples=samples, size=size, starts=starts, every=every)


def count_file(
    name: str, samples: Samples, most: int | None = None, cache: HostCache | None = None
) -> ShardEntry:
    """Count the samples of a file.

    Args:
        name: Path or URL of the file.
        samples: The format, or a function that finds where samples begin in less time.
        most: Most byte offsets to keep, an even number; None: no limit.
        cache: Where a copy of a remote file is kept; None: nowhere.

    Raises:
        Exception: Whatever reading raises, if the file cannot be read to its end.
    """
    opened, size = open_through(cache, name)
    kept: list[int] = []
    number, every = 0, EVERY
    with opened, files.decompressed(opened, name) as file:
        for number, (start, _) in enumerate(samples(file, name, 0), 1):
            if (number - 1) % every == 0:
                if len(kept) == most:
                    kept, every = kept[::2], 2 * every
                kept.append(start)
        starts = (
            tuple(kept) if file is opened else ()
        )  # in a compressed file, no sample can be found by its byte
        return ShardEntry(
            samples=number,
            size=opened.tell() if size is None else size,
            starts=starts,
            every=every,
        )


def count_files(
    names: Sequence[str],
    kind: str,
    samples: Samples,
    counts: bool | None,
    cache: HostCache | None = None,
) -> dict[str, ShardEntry] | None:
    """Count the samples of files. The counts of local ones are kept in the user's cache directory.

    Args:
        names: Names of the files.
        kind: Name of what is counted in the files.
        samples: Finds the samples of a file; see `count_file`.
        counts: True: count all files; False: count none. None: count all if counting is cheap compared to reading: all
            files are local and none is compressed. So all ranks that see the same files decide alike.
        cache: Where copies of remote files are kept; None: nowhere.

    Returns:
        The index entry of each file; None if files are not counted.

    Raises:
        ShardReadError: A file cannot be read.
    """
    if counts is False or (counts is None and any(map(files.is_remote, names))):
        return None
    found: dict[str, ShardEntry] = {}
    paths = [
        name if files.is_remote(name) else os.path.abspath(files.local_path(name))
        for name in names
    ]
    with _kept(kind, paths) as kept:
        for name, path in zip(names, paths, strict=True):
            with files.failures_named(name, lambda: ("counting its samples", None)):
                # Before counting: a file that grows meanwhile has another version the next time.
                version = None
                if not files.is_remote(name):
                    status = os.stat(path)
                    version = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
                entry = _kept_entry(kept.get(path), version)
                # A kept entry without places may be of a compressed file, which `counts=True` has counted.
                if (
                    counts is None
                    and (entry is None or not entry.starts)
                    and _is_compressed(name)
                ):
                    return None
                if entry is None:
                    logging.getLogger("paddle_shard").info(
                        "counting the samples of %s", files.shown(name)
                    )
                    entry = count_file(name, samples, MOST, cache)
                found[name] = entry
            if version is not None:
                kept[path] = {"version": version, **entry.to_json()}
    return found


def _is_compressed(name: str) -> bool:
    opened, _ = files.open_file(name)
    with opened:
        return files.decompressed(opened, name) is not opened


def source_of_files(
    names: Sequence[str],
    samples: Samples,
    entries: Mapping[str, ShardEntry] | None,
    *,
    cache: HostCache | None = None,
    shuffle_shards: bool,
    resample: bool,
) -> ShardSource:
    """Return the source of files of a format.

    Args:
        names: Names of the files.
        samples: The format.
        entries: The index entry of each file; None if files are not counted.
        cache: Where copies of remote files are kept; None: nowhere.
        shuffle_shards: If True, permute the files, in another order each epoch.
        resample: If True, each part is an endless stream of files, sampled with replacement.
    """
    read = partial(_read, samples=samples, entries=entries, cache=cache)
    counts = None if entries is None else [entries[name].samples for name in names]
    return ShardSource(
        names, read, counts=counts, shuffle_shards=shuffle_shards, resample=resample
    )


def _read(
    name: str,
    skip: int,
    *,
    samples: Samples,
    entries: Mapping[str, ShardEntry] | None,
    cache: HostCache | None,
) -> Iterator[Any]:
    """Yield the samples of a file from a given one on."""
    start = 0
    if entries is not None:
        start, skip = entries[name].before(skip)
    opened, size = open_through(cache, name, start)
    with opened, opened if start else files.decompressed(opened, name) as file:
        if entries is not None and size not in (None, entries[name].size):
            raise ValueError(
                f"the file has {size} bytes, and had {entries[name].size} when it was counted. It has changed since, "
                f"or is another file of that name: {RECOUNT}"
            )
        for _, sample in islice(samples(file, name, start), skip, None):
            yield sample


def _folder() -> Path:
    return (
        Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
        / "paddle_shard"
        / "counts"
    )


@contextmanager
def _kept(kind: str, paths: list[str]) -> Iterator[dict[str, Any]]:
    """Open the kept counts of a list of files, under a lock so that one process at a time counts.

    Yield path -> an entry in JSON and the file's "version". What is added is written at the end. If there is no place
    for the counts, nothing is kept.
    """
    file = (
        _folder() / f"{derive_key(3, kind, paths, size=16).hex()}.json"
    )  # 3 is the version of what is kept
    with ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(stack.enter_context(file.open("ab"))))
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = dict(json.loads(file.read_bytes()))
        before = dict(known)
        try:
            yield known
        finally:
            if known != before:
                with contextlib.suppress(OSError), files.replacing(file) as target:
                    target.write(json.dumps(known, separators=(",", ":")).encode())


def _kept_entry(kept: Any, version: list[Any] | None) -> ShardEntry | None:
    """Return the kept entry of a file; None if there is none or the file has changed."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        return ShardEntry.from_json(kept) if kept["version"] == version else None
    return None
