"""Where are copies of remote files kept on a host, and which of them goes when there is no room for another?

All processes of a host use a folder at the same time. They hold locks on files (`flock`), which end with the process
that holds them. So nothing has to be mended after a process was killed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
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
from paddle_shard.sources.files import BUFFER, base_name, is_remote, open_file, replacing, shown, version_of
from paddle_shard.sources.locks import flocked, held

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OURS = re.compile(r"\.?[0-9a-f]{16}-.*(?<!\.lock)")
"""Names of copies, and of those that are being made. The folder may hold other files, which are left alone."""


_never_kept = set[tuple["HostCache", str]]()
"""Caches and files that they have no room for, so that a server is not asked for the whole file in vain again."""
_TOLD, _SIZE = "user.paddle_shard.told", "user.paddle_shard.size"
"""Attributes of a copy: the digest of what the server told of the file when it was downloaded, and its bytes."""


class _Copy(io.FileIO):
    """A copy that is open for reading. It is locked, so that it is not removed meanwhile."""

    told: int | None = None
    """By what `version_of` recognizes the file; None: by the copy itself."""

    def close(self) -> None:
        """Unlock it. Closing is not enough: a child that was forked meanwhile has the file open, too."""
        if not self.closed:
            flocked(self, "LOCK_UN")
        super().close()


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

        One process downloads it under a temporary name, and the others wait for it. If the file system has no locks,
        several may download it, but each copy is complete. If there is no room for it beside the copies that are being
        read, or its size is not known, the remote file itself is opened, and a line in the log says so.

        Returns:
            (file, its size in bytes if it is known)

        Raises:
            OSError: The download failed or ended too soon, or the disk is full. No incomplete file is left.
        """
        path = os.path.join(self.folder, f"{derive_key(shown(name)).hex()}-{base_name(name)}")
        while (copy := self._whole(path, name)) is None:  # again, if it was removed as soon as it was complete
            if (self, name) in _never_kept:
                return open_file(name, start)
            if (remote := self._download(name, path)) is not None:
                if start == 0:
                    return remote
                remote[0].close()
                return open_file(name, start)
        with contextlib.suppress(OSError, ValueError):  # a file system without such attributes
            copy.told = int(os.getxattr(copy.fileno(), _TOLD))
        copy.seek(start)
        return io.BufferedReader(copy, BUFFER), os.fstat(copy.fileno()).st_size

    def _whole(self, path: str, name: str) -> _Copy | None:
        """Open a copy; return None if there is none, or if it has lost bytes since it was made, and remove it."""
        copy, had, size = _opened(path), None, None
        if copy is not None:
            with contextlib.suppress(OSError, ValueError):  # a file system without such attributes
                had, size = int(os.getxattr(copy.fileno(), _SIZE)), os.fstat(copy.fileno()).st_size
        if copy is None or had == size:
            return copy
        copy.close()
        said = "%s, the copy of %s, had %d bytes and has %d now. It is downloaded again."
        logging.getLogger("paddle_shard").warning(said, path, shown(name), had, size)
        with self._explained(name), contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # who has it open goes on with it
        return None

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
            opened = stack.enter_context(ExitStack())
            opened.enter_context(source)
            made = stack.enter_context(ExitStack())
            with self._explained(name, size):
                target = self._room(made, name, path, size)
            if target is None:
                opened.pop_all()
                return source, size
            copied = 0
            while piece := source.read(BUFFER):
                # Reading is outside: only what fails in writing is about the cache.
                with self._explained(name, size, copied):
                    rest = memoryview(piece)
                    while rest:  # a write without a buffer may write only a part
                        rest = rest[target.write(rest) :]
                copied += len(piece)
            with contextlib.suppress(OSError):
                os.setxattr(target.fileno(), _SIZE, str(copied).encode())
                os.setxattr(target.fileno(), _TOLD, str(version_of(source, name).digest).encode())
            with self._explained(name, size, copied):
                os.fsync(target.fileno())  # otherwise a crash could leave an empty file with the right name
                with self._alone():  # else who looks meanwhile might see neither of its names
                    made.close()
        return None

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Begin, name and remove copies in one process at a time; yield False if the file system has no locks."""
        with open(os.path.join(self.folder, ".lock"), "wb") as lock, held(lock) as alone:
            yield alone

    def _room(self, made: ExitStack, name: str, path: str, size: int | None) -> Any:
        """Return a new, locked file for a copy, after removing those for which there is no room beside it.

        It gets its name when `made` is closed. Return None if there is no room.
        """
        with self._alone() as alone:
            copies = list[tuple[int, int, str]]()  # (when it was used, bytes, path)
            for found in os.scandir(self.folder):
                if _OURS.fullmatch(found.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = found.stat()
                        # One that is being made is locked, or its process was killed.
                        if not (found.name.startswith(".") and alone and _removed(found.path)):
                            copies.append((status.st_mtime_ns, status.st_size, found.path))
            if self.most_bytes is not None and not self._makes_room(name, size, copies, alone):
                return None
            locked = made.enter_context(ExitStack())  # until the file has its name
            target = made.enter_context(replacing(path, 0o644, buffering=0))
            locked.enter_context(held(locked.enter_context(os.fdopen(os.dup(target.fileno()), "wb"))))
            target.truncate(size or 0)  # so that others count all of it
            return target

    def _makes_room(self, name: str, size: int | None, copies: list[tuple[int, int, str]], alone: bool) -> bool:
        """Remove the copies that were not used for the longest time; return whether there is room now."""
        most = self.most_bytes or 0
        if not alone:
            raise OSError(errno.ENOLCK, "cache_bytes= needs a file system with locks, which this is not")
        if size is None or size > most:
            if size is None:
                say_once("%s is not kept in cache_dir: its server does not tell its size.", shown(name))
            else:
                say_once("cache_bytes=%d has no room for %s of %d bytes, which is not kept.", most, shown(name), size)
            _never_kept.add((self, name))
            return False
        taken = size + sum(bytes for _, bytes, _ in copies)
        for _, bytes, path in sorted(copies):
            if taken > most and _removed(path):
                taken -= bytes
        if taken > most:
            say_once(
                "cache_bytes=%d is too little for the files that are read at the same time on this host, a few by each "
                "reader. Some are read from their servers, by each process that needs them.",
                most,
            )
        return taken <= most

    @contextmanager
    def _explained(self, name: str, size: int | None = None, copied: int | None = None) -> Iterator[None]:
        """Explain why the cache cannot be written to.

        Args:
            name: The file to download.
            size: Bytes of the file; None: unknown.
            copied: Bytes that were written; they will be removed. None: no file was made.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise OSError(error.errno, f"cannot write to cache_dir {self.folder!r}: {error}") from error
            if copied is None:
                why = f"no file can be made in it for {shown(name)}; the file system may have bytes left, but no inodes"
            else:
                free = shutil.disk_usage(self.folder).free + copied
                why = f"{shown(name)} has {'an unknown number of' if size is None else size} bytes, {free} are free"
            raise OSError(
                error.errno,
                f"cache_dir {self.folder!r} is full: {why}. Make room, limit it by cache_bytes=, or choose another "
                "cache_dir",
            ) from error


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


def _opened(path: str) -> _Copy | None:
    """Open a copy and lock it against removal; return None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        copy = _Copy(path)
        flocked(copy, "LOCK_SH")
        with contextlib.suppress(FileNotFoundError):  # it was removed before it was locked
            if os.stat(path).st_ino == os.fstat(copy.fileno()).st_ino:
                with contextlib.suppress(OSError):  # the folder may be another user's
                    now = time.time_ns()  # finer than what the system would write
                    os.utime(copy.fileno(), ns=(now, now))
                return copy
        copy.close()
    return None


def _removed(path: str) -> bool:
    """Remove a copy, or a half one, that no process has locked; return whether it is gone."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        with contextlib.suppress(OSError):
            if flocked(file, "LOCK_EX", "LOCK_NB"):
                os.unlink(path)
                return True
        return False
    return True
