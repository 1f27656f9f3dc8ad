"""What can go wrong around worker processes, and how is it prevented?"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paddle_shard.handlers import ignoring

_PARENT_SECONDS = 1.0
"""Seconds between two checks of a worker whether its parent is alive."""


def end_with_the_parent() -> None:
    """End this worker when its parent has been killed.

    Its channel tells it that only after it has read what was requested, and reading may take long.
    """
    made_by = multiprocessing.parent_process()
    parent = made_by.pid if made_by is not None and multiprocessing.get_start_method() == "fork" else os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="paddle_shard: parent", daemon=True).start()


_STACKS = "paddle_shard: stacks"
_STACK_SECONDS = 1.0
"""Seconds that a worker has to write where it is."""


def write_stacks_when_asked() -> None:
    """Let this worker write where its threads are when it gets a signal, also if it hangs outside of Python."""
    if hasattr(os, "memfd_create"):  # see `Slots`
        faulthandler.register(signal.SIGRTMAX, os.memfd_create(_STACKS))


def stacks_of(worker: int) -> str:
    """Return where the threads of a worker are, given its process id; empty if it cannot say so."""
    written = 0
    with ignoring(OSError):  # it has ended, or has not begun
        folder = f"/proc/{worker}/fd"
        files = [f"{folder}/{name}" for name in os.listdir(folder)]
        file = next((file for file in files if _STACKS in os.readlink(file)), None)
        if file is None:
            return ""
        before = os.stat(file).st_size
        os.kill(worker, signal.SIGRTMAX)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and (written == 0 or written < os.stat(file).st_size - before):
            written = os.stat(file).st_size - before
            time.sleep(_STACK_SECONDS / 20)
        with open(file, "rb") as opened:
            opened.seek(before)
            text = opened.read().decode(errors="replace")
            # What called `work` has happened in the parent.
            return re.sub(r"(/worker\.py\", line \d+ in work\n)(  File .*\n)*", r"\1", text).rstrip()
    return ""


in_use = threading.RLock()
"""Held while a thread works with Paddle, so that no fork happens then: a child would never see Paddle's locks freed."""

os.register_at_fork(before=in_use.acquire, after_in_parent=in_use.release, after_in_child=in_use.release)


@contextmanager
def garbage_left_to_the_parent() -> Iterator[None]:
    """Keep forked children from collecting this process's garbage.

    The finalizers of readers that were dropped here wait for threads that a child does not have, so they never end.
    """
    if gc.get_freeze_count():  # the user has frozen objects, and unfreezing would undo that
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
    """Delay signals that Python code handles.

    What a handler raises during a fork is lost, and a child would run the user's handlers. If a handler raises while a
    thread is being started, nobody would end that thread.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs in this thread
        yield
        return
    heard: list[int] = []
    before = {int(at): handler for at in signal.valid_signals() if callable(handler := signal.getsignal(at))}
    try:
        for number in before:  # the handler of a signal that is not delayed yet may raise
            signal.signal(number, lambda number, _: heard.append(number))
        yield
    finally:
        _let_go(before, heard)


def _let_go(before: dict[int, Callable[..., Any]], heard: list[int]) -> None:
    """Restore the handlers and raise all delayed signals again, even if a handler raises."""
    try:
        while before:
            number = next(iter(before))
            signal.signal(number, before[number])
            before.pop(number, None)
        while heard:
            number = heard[0]
            heard[:] = [other for other in heard if other != number]
            signal.raise_signal(number)
    except BaseException:
        _let_go(before, heard)
        raise
