"""Reading a DataLoader over data with an index: its order, and whether it is split already."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import paddle.io

from paddle_shard.core.checks import length_or_none
from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.arrays import NO_REPEAT
from paddle_shard.data.costs import costs_of
from paddle_shard.data.generators import generators_of
from paddle_shard.data.mixture import DROPPED_OF_MIXTURE, Mixture
from paddle_shard.data.packed import Packed
from paddle_shard.data.samplers.plan_batches import PlanBatches
from paddle_shard.data.samplers.user_batches import (
    UserBatches,
    owner_of,
    samplers,
)
from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError
from paddle_shard.loader.arguments import reject
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.plan.balance import balanced_rows
from paddle_shard.plan.order import Ordering
from paddle_shard.plan.orders import (
    PaddleOrdering,
    PaddleSequential,
    Shuffle,
    find_ordering,
)
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan
from paddle_shard.plan.shuffle import MAX_SAMPLES
from paddle_shard.plan.step import BalanceRows
from paddle_shard.plan.tails import Tail, find_tail
from paddle_shard.reading.executor import on_cpu
from paddle_shard.reading.source import Source


def read_source(
    dataloader: paddle.io.DataLoader,
    placer: BatchPlacer,
    *,
    is_split: bool,
    shuffle: Shuffle | None,
    seed: int,
    tail: str | None,
    batch_size: Sequence[tuple[int, int]] | None,
    balance: Any,
) -> Source:
    """Return the order of a DataLoader of data with an index, checked against the meshes.

    Args:
        dataloader: The user's DataLoader.
        placer: Knows the layouts of all fields.
        is_split: True if the user says that the loader of each data rank has rows of its own.
        shuffle: See `shard_dataloader`, as for the arguments below.
        seed: Seed of the order.
        tail: The name of the remainder policy.
        batch_size: The schedule of sizes.
        balance: The cost of each sample.

    Raises:
        ArgumentTypeError: The data set has no length.
        ArgumentError: Something in the DataLoader cannot be honoured.
    """
    dataset = dataloader.dataset
    sampler = dataloader.batch_sampler
    num_data_ranks = placer.num_data_ranks
    policy = find_tail(
        tail, drop_last=bool(getattr(sampler, "drop_last", False))
    )
    accumulation = getattr(sampler, "_acc_steps", 1)
    num_parts = _num_parts(sampler)
    is_split = is_split or num_parts is not None
    planned = partial(_plan_batches, seed=seed, sizes=batch_size)
    source = partial(Source, accumulation=accumulation, tail=policy)

    if sampler is None and not is_split:
        reject(
            "each item is a whole batch, with the rows that the data set gives it.",
            batch_size=batch_size,
            balance=balance,
        )
        ordering = _ordering(dataset, sampler, shuffle)
        batches = planned(
            dataset, shuffle=ordering, batch_size=1, num_data_ranks=1
        )
        return source(batches=batches, batch_size=None, item_is_batch=True)

    is_paddle_split = type(sampler) is paddle.io.DistributedBatchSampler
    if is_split and not is_paddle_split:
        reject(
            "the data is split already, and balance= assigns the rows of global batches to data ranks by cost.",
            balance=balance,
        )
    balance_rows: BalanceRows | None = None
    if balance is not None:
        balance_rows = partial(
            balanced_rows,
            num_data_ranks=num_data_ranks,
            costs_of=costs_of(balance, dataset),
        )

    # An order of this library's: that of a plain DataLoader, or of Paddle's distributed sampler.
    if not is_split and is_plain(sampler):
        data = sampler.sampler.data_source
        ordering = _ordering(dataset, sampler, shuffle)
        rows = sampler.batch_size
    else:
        _reject_for_sampler(sampler, tail, batch_size, shuffle)
        if is_split:
            _check_split(sampler, placer)
            num_data_ranks = placer.row_layout.num_data_ranks
        else:
            _check_unsplit(sampler)
        source = partial(source, custom_sampler=sampler)
        if not is_paddle_split:
            user_batches = _user_batches(
                dataset,
                sampler,
                seed=seed,
                tail=policy,
                num_data_ranks=1 if is_split else num_data_ranks,
                accumulation=accumulation,
                balance_rows=balance_rows,
                own_data_rank=placer.row_layout.data_rank
                if is_split and placer.row_layout.on_mesh
                else None,
            )
            return source(
                batches=user_batches,
                batch_size=user_batches.nominal_size,
                split=is_split,
            )
        # The order over all ranks; each takes the slice that the sampler gives it.
        data = sampler.dataset
        ordering = _ordering_of_paddle(sampler)
        rows = sampler.batch_size * num_parts
    batches = planned(
        data,
        shuffle=ordering,
        tail=policy,
        batch_size=rows * accumulation,
        num_data_ranks=num_data_ranks,
        accumulation=accumulation,
    )
    batches.balance_rows = balance_rows
    return source(batches=batches, batch_size=batches.plan.batch_size)


def _num_parts(sampler: Any) -> int | None:
    """Return into how many parts a sampler splits the data; None if it reads all of it.

    PaddleNLP's distributed sampler is not Paddle's, but has the same attributes.
    """
    nranks = getattr(sampler, "nranks", 1)
    if isinstance(sampler, paddle.io.DistributedBatchSampler):
        return int(nranks)
    return nranks if isinstance(nranks, int) and nranks > 1 else None


def _ordering(dataset: Any, sampler: Any, shuffle: Shuffle | None) -> Ordering:
    """Return the order that the user asks for, or that of a plain DataLoader."""
    if shuffle is None:
        shuffle = (
            type(getattr(sampler, "sampler", None)) is paddle.io.RandomSampler
        )
    ordering = find_ordering(shuffle, dataset)
    return (
        dataset.ordering(ordering) if isinstance(dataset, Mixture) else ordering
    )


def _ordering_of_paddle(sampler: paddle.io.DistributedBatchSampler) -> Ordering:
    """Return the order of Paddle's distributed sampler, which has a seed of its own in versions after 3.3."""
    if not sampler.shuffle:
        return PaddleSequential()
    return PaddleOrdering(seed=getattr(sampler, "seed", 0) or 0)


