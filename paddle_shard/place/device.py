"""How does a batch get onto a device, and what does the device do when the next one comes?"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import paddle
from paddle.framework import core

from paddle_shard.clock import DEVICE, at

_PAUSE = 0.0005
"""Seconds between two looks at an event that is waited for."""
_MOST_QUEUED = 2
"""Batches whose copies are queued behind the device's work before the oldest is waited for, so that the loop is at most
so many steps ahead of the device: each holds host memory."""
_TIMED, _LONGEST = 8, 10.0
"""Of the steps to which the device comes idle, one in so many is timed; and seconds for which one is, at most."""


def is_cpu(place: Any) -> bool:
    """Return whether a place is the CPU. Paddle has two classes for it."""
    return isinstance(place, core.CPUPlace) or (isinstance(place, core.Place) and place.is_cpu_place())


def _event(place: Any) -> Any:
    """Return an event of a device.

    To drop one that is not passed makes Paddle wait for it; a forked child, for ever.
    """
    # `paddle.device.Event` is the current place's, which is the same for all threads: it must not be changed here.
    if isinstance(place, core.CustomPlace):
        return core.CustomDeviceEvent(place.get_device_type(), place.get_device_id(), False, False, False)
    core.set_cuda_current_device_id(place.get_device_id())  # CUDA has one for each thread
    return core.CUDAEvent(False, False, False)


def _record(event: Any, place: Any) -> None:
    """Let an event be passed when the device has done what is queued now in its current stream."""
    event.record(paddle.device.current_stream(place).stream_base)


def _keep_for_ever(one: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


class _Queued:
    """Tensors in host memory whose copies are queued, or are just being queued."""

    def __init__(self, tensors: Sequence[Any], place: Any) -> None:
        self._tensors, self._place = tensors, place
        self._event: Any = None

    @property
    def marked(self) -> bool:
        """False if copies are being queued; if that was interrupted, or has failed, as well."""
        return self._event is not None

    def mark(self) -> None:
        """Note that no more copies are queued."""
        event = _event(self._place)
        _record(event, self._place)
        self._event = event

    def passed(self) -> bool:
        """Return whether it is known that the device has copied all of them."""
        return self._event is not None and bool(self._event.query())


_left = deque[_Queued]()
"""What was queued by queues that are gone. It is never freed with the interpreter, nor in a forked child."""
_keep_for_ever(_left)


class DeviceQueue:
    """Queues the copies of batches to a device behind what it has to compute, in the stream that computes.

    So neither the host nor the device ever waits for the other to ask: what is computed from a batch is queued behind
    its copy. Paddle's own reader copies in a stream and a thread of its own, and each copy first waits for all that was
    queued when it was asked for: copies come in bursts, and the device stands still between them (docs/speed.md).
    """

    def __init__(self, place: Any) -> None:
        """Set the device."""
        self._place, self._held = place, deque[_Queued]()
        # At the end nothing is waited for, and no line of Python runs: a signal's handler might raise there.
        weakref.finalize(self, _left.extend, self._held)

    def free(self) -> None:
        """Give up host memory that was copied; safe from any thread. A thread that reads ahead has the time for it."""
        # Without a lock, which a signal's handler might leave locked: two threads may see the same one.
        for queued in (self._held, _left):
            with suppress(IndexError, ValueError):  # the other thread was first
                while (first := queued[0]).passed():
                    queued.remove(first)

    def copied(self, tensors: Sequence[Any]) -> list[Any]:
        """Queue the copies of a batch, and return its tensors on the device. Only the thread that computes calls it.

        Args:
            tensors: One or more tensors in host memory, which nothing else writes to.
        """
        if isinstance(self._place, core.XPUPlace):  # a copy has ended when it returns, and Paddle 3.0 has no event
            return [tensor._copy_to(self._place, False) for tensor in tensors]
        for one in (*self._held, *_left):
            if not one.marked:
                one.mark()
        # As much is queued as keeps the device busy; more would only hold more of the host's memory.
        while len(self._held) >= _MOST_QUEUED:
            self.free()
            if len(self._held) >= _MOST_QUEUED:
                with at(DEVICE):
                    time.sleep(_PAUSE)  # `synchronize` would hold the GIL, so that no other thread could run
        queued = _Queued(tensors, self._place)
        self._held.append(queued)  # first: there may be no memory for a later one, or a signal's handler may raise
        made = [tensor._copy_to(self._place, False) for tensor in tensors]
        queued.mark()
        return made


def watch_of(place: Any) -> DeviceWatch | None:
    """Return what watches a device; None for a CPU, and for an XPU, of which Paddle 3.0 has no events."""
    return None if is_cpu(place) or isinstance(place, core.XPUPlace) else DeviceWatch(place)


class _Marks:
    """The events by which a device is watched: they are used again, and never dropped."""

    def __init__(self, place: Any) -> None:
        self.step, self.timed, self.timing = _event(place), _event(place), False
        _keep_for_ever(self)


def name_of(place: Any) -> str:
    """Return the name of a device, such as "gpu:0"."""
    return str(place)[len("Place(") : -1]


_marks = cache(lambda name: _Marks(paddle.device._convert_to_place(name)))
"""Those of a device, by its name."""


class DeviceWatch:
    """Tells what a wait for data costs: nothing, while the device still computes what was queued before.

    A device that is idle when data comes says by that alone not how long its own work takes. So that is timed then, for
    a few of the steps, by a thread that looks until they are done.
    """

    def __init__(self, place: Any) -> None:
        """Set the device."""
        self._place, self._marks = place, _marks(name_of(place))
        self._asked = False
        self._idle_at: float | None = None
        """When the data of the last step came to an idle device."""
        self._num_idle = 0
        self._took = deque[float](maxlen=5)
        """Seconds from when a batch came to an idle device until its step was computed; 0 if the host took longer."""

    def asked(self) -> None:
        """Note that the loop has queued its step, and asks for data."""
        marks, self._asked = self._marks, True
        _record(marks.step, self._place)
        if self._idle_at is not None:
            if self._num_idle % _TIMED == 0 and not marks.timing:
                marks.timing = True
                _record(marks.timed, self._place)
                args = marks, self._idle_at, self._took
                threading.Thread(target=_time, args=args, name="paddle_shard-device", daemon=True).start()
            self._num_idle += 1

    def hidden(self, step: float, wait: float, now: float) -> float:
        """Note that data has come, and return for how many seconds of the wait the device was busy, or would have been.

        Args:
            step: Seconds of the loop's own code before it asked.
            wait: Seconds of the wait.
            now: When data has come, by `time.perf_counter`.
        """
        if not self._asked:
            return 0.0
        if not self._marks.step.query():
            self._idle_at = None
            return wait
        self._idle_at = now
        took = statistics.median(self._took) if self._took else 0.0
        return min(wait, max(0.0, took - step))


def _time(marks: _Marks, began: float, took: deque[float]) -> None:
    """Add the seconds since a moment until the event of a step is passed; 0 if it is as good as passed now."""
    asked = time.perf_counter()
    with contextlib.suppress(Exception):  # the device is gone: that is told elsewhere
        while not marks.timed.query() and time.perf_counter() < began + _LONGEST:
            time.sleep(_PAUSE)
        ended = time.perf_counter()
        took.append(ended - began if ended > asked + 2 * _PAUSE else 0.0)
    marks.timing = False
