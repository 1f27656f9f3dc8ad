"""How is a local or remote file opened, and how does reading continue after a connection drops?"""

from __future__ import annotations

import bz2
import gzip
import http.client
import io
import lzma
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.names import is_remote, local_path
from paddle_shard.sources.remote import remote_file

RETRIES = 3
"""Retries in a row after which reading fails. A byte that arrives resets the count."""
BACKOFF = 0.5
"""Seconds before the first retry; the time doubles before each further retry."""
TIMEOUT = 60.0
"""Seconds without a byte after which an HTTP connection counts as dropped."""
BUFFER = 1 << 18

_AGAIN = (408, 429, 500, 502, 503, 504)
"""HTTP codes of failures that may pass."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class ChangedError(Exception):
    """A remote file has changed since its reading began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A remote file that is open at a given byte."""

    stream: Any
    """An object with `read1` or `read`, and with `close`."""
    size: int | None
    """Size of the whole file in bytes; None if the server does not say."""
    tag: str | None = None
    """A value that changes when the file changes: an ETag."""


def open_file(name: str, start: int = 0) -> tuple[BinaryIO, int | None]:
    """Open a local path or a URL at a byte; return the file and the size of the whole file in bytes, if known.

    If the connection to a remote file drops, reading continues at the same byte.
    """
    if name.startswith("pipe:"):
        raise ArgumentError(f"{name!r}: commands are not run. Give the URL itself: http, s3, gs, or what fsspec opens.")
    if not is_remote(name):
        path = local_path(name)
        file = open(path, "rb", buffering=BUFFER)  # noqa: SIM115
        if start:
            file.seek(start)
        return file, os.fstat(file.fileno()).st_size
    connect = _connect_http if name.startswith(("http://", "https://")) else _connect_fsspec
    remote = RemoteFile(name, connect, start)
    return io.BufferedReader(remote, BUFFER), remote.size


def decompressed(file: BinaryIO) -> BinaryIO:
    """Return the plain bytes of a file that may be compressed by gzip, bzip2 or xz, as its first bytes tell.

    Unlike `tarfile`'s own streams, these raise if the file ends too soon, and verify the checksums.
    """
    begin = cast(io.BufferedReader, file).peek(6)
    if begin.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, _Closing(gzip.GzipFile(fileobj=file), file))
    if begin.startswith(b"BZh"):
        return cast(BinaryIO, _Closing(bz2.BZ2File(file), file))
    if begin.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, _Closing(lzma.LZMAFile(file), file))
    return file


class _Closing(io.BufferedReader):
    """A decompressed file. Closing it also closes the compressed file."""

    def __init__(self, unpacked: Any, packed: BinaryIO) -> None:
        super().__init__(unpacked, BUFFER)
        self._packed = packed

    def close(self) -> None:
        super().close()
        self._packed.close()


class RemoteFile(io.RawIOBase):
    """A remote file that is read from a byte to its end, over as many connections as needed."""

    def __init__(self, name: str, connect: Callable[[str, int], Connection], start: int = 0) -> None:
        """Connect.

        Args:
            name: The URL.
            connect: Opens the URL at a byte.
            start: The first byte.
        """
        self._name, self._connect, self._position = name, connect, start
        self._connection: Connection | None = None
        self._failures = 0
        self.size: int | None = None
        self._tag: str | None = None
        while self._connection is None:
            try:
                self._open()
            except Exception as error:
                raise_if_a_handlers(error)
                self._pause_or_give_up(error)

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the byte that is read next."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; if a connection fails, connect again at the same byte.

        Raises:
            OSError: Reading failed too often in a row.
            ChangedError: The file has changed.
        """
        while self._position != self.size:
            try:
                if self._connection is None:
                    self._open()
                assert self._connection is not None
                stream = self._connection.stream
                # Read what has arrived instead of filling the buffer, so that a stall cannot lose it.
                content = getattr(stream, "read1", stream.read)(len(buffer))
                if not content and self.size is not None:
                    raise ConnectionError("the connection was closed")
            except Exception as error:
                raise_if_a_handlers(error)
                self._pause_or_give_up(error)
                continue
            buffer[: len(content)] = content
            self._position += len(content)
            self._failures = 0
            return len(content)
        return 0

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()
        super().close()

    def _open(self) -> None:
        connection = self._connect(self._name, self._position)
        size, tag = connection.size, connection.tag
        if _differ(self.size, size) or _differ(self._tag, tag):
            connection.stream.close()
            raise ChangedError(
                f"the file changed while it was read: it had {self.size} bytes (tag {self._tag}), now {size} ({tag})"
            )
        self._connection = connection
        self.size, self._tag = self.size if size is None else size, tag or self._tag

    def _disconnect(self) -> None:
        connection, self._connection = getattr(self, "_connection", None), None
        if connection is not None:
            connection.stream.close()

    def _pause_or_give_up(self, error: Exception) -> None:
        self._disconnect()
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            passing = error.code in _AGAIN
        else:
            passing = isinstance(error, OSError | http.client.HTTPException) and not isinstance(error, _FINAL)
        if not passing:
            raise error
        if self._failures == RETRIES:
            raise OSError(
                f"given up after {RETRIES} retries at byte {self._position} of {self.size or 'an unknown number'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        time.sleep(BACKOFF * 2**self._failures)
        self._failures += 1


def _differ(before: object, now: object) -> bool:
    return before is not None and now is not None and before != now


def _connect_http(name: str, start: int) -> Connection:
    request = urllib.request.Request(name, headers={"Range": f"bytes={start}-"} if start else {})
    stream = urllib.request.urlopen(request, timeout=TIMEOUT)
    try:
        tag, length = stream.headers.get("ETag"), stream.headers.get("Content-Length")
        if start == 0 or stream.status != 206:
            _discard(stream, start)  # a server that does not support ranges sends the whole file
            return Connection(stream=stream, size=None if length is None else int(length), tag=tag)
        span, _, size = stream.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if not span.startswith(f"{start}-"):
            raise ConnectionError(f"asked for bytes from {start}, the server sent {span or 'an unknown range'}")
        return Connection(stream=stream, size=int(size) if size.isdigit() else None, tag=tag)
    except BaseException:
        stream.close()
        raise


def _discard(stream: Any, size: int) -> None:
    while size:
        got = len(stream.read(min(size, BUFFER)))
        if not got:
            raise ConnectionError("the connection was closed")
        size -= got


def _connect_fsspec(name: str, start: int) -> Connection:
    system, path = remote_file(name, "webdataset")
    stream = system.open(path, "rb")
    if start:
        stream.seek(start)
    return Connection(stream=stream, size=getattr(stream, "size", None))
