"""The global random generators that a data set or a sampler may use."""

from __future__ import annotations

import sys
from typing import Any

from paddle.framework import core

from paddle_shard.core.randomness import (
    Generator,
    NumpyGenerator,
    PythonGenerator,
)

_PROBE = core.Generator()
"""Is given the state of Paddle's generator and asked for a number, so that the generator itself stays as it is."""
_MOST = 0x7FFFFFFFFFFFFFFF
"""The largest seed that Paddle takes."""


class PaddleGenerator:
    """Paddle's generator of the CPU, the current place while samples are read."""

    def seed(self, seed: int) -> None:
        """Seed it: 6 us."""
        core.default_cpu_generator().manual_seed(seed & _MOST)

    def get_state(self) -> Any:
        """Return its state: 1 us."""
        return core.default_cpu_generator().get_state()

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        core.default_cpu_generator().set_state(state)

    def mark(self) -> Any:
        """Return the number that it would draw next."""
        _PROBE.set_state(core.default_cpu_generator().get_state())
        return _PROBE.random()


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

        torch.default_generator.set_state(
            torch.frombuffer(bytearray(state), dtype=torch.uint8)
        )

    mark = get_state


def generators_of() -> tuple[Generator, ...]:
    """Return the generators that are seeded: numpy's, Python's and Paddle's, and torch's where it is imported."""
    of_torch = [TorchGenerator()] if "torch" in sys.modules else []
    return NumpyGenerator(), PythonGenerator(), PaddleGenerator(), *of_torch
