"""Which sample is at a position of a shuffled epoch, computed without a table of all samples?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.seeding import derive_key

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 6
"""Feistel rounds. With 3 the quality tests fail at every length, with 4 and more they pass from 1,000 up."""
TABLE_MAX = 4096
"""Up to this length a table is drawn: small networks are visibly not uniform."""
MAX_SAMPLES = 1 << 62
BLOCK = 4096
"""Positions that are computed at once, even if only a few are needed."""
VERSION = 1
"""Version of the orders that this package computes; a saved run resumes only with the same version."""

_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Permutation:
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
        self.num_samples = num_samples
        self._keys = np.frombuffer(key, dtype="<u8").astype(np.uint64)
        self._table = self._inverse_table = None
        if num_samples <= TABLE_MAX:
            self._table = self._draw_table()
            self._inverse_table = np.argsort(self._table, kind="stable").astype(np.int64)
        self._sizes = network_sizes(num_samples)
        self._blocks = Blockwise(self, num_samples)

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position: int64, same shape."""
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions, self._forward)

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample: int64, same shape."""
        if self._inverse_table is not None:
            return self._inverse_table[samples]
        return self._walk(samples, self._backward)

    def between(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop); a few samples come from a cached block."""
        if self._table is not None:
            return self(np.arange(start, stop, dtype=np.int64))
        return self._blocks(start, stop)

    def _draw_table(self) -> Indices:
        # Sorting by independent 64-bit hashes gives every order the same chance.
        hashes, scratch = np.arange(self.num_samples, dtype=np.uint64), np.empty(self.num_samples, np.uint64)
        for key in self._keys[:3]:
            hash_into(hashes, key, hashes, scratch)
        return np.argsort(hashes, kind="stable").astype(np.int64)

    def _walk(self, values: Indices, step: Callable[[Words], None]) -> Indices:
        """Apply a step to each value, and again to each result outside [0, n)."""
        out = np.array(values, dtype=np.uint64, order="C")
        flat, limit = out.reshape(-1), np.uint64(self.num_samples)
        for start in range(0, flat.size, BLOCK):  # so that all of a step stays in the cache
            step(flat[start : start + BLOCK])
        outside = np.flatnonzero(flat >= limit)
        while outside.size:
            again = flat[outside]
            step(again)
            flat[outside] = again
            outside = outside[again >= limit]
        return out.view(np.int64)

    def _forward(self, x: Words) -> None:
        """Replace the numbers of [0, a * b) in x by their images."""
        network(x, self._sizes, [*enumerate(self._keys[:ROUNDS])], backward=False)

    def _backward(self, x: Words) -> None:
        """Undo `_forward`."""
        network(x, self._sizes, [*enumerate(self._keys[:ROUNDS])][::-1], backward=True)


class Blockwise:
    """Short stretches of an order, cut from the newest block of 4096 positions that was computed."""

    def __init__(self, order: Callable[[Indices], Indices], length: int) -> None:
        """Compute nothing yet.

        Args:
            order: Returns the sample at each position.
            length: Number of positions.
        """
        self._order, self._length = order, length
        self._start, self._block = -1, np.empty(0, np.int64)

    def __call__(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop)."""
        if stop - start >= BLOCK:
            return self._order(np.arange(start, stop, dtype=np.int64))
        parts = []
        while start < stop:
            block_start = start - start % BLOCK
            if block_start != self._start:
                end = min(block_start + BLOCK, self._length)
                self._block = self._order(np.arange(block_start, end, dtype=np.int64))
                self._start = block_start
            upto = min(stop, block_start + BLOCK)
            parts.append(self._block[start - block_start : upto - block_start])
            start = upto
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def network_sizes(num_samples: int) -> tuple[np.uint64, np.uint64]:
    """Return a and b of the network for so many samples: a = ceil(sqrt(n)), b = ceil(n / a)."""
    a = math.isqrt(num_samples - 1) + 1
    return np.uint64(a), np.uint64(-(-num_samples // a))


def network(
    x: Words,
    sizes: tuple[np.uint64 | Words, np.uint64 | Words],
    rounds: Sequence[tuple[int, np.uint64 | Words]],
    *,
    backward: bool,
) -> None:
    """Replace each number of [0, a * b) in `x` by its image in a Feistel network on Z_a x Z_b.

    Args:
        x: uint64[n], changed in place.
        sizes: a and b, of all numbers or uint64[n].
        rounds: (number of the round, its key or uint64[n]), in the order in which they are applied.
        backward: True to undo the network; the rounds are then given in reverse.
    """
    left = x // sizes[1]
    right = x - left * sizes[1]
    added, scratch = np.empty_like(x), np.empty_like(x)
    for number, key in rounds:
        half, other, size = (left, right, sizes[0]) if number % 2 == 0 else (right, left, sizes[1])
        hash_into(other, key, added, scratch)
        # Into [0, size), size <= 2^32, by the high half of a product (Lemire 2019).
        added >>= _HALF
        added *= size
        added >>= _HALF
        if backward:
            np.subtract(size, added, out=added)
        half += added
        np.subtract(half, size, out=scratch)  # wraps round to a huge number if half < size
        np.minimum(half, scratch, out=half)
    np.multiply(left, sizes[1], out=x)
    x += right


def hash_into(x: Words, key: np.uint64 | Words, out: Words, scratch: Words) -> None:
    """Write a 64-bit hash of each number into `out`; its high bits are the well-mixed ones."""
    np.bitwise_xor(x, key, out=out)
    out *= _MULTIPLY
    np.right_shift(out, _HALF, out=scratch)
    out ^= scratch
    out *= _FINISH


@lru_cache(maxsize=8)
def permutation(num_samples: int, purpose: str, seed: int, epoch: int) -> Permutation:
    """Return the permutation of an epoch: a function of (purpose, seed, epoch) and the length alone."""
    return Permutation(num_samples, derive_key(purpose, seed, epoch, size=64))
