"""Keyed permutations of [0, n) that are computed without a table of all samples."""

from __future__ import annotations

import math
from functools import lru_cache

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

# Constants of a 64-bit hash: multiply, shift, multiply.
MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
FINISH = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)


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
        super().__init__(num_samples)
        words = np.frombuffer(key, "<u8").astype(np.uint64)
        self._rounds = words[:ROUNDS]
        side = math.isqrt(num_samples - 1) + 1
        self._sizes = (np.uint64(side), np.uint64(-(-num_samples // side)))
        self._table = None
        if num_samples <= TABLE_MAX:
            self._table = draw_table(words, num_samples)

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position: int64, same shape."""
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions, backward=False)

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample: int64, same shape."""
        if self._table is not None:
            return np.argsort(self._table)[samples]
        return self._walk(samples, backward=True)

    def _walk(self, values: Indices, *, backward: bool) -> Indices:
        """Apply the network to each value, and again to each result that is outside."""
        images = np.array(values, dtype=np.uint64, order="C")
        flat = images.reshape(-1)
        # In blocks, so that all of a step stays in the cache.
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK]
            network(block, self._sizes, self._rounds, backward=backward)
        num_samples = np.uint64(self.length)
        outside = np.flatnonzero(flat >= num_samples)
        while outside.size:
            again = flat[outside]
            network(again, self._sizes, self._rounds, backward=backward)
            flat[outside] = again
            outside = outside[again >= num_samples]
        return images.view(np.int64)


def network(
    x: Words,
    sizes: tuple[np.uint64, np.uint64],
    rounds: Words,
    *,
    backward: bool,
) -> None:
    """Replace each number of [0, a * b) in `x` by its image in a Feistel network on Z_a x Z_b.

    Args:
        x: uint64[n], changed in place.
        sizes: a and b.
        rounds: The key of each round: uint64[rounds].
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
        added >>= HALF
        added *= size
        added >>= HALF
        if backward:
            np.subtract(size, added, out=added)
        half += added
        # The difference wraps round to a huge number if half < size.
        np.subtract(half, size, out=scratch)
        np.minimum(half, scratch, out=half)
    np.multiply(high, sizes[1], out=x)
    x += right


def hash_into(x: Words, key: np.uint64, out: Words, scratch: Words) -> None:
    """Write a 64-bit hash of each number into `out`; its high bits are the well-mixed ones."""
    np.bitwise_xor(x, key, out=out)
    out *= MULTIPLY
    np.right_shift(out, HALF, out=scratch)
    out ^= scratch
    out *= FINISH


def draw_table(keys: Words, length: int) -> Indices:
    """Return a permutation of [0, length), at most 4096, as a table; `keys` has 3 words or more."""
    # Sorting by independent 64-bit hashes gives every order the same chance.
    hashes = np.arange(length, dtype=np.uint64)
    scratch = np.empty_like(hashes)
    for key in keys[:3]:
        hash_into(hashes, key, hashes, scratch)
    return np.argsort(hashes, kind="stable")


@lru_cache(maxsize=1024)
def permutation(num_samples: int, *purpose: str | int) -> Permutation:
    """Return the permutation for a purpose: a function of it and the length alone.

    It is kept, with its table if it is short: 32 KB at most.

    Args:
        num_samples: Its length.
        purpose: What is permuted, such as "order", a seed and an epoch.
    """
    return Permutation(num_samples, derive_key(*purpose, size=64))
