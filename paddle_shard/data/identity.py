"""Data identity: what a data set holds, as far as a few looks tell, for other ranks and later runs to compare.

An identity is a dict of texts that JSON can hold: what is known, such as "file a.csv", and its value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paddle_shard.core.checks import length_or_none
from paddle_shard.plan.seeding import derive_seed

_MOST_NAMES = 8
"""Files that an identity names; a digest stands for the others."""
_OF_A_COPY = ("version of ", "digest of ")
"""How the names begin whose values differ between copies of the same files."""

Identity = Mapping[str, str]
Digests = Callable[[Sequence[Any]], Sequence[int]]
"""Returns a digest of each of some samples; 0 if it is not known."""


def identity_of_files(files: Iterable[tuple[str, int, str]]) -> Identity:
    """Return the identity of a stream; empty if it has no files.

    Args:
        files: (name, bytes, version tag) of each of its files.
    """
    entries = list(files)
    if not entries:
        return {}
    identity = {"number of files": str(len(entries))}
    for name, size, tag in entries[:_MOST_NAMES]:
        identity[f"file {name}"] = f"{size} bytes"
        identity[f"version of file {name}"] = tag
    digest = hashlib.blake2b(repr(entries).encode(), digest_size=8)
    return {**identity, "digest of all files": digest.hexdigest()}


def identity_of_samples(dataset: Any, digests: Digests) -> Identity:
    """Return the identity of data with an index: its length, and digests of two samples that the length chooses.

    Args:
        dataset: The data set.
        digests: Reads samples and returns a digest of each.
    """
    length = length_or_none(dataset)
    if not length:
        return {}
    identity = {"number of samples": str(length)}
    chosen = [derive_seed("identity", number) % length for number in range(2)]
    name_of = getattr(dataset, "sample_name", repr)
    for sample, digest in zip(chosen, digests(chosen), strict=True):
        if digest:
            identity[f"sample {name_of(sample)}"] = f"digest {digest:08x}"
    return identity


def identity_of_copies(identity: Identity) -> Identity:
    """Return the part of an identity that is the same for copies of files on several hosts."""
    return {
        name: value
        for name, value in identity.items()
        if not name.startswith(_OF_A_COPY)
    }


def describe_changes(saved: Identity, now: Identity) -> str:
    """Return in words how data differs from what a saved state knows of it; empty if nothing is known to differ."""
    for name, value in now.items():
        if saved.get(name, value) != value:
            return f"{name} was {saved[name]}, and is {value} now"
    return ""
