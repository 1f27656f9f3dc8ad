"""Data identity: what a data set holds, as far as a few looks tell, for other ranks and later runs to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddle_shard.core.checks import length_or_none
from paddle_shard.loader.source import Source
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.state import LoaderState

_MOST_NAMES = 8
"""Files that an identity names; a digest stands for the others."""

Digests = Callable[[Sequence[Any]], Sequence[int]]
"""Returns a digest of each of some samples; 0 if it is not known."""


def identity_of(source: Source, dataset: Any, digests: Digests | None) -> dict[str, Any]:
    """Return what the data holds: JSON-able, the same on all ranks and in all runs that have the same data.

    Args:
        source: The order of the loader.
        dataset: Its data set.
        digests: Reads samples; None: this rank does not read any.

    Returns:
        "length": samples of data with an index. "files": names, sizes and version tags of a stream's files, and a
        digest of all of them. "samples": [name, digest] of two samples that the seed chooses.
    """
    if source.stream is not None:
        files = [list(entry) for entry in source.stream.stage.source.files_identity()]
        all_files = hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()
        return {"files": {"num": len(files), "digest": all_files, "first": files[:_MOST_NAMES]}} if files else {}
    found: dict[str, Any] = {"length": length_or_none(dataset)}
    chosen = _chosen_samples(source, found["length"])
    if digests is not None and chosen:
        name_of = getattr(dataset, "sample_name", repr)
        known = zip(chosen, digests(chosen), strict=True)
        found["samples"] = [[str(name_of(sample)), digest] for sample, digest in known if digest]
    return found


def _chosen_samples(source: Source, length: int | None) -> list[Any]:
    """Return two samples that do not depend on the mesh or the batch size."""
    plan = source.batches.plan_of(LoaderState())
    if plan is not None:
        places = [derive_seed("identity", number) % plan.num_samples for number in range(2)]
        found = [plan.samples(epoch=0, first=place, end=place + 1) for place in places]
        return [int(sample) for samples in found for sample in samples]  # Paddle's order may pad at a place
    if not length:
        return []
    return [derive_seed("identity", number) % length for number in range(2)]


def in_words(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the samples of an identity as the texts that the ranks compare: name -> value.

    Files are compared by their names and counts; copies on several hosts have version tags of their own.
    """
    return {f"sample {name}": f"digest {digest:08x}" for name, digest in identity.get("samples", ())}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words how data differs from what a saved state knows of it; empty if nothing is known to differ."""
    if None not in (saved.get("length"), now.get("length")) and saved["length"] != now["length"]:
        return f"it had {saved['length']} samples, and has {now['length']} now"
    none: dict[str, Any] = {"num": 0, "digest": "", "first": []}
    was, is_now = saved.get("files", none), now.get("files", none)
    if was["num"] != is_now["num"]:
        return f"it was {was['num']} files, and is {is_now['num']} now"
    if was["digest"] != is_now["digest"]:
        changed = [entry for entry in is_now["first"] if list(entry) not in [list(one) for one in was["first"]]]
        named = [f"{name} ({size} bytes, version {tag})" for name, size, tag in changed[:1]]
        return f"{' '.join(named) or 'one of its files'} is another than it was"
    digests = dict(map(tuple, saved.get("samples", ())))
    names = [name for name, digest in now.get("samples", ()) if digests.get(name, digest) != digest]
    return f"{' and '.join(f'sample {name}' for name in sorted(names))} held something else" if names else ""
