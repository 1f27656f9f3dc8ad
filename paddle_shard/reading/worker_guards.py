"""Guards around worker processes: the end of the parent, and signals during a fork."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
    # The parent may have died already.
    parent_process = multiprocessing.parent_process()
    parent: int | None = os.getppid()
    if parent_process and multiprocessing.get_start_method() == "fork":
        parent = parent_process.pid

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="paddle_shard-parent", daemon=True).start()


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals that Python code handles.

    What a handler raises during a fork is lost, and a child would run the user's handlers. If a handler raises while a
    thread is being started, nobody would end that thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no handler runs in this thread
        return
    handlers: dict[int, Any] = {}
    for signal_number in signal.valid_signals():
        handler = signal.getsignal(signal_number)
        if callable(handler):
            handlers[signal_number] = handler
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
