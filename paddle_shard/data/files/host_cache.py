"""Copies of remote files in a folder of the host, limited in bytes.

All processes of a host use a folder at the same time. A copy gets its name when it is complete, and one process
downloads it while the others wait for its lock. `flock` locks end with their process, so nothing needs repair after a
process was killed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from paddle_shard.core.checks import check_count
from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.files.files import (
    BUFFER,
    Path,
    base_name,
    is_remote,
    open_file,
    redacted,
    replacing,
)
from paddle_shard.data.files.locks import file_lock
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.seeding import derive_key

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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
    def of(cls, cache_dir: Path | None, cache_bytes: int | None) -> HostCache | None:
        """Return the cache that the arguments of a source describe.

        Raises:
            ArgumentError: `cache_dir` is no local folder; `cache_bytes` is less than 1, or given without `cache_dir`.
        """
        if cache_bytes is not None:
            check_count("cache_bytes", cache_bytes)
        if cache_dir is None:
            if cache_bytes is not None:
                raise ArgumentError(
                    f"cache_bytes={cache_bytes} limits cache_dir, which is not given. Give both."
                )
            return None
        is_path = isinstance(cache_dir, str | os.PathLike)
        folder = os.fspath(os.path.expanduser(cache_dir)) if is_path else ""
        if not folder or is_remote(folder):
            raise ArgumentError(
                f"cache_dir must be a folder of this host, where copies are kept, got {cache_dir!r}."
            )
        return cls(folder, cache_bytes)

    def open(self, name: str, start: int = 0) -> tuple[BinaryIO, int | None]:
        """Open the copy of a remote file at a byte; download it if there is none.

        If there is no room for it, or its size is not known, the remote file itself is opened.

        Returns:
            (file, its size in bytes if it is known)

        Raises:
            OSError: The download failed, or the folder cannot be written to. No incomplete file is left.
        """
        key = derive_key(redacted(name)).hex()
        path = os.path.join(self.folder, f"{key}-{base_name(name)}")
        if os.path.exists(path) or self._download(name, path):
            return open_file(path, start)
        return open_file(name, start)

    def _download(self, name: str, path: str) -> bool:
        """Make a copy of a file, unless another process has; return False if there is no room for it."""
        os.makedirs(self.folder, exist_ok=True)
        with self._locked(f".{os.path.basename(path)}.lock"):
            if os.path.exists(path):
                return True
            source, size = open_file(name)
            try:
                with source, ExitStack() as copying:
                    with self._locked():
                        if not self._has_room(name, size):
                            return False
                        target = copying.enter_context(
                            replacing(path, 0o644, buffering=BUFFER)
                        )
                        # Other processes count all of its bytes from now on.
                        target.truncate(size or 0)
                    shutil.copyfileobj(source, target, BUFFER)
                    target.flush()
                    # Without this, a crash could leave an empty file with the right name.
                    os.fsync(target.fileno())
                    # A process that lists the folder during a rename may miss the file.
                    with self._locked():
                        copying.close()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                text = f"cannot write to cache_dir {self.folder!r}: {error}. Make room, or limit it by cache_bytes="
                raise OSError(error.errno, text) from error
        return True

    @contextmanager
    def _locked(self, name: str = ".lock") -> Iterator[None]:
        """Let one process at a time begin and name copies, or, by another name, download a file."""
        with open(os.path.join(self.folder, name), "wb") as lock, file_lock(lock):
            yield

    def _has_room(self, name: str, size: int | None) -> bool:
        """Return whether a file fits into the folder; warn if not. Remove what killed processes have left."""
        num_bytes = size or 0
        for entry in os.scandir(self.folder):
            if not _COPY.fullmatch(entry.name):
                continue
            status = entry.stat()
            is_partial = entry.name.startswith(".")
            if is_partial and time.time() - status.st_mtime > _STALE:
                os.unlink(entry.path)
            else:
                num_bytes += status.st_size
        limit = self.most_bytes
        if limit is None or (size is not None and num_bytes <= limit):
            return True
        warn_once(
            "cache_bytes=%d: cache_dir has no room for %s of %s bytes and others: they are read from their servers. "
            "Delete copies that are not needed, or give more.",
            limit,
            redacted(name),
            size or "unknown",
        )
        return False


def open_through(
    cache: HostCache | None, name: str, start: int = 0
) -> tuple[BinaryIO, int | None]:
    """Open a file at a byte, by a copy if it is remote and there is a cache; return it and its size, if known."""
    if cache is None or not is_remote(name):
        return open_file(name, start)
    return cache.open(name, start)
