"""What must be kept from going wrong around Paddle's worker processes?"""

from __future__ import annotations

import contextlib
import gc
import glob
import multiprocessing
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from paddle.io.dataloader import dataloader_iter as machinery

_PARENT_SECONDS = 1.0
"""How often a worker looks whether its parent is there."""
_LOOK_SECONDS = 1.0
"""How often it is looked whether workers are alive."""


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


in_use = threading.RLock()
"""Held where another thread than the main one works with Paddle, whose locks a forked child would never see let go."""

os.register_at_fork(before=in_use.acquire, after_in_parent=in_use.release, after_in_child=in_use.release)


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
def signals_held() -> Iterator[None]:
    """Hold back signals that Python code handles.

    On SIGCHLD Paddle's handler would raise in the middle of what is done here; what another raises while this process
    is forked is lost; and a child would run the user's handlers until Paddle has set its own.
    """
    if threading.current_thread() is not threading.main_thread():  # where no handler runs
        yield
        return
    machinery._set_SIGCHLD_handler()  # once a process; it would do so in between
    heard: list[int] = []
    held = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in held}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for caught in dict.fromkeys(heard):
            signal.raise_signal(caught)


def remove_shared_memory(workers: Iterable[int | None]) -> None:
    """Remove the names of shared memory that ended workers have left.

    A batch that was on its way when the queue was closed, or when its worker was killed, is nobody's. What is mapped
    stays until it is let go.
    """
    for worker in workers:
        for name in glob.glob(f"/dev/shm/paddle_{worker}_*"):
            with contextlib.suppress(OSError):
                os.unlink(name)


def forget_shared_memory() -> None:
    """Let Paddle forget the names of tensors that have come through shared memory, all of which are mapped or gone.

    It keeps each for ever, some 125 bytes (3.3.1). Not where this process shares tensors of its own, which others may
    still have to open.
    """
    if not glob.glob(f"/dev/shm/paddle_{os.getpid()}_*"):
        machinery.core._cleanup_mmap_fds()


class WatchedQueue:
    """The queue on which Paddle's machinery waits for its workers, which it would do for ever for one that hangs.

    It also looks more often for workers that have died.
    """

    def __init__(self, iterator: Any, patience: float) -> None:
        """Stand in for the queue of Paddle's iterator.

        Args:
            iterator: Of Paddle's machinery.
            patience: Seconds to wait for a worker that was asked for something.
        """
        self._iterator, self._queue, self._patience = weakref.ref(iterator), iterator._data_queue, patience
        self._waited = 0.0
        self.hung: int | None = None
        """The worker that has said nothing for so long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, timeout: float) -> Any:
        """Return what a worker has sent; the machinery looks for the dead when this raises `queue.Empty`."""
        try:
            found = self._queue.get(timeout=min(timeout, _LOOK_SECONDS, self._patience))
        except queue.Empty:
            self._note_silence(min(timeout, _LOOK_SECONDS, self._patience))
            raise
        self._waited = 0.0
        return found

    def _note_silence(self, seconds: float) -> None:
        iterator = self._iterator()
        if iterator is None:
            return
        asked = iterator._task_infos.get(iterator._rcvd_idx)
        if asked is None or not all(worker.is_alive() for worker in iterator._workers):
            self._waited = 0.0  # nothing is asked for, or the machinery is about to find out by itself
            return
        self._waited += seconds
        if self._waited >= self._patience:
            self.hung = asked[0]
            iterator._exit_thread_unexpectedly()


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
