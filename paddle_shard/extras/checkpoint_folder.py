"""Folders of checkpoints: a local or shared folder, and a URL that fsspec opens.

Both have the same methods. Names are relative to the folder, with `/` between their parts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.sources.files import is_remote, local_path, remote_file, shown


def folder_of(where: str) -> LocalFolder | RemoteFolder:
    """Return the folder of a path or URL; nothing is created yet."""
    return RemoteFolder(where.rstrip("/")) if is_remote(where) else LocalFolder(os.path.abspath(local_path(where)))


class LocalFolder:
    """A folder that all ranks see: of this host, or of a file system that the hosts share."""

    is_shared = True
    """Whether all ranks open the same files, rather than copies."""

    def __init__(self, path: str) -> None:
        """Set the path."""
        self.name = path
        self._path = Path(path)

    def sizes(self, name: str = "") -> dict[str, int | None]:
        """Return the entries of the folder, or of a directory of it: name -> bytes; None for a directory."""
        sizes: dict[str, int | None] = {}
        for path in (self._path / name).glob("*"):
            with contextlib.suppress(OSError):  # deleted in between, or a link to nowhere
                sizes[path.name] = None if path.is_dir() else path.stat().st_size
        return sizes

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return (self._path / name).read_bytes()

    def create(self, name: str, content: bytes) -> None:
        """Create a file, unless it exists.

        Raises:
            FileExistsError: It exists; another process may have been faster.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        _write_synced(self._path / name, content, "xb")
        _sync(self._path)

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears whole, or not at all."""
        path = self._path / name
        new = path.with_name(f"{path.name}.new")
        _write_synced(new, content, "wb")
        os.replace(new, path)
        _sync(path.parent)

    def remove(self, name: str) -> None:
        """Delete a directory."""
        shutil.rmtree(self._path / name)
        _sync(self._path)

    @contextmanager
    def filled(self, name: str) -> Iterator[Path]:
        """Create a directory in which all ranks write; files given to `keep` stay."""
        path = self._path / name
        path.mkdir(parents=True, exist_ok=True)
        yield path

    def keep(self, name: str, file: Path) -> None:
        """Sync a file of that directory, and its name, to the disk."""
        for path in (file, self._path / name, self._path):
            _sync(path)

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """Open a directory for reading."""
        yield self._path / name


class RemoteFolder:
    """A URL that fsspec opens. Files are written to a temporary directory first, and read from another."""

    is_shared = False

    def __init__(self, url: str) -> None:
        """Set the URL."""
        self.name = shown(url)
        self._url = url

    @property
    def _system(self) -> Any:
        return remote_file(self._url, "webdataset")[0]

    def _at(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def sizes(self, name: str = "") -> dict[str, int | None]:
        """See `LocalFolder.sizes`."""
        self._system.invalidate_cache()  # other processes write here, too
        try:
            entries = self._system.ls(self._at(name), detail=True)
        except FileNotFoundError:
            return {}
        sizes = {PurePosixPath(entry["name"]).name: entry for entry in entries}
        return {name: None if entry["type"] == "directory" else entry["size"] for name, entry in sizes.items()}

    def read(self, name: str) -> bytes:
        """See `LocalFolder.read`."""
        content: bytes = self._system.cat_file(self._at(name))
        return content

    def create(self, name: str, content: bytes) -> None:
        """See `LocalFolder.create`.

        Raises:
            ArgumentError: The server ignores that the file must not exist.
        """
        self._system.makedirs(self._url, exist_ok=True)
        self._system.pipe_file(self._at(name), content, mode="create")
        with contextlib.suppress(FileExistsError):
            self._system.pipe_file(self._at(name), content, mode="create")
            raise ArgumentError(
                f"folder={self.name!r}: its server cannot create a file only if it does not exist, so two runs would "
                "not notice each other. Save to a shared folder, or to a server that can (S3, GCS, Azure)."
            )

    def write(self, name: str, content: bytes) -> None:
        """See `LocalFolder.write`. Servers of objects show a whole object or none."""
        self._system.pipe_file(self._at(name), content)

    def remove(self, name: str) -> None:
        """See `LocalFolder.remove`."""
        self._system.rm(self._at(name), recursive=True)

    @contextmanager
    def filled(self, name: str) -> Iterator[Path]:
        """See `LocalFolder.filled`. Each rank writes in a directory of its own."""
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)

    def keep(self, name: str, file: Path) -> None:
        """See `LocalFolder.keep`."""
        self._system.makedirs(self._at(name), exist_ok=True)
        self._system.put_file(str(file), self._at(f"{name}/{file.name}"))

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """See `LocalFolder.opened`."""
        with tempfile.TemporaryDirectory() as directory:
            for file in self.sizes(name):
                self._system.get_file(self._at(f"{name}/{file}"), os.path.join(directory, file))
            yield Path(directory)


def _write_synced(path: Path, content: bytes, mode: str) -> None:
    with open(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Write a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
