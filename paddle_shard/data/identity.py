"""Data identity: what a data set holds, as far as a few looks tell, for other ranks and later runs to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paddle_shard.core.checks import length_or_none
from paddle_shard.plan.seeding import derive_seed

_MOST_NAMES = 8
"""Files that an identity names; a digest stands for the others."""

_NO_FILES: dict[str, Any] = {"num": 0, "digest": "", "first": []}

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


def identity_of_samples(dataset: Any, digests: Digests | None) -> dict[str, Any]:
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
        chosen = [derive_seed("identity", number) % length for number in range(2)]
        name_of = getattr(dataset, "sample_name", repr)
        identity["samples"] = [
            [str(name_of(sample)), digest]
            for sample, digest in zip(chosen, digests(chosen), strict=True)
            if digest
        ]
    return identity


def in_words(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the samples of an identity as the texts that the ranks compare: name -> value.

    Files are compared by their names and counts; copies on several hosts have version tags of their own.
    """
    return {
        f"sample {name}": f"digest {digest:08x}"
        for name, digest in identity.get("samples", ())
    }


def describe_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words how data differs from what a saved state knows of it; empty if nothing is known to differ."""
    lengths = [saved.get("length"), now.get("length")]
    if None not in lengths and lengths[0] != lengths[1]:
        return f"it had {lengths[0]} samples, and has {lengths[1]} now"
    before = saved.get("files", _NO_FILES)
    files = now.get("files", _NO_FILES)
    if before["num"] != files["num"]:
        return f"it was {before['num']} files, and is {files['num']} now"
    if before["digest"] != files["digest"]:
        known = list(map(list, before["first"]))
        for name, size, tag in files["first"]:
            if [name, size, tag] not in known:
                return f"{name} ({size} bytes, version {tag}) is another than it was"
        return "one of its files is another than it was"
    digests = dict(map(tuple, saved.get("samples", ())))
    names = [
        f"sample {name}"
        for name, digest in sorted(now.get("samples", ()))
        if digests.get(name, digest) != digest
    ]
    return f"{' and '.join(names)} held something else" if names else ""
