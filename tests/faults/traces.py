"""What has a fault left behind in this process?"""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

from paddle_shard.errors import PaddleShardError
from tests.deadlines import HANG
from tests.descriptors import open_files

KEPT = re.compile(r"^paddle_shard-(agree|reception)")
"""Threads that live as long as the process."""
NOTHING = "nothing came"


def kill(pid):
    """Kill a worker."""
    os.kill(pid, signal.SIGKILL)


def children(pid="self"):
    """The processes that a process has started and that have not been waited for."""
    found = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                found |= {
                    int(child)
                    for child in (task / "children").read_text().split()
                }
    return found


def alive(pid):
    """Whether a process runs, or one of its threads; one that has ended and was not waited for does not."""
    try:
        ended = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            == "Z"
        )
        return not ended or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def gone(pids, seconds=HANG):
    """The processes that still run when the time is over."""
    return waited_for(lambda: {pid for pid in pids if alive(pid)}, seconds)


def waited_for(find, seconds):
    """What is found, as soon as it is nothing, or when the time is over."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def in_a_fork(work, seconds=HANG):
    """What a forked child returns, or the exception that it raises; it and its children are killed in the end."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def go():
        os.setsid()
        try:
            found = work()
        except BaseException as error:
            found = (
                error
                if isinstance(error, PaddleShardError)
                else f"{type(error).__name__}: {error}"
            )
        writer.send(found)

    child = context.Process(target=go)
    child.start()
    try:
        found = reader.recv() if reader.poll(seconds) else NOTHING
        if found is not NOTHING:
            child.join(seconds)
            assert child.exitcode == 0, (
                f"exit code {child.exitcode}; None: it does not end"
            )
        return found
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        child.close()
        reader.close()
        writer.close()


def shared_memory():
    """How many pieces of memory that is shared with workers this process has."""
    with open("/proc/self/maps") as maps:
        return sum("/memfd:paddle_shard" in line for line in maps)


def descriptors():
    """How many sockets, pipes and other things are open."""
    return Counter(one.kind for one in open_files())


class Traces:
    """What is there before a test."""

    def __init__(self):
        self._children, self._threads = children(), set(threading.enumerate())
        self._open, self._memory = descriptors(), shared_memory()

    def left(self, seconds=HANG):
        """What is there now and was not before, when it has had time to go."""
        if not self._left():
            return {}
        gc.collect()
        return waited_for(self._left, seconds)

    def _left(self):
        opened, threads = (
            descriptors(),
            set(threading.enumerate()) - self._threads,
        )
        more = {
            kind: opened[kind] - self._open[kind] for kind in ("socket", "pipe")
        }
        found = {
            "processes": children() - self._children,
            "threads": {
                thread for thread in threads if not KEPT.search(thread.name)
            },
            "shared memory": max(0, shared_memory() - self._memory),
            "open": {
                kind: number for kind, number in more.items() if number > 0
            },
        }
        return {what: left for what, left in found.items() if left}
