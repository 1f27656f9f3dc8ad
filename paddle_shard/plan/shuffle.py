"""Keyed permutations of [0, n) that are computed without a table of all samples.

`Permutation` is the order of one epoch. `SourcePermutations` are those of many sources, evaluated together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.order import BLOCK, Indices, Order
from paddle_shard.plan.seeding import derive_key

Words = npt.NDArray[np.uint64]

ROUNDS = 6
"""Feistel rounds. With 3 the quality tests fail at every length, with 4 and more they pass from 1,000 up."""
TABLE_MAX = 4096
"""Up to this length a table is drawn: small networks are visibly not uniform."""
MAX_SAMPLES = 1 << 62
VERSION = 1
"""Version of the orders that this package computes; a saved run resumes only with the same version."""

_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Permutation(Order):
    """A keyed bijection of [0, n): an alternating Feistel network on Z_a x Z_b, repeated until the result is inside.

    a = ceil(sqrt(n)) and b = ceil(n / a), so a * b < n + a and a walk of more than one step is rare. (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: generalized Feistel and cycle walking.)
    """

    def __init__(self, num_samples: int, key: bytes) -> None:
        """Set up the permutation.

        Args:
            num_samples: n, in [1, 2^62].
            key: 64 bytes; another key gives another permutation.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ValueError(f"num_samples must be in [1, 2^62], got {num_samples}.")
        super().__init__(num_samples)
        words = _words(key)
        self._tables: tuple[Indices, Indices] | None = None
        if num_samples <= TABLE_MAX:
            table = draw_tables(words, num_samples)[0]
            self._tables = (table, np.argsort(table))
        self._sizes = network_sizes(num_samples)
        self._rounds = words[0, :ROUNDS]

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position: int64, same shape."""
        return self._apply(positions, backward=False)

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample: int64, same shape."""
        return self._apply(samples, backward=True)

    def _apply(self, values: Indices, *, backward: bool) -> Indices:
        if self._tables is not None:
            return self._tables[backward][values]

        def step(x: Words, _: Any) -> None:
            network(x, self._sizes, self._rounds, backward=backward)

        return walk(values, np.uint64(self.length), step)


def _words(keys: bytes) -> Words:
    """Return the numbers that keys hold: uint64[keys, 8]."""
    return np.frombuffer(keys, "<u8").astype(np.uint64).reshape(-1, 8)


