"""The queue of copies to a device, and whether the device is still busy when the next batch is wanted."""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import paddle
from paddle.framework import core

_PAUSE = 0.0005
"""Seconds between two looks at an event that is waited for."""
_MOST_QUEUED = 2
"""Batches whose copies are queued behind the device's work before the oldest is waited for, so that the loop is at most
so many steps ahead of the device: each holds host memory."""


def is_cpu(place: Any) -> bool:
    """Return whether a place is the CPU. Paddle has two classes for it."""
    return name_of(place) == "cpu"


def name_of(place: Any) -> str:
    """Return the name of a device, such as "gpu:0"."""
    return str(place)[len("Place(") : -1]


def _make_event(place: Any) -> Any:
    """Return an event of a device.

    To drop one that has not been reached makes Paddle wait for it; in a forked child, forever.
    """
    # `paddle.device.Event` is the current place's, which is the same for all threads: it must not be changed here.
    if isinstance(place, core.CustomPlace):
        return core.CustomDeviceEvent(
            place.get_device_type(), place.get_device_id(), False, False, False
        )
    # CUDA has a current device for each thread.
    core.set_cuda_current_device_id(place.get_device_id())
    return core.CUDAEvent(False, False, False)


def _record(event: Any, place: Any) -> None:
    """Let the device reach an event after what is queued now in its current stream."""
    event.record(paddle.device.current_stream(place).stream_base)


@dataclass(slots=True, eq=False)
class _Copies:
    """Copies of a batch that are queued, or are just being queued."""

    tensors: Sequence[Any]
    """Tensors in host memory."""
    event: Any = None
    """Is reached after the copies; None while they are queued, and if that was interrupted or has failed."""


def _never_free(value: Any) -> None:
    """Keep an object that holds events: neither the end of the interpreter nor a forked child frees it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_copies_to: defaultdict[str, deque[_Copies]] = defaultdict(deque)
"""Name of a device -> copies to it, the oldest first."""
_never_free(_copies_to)


@cache
def _watched_event(name: str) -> Any:
    """Return the event of a device by which steps are watched; it is used again, and never dropped."""
    event = _make_event(paddle.device._convert_to_place(name))
    _never_free(event)
    return event


class DeviceQueue:
    """Queues the copies of batches to a device behind what it has to compute, in the stream that computes.

    So neither the host nor the device ever waits for the other to ask: what is computed from a batch is queued behind
    its copy. Paddle's own reader copies in a stream and a thread of its own, and each copy first waits for all that was
    queued when it was asked for: copies come in bursts, and the device stands still between them (docs/speed.md).

    All loaders of a process share the queue of a device.
    """

    def __init__(self, place: Any) -> None:
        """Set the device."""
        self._place = place
        self._queued = _copies_to[name_of(place)]

    def free(self) -> None:
        """Free host memory that was copied; safe from any thread. A thread that reads ahead has the time for it."""
        # Without a lock, which a signal's handler might leave locked: two threads may see the same copies.
        with suppress(IndexError, ValueError):  # the other thread was first
            while (
                event := self._queued[0].event
            ) is not None and event.query():
                self._queued.remove(self._queued[0])

    def copied(self, tensors: Sequence[Any]) -> list[Any]:
        """Queue the copies of a batch, and return its tensors on the device. Only the thread that computes calls it.

        Args:
            tensors: One or more tensors in host memory, which nothing else writes to.
        """
        # On an XPU a copy has ended when it returns, and Paddle 3.0 has no event.
        if isinstance(self._place, core.XPUPlace):
            return [tensor._copy_to(self._place, False) for tensor in tensors]
        for copies in tuple(self._queued):
            if copies.event is None:
                self._mark(copies)
        # As much is queued as keeps the device busy; more would only hold more of the host's memory.
        while len(self._queued) >= _MOST_QUEUED:
            self.free()
            if len(self._queued) >= _MOST_QUEUED:
                # `synchronize` would hold the GIL, so that no other thread could run.
                time.sleep(_PAUSE)
        # First, since there may be no memory for a later tensor, or a signal's handler may raise.
        copies = _Copies(tensors)
        self._queued.append(copies)
        on_device = [tensor._copy_to(self._place, False) for tensor in tensors]
        self._mark(copies)
        return on_device

    def _mark(self, copies: _Copies) -> None:
        """Note that no more of the copies are queued."""
        event = _make_event(self._place)
        _record(event, self._place)
        copies.event = event


class DeviceWatch:
    """Shows what a wait for data costs: nothing, while the device still computes what was queued before."""

    def __init__(self, place: Any) -> None:
        """Set the place of a device that has events."""
        self._place = place
        self._event = _watched_event(name_of(place))

    @staticmethod
    def of(place: Any) -> DeviceWatch | None:
        """Return a watch; None of a CPU, and of an XPU, which has no events in Paddle 3.0: there, every wait counts."""
        has_events = not (is_cpu(place) or isinstance(place, core.XPUPlace))
        return DeviceWatch(place) if has_events else None

    def step_queued(self) -> None:
        """Note that the loop has queued its step, and asks for data."""
        _record(self._event, self._place)

    def is_busy(self) -> bool:
        """Return whether the device still computes the step that was queued last."""
        return not self._event.query()
