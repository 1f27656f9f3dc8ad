"""How do the ranks of one host get memory that all of them share?"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
from typing import Any

from paddle_shard.agree import Group, ProgressTable
from paddle_shard.agree.progress_table import PASSES

_TOKEN = 16


def join_table(group: Group) -> ProgressTable | None:
    """Return a progress table in memory that all ranks of a group have mapped; None if a rank cannot. Collective.

    The first rank makes a file without a name, and the others open it through /proc, so the file disappears when they
    end. A token proves that it is that file, and not a file of another host or container.
    """
    size = _TOKEN + 8 * PASSES * group.size
    memory, told = _made(size) if group.rank == 0 else (None, b"null")
    try:
        first = json.loads(group.gather(told)[0])
        if memory is None and first is not None:
            memory = _opened(size, **first)
        everybody = all(fine == b"+" for fine in group.gather(b"+" if memory is not None else b"-"))
        if memory is None or not everybody:
            return None
        words = memoryview(mmap.mmap(memory, size))[_TOKEN:].cast("q")
        return ProgressTable(words, group.rank, group.size)  # type: ignore[arg-type]
    finally:
        if memory is not None:
            os.close(memory)


def _made(size: int) -> tuple[int | None, bytes]:
    """Return a new file, and a JSON text with its path and token."""
    try:
        memory = os.memfd_create("paddle_shard")
    except (AttributeError, OSError):  # a C library from before 2018
        return None, b"null"
    token = secrets.token_bytes(_TOKEN)
    os.write(memory, token)
    os.truncate(memory, size)
    return memory, json.dumps({"path": f"/proc/{os.getpid()}/fd/{memory}", "token": token.hex()}).encode()


def _opened(size: int, path: str, token: str) -> int | None:
    """Return the file that another rank has made, or None if it cannot be opened."""
    try:
        memory = os.open(path, os.O_RDWR)
    except OSError as error:
        logging.getLogger(__name__).debug("no progress table: %s", error)
        return None
    found: Any = os.fstat(memory)
    if found.st_size == size and os.pread(memory, _TOKEN, 0).hex() == token:
        return memory
    os.close(memory)
    return None
