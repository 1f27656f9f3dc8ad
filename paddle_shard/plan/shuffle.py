"""Which sample stands at a position of a shuffled epoch, without a table of them all?"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.seeding import derive_key

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 8
"""Feistel rounds; 6 is the least that passed our quality tests, and two more cost little."""
TABLE_MAX = 4096
"""Up to this length a table is drawn: small networks are visibly not uniform."""
MAX_SAMPLES = 1 << 62
BLOCK = 4096
"""Positions that are computed at once when a few are asked for."""

_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Permutation:
    """A keyed bijection of [0, n): an alternating Feistel network on Z_a x Z_b, walked until it lands inside.

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
        self._a = math.isqrt(num_samples - 1) + 1
        self._b = -(-num_samples // self._a)
        self._block_start, self._block = -1, np.empty(0, np.int64)

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
        """Return the samples at positions [start, stop), by way of a cached block where they are few."""
        if self._table is not None or stop - start >= BLOCK:
            return self(np.arange(start, stop, dtype=np.int64))
        parts = []
        while start < stop:
            block_start = start - start % BLOCK
            if block_start != self._block_start:
                end = min(block_start + BLOCK, self.num_samples)
                block = self(np.arange(block_start, end, dtype=np.int64))
                self._block_start, self._block = block_start, block
            upto = min(stop, block_start + BLOCK)
            parts.append(self._block[start - block_start : upto - block_start])
            start = upto
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _draw_table(self) -> Indices:
        # Sorting by independent 64-bit hashes gives every order the same chance.
        counters = np.arange(self.num_samples, dtype=np.uint64)
        for key in self._keys[:4]:
            counters = _hash(counters, key)
        return np.argsort(counters, kind="stable").astype(np.int64)

    def _walk(self, values: Indices, step: Callable[[Words], Words]) -> Indices:
        out = step(np.asarray(values).astype(np.uint64))
        limit = np.uint64(self.num_samples)
        outside = np.flatnonzero(out >= limit)
        flat = out.reshape(-1)
        while outside.size:
            flat[outside] = step(flat[outside])
            outside = outside[flat[outside] >= limit]
        return out.astype(np.int64)

    def _forward(self, x: Words) -> Words:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = x // b, x % b
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = _add(left, _scaled(right, key, a), a)
            else:
                right = _add(right, _scaled(left, key, b), b)
        return left * b + right

    def _backward(self, x: Words) -> Words:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = x // b, x % b
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2 == 0:
                left = _add(left, a - _scaled(right, key, a), a)
            else:
                right = _add(right, b - _scaled(left, key, b), b)
        return left * b + right


def _hash(x: Words, key: np.uint64) -> Words:
    h = (x ^ key) * _MULTIPLY
    h ^= h >> _HALF
    h *= _FINISH
    h ^= h >> _HALF
    h *= _FINISH
    return h


def _scaled(x: Words, key: np.uint64, size: np.uint64) -> Words:
    """Hash x into [0, size), size <= 2^32, by the high half of a product (Lemire 2019)."""
    h = _hash(x, key)
    h >>= _HALF
    h *= size
    h >>= _HALF
    return h


def _add(x: Words, y: Words, size: np.uint64) -> Words:
    """(x + y) mod size for x < size and y <= size."""
    total = x + y
    return np.where(total >= size, total - size, total)


@lru_cache(maxsize=8)
def permutation(num_samples: int, purpose: str, seed: int, epoch: int) -> Permutation:
    """Return the permutation of an epoch: a function of (purpose, seed, epoch) and the length alone."""
    return Permutation(num_samples, derive_key(purpose, seed, epoch, size=64))
