"""Sampling profiler: what a training thread waits for when it waits for data.

A thread looks at the stacks of the other threads, 50 times a second while they wait. The code that is measured holds no
clock. In worker processes a profiler of their own samples the main thread, and its counts travel with the answers.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat, starmap, takewhile
from operator import attrgetter
from types import CodeType, FrameType
from typing import TypeVar

_Value = TypeVar("_Value")

READING = "reading"
COLLATING = "collating"
ORDER = "ordering samples"
TRANSPORT = "handing batches over"
PLACING = "placing"
OTHER_RANKS = "waiting for other ranks"
LOADER = "the loader's own code"
CATEGORIES = frozenset(
    {READING, COLLATING, ORDER, TRANSPORT, PLACING, OTHER_RANKS, LOADER}
)
"""All other keys of the counts are names of the user's functions."""

TRAINING = "training"
READING_AHEAD = "reading ahead"
WORKER = "worker"

_PERIOD = 0.02
"""Seconds between two samples of a wait."""
_LONGEST_PERIOD = 0.08
"""Seconds after a sample outside of a wait, at most: a sample takes the interpreter lock from the training thread."""
_MOST_SAMPLES = 1000
"""Number of samples that are kept, so that a new cause shows within seconds of waiting."""
_SMALLEST_SHARE = 0.05
"""Share of a step below which a wait is not reported."""
_SMALLEST_CAUSE = 0.1
"""Share of the wait below which a cause is not reported."""
_MOST_CAUSES = 3

_CATEGORY_OF = {
    "collate": COLLATING,
    "batch": COLLATING,
    "channel": TRANSPORT,
    "executor": TRANSPORT,
    "ray_readers": TRANSPORT,
    "serialization": TRANSPORT,
    "worker": TRANSPORT,
    "workers": TRANSPORT,
    "plan": ORDER,
    "samplers": ORDER,
    "data": READING,
    "reading": READING,
    "placement": PLACING,
    "placing": PLACING,
    "ranks": OTHER_RANKS,
}
"""Name of a file or folder of this package -> category. A file counts before its folder."""
_IDLE = "_read_ahead"
"""Innermost function of the thread that reads ahead, once it has read as far as it may."""
_USER = ""
_RUNTIME = "runtime"
"""Code of Python and of libraries that this package calls; its time belongs to the caller."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Profiler:
    """Counts what a training thread waits for, by category and by the user's function.

    Examples:
        >>> profiler = Profiler()
        >>> profiler.start()
        >>> profiler.stop()
        >>> sum(profiler.counts().values())
        0
    """

    def __init__(self) -> None:
        self.is_waiting = True
        """Set to False while the training thread is outside this loader; then nothing is sampled. If it always stays
        True, a wait is recognized by its stack alone."""
        self._roles: dict[int, str] = {}
        self._samples: deque[str] = deque(maxlen=_MOST_SAMPLES)
        """The category of each of the newest samples."""
        self._num_unresolved = 0
        """Samples of waits for a worker whose answer has not come."""
        self._random = random.Random(0)  # not the user's generator
        self._run: object = None
        """Identifies the sampling thread that may continue. No lock: a forked child could find it locked."""

    def start(self, role: str = TRAINING) -> None:
        """Sample the calling thread from now on, as `TRAINING` or `WORKER`; a second call changes only the thread."""
        self.watch(threading.get_ident(), role)
        if self._run is None:
            self._run = object()
            threading.Thread(
                target=self._sample_until_stopped,
                args=(self._run,),
                name="paddle_shard-profile",
                daemon=True,
            ).start()

    def stop(self) -> None:
        """Stop sampling; the counts stay. Safe to call again, and in a forked child."""
        self._run = None
        self._roles.clear()

    def watch(self, thread_id: int, role: str) -> None:
        """Sample another thread, until it ends; `READING_AHEAD` says what the training thread waits for."""
        self._roles[thread_id] = role

    def counts(self) -> Counter[str]:
        """Return the number of the newest samples by category."""
        return Counter(self._samples.copy()) + Counter(
            {TRANSPORT: self._num_unresolved}
        )

    def snapshot(self) -> list[str]:
        """Return and clear a worker's samples. Send them with an answer."""
        samples = list(self._samples)
        self._samples.clear()
        return samples

    def merge(self, samples: Sequence[str]) -> None:
        """Attribute the samples that waited for a worker's answer to what its `snapshot` says."""
        if samples:
            num_waited = self._num_unresolved
            self._num_unresolved -= num_waited
            self._samples.extend(self._random.choices(samples, k=num_waited))

    def _sample_until_stopped(self, run: object) -> None:
        period = _PERIOD
        while self._run is run:
            time.sleep(period)
            if self._run is run:
                sees_wait = self.is_waiting and self._sample()
                period = (
                    _PERIOD if sees_wait else min(2 * period, _LONGEST_PERIOD)
                )

    def _stacks(self) -> dict[str, list[CodeType]]:
        """Return the functions that run in each thread that is watched, by its role."""
        [frames] = _list_without_gc(starmap(sys._current_frames, [()]))
        stacks: dict[str, list[CodeType]] = {}
        for thread_id, role in list(self._roles.items()):
            if thread_id in frames:
                stacks[role] = _stack(frames[thread_id])
            else:
                # the thread has ended, and its number may be given to another one
                self._roles.pop(thread_id, None)
        # this thread's frame refers to it: all frames and their variables would wait for the collector
        frames.clear()
        return stacks

    def _sample(self) -> bool:
        """Return whether a thread waits for data or reads it, and count in what."""
        stacks = self._stacks()
        if WORKER in stacks:
            stack = _in_thread(stacks[WORKER])
            category = _category(stack)
            is_idle = _is_blocked(stack, category)
            if not is_idle:
                self._samples.append(category)
            return not is_idle
        stack = _in_wait(stacks.get(TRAINING, []))
        if not stack:
            return False
        category = _category(stack)
        if READING_AHEAD in stacks and (
            category == OTHER_RANKS or _is_blocked(stack, category)
        ):
            ahead = _in_thread(stacks[READING_AHEAD])
            if ahead[-1].co_name != _IDLE:
                stack = ahead
                category = _category(ahead)
        if _is_blocked(stack, category):
            self._num_unresolved += 1
        else:
            self._samples.append(category)
        return True


