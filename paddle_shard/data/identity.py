"""Data identity: what a data set holds, as far as a few looks tell, for other ranks and later runs to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paddle_shard.core.checks import length_or_none
from paddle_shard.plan.seeding import derive_seed

_MOST_NAMES = 8
"""Files that an identity names; a digest stands for the others."""

Digests = Callable[[Sequence[Any]], Sequence[int]]
"""Returns a digest of each of some samples; 0 if it is not known."""


def identity_of_files(files: Iterable[tuple[str, int, str]]) -> dict[str, Any]:
    """Return the identity of a stream: JSON-able.

    Args:
        files: (name, bytes, version tag) of each of its files.

    Returns:
        "files": their number, a digest of all of them, and the first ones; empty if there are none.
    """
    entries = [list(entry) for entry in files]
    if not entries:
        return {}
    digest = hashlib.blake2b(repr(entries).encode(), digest_size=8).hexdigest()
    first = entries[:_MOST_NAMES]
    return {"files": {"num": len(entries), "digest": digest, "first": first}}


def identity_of_samples(
    dataset: Any, digests: Digests | None
) -> dict[str, Any]:
    """Return the identity of data with an index: JSON-able.

    Args:
        dataset: The data set.
        digests: Reads samples and returns a digest of each; None: only the length is known.

    Returns:
        "length": the number of samples. "samples": [name, digest] of two samples that the length chooses.
    """
    length = length_or_none(dataset)
    identity: dict[str, Any] = {"length": length}
    if digests is not None and length:
        chosen = [
            derive_seed("identity", number) % length for number in range(2)
        ]
        name_of = getattr(dataset, "sample_name", repr)
        identity["samples"] = [
            [str(name_of(sample)), digest]
            for sample, digest in zip(chosen, digests(chosen), strict=True)
            if digest
        ]
    return identity


def in_words(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return an identity as the texts that the ranks compare: name -> value.

    Copies of files on several hosts have version tags of their own, which are left out.
    """
    facts = {
        f"sample {name}": f"digest {digest:08x}"
        for name, digest in identity.get("samples", ())
    }
    if "files" in identity:
        files = identity["files"]
        facts["number of files"] = str(files["num"])
        facts |= {
            f"file {name}": f"{size} bytes" for name, size, _ in files["first"]
        }
    return facts


def describe_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words how data differs from what a saved state knows of it; empty if nothing is known to differ."""
    before = _facts(saved)
    for name, value in _facts(now).items():
        if before.get(name, value) != value:
            return f"{name} was {before[name]}, and is {value} now"
    return ""


def _facts(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return all that an identity knows, in words: name -> value."""
    facts = in_words(identity)
    if "files" in identity:
        files = identity["files"]
        facts |= {
            f"file {name}": f"{size} bytes, version {tag}"
            for name, size, tag in files["first"]
        }
        facts["digest of all files"] = files["digest"]
    if identity.get("length") is not None:
        facts["number of samples"] = str(identity["length"])
    return facts
