"""Global random generators: seed them for the user's code, and restore their states afterwards."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import methodcaller
from typing import Any, Protocol

import numpy as np

_MT19937_BYTES = 4 * 624 + 4
"""Size of numpy's `mt19937_state`: 624 words and the position."""


class Generator(Protocol):
    """A global random generator of some library."""

    def seed(self, seed: int, /) -> None:
        """Seed it with a number in [0, 2^64)."""

    def get_state(self) -> Any:
        """Return a copy of its state; two are equal if the generator was not used between them."""

    def set_state(self, state: Any, /) -> None:
        """Restore a state."""

    def mark(self) -> Any:
        """Return a value that is equal to an earlier one if the generator was not used since; cheaper than a state."""


class PythonGenerator:
    """The generator of the module `random`."""

    seed = staticmethod(random.seed)
    get_state = staticmethod(random.getstate)
    set_state = staticmethod(random.setstate)
    mark = staticmethod(random.getstate)


class NumpyGenerator:
    """The generator that `numpy.random.rand` and similar functions use."""

    def seed(self, seed: int) -> None:
        """Seed it with the low 32 bits."""
        np.random.seed(seed & 0xFFFFFFFF)

    def get_state(self) -> Any:
        """Return its state."""
        state: Any = np.random.get_state()
        name, words, *rest = state
        # bytes, so that two states can be compared
        return name, words.tobytes(), *rest

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        name, words, *rest = state
        np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))

    def mark(self) -> Any:
        """Return the words of the Mersenne Twister and its position in them: 1 us, where a state takes 60."""
        generator = np.random.mtrand._rand._bit_generator
        if not isinstance(generator, np.random.MT19937):
            return self.get_state()
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


_private = threading.RLock()
"""Held while the global generators have private states, so that no other thread saves these as the user's."""


def states(generators: Sequence[Generator]) -> list[Any]:
    """Return the states of some generators: about 50 us for numpy's and Python's."""
    with _private:
        return list(map(methodcaller("get_state"), generators))


def restore(generators: Sequence[Generator], before: Sequence[Any]) -> None:
    """Restore the states of some generators."""
    for generator, state in zip(generators, before, strict=True):
        generator.set_state(state)


@contextmanager
def kept(generators: Sequence[Generator]) -> Iterator[None]:
    """Restore the states of some generators at the end of the `with` block."""
    before = states(generators)
    try:
        yield
    finally:
        restore(generators, before)


class PrivateRandomness:
    """A private stream of random numbers for code that uses the global generators.

    Inside `with private():`, the generators continue where the last such block left them; the first block begins with
    states that depend on the seed alone. Outside, they are as the user left them.
    """

    def __init__(
        self,
        generators: Sequence[Generator],
        seed: int,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._generators = generators
        self._seed = seed
        self._around = around
        self._states: list[Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Give the generators the private states inside the `with` block."""
        with _private, self._around(), kept(self._generators):
            if self._states is None:
                for generator in self._generators:
                    generator.seed(self._seed)
            else:
                restore(self._generators, self._states)
            try:
                yield
            finally:
                self._states = states(self._generators)
