"""What must be kept from going wrong around Paddle's worker processes?"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.io.dataloader import dataloader_iter as machinery

_PARENT_SECONDS = 1.0
"""How often a worker looks whether its parent is there."""


def end_with_the_parent() -> None:
    """End this worker when its parent has been killed.

    Paddle's own watchdog looks between two messages, and from a dead parent there comes none.
    """
    made_by = multiprocessing.parent_process()
    parent = made_by.pid if made_by is not None and multiprocessing.get_start_method() == "fork" else os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        try:
            machinery.core._cleanup_mmap_fds()  # the shared memory that nobody will take
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="paddle_shard: parent", daemon=True).start()


@contextmanager
def garbage_left_to_the_parent() -> Iterator[None]:
    """Keep forked children from collecting this process's garbage.

    Finalizers of readers that were abandoned here wait for threads that a child does not have, and never end.
    """
    if gc.get_freeze_count():  # the user's own: thawing it would undo it
        gc.collect()
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def deaths_unheard() -> Iterator[None]:
    """Hold back SIGCHLD, on which Paddle's handler would raise in the middle of what is done here."""
    if threading.current_thread() is not threading.main_thread():  # where no handler runs
        yield
        return
    machinery._set_SIGCHLD_handler()  # once a process; it would do so in between
    heard = False

    def note(*_: Any) -> None:
        nonlocal heard
        heard = True

    before = signal.signal(signal.SIGCHLD, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
        if heard:  # the user may have a handler, too
            signal.raise_signal(signal.SIGCHLD)


@contextmanager
def freed(iterator: Any) -> Iterator[None]:
    """Keep the machinery from waiting for ever for a worker that dies when it is to begin another epoch.

    Its own thread finds the dead within 5 s and ends; the wait goes on. Then the next batch raises.
    """
    if iterator is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            if not iterator._thread.is_alive():
                iterator._resume_worker_cnt = 0

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
