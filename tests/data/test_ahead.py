"""Streams of remote files: the next file is opened, and read ahead, while one is read."""

import io
import threading
import time

import pytest

from paddle_shard.data.files.ahead import FileAhead
from paddle_shard.data.files.files import BUFFER


class Slow(io.RawIOBase):
    """A remote file of some bytes; it counts what was read of it, and may fail."""

    def __init__(self, size, fails_at=None):
        self.size, self.fails_at, self.position = size, fails_at, 0

    def readable(self):
        return True

    def read(self, size=-1):
        if self.fails_at is not None and self.position >= self.fails_at:
            raise OSError(f"lost at {self.position}")
        size = min(size, self.size - self.position)
        self.position += size
        return bytes([self.position % 251]) * size


def file_threads():
    return [t for t in threading.enumerate() if t.name == "paddle_shard-file"]


def wait_until(is_true):
    deadline = time.monotonic() + 10
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_true()


@pytest.mark.parametrize("size", [0, 1, BUFFER, 3 * BUFFER + 7])
def test_file_ahead_reads_all_bytes(size):
    source, alone = Slow(size), Slow(size)
    expected = b"".join(iter(lambda: alone.read(BUFFER), b""))
    file, told = FileAhead(lambda: (source, size), 2 * BUFFER).open()
    with file:
        assert told == size
        assert file.read() == expected
        assert file.read() == b""
    wait_until(lambda: not file_threads())


def test_file_ahead_reads_no_more_than_its_limit():
    source = Slow(100 * BUFFER)
    file = FileAhead(lambda: (source, None), 4 * BUFFER)
    wait_until(lambda: source.position == 4 * BUFFER)
    time.sleep(0.05)
    assert source.position == 4 * BUFFER
    del file
    wait_until(lambda: not file_threads())
    assert source.position < 8 * BUFFER


def test_file_ahead_raises_where_it_failed():
    def lost():
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        FileAhead(lost, BUFFER).open()
    source = Slow(9 * BUFFER, fails_at=2 * BUFFER)
    file, _ = FileAhead(lambda: (source, None), 4 * BUFFER).open()
    assert len(file.read(2 * BUFFER)) == 2 * BUFFER
    with pytest.raises(OSError, match="lost at"):
        file.read(1)
    file.close()
    wait_until(lambda: not file_threads())


def test_file_ahead_hands_over_a_local_copy(tmp_path):
    (tmp_path / "copy").write_bytes(b"data")
    copy = (tmp_path / "copy").open("rb")
    file, size = FileAhead(lambda: (copy, 4), BUFFER).open()
    with file:
        assert (file.read(), size) == (b"data", 4)
        assert file.seekable()
    wait_until(lambda: not file_threads())
