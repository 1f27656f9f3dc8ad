"""How is a remote file kept on disk if many processes need it at the same time?"""

from __future__ import annotations

import errno
import glob
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.seeding import derive_key
from paddle_shard.sources.files import BUFFER, open_file
from paddle_shard.sources.names import base_name, shown

_FULL = (errno.ENOSPC, errno.EDQUOT)


def cached(name: str, cache_dir: str) -> str:
    """Return the path of a local copy of a remote file; download the file if there is no copy yet.

    The first caller downloads the file under a temporary name and renames it. Other callers, also in other processes,
    wait for it. If the file system has no locks, several callers may download the file, but each copy is complete.
    No copy is ever removed.

    Raises:
        OSError: The download failed or ended too soon, or the disk is full. No incomplete file is left.
    """
    with _room(name, cache_dir):
        os.makedirs(cache_dir, exist_ok=True)
    kept = f"{derive_key(shown(name)).hex()}-{base_name(name)}"
    path = os.path.join(cache_dir, kept)
    if os.path.exists(path):
        return path
    with _room(name, cache_dir):
        lock = open(os.path.join(cache_dir, f".{kept}.lock"), "wb")  # noqa: SIM115
    with lock, held(lock) as alone:
        if os.path.exists(path):
            return path
        if alone:  # remove what a killed process has left
            for stale in glob.glob(os.path.join(glob.escape(cache_dir), f".{glob.escape(kept)}.*.part")):
                os.unlink(stale)
        with _room(name, cache_dir):
            handle, part = tempfile.mkstemp(prefix=f".{kept}.", suffix=".part", dir=cache_dir)
        try:
            with open(handle, "wb", buffering=0) as target:
                _download(name, target, cache_dir)
            os.chmod(part, 0o644)
            os.replace(part, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(part)
            raise
    return path


def _download(name: str, target: io.FileIO, cache_dir: str) -> None:
    source, size = open_file(name)
    copied = 0
    with source:
        while piece := source.read(BUFFER):
            try:
                rest = memoryview(piece)
                while rest:
                    rest = rest[target.write(rest) :]
            except OSError as error:
                raise_if_a_handlers(error)
                raise _explained(error, name, cache_dir, size, copied) from error
            copied += len(piece)
    try:
        os.fsync(target.fileno())  # otherwise a crash could leave an empty file with the right name
    except OSError as error:
        raise_if_a_handlers(error)
        raise _explained(error, name, cache_dir, size, copied) from error
    if size is not None and copied != size:
        raise OSError(f"the download has {copied} bytes, the server said {size}")


@contextmanager
def _room(name: str, cache_dir: str) -> Iterator[None]:
    """Explain the error if the disk has no room for a file or a directory."""
    try:
        yield
    except OSError as error:
        raise_if_a_handlers(error)
        if error.errno not in _FULL:
            raise
        raise OSError(
            error.errno,
            f"cache_dir {cache_dir!r} is full: no file can be made in it for {shown(name)}; the file system may have "
            "bytes left, but no inodes. Make room, or choose another cache_dir",
        ) from error


def _explained(error: OSError, name: str, cache_dir: str, size: int | None, copied: int) -> OSError:
    if error.errno not in _FULL:
        return OSError(error.errno, f"cannot write to cache_dir {cache_dir!r}: {error}")
    free = shutil.disk_usage(cache_dir).free + copied  # what was written will be removed
    return OSError(
        error.errno,
        f"cache_dir {cache_dir!r} is full: {shown(name)} has {'an unknown number of' if size is None else size} bytes, "
        f"{free} are free. Make room, or choose another cache_dir",
    )


@contextmanager
def held(file: IO[bytes]) -> Iterator[bool]:
    """Hold a lock among processes and threads; yield False if the file cannot be locked."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        locked = True
    except (ImportError, OSError) as error:
        raise_if_a_handlers(error)
        locked = False
    try:
        yield locked
    finally:
        if locked:  # closing is not enough: a child that was forked meanwhile has the file open, too
            fcntl.flock(file, fcntl.LOCK_UN)
