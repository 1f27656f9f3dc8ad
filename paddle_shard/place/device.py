"""How does a batch get onto a device, and what does the device do when the next one comes?"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import paddle
from paddle.framework import core

from paddle_shard.clock import DEVICE, at
from paddle_shard.handlers import ignoring

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


class DeviceQueue:
    """Queues the copies of batches to a device behind what it has to compute, in the stream that computes.

    So neither the host nor the device ever waits for the other to ask: what is computed from a batch is queued behind
    its copy. Paddle's own reader copies in a stream and a thread of its own, and each copy first waits for all that was
    queued when it was asked for: copies come in bursts, and the device stands still between them (docs/speed.md).
    """

    def __init__(self, place: Any) -> None:
        """Set the device."""
        self._place = place
        self._held = deque[tuple[Any, Sequence[Any]]]()
        """Of the last batches, an event that is passed when it was copied, and its tensors in host memory."""
        weakref.finalize(self, _wait_for_all, self._held, os.getpid())

    def copied(self, tensors: Sequence[Any]) -> list[Any]:
        """Queue the copies of a batch, and return its tensors on the device.

        Args:
            tensors: One or more tensors in host memory, which nothing else writes to.
        """
        held = self._held
        # As much is queued as keeps the device busy; more would only hold more of the host's memory.
        while held and (len(held) >= _MOST_QUEUED or held[0][0].query()):
            _wait_for(held[0][0])
            held.popleft()
        made: list[Any] = []
        try:
            for tensor in tensors:
                made.append(tensor._copy_to(self._place, False))
        finally:  # also if the device has no memory for the next one
            if made and not isinstance(self._place, core.XPUPlace):  # it has copied, and Paddle 3.0 has no event for it
                event = _event(self._place)
                _record(event, self._place)
                held.append((event, tensors))
        return made


def _wait_for_all(held: deque[tuple[Any, Sequence[Any]]], process: int) -> None:
    if os.getpid() != process:  # a forked child has no device
        _keep_for_ever(tuple(held))
    elif held:
        _wait_for(held[-1][0])


def _wait_for(event: Any) -> None:
    if event.query():
        return
    with at(DEVICE):
        while not event.query():  # `synchronize` would hold the GIL, so that no other thread could run
            time.sleep(_PAUSE)


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


def _keep_for_ever(one: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


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
        """Seconds from when a batch came to an idle device until its step was computed."""

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
    """Add the seconds since a moment until the event of a step is passed."""
    with ignoring(Exception):  # the device is gone: that is told elsewhere
        while not marks.timed.query() and time.perf_counter() < began + _LONGEST:
            time.sleep(_PAUSE)
        took.append(time.perf_counter() - began)
    marks.timing = False