def describe_waits(
    wait_seconds: float,
    step_seconds: float,
    hidden_seconds: float,
    counts: Mapping[str, float],
    rank: int,
) -> str:
    """Return which share of a step waits for data, on which rank and in what; empty if it is less than 5%.

    Args:
        wait_seconds: In the loader, of a mean step.
        step_seconds: In the user's code, of a mean step.
        hidden_seconds: Of `wait_seconds`, those in which the device was still busy.
        counts: See `Profiler.counts`.
        rank: Global rank that waits.

    Examples:
        >>> describe_waits(0.0041, 0.0067, 0.0, {"Digits.__getitem__": 81, "collating": 19}, 3)
        'Rank 3 waits 38% of a step (4.1 ms of 10.8 ms) for data: 81% in Digits.__getitem__, 19% collating.'
    """
    whole = wait_seconds + step_seconds
    late = wait_seconds - hidden_seconds
    if whole <= 0.0 or late < _SMALLEST_SHARE * whole:
        return ""
    text = f"Rank {rank} waits {late / whole:.0%} of a step ({late * 1e3:.1f} ms of {whole * 1e3:.1f} ms) for data"
    total = sum(counts.values())
    causes = [
        f"{count / total:.0%} {'' if name in CATEGORIES else 'in '}{name}"
        for name, count in Counter(counts).most_common(_MOST_CAUSES)
        if count >= _SMALLEST_CAUSE * total > 0
    ]
    text += f": {', '.join(causes)}." if causes else "."
    if hidden_seconds >= _SMALLEST_SHARE * whole:
        text += f" The device hides another {hidden_seconds * 1e3:.1f} ms."
    return text


def _stack(frame: FrameType | None) -> list[CodeType]:
    """Return the functions that run, outermost first."""
    callers = accumulate(repeat("f_back"), getattr, initial=frame)
    return _list_without_gc(
        map(attrgetter("f_code"), takewhile(bool, callers))
    )[::-1]


def _list_without_gc(values: Iterator[_Value]) -> list[_Value]:
    """Return what an iterator in C gives, while no other thread runs.

    Python 3.11 allocates when it looks at a frame, and may then collect. A finalizer that waits would let the thread
    that is looked at return from the function of the frame, which is freed, or start a thread, which waits forever.
    """
    if gc.isenabled():
        values = chain(iter(gc.disable, None), values, iter(gc.enable, None))
    return list(values)


def _in_wait(stack: list[CodeType]) -> list[CodeType]:
    """Return the part of a training thread's stack below its loop; empty if the loop itself runs."""
    for depth, code in enumerate(stack):
        if code.co_name in (
            "__next__",
            "__iter__",
        ) and code.co_filename.startswith(_PACKAGE):
            return stack[depth:]
    return []


def _in_thread(stack: list[CodeType]) -> list[CodeType]:
    """Return a thread's or process's own part of its stack, without what a fork has inherited."""
    for depth in range(len(stack) - 1, -1, -1):
        if stack[depth].co_name == "_bootstrap":
            return stack[depth:]
    return stack


def _category(stack: list[CodeType]) -> str:
    """Return the first user's function below this package's, or else what the innermost code of this package does."""
    category = ""
    for code in stack:
        origin = _origin(code.co_filename)
        if origin == _USER and category:
            return _function_name(code)
        if origin == LOADER:
            category = category or LOADER
        elif origin in CATEGORIES:
            category = origin
    return category or LOADER


def _is_blocked(stack: list[CodeType], category: str) -> bool:
    """Return whether a thread waits for another thread or process of this rank."""
    is_in_wait = stack[-1].co_name in ("wait", "receive", "__next__")
    return is_in_wait and category in (TRANSPORT, LOADER)


@functools.lru_cache(maxsize=4096)
def _origin(filename: str) -> str:
    """Return the category of a file of this package, `_RUNTIME`, or `_USER`."""
    if filename.startswith(_PACKAGE):
        parts = os.path.splitext(filename)[0][len(_PACKAGE) :].split(os.sep)
        return next(
            (
                _CATEGORY_OF[part]
                for part in reversed(parts)
                if part in _CATEGORY_OF
            ),
            LOADER,
        )
    is_library = (
        filename.startswith((_STANDARD_LIBRARY, "<frozen "))
        or "-packages" in filename
    )
    return _RUNTIME if is_library else _USER


def _function_name(code: CodeType) -> str:
    """Return the qualified name of a function, with its line if the name alone says too little."""
    # Python >= 3.11 has the former
    name = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
    if "<" in name or name.startswith("__"):
        return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return str(name)
