"""`FileAhead`: a remote file that a thread opens, and reads ahead of its reader."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, Queue
from typing import Any, BinaryIO

from paddle_shard.core import forks
from paddle_shard.data.files.files import BUFFER, FileAndSize

LIMIT = 32 << 20
"""Bytes of each of the next files that are read ahead, in all parts of a reader together."""
LEAST = 1 << 20
"""Bytes of a file below which nothing is read ahead: the files of so many parts wait for each other less."""

_Block = bytes | Exception


class FileAhead(io.RawIOBase):
    """A file that a thread opens at once, and reads until some bytes wait for their reader.

    Dropping or closing it ends the thread, after the read that it is in.
    """

    def __init__(
        self, open_file: Callable[[], FileAndSize], limit: int
    ) -> None:
        """Begin to open and to read.

        Args:
            open_file: Opens the file, and returns it with its size in bytes if that is known. A local file, such as a
                copy that it has downloaded, is not read by the thread.
            limit: Bytes that may wait.
        """
        self._opened: Future[tuple[BinaryIO | None, int | None]] = Future()
        self._blocks: Queue[_Block] = Queue(max(1, limit // BUFFER))
        self._is_closed = threading.Event()
        self._block = b""
        # The thread does not refer to this object, so that dropping it ends the thread.
        threading.Thread(
            target=_read_ahead,
            args=(open_file, self._opened, self._blocks, self._is_closed),
            name="paddle_shard-file",
            daemon=True,
        ).start()

    def open(self) -> FileAndSize:
        """Wait until the file is open; return what reads it, and its size.

        Raises:
            Exception: Whatever opening has raised.
        """
        local, size = self._opened.result()
        return local or io.BufferedReader(self, BUFFER), size

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes; 0 at the end."""
        if not self._block:
            block = self._blocks.get()
            if isinstance(block, Exception):
                raise block
            self._block = block
        size = min(len(buffer), len(self._block))
        buffer[:size] = self._block[:size]
        self._block = self._block[size:]
        if not size:
            self._blocks.put(b"")  # it is the end for the next call, too
        return size

    def close(self) -> None:
        """End the thread; safe to call again."""
        self._is_closed.set()
        try:
            while True:
                self._blocks.get_nowait()
        except Empty:
            super().close()


def _read_ahead(
    open_file: Callable[[], FileAndSize],
    opened: Future[tuple[BinaryIO | None, int | None]],
    blocks: Queue[_Block],
    is_closed: threading.Event,
) -> None:
    lock = forks.reader_lock()
    try:
        with lock:
            file, size = open_file()
    except BaseException as error:
        opened.set_exception(error)
        return
    if isinstance(getattr(file, "raw", None), io.FileIO):
        opened.set_result((file, size))
        return
    opened.set_result((None, size))
    with file:
        block: _Block = b"-"
        while block and not is_closed.is_set():
            try:
                with lock:
                    block = file.read(BUFFER)
            except Exception as error:
                block = error
            blocks.put(block)
            if isinstance(block, Exception):
                return
