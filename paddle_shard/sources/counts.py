"""How many samples does each file have, where do they begin, and how are counts of local files kept?"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_shard.errors import PaddleShardError, ShardReadError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.seeding import derive_key
from paddle_shard.sources.files import decompressed, held, is_remote, local_path, open_file, replacing, shown

VERSION = 1
KEPT = 64
"""Number of lists of files whose counts are kept: the most recently used ones."""
RECENT = 2.0
"""Seconds after a change for which a file's count is not kept: a second change could get the same time stamp."""
SLOW = 5.0
"""Seconds after which a log line says what takes so long."""

_Stamp = tuple[int, int, int]
"""(size in bytes, time of the last change of the content, that of the inode), times in ns."""
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


def count_files(
    names: Sequence[str], kind: str, count: Callable[[str], ShardEntry], counts: bool | None
) -> dict[str, ShardEntry] | None:
    """Count the samples of files. The counts of local ones are kept in the user's cache directory.

    Args:
        names: Names of the files.
        kind: Name of what is counted in the files.
        count: Counts the samples of a file.
        counts: True: count all files; False: count none. None: count all if counting is cheap compared to reading: all
            files are local and none is compressed. So all ranks that see the same files decide alike.

    Returns:
        The index entry of each file; None if files are not counted.

    Raises:
        ShardReadError: A file cannot be read.
    """
    if counts is False or (counts is None and any(map(is_remote, names))):
        return None
    found: dict[str, ShardEntry] = {}
    with _said_if_slow(len(names)), _kept(kind, names) as kept:
        for name in names:
            try:
                stamp = None if is_remote(name) else _stamp(name)
                entry = kept.get(name, stamp)
                if counts is None and (entry is None or not entry.starts) and _is_packed(name):
                    return None
                found[name] = count(name) if entry is None else entry
            except PaddleShardError:
                raise
            except Exception as error:
                raise_if_a_handlers(error)
                raise ShardReadError.of(
                    f"{shown(name)}: counting its samples failed: {described(error)}", shown(name)
                ) from error
            kept.keep(name, stamp, found[name])
    return found


def _stamp(name: str) -> _Stamp:
    status = os.stat(local_path(name))
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_packed(name: str) -> bool:
    opened, _ = open_file(name)
    with opened:
        return decompressed(opened) is not opened


@contextmanager
def _said_if_slow(num_files: int) -> Iterator[None]:
    timer = threading.Timer(
        SLOW,
        logging.getLogger("paddle_shard").warning,
        (
            "counting the samples of %d files, so that the parts of the stream are equal. The counts of local files "
            "are kept in %s; counts=False (index=False for tars) does without.",
            num_files,
            _folder(),
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# The counts that are kept


def _folder() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "paddle_shard" / "counts"


@contextmanager
def _kept(kind: str, names: Sequence[str]) -> Iterator[_Kept]:
    """Open the kept counts of a list of files, under a lock so that one process at a time counts.

    If there is no place for the counts, nothing is kept.
    """
    path = _folder() / f"{derive_key(VERSION, kind, [_path(name) for name in names], size=16).hex()}.json"
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(stack.enter_context(path.open("ab"))))
        kept = _Kept(path)
        try:
            yield kept
        finally:
            with suppress(OSError):
                kept.close()


class _Kept:
    """The content of a cache file: the counts of a list of files."""

    def __init__(self, path: Path) -> None:
        self._file, self._changed = path, False
        self._known: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self._known = dict(json.loads(path.read_bytes()))

    def get(self, name: str, stamp: _Stamp | None) -> ShardEntry | None:
        """Return the kept entry of a file; None if there is none or the file has changed."""
        try:
            *known, samples, every, starts = self._known[_path(name)]
            if stamp is not None and tuple(known) == stamp:
                return ShardEntry(samples=samples, size=stamp[0], starts=tuple(starts), every=every)
        except (KeyError, ValueError, TypeError):
            pass
        return None

    def keep(self, name: str, stamp: _Stamp | None, entry: ShardEntry) -> None:
        """Note the count of a file, unless the file is remote or has changed just now."""
        if stamp is None or entry.size != stamp[0] or time.time() - max(stamp[1:]) / 1e9 < RECENT:
            return
        line = [*stamp, entry.samples, entry.every, list(entry.starts)]
        if self._known.get(_path(name)) != line:
            self._known[_path(name)], self._changed = line, True

    def close(self) -> None:
        """Write new counts, and remove the lists that were not used for the longest time."""
        if self._changed:
            with replacing(self._file) as file:
                file.write(json.dumps(self._known, separators=(",", ":")).encode())
        else:
            os.utime(self._file)
        files = sorted(self._file.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in files[:-KEPT]:
            path.unlink()


def _path(name: str) -> str:
    return name if is_remote(name) else os.path.abspath(local_path(name))
