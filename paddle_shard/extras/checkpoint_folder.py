"""The folder of checkpoints: a directory that all ranks see, of this host or of a file system that hosts share.

All that `Checkpoints` does with a disk, but for `paddle.load`, is here, so that a simulated disk can take its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paddle

from paddle_shard.run.record_lines import sync


def sizes_in(directory: Path) -> dict[str, int | None]:
    """Return the entries of a directory: name -> bytes. There are none if it does not exist.

    It is None for a directory, for what was deleted in between, and for a link to nowhere.

    Raises:
        OSError: It cannot be read now. What it holds must not be taken for missing.
    """
    sizes: dict[str, int | None] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            sizes[name] = None
            try:
                status = os.stat(directory / name)
                if not stat.S_ISDIR(status.st_mode):
                    sizes[name] = status.st_size
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
    return sizes


def read_file(path: Path) -> bytes:
    """Return the content of a file."""
    with open(path, "rb") as file:
        return file.read()


def create_file(path: Path, content: bytes) -> None:
    """Create a file, and its directory, unless the file exists.

    Raises:
        FileExistsError: It exists; another process may have been faster.
    """
    os.makedirs(path.parent, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
    sync(path)
    with contextlib.suppress(
        PermissionError
    ):  # of a directory above, which was there before
        sync(*path.parents)


def save_files(directory: Path, contents: Mapping[str, Any]) -> dict[str, int]:
    """Save what `paddle.save` takes, by the names of files, in a directory; return the size of each file."""
    os.makedirs(directory, exist_ok=True)
    for name, content in contents.items():
        paddle.save(content, str(directory / name))
    sync(*(directory / name for name in contents), directory, directory.parent)
    return {name: os.stat(directory / name).st_size for name in contents}


def remove_directory(path: Path) -> None:
    """Delete a directory with its files."""
    shutil.rmtree(path)
    sync(path.parent)
