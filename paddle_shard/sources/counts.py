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
from paddle_shard.plan.handlers import ignoring, raise_if_a_handlers
from paddle_shard.plan.seeding import derive_key
from paddle_shard.sources.files import decompressed, held, is_remote, local_path, open_file, replacing, shown

VERSION = 1
KEPT = 64
"""Number of lists of files whose counts are kept: the most recently used ones."""
RECENT = 2.0
"""Seconds after a change for which a file's count is not kept: a second change could get the same time stamp."""
SLOW = 5.0
"""Seconds after which a log line says what takes so long."""
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
    paths = {name: name if is_remote(name) else os.path.abspath(local_path(name)) for name in names}
    slow = (
        "counting the samples of %d files, so that the parts of the stream are equal. The counts of local files are "
        "kept in %s; counts=False (index=False for tars) does without."
    )
    with said_if_slow(slow, len(names), _folder()), _kept(kind, list(paths.values())) as kept:
        for name, path in paths.items():
            try:
                stamp = None
                if not is_remote(name):
                    status = os.stat(path)
                    stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                entry = _entry(kept.get(path), stamp)
                if counts is None and (entry is None or not entry.starts):
                    opened, _ = open_file(name)
                    with opened:
                        if decompressed(opened) is not opened:
                            return None
                found[name] = entry = entry or count(name)
            except PaddleShardError:
                raise
            except Exception as error:
                raise_if_a_handlers(error)
                raise ShardReadError.of(
                    f"{shown(name)}: counting its samples failed: {described(error)}", shown(name)
                ) from error
            if stamp is not None and entry.size == stamp[0] and time.time() - max(stamp[1:]) / 1e9 >= RECENT:
                kept[path] = [*stamp, entry.samples, entry.every, list(entry.starts)]
    return found


@contextmanager
def said_if_slow(text: str, *values: Any) -> Iterator[None]:
    """Log a warning if the `with` block takes long."""
    timer = threading.Timer(SLOW, logging.getLogger("paddle_shard").warning, (text, *values))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _folder() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "paddle_shard" / "counts"


@contextmanager
def _kept(kind: str, paths: list[str]) -> Iterator[dict[str, Any]]:
    """Open the kept counts of a list of files, under a lock so that one process at a time counts.

    Yield path -> [size, times of change, samples, every, starts]. What is added is written at the end. If there is no
    place for the counts, nothing is kept.
    """
    file = _folder() / f"{derive_key(VERSION, kind, paths, size=16).hex()}.json"
    with ExitStack() as stack:
        with ignoring(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(stack.enter_context(file.open("ab"))))
        known: dict[str, Any] = {}
        with ignoring(OSError, ValueError, TypeError):
            known = dict(json.loads(file.read_bytes()))
        before = dict(known)
        try:
            yield known
        finally:
            with ignoring(OSError):
                if known != before:
                    with replacing(file) as target:
                        target.write(json.dumps(known, separators=(",", ":")).encode())
                else:
                    os.utime(file)
                # Remove the lists that were not used for the longest time.
                files = sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
                for path in files[:-KEPT]:
                    path.unlink()


def _entry(kept: Any, stamp: tuple[int, int, int] | None) -> ShardEntry | None:
    """Return the kept entry of a file; None if there is none or the file has changed."""
    with suppress(ValueError, TypeError):
        *known, samples, every, starts = kept
        if stamp is not None and tuple(known) == stamp:
            return ShardEntry(samples=samples, size=stamp[0], starts=tuple(starts), every=every)
    return None
