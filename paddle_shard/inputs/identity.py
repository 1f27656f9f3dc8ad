"""Data identity: what a data set holds, as far as a few looks tell, for other ranks and later runs to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddle_shard.checks import length_or_none
from paddle_shard.inputs.source import Source
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.state import LoaderState

_MOST_NAMES = 64
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
        return [int(plan.samples(epoch=0, first=place, end=place + 1)[0]) for place in places]
    if not length:
        return []
    return [derive_seed("identity", number) % length for number in range(2)]


def in_words(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return an identity as the texts that the ranks compare: name -> value."""
    words: dict[str, str] = {}
    for name, digest in identity.get("samples", ()):
        words[f"sample {name}"] = f"digest {digest:08x}"
    if "files" in identity:
        files = identity["files"]
        words["files"] = "\n".join(f"{name} ({size} bytes, {tag})" for name, size, tag in files["first"])
        words["all files"] = f"{files['num']} files, digest {files['digest']}"
    return words


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words how data differs from what a saved state knows of it; empty if nothing is known to differ."""
    if None not in (saved.get("length"), now.get("length")) and saved["length"] != now["length"]:
        return f"it had {saved['length']} samples, and has {now['length']} now"
    was, is_now = in_words(saved), in_words(now)
    if was.get("all files") != is_now.get("all files"):
        before = set(was.get("files", "").split("\n"))
        changed = [line for line in is_now.get("files", "").split("\n") if line not in before]
        named = f", such as {changed[0]}" if changed and changed[0] else ""
        return f"it was {was.get('all files', 'no files')}, and is {is_now.get('all files', 'no files')} now{named}"
    names = [name for name in was.keys() & is_now.keys() if name.startswith("sample ") and was[name] != is_now[name]]
    return f"{' and '.join(sorted(names))} held something else" if names else ""