def is_plain(batch_sampler: Any) -> bool:
    """Return whether a batch sampler is what `DataLoader(batch_size=, shuffle=)` makes."""
    if type(batch_sampler) is not paddle.io.BatchSampler:
        return False
    sampler: Any = batch_sampler.sampler
    if type(sampler) is paddle.io.RandomSampler:
        user_options = (
            sampler.replacement,
            sampler._num_samples,
            sampler.generator,
        )
        return user_options == (False, None, None)
    return type(sampler) is paddle.io.SequenceSampler


def _reject_for_sampler(
    sampler: Any, tail: str | None, batch_size: Any, shuffle: Shuffle | None
) -> None:
    """Reject arguments that a sampler which decides the order cannot have."""
    if sampler is None:
        raise ArgumentError(
            "is_dataset_splitted=True needs a DataLoader with a batch size, got one with batch_size=None. "
            "Leave is_dataset_splitted at False: each item is a global batch, of which each rank takes its rows."
        )
    name = f"the loader has its own {type(sampler).__name__}"
    reject(
        f"{name}, which decides the size of its batches. A schedule of sizes is for a DataLoader "
        "of data with an index, without a sampler of its own.",
        batch_size=batch_size,
    )
    reject(f"{name}, which decides the order.", shuffle=shuffle)
    if tail in ("pad", "fill") and getattr(sampler, "drop_last", False):
        raise ArgumentError(
            f"tail={tail!r}: the loader's {type(sampler).__name__} has drop_last=True and drops its last, short "
            "batch itself. Build it with drop_last=False, or leave tail at None."
        )


def _check_unsplit(batch_sampler: Any) -> None:
    """Reject torch's `DistributedSampler`, and subclasses, where data is split here."""
    for sampler in samplers(batch_sampler):
        num_parts = getattr(sampler, "num_replicas", 1)
        if (
            isinstance(num_parts, int)
            and num_parts > 1
            and hasattr(sampler, "rank")
        ):
            raise SplitError(
                f"the loader's {type(sampler).__name__} draws for rank={sampler.rank} of num_replicas={num_parts}, and "
                "would be split again. Leave it out: paddle.io.DataLoader(dataset, batch_size=rows of all ranks, "
                "shuffle=True). Or, if it cuts for the data ranks of these meshes, set is_dataset_splitted=True."
            )


def _check_split(sampler: Any, placer: BatchPlacer) -> None:
    """Check that a loader which is split already was split for these meshes."""
    row_layout = placer.row_layout
    rank = row_layout.global_rank
    slices = {layout.slice_of(rank) for layout in placer.layouts} - {None}
    if len(slices) > 1:
        raise SplitError(
            "the data is split already, and a rank reads one part of it only, but shard_dims gives global rank "
            f"{rank} different (data rank, number of data ranks) for different fields: {slices}. "
            "Give all fields the same axes, and order the meshes alike."
        )
    num_data_ranks = row_layout.num_data_ranks
    data_rank = row_layout.data_rank if row_layout.on_mesh else None
    num_parts = getattr(sampler, "nranks", num_data_ranks)
    part = getattr(sampler, "local_rank", data_rank)
    if num_parts != num_data_ranks or (slices and part != data_rank):
        raise SplitError(
            f"the loader's {type(sampler).__name__} reads part local_rank={part} of nranks={num_parts}, but shard_dims "
            f"gives global rank {rank} data rank {data_rank} of {num_data_ranks}. Use num_replicas="
            f"{num_data_ranks} and rank={data_rank}, not the world size and the global rank; or give a plain "
            "BatchSampler and let this loader split."
        )


