"""Copies of remote files in a folder of the host.

All processes of a host use a folder at the same time. Each copy is written to a file of its own and gets its name when
it is complete. One process downloads it while the others wait for its lock, which ends with that process.
"""

from __future__ import annotations

import os
import shutil

from paddle_shard.data.files.files import (
    BUFFER,
    FileAndSize,
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


def check_cache_dir(cache_dir: Path | None) -> str | None:
    """Return the folder of a source's `cache_dir=`; None if it is not given.

    Raises:
        ArgumentError: It is a URL.
    """
    if cache_dir is None:
        return None
    folder = os.path.expanduser(os.fspath(cache_dir))
    if is_remote(folder):
        raise ArgumentError(
            f"cache_dir must be a folder of this host, where copies are kept, got {cache_dir!r}."
        )
    return folder


def open_cached(folder: str | None, name: str, start: int = 0) -> FileAndSize:
    """Open a file at a byte; a remote one by its copy in the folder, which is made if there is none.

    Args:
        folder: The folder of copies; None: remote files are read from their servers.
        name: Path or URL of the file.
        start: The byte.

    Returns:
        (file, its size in bytes)

    Raises:
        OSError: The download failed, or the folder cannot be written to.
    """
    if folder is None or not is_remote(name):
        return open_file(name, start)
    key = derive_key(redacted(name)).hex()
    path = os.path.join(folder, f"{key}-{base_name(name)}")
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        with file_lock(f"{path}.lock"):
            if not os.path.exists(path):
                source, _ = open_file(name)
                with source, replacing(path) as target:
                    shutil.copyfileobj(source, target, BUFFER)
    return open_file(path, start)
