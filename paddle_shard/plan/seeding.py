"""Keys and seeds derived from others: independent of each other, and the same on every rank."""

from __future__ import annotations

import hashlib
from typing import Any

_MASK = (1 << 64) - 1


def derive_key(*parts: Any, size: int = 8) -> bytes:
    """Return `size` bytes that look random and depend on every part, but not on the machine (BLAKE2b).

    Args:
        parts: Strings, ints, or anything whose `repr` is stable; ("a", 1) and ("a1",) differ.
        size: Number of bytes, at most 64.
    """
    return hashlib.blake2b(repr(parts).encode(), digest_size=size).digest()


def derive_seed(*parts: Any) -> int:
    """Return a seed in [0, 2^64) that depends on every part; see `derive_key`."""
    return int.from_bytes(derive_key(*parts), "little")


def mix(key: int, value: int) -> int:
    """Return a 64-bit hash of a key and an index in about 0.5 us: splitmix64's finalizer.

    Examples:
        >>> mix(1, 2) != mix(2, 1)
        True
    """
    z = (key + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
