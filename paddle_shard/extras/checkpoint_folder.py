"""The folder of checkpoints: a directory that all ranks see, of this host or of a file system that hosts share."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def sizes_in(directory: Path) -> dict[str, int | None]:
    """Return the entries of a directory: name -> bytes; None for a directory. There are none if it does not exist."""
    sizes: dict[str, int | None] = {}
    for path in directory.glob("*"):
        with contextlib.suppress(OSError):  # deleted in between, or a link to nowhere
            sizes[path.name] = None if path.is_dir() else path.stat().st_size
    return sizes


def create_file(path: Path, content: bytes) -> None:
    """Create a file, and its directory, unless the file exists.

    Raises:
        FileExistsError: It exists; another process may have been faster.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
    sync(path, path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a file that appears whole, or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def remove_directory(path: Path) -> None:
    """Delete a directory with its files."""
    shutil.rmtree(path)
    sync(path.parent)


def sync(*paths: Path) -> None:
    """Write files, or the names in directories, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
