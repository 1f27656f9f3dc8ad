"""Where do checkpoints lie: what is asked of a local or shared folder, and of a URL that fsspec opens?

Both have the same methods. Names are relative to the folder, with `/` between their parts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.sources.files import is_remote, local_path, remote_file, shown


def folder_of(where: str) -> LocalFolder | RemoteFolder:
    """Return the folder of a path or URL; nothing is made or asked yet."""
    return RemoteFolder(where.rstrip("/")) if is_remote(where) else LocalFolder(os.path.abspath(local_path(where)))


class LocalFolder:
    """A folder that all ranks see: of this host, or of a file system that the hosts share."""

    shared = True
    """True if what one rank has opened is what all ranks have opened."""

    def __init__(self, path: str) -> None:
        """Set the path."""
        self.name, self._path = path, Path(path)

    def sizes(self, name: str = "") -> dict[str, int | None]:
        """Return what is in the folder, or in a directory of it: name -> bytes; None for a directory."""
        found: dict[str, int | None] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path / name) as entries:
            for one in entries:
                with contextlib.suppress(OSError):  # deleted in between, or a link to nowhere: as if it was not there
                    found[one.name] = None if one.is_dir() else one.stat().st_size
        return found

    def read(self, name: str) -> bytes:
        """Return what a file holds."""
        return (self._path / name).read_bytes()

    def create(self, name: str, content: bytes) -> None:
        """Make a file, unless it exists.

        Raises:
            FileExistsError: It exists; another process may have been faster.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        self._write(self._path / name, content, "xb")
        _sync(self._path)

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears whole, or not at all."""
        path = self._path / name
        aside = path.with_name(f"{path.name}.new")
        self._write(aside, content, "wb")
        os.replace(aside, path)
        _sync(path.parent)

    def _write(self, path: Path, content: bytes, mode: str) -> None:
        with open(path, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, name: str) -> None:
        """Delete a directory, or a file."""
        path = self._path / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
        _sync(self._path)

    @contextmanager
    def filled(self, name: str) -> Iterator[Path]:
        """Make a directory in which all ranks write; what is given to `keep` stays."""
        path = self._path / name
        path.mkdir(parents=True, exist_ok=True)
        yield path

    def keep(self, name: str, file: Path) -> None:
        """Have a file of that directory on the disk, with its name."""
        for path in (file, self._path / name, self._path):
            _sync(path)

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """Give a directory's files to be read."""
        yield self._path / name


class RemoteFolder:
    """A URL that fsspec opens. Files are written to a temporary directory first, and read from another."""

    shared = False

    def __init__(self, url: str) -> None:
        """Set the URL."""
        self.name, self._url = shown(url), url

    @property
    def _system(self) -> Any:
        return remote_file(self._url, "webdataset")[0]

    def _at(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def sizes(self, name: str = "") -> dict[str, int | None]:
        """See `LocalFolder.sizes`."""
        self._system.invalidate_cache()  # other processes write here, too
        try:
            found = self._system.ls(self._at(name), detail=True)
        except FileNotFoundError:
            return {}
        entries = ((one["name"].rstrip("/").rpartition("/")[2], one) for one in found)
        return {entry: None if one["type"] == "directory" else one["size"] for entry, one in entries if entry}

    def read(self, name: str) -> bytes:
        """See `LocalFolder.read`."""
        content: bytes = self._system.cat_file(self._at(name))
        return content

    def create(self, name: str, content: bytes) -> None:
        """See `LocalFolder.create`. It is tried twice, since some servers ignore that a file must not exist.

        Raises:
            ArgumentError: The file system cannot make a file only if it does not exist.
        """
        system, url = self._system, self._at(name)
        pipe = getattr(type(system), "_pipe_file", None) or type(system).pipe_file
        try:
            # What fsspec does for file systems that have no such call is to look first, which is not exclusive.
            if pipe.__module__ in ("fsspec.spec", "fsspec.asyn"):
                raise NotImplementedError
            system.makedirs(self._url, exist_ok=True)
            system.pipe_file(url, content, mode="create")
            with contextlib.suppress(FileExistsError):
                system.pipe_file(url, content, mode="create")
                raise NotImplementedError
        except NotImplementedError:
            raise ArgumentError(
                f"folder={self.name!r}: {type(system).__name__} cannot make a file only if it does not exist, so two "
                "runs would not notice each other. Save to a shared folder, or to a server that can (S3, GCS, Azure)."
            ) from None

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


def written_by(directory: Path, rank: int) -> list[Path]:
    """Return the files of a rank, as `dist.save_state_dict` names them: with its number first; others are rank 0's."""
    named = {path: path.name.partition("_")[0] for path in directory.iterdir()}
    return sorted(path for path, number in named.items() if (int(number) if number.isdigit() else 0) == rank)


def _sync(path: Path) -> None:
    """Have a file, or the names in a directory, written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
