"""How does code that draws from global generators draw the same on every rank, and disturb nobody?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np


class Generator(Protocol):
    """A global random generator of some library."""

    def seed(self, seed: int) -> None:
        """Seed it with a number in [0, 2^64)."""

    def get_state(self) -> Any:
        """Return its state, a value that later draws do not change."""

    def set_state(self, state: Any) -> None:
        """Put a state back."""


class PythonGenerator:
    """The generator of the module `random`."""

    def seed(self, seed: int) -> None:
        """Seed it."""
        random.seed(seed)

    def get_state(self) -> Any:
        """Return its state."""
        return random.getstate()

    def set_state(self, state: Any) -> None:
        """Put a state back."""
        random.setstate(state)


class NumpyGenerator:
    """The generator behind `numpy.random.rand` and its like."""

    def seed(self, seed: int) -> None:
        """Seed it with the low 32 bits."""
        np.random.seed(seed & 0xFFFFFFFF)

    def get_state(self) -> Any:
        """Return its state."""
        return np.random.get_state()

    def set_state(self, state: Any) -> None:
        """Put a state back."""
        np.random.set_state(state)


@contextmanager
def kept(generators: Sequence[Generator]) -> Iterator[None]:
    """Put the generators' states back at the end, whatever was drawn inside."""
    outer = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, outer, strict=True):
            generator.set_state(state)


class PrivateRandomness:
    """A stream of random numbers of its own for code that draws from the global generators.

    Inside `with private:` the generators go on where the last such block left them, from states that the seed
    alone fixes; outside they are as their user left them.
    """

    def __init__(self, generators: Sequence[Generator], seed: int) -> None:
        self._generators = generators
        self._seed = seed
        self._states: list[Any] | None = None
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = kept(self._generators)
        self._outer.__enter__()
        for number, generator in enumerate(self._generators):
            if self._states is None:
                generator.seed(self._seed)
            else:
                generator.set_state(self._states[number])

    def __exit__(self, *error: Any) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        self._outer.__exit__(*error)
