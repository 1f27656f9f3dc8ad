"""Copies of remote files in a folder of the host, limited in bytes.

All processes of a host use a folder at the same time. A copy gets its name when it is complete, and one process
downloads it while the others wait for its lock. `flock` locks end with their process, so nothing needs repair after a
process was killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from paddle_shard.checks import check_count
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.seeding import derive_key
from paddle_shard.say_once import say_once
from paddle_shard.sources.files import BUFFER, base_name, is_remote, open_file, replacing, shown
from paddle_shard.sources.locks import held

_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPY = re.compile(r"\.?[0-9a-f]{16}-.*(?<!\.lock)")
"""Names of copies, and of incomplete ones. The folder may hold other files, which are left alone."""
_STALE = 3600.0
"""Seconds without a write after which an incomplete copy counts as that of a killed process."""


@dataclass(frozen=True, slots=True)
class HostCache:
    """A folder of copies of remote files. Each is downloaded once, by the process that needs it first."""

    folder: str
    most_bytes: int | None
    """Most bytes that all copies may have; None: no limit."""

    @classmethod
    def of(cls, cache_dir: str | os.PathLike[str] | None, cache_bytes: int | None) -> HostCache | None:
        """Return the cache that the arguments of a source describe.

        Raises:
            ArgumentError: `cache_dir` is no local folder; `cache_bytes` is less than 1, or given without `cache_dir`.
            ArgumentTypeError: `cache_dir` is no path.
        """
        if cache_bytes is not None:
            check_count("cache_bytes", cache_bytes)
            if cache_dir is None:
                raise ArgumentError(f"cache_bytes={cache_bytes} limits cache_dir, which is not given. Give both.")
        if cache_dir is None:
            return None
        if not isinstance(cache_dir, str | os.PathLike):
            raise ArgumentTypeError(f"cache_dir must be the path of a folder, got {cache_dir!r}.")
        folder = os.path.expanduser(os.fspath(cache_dir))
        if not folder or is_remote(folder):
            raise ArgumentError(f"cache_dir must be a folder of this host, where copies are kept, got {cache_dir!r}.")
        return cls(folder, cache_bytes)

    def open(self, name: str, start: int = 0) -> tuple[BinaryIO, int | None]:
        """Open the copy of a remote file at a byte; download it if there is none.

        If there is no room for it, or its size is not known, the remote file itself is opened.

        Returns:
            (file, its size in bytes if it is known)

        Raises:
            OSError: The download failed, or the folder cannot be written to. No incomplete file is left.
        """
        path = os.path.join(self.folder, f"{derive_key(shown(name)).hex()}-{base_name(name)}")
        while True:  # again, if another process removed the copy right after it was complete
            with contextlib.suppress(FileNotFoundError):
                copy = open(path, "rb", buffering=BUFFER)  # noqa: SIM115
                with contextlib.suppress(OSError):  # the folder may be another user's
                    now = time.time_ns()  # finer than the system's own time stamps
                    os.utime(path, ns=(now, now))
                copy.seek(start)
                return copy, os.fstat(copy.fileno()).st_size
            remote = self._download(name, path)
            if remote is not None:
                return _at(start, name, *remote)

    def _download(self, name: str, path: str) -> tuple[BinaryIO, int | None] | None:
        """Make a copy of a file, unless another process has; return the remote file if there is no room for one."""
        with ExitStack() as stack:
            with self._explained(name):
                os.makedirs(self.folder, exist_ok=True)
                lock = stack.enter_context(open(os.path.join(self.folder, f".{os.path.basename(path)}.lock"), "wb"))
                stack.enter_context(held(lock))
            if os.path.exists(path):
                return None
            source, size = open_file(name)
            with self._explained(name, size):
                copying = stack.enter_context(ExitStack())
                target = self._begin_copy(copying, path, size or 0) if self._fits(name, size) else None
            if target is None:
                return source, size
            stack.enter_context(source)
            while piece := source.read(BUFFER):
                with self._explained(name, size):  # errors of reading are not about the folder
                    target.write(piece)
            with self._explained(name, size):
                target.flush()
                os.fsync(target.fileno())  # otherwise a crash could leave an empty file with the right name
                with self._locked():  # a process that lists the folder during a rename may miss the file
                    copying.close()
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Begin, name and remove copies in one process at a time."""
        with open(os.path.join(self.folder, ".lock"), "wb") as lock, held(lock):
            yield

    def _fits(self, name: str, size: int | None) -> bool:
        """Return whether there can be room for a file; log if not."""
        if self.most_bytes is None or (size is not None and size <= self.most_bytes):
            return True
        if size is None:
            say_once("%s is not kept in cache_dir: its server does not send its size.", shown(name))
        else:
            say_once("cache_bytes=%d has no room for %s of %d bytes", self.most_bytes, shown(name), size)
        return False

    def _begin_copy(self, stack: ExitStack, path: str, size: int) -> Any:
        """Return a new file, which gets its name when `stack` is closed; None if there is no room for it."""
        with self._locked():
            if not self._make_room(size):
                return None
            target = stack.enter_context(replacing(path, 0o644, buffering=BUFFER))
            target.truncate(size)  # so that other processes count all of it
            return target

    def _make_room(self, size: int) -> bool:
        """Remove what killed processes left, and the least recently used copies; return whether there is room.

        A process that reads a removed copy continues to read it; its bytes are freed when it closes the file.
        """
        copies = list[tuple[int, int, str]]()  # (time of last use, bytes, path)
        for entry in os.scandir(self.folder):
            if not _COPY.fullmatch(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                if not entry.name.startswith("."):
                    copies.append((status.st_mtime_ns, status.st_size, entry.path))
                elif time.time() - status.st_mtime > _STALE:
                    os.unlink(entry.path)
                else:  # another process writes it
                    size += status.st_size
        if self.most_bytes is None:
            return True
        if size > self.most_bytes:
            return False
        total = size + sum(num_bytes for _, num_bytes, _ in copies)
        for _, num_bytes, path in sorted(copies):
            if total <= self.most_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= num_bytes
        return True

    @contextmanager
    def _explained(self, name: str, size: int | None = None) -> Iterator[None]:
        """Name the folder in errors of writing to it."""
        try:
            yield
        except OSError as error:
            text = f"cannot write to cache_dir {self.folder!r}: {error}"
            if error.errno in _FULL:
                free = shutil.disk_usage(self.folder).free
                text = (
                    f"cache_dir {self.folder!r} is full: {error}. {shown(name)} has {size or 'unknown'} bytes, {free} "
                    "are free. Make room, limit it by cache_bytes=, or choose another cache_dir"
                )
            raise OSError(error.errno, text) from error


def _at(start: int, name: str, file: BinaryIO, size: int | None) -> tuple[BinaryIO, int | None]:
    """Return a remote file at a byte."""
    if not start:
        return file, size
    file.close()
    return open_file(name, start)


def files_at_once(readers: Iterable[tuple[int, Iterable[int]]]) -> int:
    """Return how many files the readers of one host read at the same time, at most.

    Readers of the same part are not at the same row: one may be in the next file already.

    Args:
        readers: The host of each reader, and the parts that it holds.

    Examples:
        >>> files_at_once([(0, [0, 1]), (0, [0, 1]), (0, [0, 1]), (1, [2, 3])])
        4
    """
    files = Counter[int]()
    for (host, _), number in Counter((host, part) for host, parts in readers for part in parts).items():
        files[host] += min(2, number)
    return max(files.values())


def least_bytes(sizes: Sequence[int], at_once: int) -> int:
    """Return the least `cache_bytes` with which each of some files has room beside those that are read meanwhile.

    A copy that is read stays, and which files are read at the same time changes with each epoch: the largest may meet.

    Args:
        sizes: Bytes of the files.
        at_once: How many files are read at the same time.
    """
    return sum(sorted(sizes)[-at_once:])


def open_through(cache: HostCache | None, name: str, start: int = 0) -> tuple[BinaryIO, int | None]:
    """Open a file at a byte, by a copy if it is remote and there is a cache; return it and its size, if known."""
    return open_file(name, start) if cache is None or not is_remote(name) else cache.open(name, start)
