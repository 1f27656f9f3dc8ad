"""What the recipes have in common: the rows, seeds and checks of the share that another library reads.

Copy this file beside the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paddle_shard.checks import check_count
from paddle_shard.errors import SplitError, StateError
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.sources.external import ShardOptions


def local_rows(batch_size: int, share: ShardOptions) -> int:
    """Return the rows that one data rank reads of a global batch.

    Raises:
        ArgumentError: The batch size is not an int >= 1.
        BatchSizeError: The data ranks do not divide it.
    """
    check_count("batch_size", batch_size)
    check_batch_size(batch_size, share.num_shards)
    return batch_size // share.num_shards


def seed_of(share: ShardOptions, *purpose: Any, bits: int = 31) -> int:
    """Return a seed of `bits` bits for this epoch, the same on every data rank."""
    return derive_seed("adapter", share.seed, share.epoch, *purpose) >> (64 - bits)


def check_share(found: Mapping[str, Any], share: ShardOptions, what: str, fix: str) -> None:
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


def check_same(share: ShardOptions, **values: Any) -> None:
    """Check that what a saved state depends on is the same as when it was saved.

    Args:
        share: The share; nothing is checked if it has no state.
        values: Values that the saved state has under the same names.

    Raises:
        StateError: One differs.
    """
    for name, value in values.items():
        if share.state is not None and share.state.get(name) != value:
            raise StateError(
                f"state: {name} was {share.state.get(name)!r} when it was saved, and is {value!r} now. Go on with the "
                "same data and batch size, or begin the epoch anew."
            )


def build_watched(build: Callable[[Any], Any], share: ShardOptions, library: str) -> Any:
    """Return what a user's function builds for a share.

    Raises:
        SplitError: The function has not read both `shard` and `num_shards`, so every data rank would read all the data.
    """
    asked: set[str] = set()

    class Watched:
        """The share, which records what the function reads of it."""

        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(share, name)

    built = build(Watched())
    if share.num_shards > 1 and not {"shard", "num_shards"} <= asked:
        raise SplitError(
            f"{library}: the function that builds the loader has looked at neither share.shard nor share.num_shards, "
            f"or at one only, so that each of the {share.num_shards} data ranks would read all of the data. Split it "
            "there, in the function itself, not later in a worker."
        )
    return built
