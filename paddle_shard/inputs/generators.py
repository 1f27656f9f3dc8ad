"""Which global random generators may a data set or a sampler draw from?"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.base.framework import _dygraph_place_guard
from paddle.framework import core

from paddle_shard.place.device import is_cpu
from paddle_shard.randomness import Generator, NumpyGenerator, PythonGenerator

_PROBE = core.Generator()
"""Is given the state of Paddle's generator and asked for a number, so that the generator itself stays as it is."""
_MOST = 0x7FFFFFFFFFFFFFFF
"""The largest seed that Paddle takes."""


@dataclass(frozen=True, slots=True)
class _PaddleState:
    """A state of Paddle's generator. Paddle's own state objects cannot be compared."""

    mark: Any
    """Equal for two states if nothing was drawn between them."""
    state: Any = field(compare=False)


class PaddleGenerator:
    """Paddle's generator of the CPU, the current place while samples are read."""

    def seed(self, seed: int) -> None:
        """Seed it: 6 us."""
        core.default_cpu_generator().manual_seed(seed & _MOST)

    def get_state(self) -> Any:
        """Return its state: 1 us."""
        state = core.default_cpu_generator().get_state()
        _PROBE.set_state(state)
        return _PaddleState(_PROBE.random(), state)

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        core.default_cpu_generator().set_state(state.state)

    def mark(self) -> Any:
        """Return the number that it would draw next."""
        _PROBE.set_state(core.default_cpu_generator().get_state())
        return _PROBE.random()


class DeviceGenerator:
    """The generators of a device and of those of its kind. No two states of them are equal, as if all samples drew.

    The model draws from them, too. Only the process that has made it uses the device: workers cannot.
    """

    def __init__(self, place: Any = None) -> None:
        """Set the device; None: there is none to seed."""
        self._place, self._process = place, os.getpid()

    def __reduce__(self) -> Any:
        return DeviceGenerator, ()

    def _here(self) -> bool:
        return self._place is not None and os.getpid() == self._process

    def seed(self, seed: int) -> None:
        """Seed them, and that of the CPU alike."""
        if self._here():
            with _dygraph_place_guard(self._place):
                paddle.seed(seed & _MOST)

    def get_state(self) -> Any:
        """Return their states."""
        if not self._here():
            return _PaddleState(object(), None)
        with _dygraph_place_guard(self._place):
            return _PaddleState(object(), paddle.get_rng_state())

    def set_state(self, state: Any) -> None:
        """Restore the states."""
        if state.state is not None:
            with _dygraph_place_guard(self._place):
                paddle.set_rng_state(state.state)

    def mark(self) -> Any:
        """Return a new object: samples count as drawing."""
        return object()


class TorchGenerator:
    """torch's generator of the CPU, which the transforms of torchvision draw from."""

    def seed(self, seed: int) -> None:
        """Seed it."""
        import torch

        torch.default_generator.manual_seed(seed)

    def get_state(self) -> bytes:
        """Return its state."""
        import torch

        return bytes(torch.default_generator.get_state().numpy())

    def set_state(self, state: bytes) -> None:
        """Restore a state."""
        import torch

        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    mark = get_state


def generators_of(dataset: Any, place: Any = None) -> tuple[Generator, ...]:
    """Return the generators that are seeded before each sample of a data set.

    They are numpy's, Python's and Paddle's, and torch's where it is imported. What a sample draws on a device cannot be
    found out, since the model draws from that device's generator, too. Such a data set says so by an attribute
    `seed_paddle`.

    Args:
        dataset: The data set.
        place: The loader's place; None: the CPU.
    """
    found: list[Generator] = [NumpyGenerator(), PythonGenerator(), PaddleGenerator()]
    if getattr(dataset, "seed_paddle", False):
        found.append(DeviceGenerator(None if place is None or is_cpu(place) else place))
    if "torch" in sys.modules:
        found.append(TorchGenerator())
    return tuple(found)
