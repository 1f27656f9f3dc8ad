"""Which global random generators may a data set or a sampler draw from?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.base.framework import _current_expected_place
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
    """Paddle's generator of the CPU and, where a device is in use, those of devices. Workers have the CPU's only."""

    def __init__(self, *, watched: bool = True) -> None:
        """Set it up.

        Args:
            watched: True if a state shows whether something was drawn on the CPU. Otherwise no two states are equal, as
                if something was always drawn.
        """
        self._watched = watched

    def seed(self, seed: int) -> None:
        """Seed the generators: 6 us."""
        seed &= 0x7FFFFFFFFFFFFFFF
        if is_cpu(_current_expected_place()):
            core.default_cpu_generator().manual_seed(seed)
        else:
            paddle.seed(seed)

    def get_state(self) -> Any:
        """Return their states: 1 us."""
        cpu = core.default_cpu_generator().get_state()
        device = None if is_cpu(_current_expected_place()) else paddle.get_rng_state()
        _PROBE.set_state(cpu)
        return _PaddleState(_PROBE.random() if self._watched else object(), cpu, device)

    def set_state(self, state: Any) -> None:
        """Restore the states."""
        if state.device is not None:
            paddle.set_rng_state(state.device)
        core.default_cpu_generator().set_state(state.cpu)


def generators_of(dataset: Any, *, stream: bool) -> tuple[Generator, ...]:
    """Return the generators that are seeded before each sample of a data set: numpy's, Python's and Paddle's.

    Data with an index that draws from Paddle's on the CPU is found out. Of a stream, and of what draws on a device, it
    cannot be: seeding Paddle's for each sample would cost more than the others together, and a device's is also drawn
    from by the model. Such a data set says so by an attribute `seed_paddle`.
    """
    told = bool(getattr(dataset, "seed_paddle", False))
    paddles = () if stream and not told else (PaddleGenerator(watched=not told),)
    return (NumpyGenerator(), PythonGenerator(), *paddles)
