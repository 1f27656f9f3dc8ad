"""Guards around worker processes: the end of the parent, files that it has open, and signals during a fork."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PARENT_SECONDS = 1.0
"""Seconds between two checks of a worker whether its parent is alive."""


def end_with_the_parent() -> None:
    """End this worker when its parent has been killed.

    The end of its channel shows that only after the worker has read what was requested, and reading may take long.
    """
    # If it has died already, this worker has few requests to answer.
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        os._exit(1)

    threading.Thread(
        target=watch, name="paddle_shard-parent", daemon=True
    ).start()


def own_file_positions() -> None:
    """Open again, at the same position, each file that the parent has open for reading.

    A forked child shares the positions: workers that seek and read, as in a zip that a data set holds open, would move
    each other's and read at the wrong place.
    """
    for name in os.listdir("/proc/self/fd"):
        # closed meanwhile, or may not be opened
        with contextlib.suppress(OSError):
            shared = int(name)
            is_file = stat.S_ISREG(os.fstat(shared).st_mode)
            flags = fcntl.fcntl(shared, fcntl.F_GETFL)
            if not is_file or flags & (os.O_WRONLY | os.O_RDWR):
                continue
            own = os.open(f"/proc/self/fd/{name}", flags)
            os.lseek(own, os.lseek(shared, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, shared, os.get_inheritable(shared))
            os.close(own)


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals that Python code handles.

    What a handler raises during a fork is lost, and a child would run the user's handlers. If a handler raises while a
    thread is being started, that thread would never end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no handler runs in this thread
        return
    handlers: dict[int, Any] = {
        number: signal.getsignal(number)
        for number in signal.valid_signals()
        if callable(signal.getsignal(number))
    }
    received: set[int] = set()
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: received.add(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in sorted(received):
            signal.raise_signal(number)
