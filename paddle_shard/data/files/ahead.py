"""`FileAhead`: a remote file that a thread opens, and reads ahead of its reader."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from queue import Empty, Queue
from typing import Any

from paddle_shard.core import forks
from paddle_shard.data.files.files import BUFFER, FileAndSize

LIMIT = 32 << 20
"""Bytes of each of the next files that are read ahead, in all parts of a reader together."""
LEAST = 1 << 20
"""Bytes of a file below which nothing is read ahead: the files of so many parts wait for each other less."""

OpenFile = Callable[[], FileAndSize]
"""Opens a file at some byte."""


class FileAhead(io.RawIOBase):
    """A file that a thread opens at once, and reads until some bytes wait for their reader.

    Dropping or closing it ends the thread, after the read that it is in.
    """

    def __init__(self, open_file: OpenFile, limit: int) -> None:
        """Begin to open and to read.

        Args:
            open_file: Opens the file, and returns it with its size in bytes. A local file, such as a
                copy that it has downloaded, is not read by the thread.
            limit: Bytes that may wait.
        """
        self._results: Queue[Any] = Queue(max(1, limit // BUFFER))
        """(file or None, size), then blocks of bytes; an exception ends them."""
        self._is_closed = threading.Event()
        self._block = b""
        # The thread does not refer to this object, so that dropping it ends the thread.
        threading.Thread(
            target=_read_ahead,
            args=(open_file, self._results, self._is_closed),
            name="paddle_shard-file",
            daemon=True,
        ).start()

    def _next_result(self) -> Any:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def open(self) -> FileAndSize:
        """Wait until the file is open; return what reads it, and its size.

        Raises:
            Exception: Whatever opening has raised.
        """
        local, size = self._next_result()
        return local or io.BufferedReader(self, BUFFER), size

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes; 0 at the end."""
        if not self._block:
            self._block = self._next_result()
        size = min(len(buffer), len(self._block))
        buffer[:size] = self._block[:size]
        self._block = self._block[size:]
        if not size:
            self._results.put(b"")  # it is the end for the next call, too
        return size

    def close(self) -> None:
        """End the thread; safe to call again."""
        self._is_closed.set()
        try:
            while True:
                self._results.get_nowait()
        except Empty:
            super().close()


def _read_ahead(
    open_file: OpenFile,
    results: Queue[Any],
    is_closed: threading.Event,
) -> None:
    lock = forks.reader_lock()
    try:
        with lock:
            file, size = open_file()
        if isinstance(getattr(file, "raw", None), io.FileIO):
            results.put((file, size))
            return
        results.put((None, size))
        with file:
            block = b"-"
            while block and not is_closed.is_set():
                with lock:
                    block = file.read(BUFFER)
                results.put(block)
    except BaseException as error:
        results.put(error)
