"""How does a batch get onto a device, and what does the device do when the next one comes?"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
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
    return isinstance(place, core.CPUPlace) or (
        isinstance(place, core.Place) and place.is_cpu_place()
    )


def _event(place: Any) -> Any:
    """Return an event of a device.

    To drop one that is not passed makes Paddle wait for it; a forked child, for ever.
    """
    # `paddle.device.Event` is the current place's, which is the same for all threads: it must not be changed here.
    if isinstance(place, core.CustomPlace):
        return core.CustomDeviceEvent(
            place.get_device_type(), place.get_device_id(), False, False, False
        )
    core.set_cuda_current_device_id(
        place.get_device_id()
    )  # CUDA has one for each thread
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
        if isinstance(
            self._place, core.XPUPlace
        ):  # a copy has ended when it returns, and Paddle 3.0 has no event
            return [tensor._copy_to(self._place, False) for tensor in tensors]
        for one in (*self._held, *_left):
            if not one.marked:
                one.mark()
        # As much is queued as keeps the device busy; more would only hold more of the host's memory.
        while len(self._held) >= _MOST_QUEUED:
            self.free()
            if len(self._held) >= _MOST_QUEUED:
                time.sleep(
                    _PAUSE
                )  # `synchronize` would hold the GIL, so that no other thread could run
        queued = _Queued(tensors, self._place)
        self._held.append(
            queued
        )  # first: there may be no memory for a later one, or a signal's handler may raise
        made = [tensor._copy_to(self._place, False) for tensor in tensors]
        queued.mark()
        return made


def name_of(place: Any) -> str:
    """Return the name of a device, such as "gpu:0"."""
    return str(place)[len("Place(") : -1]


_events = cache(lambda name: _event(paddle.device._convert_to_place(name)))
"""The event of a device by which steps are watched, by the device's name. It is used again, and never dropped."""


class DeviceWatch:
    """Tells what a wait for data costs: nothing, while the device still computes what was queued before."""

    def __init__(self, place: Any) -> None:
        """Set the place; of a CPU, and of an XPU, which has no events in Paddle 3.0, every wait counts."""
        self._place = place
        self._event: Any = None
        if not (is_cpu(place) or isinstance(place, core.XPUPlace)):
            self._event = _events(name_of(place))
            _keep_for_ever(self._event)

    def step_queued(self) -> None:
        """Note that the loop has queued its step, and asks for data."""
        if self._event is not None:
            _record(self._event, self._place)

    def is_busy(self) -> bool:
        """Return whether the device still computes the step that was queued last."""
        return self._event is not None and not self._event.query()
