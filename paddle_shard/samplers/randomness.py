"""How does code that draws from global generators draw the same on every rank, and disturb nobody?"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
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

    def mark(self) -> Any:
        """Return, in a fraction of a microsecond, a value that every draw and every seed changes; None: not known.

        A draw may go unseen once if the state holds a number that was drawn ahead; see `settle`.
        """

    def settle(self, state: Any) -> bool:
        """Throw away a number that was drawn ahead, if its state, which is given, says so; return whether."""


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

    def mark(self) -> Any:
        """Return where in its table it stands, a word of that, and the Gaussian drawn ahead."""
        if _PYTHON_WORDS is None:
            return None
        return _PYTHON_WORDS[0].value, _PYTHON_WORDS[1].value, random._inst.gauss_next  # type: ignore[attr-defined]

    def settle(self, state: Any) -> bool:
        """Nothing is unseen."""
        return False


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

    def mark(self) -> Any:
        """Return where in its table it stands, and a word of that."""
        words = _numpy_words(np.random.mtrand._rand._bit_generator)
        return None if words is None else (words[0].value, words[1].value)

    def settle(self, state: Any) -> bool:
        """Forget a Gaussian that was drawn ahead."""
        if state[3]:
            np.random.seed(0)
        return bool(state[3])


Words = tuple[ctypes.c_int, ctypes.c_uint32]
"""(position in the table of a Mersenne Twister, the table's second word), as they stand in memory; some seeds make
the same first word."""


@lru_cache(maxsize=2)
def _numpy_words(bit_generator: Any) -> Words | None:
    """Look at the state of a bit generator of numpy, where its documented interface says it is."""
    if type(bit_generator) is not np.random.MT19937:
        return None
    address = bit_generator.ctypes.state_address  # struct {uint32_t key[624]; int pos;}
    words = ctypes.c_int.from_address(address + 624 * 4), ctypes.c_uint32.from_address(address + 4)
    state = bit_generator.state["state"]
    return words if (words[0].value, words[1].value) == (state["pos"], int(state["key"][1])) else None


def _python_words() -> Words | None:
    """Look at the state of the module `random`: CPython's RandomObject is {head; int index; uint32_t state[624]}."""
    address = id(random._inst) + object.__basicsize__
    if sys.implementation.name != "cpython" or random._inst.__sizeof__() < object.__basicsize__ + 625 * 4:
        return None
    words = ctypes.c_int.from_address(address), ctypes.c_uint32.from_address(address + 8)
    *table, index = random.getstate()[1]
    return words if (words[0].value, words[1].value) == (index, table[1]) else None


_PYTHON_WORDS = _python_words()


@contextmanager
def kept(generators: Sequence[Generator]) -> Iterator[None]:
    """Put the generators' states back at the end, whatever was drawn inside."""
    outer = [(generator, generator.get_state(), generator.mark()) for generator in generators]
    settled = [generator.settle(state) for generator, state, _ in outer]
    try:
        yield
    finally:
        for (generator, state, mark), changed in zip(outer, settled, strict=True):
            if changed or mark is None or generator.mark() != mark:
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
