"""How does code that draws from global generators draw the same on every rank, without side effects?"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np


class Generator(Protocol):
    """A global random generator of some library."""

    def seed(self, seed: int) -> None:
        """Seed it with a number in [0, 2^64)."""

    def get_state(self) -> Any:
        """Return its state, a value that later draws do not change."""

    def set_state(self, state: Any) -> None:
        """Restore a state."""

    def mark(self) -> Any:
        """Return, in a fraction of a microsecond, a value that every draw and every seed changes; None if unknown."""


class PythonGenerator:
    """The generator of the module `random`."""

    def seed(self, seed: int) -> None:
        """Seed it."""
        random.seed(seed)

    def get_state(self) -> Any:
        """Return its state."""
        return random.getstate() if _PYTHON is None else (_PYTHON.copy(), _INSTANCE.gauss_next)

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        if _PYTHON is not None:
            words, gauss = state
            index, *key = np.frombuffer(words, np.uint32).tolist()
            state = (3, (*key, index), gauss)
        random.setstate(state)

    def mark(self) -> Any:
        """Return its position in the table, a word of the table, and the Gaussian that was drawn ahead."""
        return None if _PYTHON is None else (_PYTHON.position.value, _PYTHON.word.value, _INSTANCE.gauss_next)


class NumpyGenerator:
    """The generator that `numpy.random.rand` and similar functions use."""

    def seed(self, seed: int) -> None:
        """Seed it with the low 32 bits."""
        np.random.seed(seed & 0xFFFFFFFF)

    def get_state(self) -> Any:
        """Return its state."""
        generator = _rand()
        table, ahead = _numpy_table(generator._bit_generator), _numpy_ahead(generator)
        if table is None or ahead is None:
            return np.random.get_state()
        return table.copy(), ahead[0].value, ahead[1].value

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        if isinstance(state[0], bytes):
            words = np.frombuffer(state[0], np.uint32)
            state = ("MT19937", words[:624], int(words[624]), *state[1:])
        np.random.set_state(state)

    def mark(self) -> Any:
        """Return its position in the table, a word of the table, and whether a Gaussian was drawn ahead."""
        generator = _rand()
        table, ahead = _numpy_table(generator._bit_generator), _numpy_ahead(generator)
        return None if table is None or ahead is None else (table.position.value, table.word.value, ahead[0].value)


# Reading a state through its library costs 7 us (`random`) or 40 us (numpy): more than reading many samples costs. So
# the states are read directly from memory, after a check that they are where they are expected.


class _Table:
    """The state of a Mersenne Twister in memory."""

    def __init__(self, address: int, position: int, word: int) -> None:
        """View the 625 words at an address.

        `position` and `word` are the offsets in bytes of the position in the table and of the table's second word. It
        is the second word because some seeds make the same first word.
        """
        self._address = address
        self.position = ctypes.c_int.from_address(address + position)
        self.word = ctypes.c_uint32.from_address(address + word)

    def copy(self) -> bytes:
        """Return a copy of all words."""
        return ctypes.string_at(self._address, 625 * 4)


def _rand() -> Any:
    return np.random.mtrand._rand


@lru_cache(maxsize=2)
def _numpy_table(bit_generator: Any) -> _Table | None:
    """View the state of a numpy bit generator at its documented address; None if it is not there."""
    if type(bit_generator) is not np.random.MT19937:
        return None
    address = bit_generator.ctypes.state_address  # struct {uint32_t key[624]; int pos;}
    table = _Table(address, position=624 * 4, word=4)
    state = bit_generator.state["state"]
    return table if table.copy() == state["key"].tobytes() + struct.pack("=i", state["pos"]) else None


@lru_cache(maxsize=2)
def _numpy_ahead(generator: Any) -> tuple[ctypes.c_int, ctypes.c_double] | None:
    """View the flag and the value of a Gaussian that a RandomState has drawn ahead: {int; double} in the object."""
    offset = _offset_of_gauss()
    if offset is None or type(generator) is not np.random.RandomState:
        return None
    return ctypes.c_int.from_address(id(generator) + offset - 8), ctypes.c_double.from_address(id(generator) + offset)


@cache
def _offset_of_gauss() -> int | None:
    """Find by experiment the offset in a RandomState of the Gaussian that was drawn ahead; None if not found."""
    if sys.implementation.name != "cpython":
        return None
    trial = np.random.RandomState(1)
    trial.standard_normal()
    state: Any = trial.get_state()
    ahead, gauss = state[3:]
    size = type(trial).__basicsize__
    offset = ctypes.string_at(id(trial), size).find(struct.pack("=d", gauss))
    if offset < 8:
        return None
    flag = ctypes.c_int.from_address(id(trial) + offset - 8)
    before = flag.value
    trial.standard_normal()
    return offset if ahead == 1 and (before, flag.value) == (1, 0) else None


def _python_table() -> _Table | None:
    """View the state of the module `random`: CPython's RandomObject is {head; int index; uint32_t state[624]}."""
    address = id(_INSTANCE) + object.__basicsize__
    if sys.implementation.name != "cpython" or _INSTANCE.__sizeof__() < object.__basicsize__ + 625 * 4:
        return None
    table = _Table(address, position=0, word=8)
    *key, index = random.getstate()[1]
    return table if table.copy() == np.array([index, *key], np.uint32).tobytes() else None


_INSTANCE: Any = random._inst
_PYTHON = _python_table()


Snapshot = list[tuple[Generator, Any, Any]]
"""Generators, their states and their marks."""


def snapshot(generators: Sequence[Generator]) -> Snapshot:
    """Return a snapshot of the generators."""
    return [(generator, generator.get_state(), generator.mark()) for generator in generators]


def refresh(before: Snapshot) -> None:
    """Update a snapshot to the generators' present states; states that have not changed are not read."""
    for number, (generator, _, mark) in enumerate(before):
        now = generator.mark()
        if now is None or now != mark:
            before[number] = (generator, generator.get_state(), now)


def restore(before: Snapshot) -> None:
    """Restore the generators to a snapshot, whatever was drawn since."""
    for generator, state, mark in before:
        if mark is None or generator.mark() != mark:
            generator.set_state(state)


@contextmanager
def kept(generators: Sequence[Generator]) -> Iterator[None]:
    """Restore the generators' states at the end, whatever was drawn inside."""
    before = snapshot(generators)
    try:
        yield
    finally:
        restore(before)


class PrivateRandomness:
    """A private stream of random numbers for code that draws from the global generators.

    Inside `with private:`, the generators continue where the last such block left them; the first block begins with
    states that depend on the seed alone. Outside, they are as the user left them.
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
