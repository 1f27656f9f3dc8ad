"""Which global random generators may a data set or a sampler draw from?"""

from __future__ import annotations

from typing import Any

import paddle

from paddle_shard.samplers.randomness import Generator, NumpyGenerator, PythonGenerator


class PaddleGenerator:
    """The generators of Paddle's devices."""

    def seed(self, seed: int) -> None:
        """Seed the generators."""
        paddle.seed(seed & 0x7FFFFFFFFFFFFFFF)

    def get_state(self) -> Any:
        """Return their states."""
        return paddle.get_rng_state()

    def set_state(self, state: Any) -> None:
        """Restore the states."""
        paddle.set_rng_state(state)

    def mark(self) -> Any:
        """Return None: Paddle has no such value."""
        return None


def generators(*, with_paddle: bool) -> tuple[Generator, ...]:
    """Return numpy's and Python's generators, and also Paddle's if asked for."""
    both = (NumpyGenerator(), PythonGenerator())
    return (*both, PaddleGenerator()) if with_paddle else both
