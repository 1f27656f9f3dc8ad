"""Which global random generators may a data set or a sampler draw from?"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from functools import partial
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

    def __reduce__(self) -> Any:
        """Pickle it for another process, which cannot use the device either."""
        return partial(PaddleGenerator, watched=self._watched), ()

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


def generators_of(dataset: Any, place: Any = None) -> tuple[Generator, ...]:
    """Return the generators that are seeded before each sample of a data set.

    They are numpy's, Python's and Paddle's, and torch's where it is imported. What a sample draws on a device cannot be
    found out, since the model draws from that device's generator, too. Such a data set says so by an attribute
    `seed_paddle`.

    Args:
        dataset: The data set.
        place: The loader's place; None: the CPU.
    """
    paddles = PaddleGenerator()
    if getattr(dataset, "seed_paddle", False):
        paddles = PaddleGenerator(watched=False, place=None if place is None or is_cpu(place) else place)
    torchs = [TorchGenerator()] if "torch" in sys.modules else []
    return (NumpyGenerator(), PythonGenerator(), paddles, *torchs)