def _plan_batches(
    dataset: Any, *, sizes: Sequence[tuple[int, int]] | None, **settings: Any
) -> PlanBatches:
    """Return an order that this library makes; `settings` are the fields of its `ShardPlan`."""
    schedule = None
    if sizes is not None:
        num_micro = settings["accumulation"]
        entries = [(int(first), int(rows) * num_micro) for first, rows in sizes]
        for _, rows in entries:
            check_batch_size(rows, settings["num_data_ranks"], num_micro)
        schedule = BatchSizes(tuple(entries))
        settings["batch_size"] = entries[0][1]
    plan = _plan(dataset, **settings)
    if isinstance(dataset, Mixture) and plan.num_served < plan.num_samples:
        warn_once(DROPPED_OF_MIXTURE, plan.num_samples - plan.num_served)
    rows_of = (
        dataset.fingerprint() if isinstance(dataset, Mixture | Packed) else None
    )
    return PlanBatches(plan, rows_of, schedule)


def _user_batches(
    dataset: Any,
    sampler: Any,
    *,
    seed: int,
    tail: Tail,
    num_data_ranks: int,
    accumulation: int,
    balance_rows: BalanceRows | None,
    own_data_rank: int | None,
) -> UserBatches:
    """Return the order of the user's own sampler.

    Args:
        dataset: The data set.
        sampler: The batch sampler.
        seed: Seed of the random numbers that it draws.
        tail: The remainder policy.
        num_data_ranks: Data ranks over which its batches are split.
        accumulation: Micro-batches of a batch.
        balance_rows: Assigns rows to data ranks by cost.
        own_data_rank: This data rank, if the data is split already.
    """
    size = getattr(sampler, "batch_size", None)
    nominal = size * accumulation if isinstance(size, int) else None
    consecutive = type(sampler) is paddle.io.BatchSampler
    num_steps = None
    if nominal is not None:
        check_batch_size(nominal, num_data_ranks, accumulation)
        if consecutive and length_or_none(sampler.sampler) is not None:
            # It yields single indices: its length gives the number of batches, and whether the last is short.
            num_steps = _plan(
                sampler.sampler,
                tail=tail,
                batch_size=nominal,
                num_data_ranks=num_data_ranks,
                accumulation=accumulation,
            ).num_steps
    rank_seed: tuple[int, ...] = ()
    if own_data_rank is None:
        lengths = _lengths(dataset, sampler, has_size=nominal is not None)
    else:  # the sampler of another data rank has a state of its own
        has_state = owner_of(sampler) is not None
        lengths = {"data_rank": own_data_rank} if has_state else {}
        if getattr(sampler, "draws_for_rank", False):
            rank_seed = (own_data_rank,)
    return UserBatches(
        batch_sampler=sampler,
        num_data_ranks=num_data_ranks,
        tail=tail,
        nominal_size=nominal,
        num_steps=num_steps,
        accumulation=accumulation if own_data_rank is None else 1,
        seed=seed,
        generators=generators_of(),
        around=on_cpu,
        takes_epoch=isinstance(sampler, paddle.io.DistributedBatchSampler),
        consecutive=consecutive,
        dataset=dataset,
        lengths=lengths,
        rank_seed=rank_seed,
        balance_rows=balance_rows,
    )


def _lengths(dataset: Any, sampler: Any, *, has_size: bool) -> dict[str, int]:
    """Return the lengths on which the order of a sampler depends, without the batch size, which may change."""
    inner = getattr(sampler, "sampler", None)
    lengths = {
        "num_samples": length_or_none(dataset),
        "sampler_length": length_or_none(inner),
        "num_batches": None if has_size else length_or_none(sampler),
    }
    num_drawn = getattr(inner, "num_samples", None)
    if lengths["sampler_length"] is None and isinstance(num_drawn, int):
        lengths["sampler_length"] = (
            num_drawn  # `len` of Paddle's WeightedRandomSampler may fail
        )
    return {
        name: length for name, length in lengths.items() if length is not None
    }


def _plan(data: Any, **settings: Any) -> ShardPlan:
    """Return the plan of a data set, or of a sampler of single indices; reject one that serves nothing."""
    name = type(data).__name__
    try:
        length = len(data)
    except Exception as error:  # whatever the user's __len__ raises
        raise ArgumentTypeError(
            f"the data set {name} has no length ({error}); give it a __len__. A stream has none: give "
            "the DataLoader a paddle.io.IterableDataset or a Stream (Stream.of, Stream.huggingface)."
        ) from error
    if length == 0:
        raise ArgumentError(
            f"the {name} is empty: an empty data set cannot be sharded. Check its path and filters."
        )
    if length > MAX_SAMPLES:
        raise ArgumentError(
            f"the {name} has {length} samples, more than 2^62. {NO_REPEAT}"
        )
    plan = ShardPlan(num_samples=length, **settings)
    if plan.num_steps == 0:
        raise ArgumentError(
            f"tail={plan.tail!r} leaves no batch: the loader's {name} has {length} samples and the "
            f"global batch {plan.batch_size}. Use a smaller batch, tail='pad' or 'fill', or drop_last=False."
        )
    return plan
