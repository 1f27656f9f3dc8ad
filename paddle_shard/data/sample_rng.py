"""The global random generators while user code reads samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paddle_shard.core.randomness import Generator, restore, states
from paddle_shard.plan.seeding import derive_seed, mix


class SampleRng:
    """The global generators while user code reads samples: seeded for each sample, or left alone if nothing uses them.

    The first batch of an epoch iterator is read with a look: every seeding checks whether the generators were used
    since the one before. If nothing used them, the rest is read without touching them.

    Attributes:
        looks: True if batches show whether the generators are used: there are some, and the data set does not say it.
        seeds: True if `seed` seeds the generators; False if it does nothing.
    """

    def __init__(
        self, generators: Sequence[Generator], uses_rng: object = None
    ) -> None:
        """Set up.

        Args:
            generators: The global generators that samples may use.
            uses_rng: Whether the data set uses them, if it is a bool; else the first batch shows it.
        """
        self._generators = generators
        self.looks = not isinstance(uses_rng, bool) and len(generators) > 0
        self.seeds = uses_rng is not False and len(generators) > 0
        self.unread_sources: set[Any] = set()
        """Sources of a mixture of which nothing was read yet; batches are looked at until there are none."""
        self._marks: list[Any] | None = None
        """The generators' marks at the beginning or after the last seeding, while a batch is looked at; None once they
        were used."""

    def seed(self, key: int, index: Any = None) -> None:
        """Seed the generators with a key in [0, 2^64), or for an index under that key, if samples use them."""
        if not self.seeds:
            return
        seed = key
        if index is not None:
            is_number = isinstance(index, int)
            seed = mix(key, index) if is_number else derive_seed(key, index)
        self._look()
        for generator in self._generators:
            generator.seed(seed)
        if self._marks is not None:
            self._marks = self._current_marks()

    def _look(self) -> None:
        if self._marks is not None and self._current_marks() != self._marks:
            self._marks = None

    def _current_marks(self) -> list[Any]:
        return [generator.mark() for generator in self._generators]

    @contextmanager
    def reading(self, *, look: bool, keep: bool) -> Iterator[None]:
        """Read one batch inside the `with` block, seeding each sample.

        Args:
            look: Find out whether the batch uses the generators, and go by that from then on.
            keep: Restore the generators at the end: they belong to the training loop.
        """
        before = states(self._generators) if keep else None
        seeded = self.seeds
        self.seeds = True
        self._marks = self._current_marks() if look else None
        try:
            yield
            self._look()
        finally:
            if look:
                is_used = self._marks is None
                if is_used:
                    self.unread_sources.clear()
                self.seeds = is_used or len(self.unread_sources) > 0
                self._marks = None
            else:
                self.seeds = seeded
            if before is not None:
                restore(self._generators, before)
