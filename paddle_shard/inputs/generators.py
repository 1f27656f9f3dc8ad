"""Which global random generators may a data set or a sampler draw from?"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.base.framework import _dygraph_place_guard
from paddle.framework import core

from paddle_shard.place.local_tensor import is_cpu
from paddle_shard.samplers.randomness import Generator, NumpyGenerator, PythonGenerator

_PROBE = core.Generator()
"""Is given the state of Paddle's generator and asked for a number, so that the generator itself stays as it is."""


@dataclass(frozen=True, slots=True)
class _PaddleState:
    """States of Paddle's generators. Paddle's own state objects cannot be compared."""

    mark: Any
    """Equal for two states if nothing was drawn between them."""
    cpu: Any = field(compare=False)
    device: Any = field(compare=False)


class PaddleGenerator:
    """Paddle's generator of the CPU, the current place while samples are read; and those of devices, if asked for."""

    def __init__(self, *, watched: bool = True, place: Any = None) -> None:
        """Set it up.

        Args:
            watched: True if a state shows whether something was drawn on the CPU. Otherwise no two states are equal, as
                if something was always drawn.
            place: A device, if its generator and those of its kind are seeded and kept, too. Workers cannot use it.
        """
        self._watched, self._place, self._process = watched, place, os.getpid()

    def _device(self) -> Any:
        """Return the device, or None."""
        return self._place if os.getpid() == self._process else None

    def seed(self, seed: int) -> None:
        """Seed the generators: 6 us."""
        seed &= 0x7FFFFFFFFFFFFFFF
        if (device := self._device()) is None:
            core.default_cpu_generator().manual_seed(seed)
        else:
            with _dygraph_place_guard(device):
                paddle.seed(seed)

    def get_state(self) -> Any:
        """Return their states: 1 us."""
        cpu, of_devices = core.default_cpu_generator().get_state(), None
        if (device := self._device()) is not None:
            with _dygraph_place_guard(device):
                of_devices = paddle.get_rng_state()
        _PROBE.set_state(cpu)
        return _PaddleState(_PROBE.random() if self._watched else object(), cpu, of_devices)

    def set_state(self, state: Any) -> None:
        """Restore the states."""
        if state.device is not None:
            with _dygraph_place_guard(self._place):
                paddle.set_rng_state(state.device)
        core.default_cpu_generator().set_state(state.cpu)


def generators_of(dataset: Any, *, stream: bool, place: Any = None) -> tuple[Generator, ...]:
    """Return the generators that are seeded before each sample of a data set: numpy's, Python's and Paddle's.

    Data with an index that draws from Paddle's on the CPU is found out. Of a stream, and of what draws on a device, it
    cannot be: seeding Paddle's for each sample would cost more than the others together, and a device's is also drawn
    from by the model. Such a data set says so by an attribute `seed_paddle`.

    Args:
        dataset: The data set.
        stream: True if the data set has no index.
        place: The loader's place; None: the CPU.
    """
    if getattr(dataset, "seed_paddle", False):
        paddles = [PaddleGenerator(watched=False, place=None if place is None or is_cpu(place) else place)]
    else:
        paddles = [] if stream else [PaddleGenerator()]
    return (NumpyGenerator(), PythonGenerator(), *paddles)
