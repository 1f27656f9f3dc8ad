"""Lines of a record: append one, and read all with what was changed or taken out.

A record is a file of JSON lines. Each line begins with the digest of the one before it, and ends with that of its own
text. A line is written in one call and synced to the disk, so that a crash leaves half a line at most, and the next
one that is appended takes its place.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, BinaryIO

from paddle_shard.errors import ArgumentError

FORMAT = 1
"""Version of the lines; no other is read."""
_LOCK_SECONDS = 1.0
_BLOCK = 1 << 16
_OWN = b', "own": '


def digest_of(line: bytes) -> str:
    """Return the digest of a line without its end."""
    return blake2b(line, digest_size=8).hexdigest()


def append(path: str, line: Mapping[str, Any]) -> tuple[str, int]:
    """Append a line, behind the last whole line of the file; loaders may append to one file at the same time.

    Args:
        path: The file; a line that begins a job makes it if there is none.
        line: JSON-able. What is not is written as its `repr`.

    Returns:
        The digest of the line, and the number of bytes of a half line that was there and is gone.

    Raises:
        OSError: It cannot be written, or another process holds the file.
    """
    # Opened each time: a process that forks meanwhile, and a file system that was away, do no harm.
    # Only a first line creates the file: one that was removed meanwhile would lack its beginning.
    create = os.O_CREAT if line["line"] == "begin" else 0
    with open(
        os.open(path, os.O_RDWR | create, 0o644), "r+b", buffering=0
    ) as file:
        _lock(file)
        last, half = _last_line(file)
        linked: dict[str, Any] = {
            "after": digest_of(last) if last else "",
            **line,
        }
        if half:
            file.truncate(file.seek(0, os.SEEK_END) - half)
            linked["mended"] = half
        text = json.dumps(linked, default=repr).encode()[:-1]
        written = text + _OWN + b'"%s"}' % digest_of(text).encode()
        size = file.seek(0, os.SEEK_END)
        if file.write(written + b"\n") <= len(written):
            # The next append removes what is there of it.
            raise OSError("no space is left for the whole line")
        try:
            sync(path)
        except OSError:
            # The disk may never get it, and a line behind it would be lost as well.
            file.truncate(size)
            raise
        if create:
            sync(os.path.dirname(path))
        return digest_of(written), half


def sync(*paths: str | os.PathLike[str]) -> None:
    """Write files, or the names in directories, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # EINVAL: this file system writes names, or devices, by itself.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed, if its file system has locks.

    Raises:
        OSError: Another process holds it for longer than it takes to append a line.
    """
    import fcntl

    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        except OSError:
            return None  # this file system has no locks


def _last_line(file: BinaryIO) -> tuple[bytes, int]:
    """Return the last whole line of a file, and the number of bytes behind it."""
    size = file.seek(0, os.SEEK_END)
    tail = b""
    while len(tail) < size and tail.count(b"\n") < 2:
        begin = max(0, size - len(tail) - _BLOCK)
        file.seek(begin)
        tail = file.read(size - len(tail) - begin) + tail
    whole, _, half = tail.rpartition(b"\n")
    return whole.rpartition(b"\n")[2], len(half)


def read_record(path: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines of a record, each with its `number` from 1 and its `digest`, and what is wrong with the file.

    Lines at the end that were taken off as a whole leave no trace.

    Raises:
        ArgumentError: It cannot be read, or is no record of this version.
    """
    try:
        with open(path, "rb") as file:
            *whole, half = file.read().split(b"\n")
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be read ({error}). Give the file of shard_dataloader(record=)."
        ) from error
    lines = []
    problems = []
    digest_before = ""
    for number, text in enumerate(whole, 1):
        after = digest_before
        digest = digest_of(text)
        try:
            line = json.loads(text)
            after = line["after"]
            content, _, own_digest = text.rpartition(_OWN)
            if own_digest != b'"%s"}' % digest_of(content).encode():
                problems.append(f"line {number} was changed")
            lines.append({**line, "number": number, "digest": digest})
        except (ValueError, TypeError, KeyError, RecursionError):
            problems.append(
                f"line {number} is not a line of a record: it was changed"
            )
        if after != digest_before:
            what = f"line {number - 1} was changed or taken out"
            if number == 1:
                what = "lines before it were taken out"
            problems.append(
                f"line {number} does not follow on the one before it: {what}"
            )
        digest_before = digest
    if half:
        problems.append(
            f"line {len(whole) + 1} is cut after {len(half)} bytes, as by a crash while it was written"
        )
    if not any(line.get("line") == "begin" for line in lines):
        raise ArgumentError(
            f"{path} is no record of a run. Give the file of shard_dataloader(record=)."
        )
    if any(line.get("format", FORMAT) != FORMAT for line in lines):
        raise ArgumentError(
            f"{path} has lines of another format than {FORMAT}, which this paddle_shard reads."
        )
    return lines, problems
