"""What do all adapters have in common?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from paddle_shard.errors import BatchSizeError, MissingDependencyError, SplitError, StateError
from paddle_shard.plan.partition import nearest_multiples
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.sources.foreign import Share

VERSION = 1
"""Version of the states that adapters save."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra to install.

    Raises:
        MissingDependencyError: A package that is imported in the `with` block is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name or error} cannot be imported ({error}). Install it with: pip install 'paddle_shard[{extra}]'."
        ) from error


def local_rows(batch_size: int, share: Share) -> int:
    """Return the rows that one data rank reads of a global batch.

    Raises:
        BatchSizeError: The batch size is not an int >= 1, or the data ranks do not divide it.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise BatchSizeError(f"batch_size must be an int >= 1, got {batch_size!r}.")
    if batch_size % share.num_shards:
        near = " or ".join(map(str, nearest_multiples(batch_size, share.num_shards)))
        raise BatchSizeError(
            f"batch_size={batch_size} is the global batch, which {share.num_shards} data ranks do not divide. "
            f"Nearest sizes that work: {near}."
        )
    return batch_size // share.num_shards


def seed_of(share: Share, *purpose: Any, bits: int = 31) -> int:
    """Return a seed of `bits` bits for this epoch, the same on every data rank."""
    return derive_seed("adapter", share.seed, share.epoch, *purpose) >> (64 - bits)


def check_share(found: Mapping[str, Any], share: Share, what: str, fix: str) -> None:
    """Check that an object of a library has the data rank and the number of data ranks of a share.

    Args:
        found: Exactly two entries, the library's name -> the object's value: first the data rank, then the number of
            data ranks.
        share: The share that the values must agree with.
        what: The object that has the values, for the message.
        fix: What to write instead.

    Raises:
        SplitError: The values differ from the share's.
    """
    (rank, has_rank), (count, has_count) = found.items()
    if (has_rank, has_count) != (share.shard, share.num_shards):
        raise SplitError(
            f"{what} has {rank}={has_rank} and {count}={has_count}, but this process is data rank {share.shard} of "
            f"{share.num_shards} (which is not the global rank, nor the world size). {fix}"
        )


class WatchedShare:
    """A `Share` that records which of its attributes were read."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._share, name)
        self.asked.add(name)
        return value


def build_watched(build: Callable[[Any], Any], share: Share, library: str) -> Any:
    """Return what a user's function builds for a share.

    Raises:
        SplitError: The function has not read both `shard` and `num_shards`, so every data rank would read all the data.
    """
    watched = WatchedShare(share)
    built = build(watched)
    if share.num_shards > 1 and not {"shard", "num_shards"} <= watched.asked:
        raise SplitError(
            f"{library}: the function that builds the loader has looked at neither share.shard nor share.num_shards, "
            f"or at one only, so that each of the {share.num_shards} data ranks would read all of the data. Split it "
            "there, in the function itself, not later in a worker."
        )
    return built


def opened(state: Any, library: str, **expected: Any) -> Mapping[str, Any]:
    """Check a state that `sealed` made, and return it.

    Raises:
        StateError: The state is of another library, another version, or other data.
    """
    if not isinstance(state, Mapping) or state.get("adapter") != library or state.get("version") != VERSION:
        shown = {key: state.get(key) for key in ("adapter", "version")} if isinstance(state, Mapping) else state
        raise StateError(f"state: {shown!r} is no state of the {library} adapter in version {VERSION}.")
    for name, value in expected.items():
        if state.get(name) != value:
            raise StateError(
                f"state: {name} was {state.get(name)!r} when it was saved, and is {value!r} now. Go on with the same "
                "data and batch size, or begin the epoch anew."
            )
    return state


def sealed(adapter: str, **values: Any) -> dict[str, Any]:
    """Return values as a state that `opened` can check."""
    return {"adapter": adapter, "version": VERSION, **values}


def stacked(samples: Sequence[Any]) -> Any:
    """Return a batch of samples of one structure: arrays and numbers stacked, other leaves as a list."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        return [stacked([sample[i] for sample in samples]) for i in range(len(first))]
    if isinstance(first, np.ndarray | np.generic | bool | int | float):
        return np.stack(samples)
    return list(samples)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, and restore the old ones."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
