"""What can go wrong around worker processes, and how is it prevented?"""

from __future__ import annotations

import contextlib
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

_PARENT_SECONDS = 1.0
"""Seconds between two checks of a worker whether its parent is alive."""


_STACKS = "paddle_shard: stacks"
_STACK_SECONDS = 4.0
"""Seconds that a worker has to write where it is."""


def answer_to_the_parent() -> None:
    """End this worker when its parent has been killed, and write where its threads are when the parent asks.

    Its channel tells it that only after it has read what was requested, and reading may take long. Asked by a signal,
    a worker that is only slow would be disturbed: what waits in C may take it for the end of its wait.
    """
    made_by = multiprocessing.parent_process()
    parent = made_by.pid if made_by is not None and multiprocessing.get_start_method() == "fork" else os.getppid()
    stacks = os.memfd_create(_STACKS) if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)

    def watch() -> None:
        written = 0
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
            if os.fstat(stacks).st_size > written:  # the parent has asked
                os.lseek(stacks, 0, os.SEEK_END)
                faulthandler.dump_traceback(stacks)
                written = os.fstat(stacks).st_size
        os._exit(1)

    threading.Thread(target=watch, name="paddle_shard: parent", daemon=True).start()


def stacks_of(worker: int) -> str:
    """Return where the threads of a worker are, given its process id; empty if it does not say so."""
    with contextlib.suppress(OSError):  # it has ended, or has not begun
        folder = f"/proc/{worker}/fd"
        found = [f"{folder}/{name}" for name in os.listdir(folder) if _STACKS in os.readlink(f"{folder}/{name}")]
        if found:
            with open(found[0], "r+b", buffering=0) as stacks:
                start = stacks.seek(0, os.SEEK_END) + stacks.write(b"?")
                deadline, size = time.monotonic() + _STACK_SECONDS, 0
                while time.monotonic() < deadline and (size <= start or size < os.fstat(stacks.fileno()).st_size):
                    size = os.fstat(stacks.fileno()).st_size
                    time.sleep(_STACK_SECONDS / 40)
                stacks.seek(start)
                threads = stacks.read().decode(errors="replace").split("\n\n")
                text = "\n\n".join(one for one in threads if " in watch\n" not in one)
                # What called `work` has happened in the parent.
                return re.sub(r"(/worker\.py\", line \d+ in work\n)(  File .*\n)*", r"\1", text).rstrip()
    return ""


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
