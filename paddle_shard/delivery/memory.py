"""Whose is the memory of this host, and how much is left?

What is measured is what Linux tells of processes (`/proc/<pid>/smaps_rollup`) and of the limit of a container (cgroups,
both versions). A page that two processes share, such as a batch on its way or what a fork has not written to, counts as
shared and not as anyone's own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 5.0
"""Seconds from one look to the next."""
UNTOLD = OSError, LookupError, ValueError
"""What `memory` raises where a kernel does not tell all of it."""
_SHORT = 0.05
"""Share of the host's memory below which what is left is short."""


class Memory(NamedTuple):
    """Memory of this host, in bytes."""

    own: int
    """Of this rank's process alone."""
    workers: tuple[int, ...]
    """Of each of its child processes alone, the largest first."""
    shared: int
    """That this rank's process shares with others: batches on their way, and what its forked workers have only read."""
    left: int
    """That is left on this host, or to this container."""
    whole: int
    """That there is."""

    def __str__(self) -> str:
        of_workers = ""
        if self.workers:
            largest = f" (the largest {_gb(self.workers[0])})" if len(self.workers) > 1 else ""
            of_workers = f", its {len(self.workers)} child processes {_gb(sum(self.workers))}{largest}"
        left = f"{_gb(self.left)} of {_gb(self.whole)} left"
        return f"{_gb(self.own)} of its own{of_workers}, {_gb(self.shared)} shared; {left}"


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Return whose memory is whose: it takes about 10 ms for each process of 2 GB."""
    me, children = os.getpid(), set[str]()
    for thread in (proc / str(me) / "task").iterdir():  # a process is the child of the thread that has forked it
        with contextlib.suppress(OSError):  # the thread has just ended, or this kernel does not tell
            children.update((thread / "children").read_text().split())
    own, shared = _pages(proc, str(me))
    workers = sorted((_pages(proc, pid)[0] for pid in children), reverse=True)
    left, whole = left_of_host(proc, cgroups)
    return Memory(own, tuple(workers), shared, left, whole)


def is_short(left: int, whole: int) -> bool:
    """Return whether little memory is left."""
    return left < _SHORT * whole


def shortage(found: Memory) -> str:
    """Return a line that says that memory is short, why, and what would help."""
    if sum(found.workers) > max(found.own, found.shared):
        remedy = "Fewer workers (num_workers=), or samples in one array or memory map, which workers share, take less."
    elif found.shared > found.own:
        remedy = (
            "What is shared is there once for all workers. If it is batches on their way, a smaller prefetch_factor= "
            "holds fewer; if it is the data set, a memory map of files is given back when needed."
        )
    else:
        remedy = "Most of it is this process's own: the data set itself, or the model."
    return f"memory is short, and processes will soon be killed. This rank has {found}. {remedy}"


def _pages(proc: Path, pid: str) -> tuple[int, int]:
    """Return the bytes of a process that are its own, and those that it shares."""
    with contextlib.suppress(OSError):  # it has just ended
        lines = (line.split() for line in (proc / pid / "smaps_rollup").read_text().splitlines()[1:])
        sizes = {words[0]: int(words[1]) << 10 for words in lines}
        own = sizes["Private_Clean:"] + sizes["Private_Dirty:"]
        return own, sizes["Rss:"] - own
    return 0, 0


def left_of_host(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the bytes that are left, and all: of the host, or of its tightest limit for this process."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    of_host = {words[0]: int(words[1]) << 10 for words in lines}
    found = [(of_host["MemAvailable:"], of_host["MemTotal:"])]
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, of, path = line.split(":", 2)
        if of not in ("", "memory"):
            continue
        root = cgroups / of
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if of else ("memory.max", "memory.current")
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):  # a limit above holds, too
            if not folder.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
                limit, used = (int((folder / name).read_text()) for name in names)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # is given back when needed
                found.append((max(0, limit - used + cached), limit))
    return min(found)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"
