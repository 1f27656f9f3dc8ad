"""How does code of the user's draw from global generators: from our seeds, and without side effects?

A library's global generator is seeded, and then it is as the user left it (`kept`).
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import methodcaller
from typing import Any, Protocol

import numpy as np


class _Parts(threading.local):
    seed: Callable[[int | None], None] | None = None


parts = _Parts()
"""`seed` seeds the generators for a part of the sample that this thread reads; None where samples are not seeded."""


def seed_part(number: int | None) -> None:
    """Seed for a part of a sample that may be read for other samples, too, such as a document of several packed rows.

    So all of them hold the same draw of it.

    Args:
        number: What tells the part from others; None: for what is drawn for the sample after its parts.
    """
    if parts.seed is not None:
        parts.seed(number)


class Generator(Protocol):
    """A global random generator of some library."""

    def seed(self, seed: int, /) -> None:
        """Seed it with a number in [0, 2^64)."""

    def get_state(self) -> Any:
        """Return its state, which later draws do not change; it equals an earlier one if nothing was drawn between."""

    def set_state(self, state: Any, /) -> None:
        """Restore a state."""


class PythonGenerator:
    """The generator of the module `random`."""

    seed = staticmethod(random.seed)
    get_state = staticmethod(random.getstate)
    set_state = staticmethod(random.setstate)


class NumpyGenerator:
    """The generator that `numpy.random.rand` and similar functions use."""

    def seed(self, seed: int) -> None:
        """Seed it with the low 32 bits."""
        np.random.seed(seed & 0xFFFFFFFF)

    def get_state(self) -> Any:
        """Return its state."""
        state: Any = np.random.get_state()
        name, words, *rest = state
        return name, words.tobytes(), *rest  # bytes, so that two states can be compared

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        name, words, *rest = state
        np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))


_private = threading.RLock()
"""Held while the global generators hold a sampler's private states, which no other thread may take for the user's."""
_seeded = threading.RLock()
"""Held while samples are read for which the global generators are seeded, and by a thread that reads without seeds."""
_LONGEST = 5.0
"""Seconds for which either waits for the other: who is read may itself wait for the other one's thread."""


def _renew() -> None:
    global _private, _seeded
    _private, _seeded = threading.RLock(), threading.RLock()


class Undisturbed:
    """Lets no other thread read with, or without, seeds until it is released, or dropped.

    What a signal's handler raises may come before any line that would release it.
    """

    _lock: Any = None
    """None as long as a handler may have raised before `__init__` has begun."""

    def __init__(self) -> None:
        self._lock = _seeded
        self.alone = self._lock.acquire(timeout=_LONGEST)
        """False if another thread did so all the time."""

    def release(self) -> None:
        """Let them; safe to call again."""
        if self._lock is not None:
            with suppress(RuntimeError):  # it is not this thread's, or was released before a handler has raised
                self._lock.release()
            self._lock = None

    def __del__(self) -> None:
        self.release()


if hasattr(os, "register_at_fork"):  # a plan works on all systems
    # A forked child gets new locks, since the thread that holds the old ones is not there.
    os.register_at_fork(after_in_child=_renew)


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
    """Restore the generators' states at the end, whatever was drawn inside."""
    before = states(generators)
    try:
        yield
    finally:
        restore(generators, before)


class PrivateRandomness:
    """A private stream of random numbers for code that draws from the global generators.

    Inside `with private():`, the generators continue where the last such block left them; the first block begins with
    states that depend on the seed alone. Outside, they are as the user left them.
    """

    def __init__(
        self,
        generators: Sequence[Generator],
        seed: int,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._generators, self._seed, self._around = generators, seed, around
        self._states: list[Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the generators hold the private states."""
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