def network_sizes(num_samples: int) -> tuple[np.uint64, np.uint64]:
    """Return a and b of the network for so many samples: a = ceil(sqrt(n)), b = ceil(n / a)."""
    a = math.isqrt(num_samples - 1) + 1
    return np.uint64(a), np.uint64(-(-num_samples // a))


def network(
    x: Words,
    sizes: tuple[np.uint64, np.uint64] | Words,
    rounds: Words,
    *,
    backward: bool,
) -> None:
    """Replace each number of [0, a * b) in `x` by its image in a Feistel network on Z_a x Z_b.

    Args:
        x: uint64[n], changed in place.
        sizes: a and b, of all numbers; or uint64[2, n].
        rounds: The key of each round: uint64[rounds], or uint64[rounds, n] for each number.
        backward: True to undo the network.
    """
    high = x // sizes[1]
    right = x - high * sizes[1]
    added = np.empty_like(x)
    scratch = np.empty_like(x)
    halves = ((high, right, sizes[0]), (right, high, sizes[1]))
    for number in range(len(rounds))[:: -1 if backward else 1]:
        half, other, size = halves[number % 2]
        hash_into(other, rounds[number], added, scratch)
        # Into [0, size), size <= 2^32, by the high half of a product (Lemire 2019).
        added >>= _HALF
        added *= size
        added >>= _HALF
        if backward:
            np.subtract(size, added, out=added)
        half += added
        # The difference wraps round to a huge number if half < size.
        np.subtract(half, size, out=scratch)
        np.minimum(half, scratch, out=half)
    np.multiply(high, sizes[1], out=x)
    x += right


def hash_into(x: Words, key: np.uint64 | Words, out: Words, scratch: Words) -> None:
    """Write a 64-bit hash of each number into `out`; its high bits are the well-mixed ones."""
    np.bitwise_xor(x, key, out=out)
    out *= _MULTIPLY
    np.right_shift(out, _HALF, out=scratch)
    out ^= scratch
    out *= _FINISH


def walk(
    values: Indices, limits: np.uint64 | Words, step: Callable[[Words, Any], None]
) -> Indices:
    """Apply a network to each value, and again to each result that is not below its limit.

    Args:
        values: int64, of any shape; they stay as they are.
        limits: One limit for all values, or uint64[n].
        step: Replaces some values, given as an array and as their numbers, by their images.
    """
    out = np.array(values, dtype=np.uint64, order="C")
    flat = out.reshape(-1)
    limits = np.broadcast_to(limits, flat.shape)
    # In blocks, so that all of a step stays in the cache.
    for start in range(0, flat.size, BLOCK):
        step(flat[start : start + BLOCK], slice(start, start + BLOCK))
    outside = np.flatnonzero(flat >= limits)
    while outside.size:
        again = flat[outside]
        step(again, outside)
        flat[outside] = again
        outside = outside[again >= limits[outside]]
    return out.view(np.int64)


def draw_tables(keys: Words, length: int) -> npt.NDArray[np.intp]:
    """Return a table of `length` entries, at most 4096, for each row of `keys`: uint64[n, 3 or more]."""
    # Sorting by independent 64-bit hashes gives every order the same chance.
    hashes = np.tile(np.arange(length, dtype=np.uint64), (len(keys), 1))
    scratch = np.empty_like(hashes)
    for number in range(3):
        hash_into(hashes, keys[:, number, None], hashes, scratch)
    return np.argsort(hashes, axis=1, kind="stable")


@lru_cache(maxsize=8)
def permutation(num_samples: int, purpose: str, seed: int, epoch: int) -> Permutation:
    """Return the permutation of an epoch: a function of (purpose, seed, epoch) and the length alone."""
    return Permutation(num_samples, derive_key(purpose, seed, epoch, size=64))


# Many permutations at once


@lru_cache(maxsize=4096)
def _small_table(key: bytes, length: int) -> npt.NDArray[np.int16]:
    table: npt.NDArray[np.int16] = draw_tables(_words(key), length)[0].astype(np.int16)
    return table


class SourcePermutations:
    """The permutations of the epochs of some sources, evaluated together.

    Entry by entry, the result is that of `Permutation(length, key)`. With a thousand sources, a batch has a few samples
    of each, and numpy takes longer to begin on an array than to compute a few samples.
    """

    def __init__(self, lengths: Indices, key_of: Callable[[int, int], bytes]) -> None:
        """Set up; nothing is computed yet.

        Args:
            lengths: int64[sources], each at most 2^52.
            key_of: Returns the key of (source, epoch), 64 bytes.
        """
        self._lengths = lengths
        self._key_of = key_of
        sides = np.sqrt(lengths - 1).astype(np.int64) + 1
        self._sizes = np.array([sides, -(-lengths // sides)], np.uint64)
        """a and b of the network of each source; see `network_sizes`."""
        # Replaced as one value, since threads share it.
        self._newest = (
            np.full(len(lengths), -1),
            np.zeros((ROUNDS, len(lengths)), np.uint64),
        )
        """The newest epoch of each source, and the round keys of the network in it."""

    def __call__(self, sources: Indices, epochs: Indices, places: Indices) -> Indices:
        """Return the sample at each place: int64, as many as there are places.

        Args:
            sources: int64, the source of each.
            epochs: int64, the epoch of the source.
            places: int64, the place in it.
        """
        samples = np.empty_like(places)
        is_small = (self._lengths <= TABLE_MAX)[sources]
        for compute, chosen in ((self._look_up, is_small), (self._walk, ~is_small)):
            if chosen.size and chosen.all():
                return compute(sources, epochs, places)
            if chosen.any():
                samples[chosen] = compute(
                    sources[chosen], epochs[chosen], places[chosen]
                )
        return samples

    def _look_up(self, sources: Indices, epochs: Indices, places: Indices) -> Indices:
        """Return the samples of sources that have tables."""
        owners, _, numbers, keys = self._keys(sources, epochs)
        lengths = self._lengths[owners]
        tables = list(map(_small_table, keys, lengths.tolist()))
        starts = np.cumsum(lengths) - lengths
        entries = np.concatenate(tables)[starts[numbers] + places]
        samples: Indices = entries.astype(np.int64)
        return samples

    def _walk(self, sources: Indices, epochs: Indices, places: Indices) -> Indices:
        """Return the samples of sources that have networks."""
        known_epochs, rounds = self._newest
        columns = sources.copy()
        is_new = epochs != known_epochs[sources]
        if is_new.any():
            owners, new_epochs, numbers, keys = self._keys(
                sources[is_new], epochs[is_new]
            )
            num_sources = len(known_epochs)
            columns[is_new] = num_sources + numbers
            new_rounds = _words(b"".join(keys)).T[:ROUNDS]
            rounds = np.concatenate([rounds, new_rounds], axis=1)
            newest = np.arange(num_sources)
            newest[owners] = num_sources + np.arange(len(owners))
            known_epochs = known_epochs.copy()
            known_epochs[owners] = new_epochs
            self._newest = (known_epochs, rounds[:, newest])

        def step(x: Words, chosen: Any) -> None:
            sizes = self._sizes.take(sources[chosen], axis=1)
            network(x, sizes, rounds.take(columns[chosen], axis=1), backward=False)

        return walk(places, self._lengths.astype(np.uint64)[sources], step)

    def _keys(
        self, sources: Indices, epochs: Indices
    ) -> tuple[Indices, Indices, Indices, list[bytes]]:
        """Return each (source, epoch) once: the sources, the epochs, the number of each entry's pair, the keys."""
        num_sources = len(self._lengths)
        pairs, numbers = np.unique(epochs * num_sources + sources, return_inverse=True)
        epoch_of, source_of = np.divmod(pairs, num_sources)
        keys = list(map(self._key_of, source_of.tolist(), epoch_of.tolist()))
        return source_of, epoch_of, numbers, keys
