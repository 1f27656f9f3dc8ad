"""Reading a DataLoader over data with an index: its order, and whether it is split already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import paddle.io

from paddle_shard.core.checks import length_or_none
from paddle_shard.core.warn_once import say_once
from paddle_shard.data.arrays import NO_REPEAT
from paddle_shard.data.costs import costs_of
from paddle_shard.data.generators import generators_of
from paddle_shard.data.mixture import DROPPED_OF_MIXTURE, Mixture
from paddle_shard.data.packed import Packed
from paddle_shard.data.samplers import PlanBatches, UserBatches
from paddle_shard.data.samplers.user_batches import owner_of, samplers
from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError
from paddle_shard.loader.options import DEALS, DECIDES, LoaderOptions
from paddle_shard.placement.field import FieldLayout
from paddle_shard.plan.balance import dealt
from paddle_shard.plan.order import Ordering
from paddle_shard.plan.orders import PaddleOrdering, PaddleSequential, find_ordering
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan
from paddle_shard.plan.shuffle import MAX_SAMPLES
from paddle_shard.plan.step import Deal
from paddle_shard.plan.tails import Tail, find_tail
from paddle_shard.reading.executor import on_cpu
from paddle_shard.reading.source import Source


def read_source(options: LoaderOptions, layouts: Sequence[FieldLayout]) -> Source:
    """Return the order of a DataLoader of data with an index, checked against the meshes.

    Raises:
        ArgumentTypeError: The data set has no length.
        ArgumentError: Something in the DataLoader cannot be honoured.
    """
    dataset, sampler = options.dataloader.dataset, options.dataloader.batch_sampler
    options.refuse(
        num_batches=f"it is for streams; the {type(dataset).__name__} has a length and an index."
    )
    # PaddleNLP's distributed sampler is not Paddle's, but says what part it reads just the same.
    nranks = getattr(sampler, "nranks", 1)
    distributed = isinstance(sampler, paddle.io.DistributedBatchSampler) or (
        isinstance(nranks, int) and nranks > 1
    )
    split = options.is_dataset_splitted or distributed
    ranks = math.lcm(*(layout.num_data_ranks for layout in layouts))
    tail = find_tail(options.tail, drop_last=bool(getattr(sampler, "drop_last", False)))
    accumulation = getattr(sampler, "_acc_steps", 1)
    if sampler is None and not split:  # each item is a global batch
        whole = "whole batches (batch_size=None)"
        options.refuse(
            batch_size=f"the loader has {whole}, {DECIDES}",
            balance=f"the data has {whole}, and {DEALS}",
        )
        items = _planned(
            options, dataset, shuffle=_ordering(options), batch_size=1, num_data_ranks=1
        )
        return Source(
            batches=items,
            batch_size=None,
            accumulation=accumulation,
            item_is_batch=True,
            tail=tail,
        )
    paddles = type(sampler) is paddle.io.DistributedBatchSampler
    if split and not paddles:
        options.refuse(balance=f"the data is split already, and {DEALS}")
    costs = None if options.balance is None else costs_of(options.balance, dataset)
    deal: Deal | None = (
        None if costs is None else partial(dealt, num_data_ranks=ranks, costs_of=costs)
    )
    plain = not split and is_plain(sampler)
    if not plain:
        _check_own_order(options, tail)
        if split:
            ranks = _check_split(sampler, layouts)
        else:
            _check_unsplit(sampler)
    source = partial(
        Source,
        accumulation=accumulation,
        tail=tail,
        custom_sampler=None if plain else sampler,
        costs=costs,
    )
    if not (plain or paddles):
        mine = (
            next((layout.data_rank for layout in layouts if layout.on_mesh), 0)
            if split
            else None
        )
        users = _users(options, 1 if split else ranks, accumulation, tail, deal, mine)
        return source(batches=users, batch_size=users.nominal_size, split=split)
    if plain:
        data, shuffle, size = (
            sampler.sampler.data_source,
            _ordering(options),
            sampler.batch_size,
        )
    else:  # its order over all its ranks; each takes the slice that the sampler gives it
        data, shuffle = (
            sampler.dataset,
            PaddleOrdering() if sampler.shuffle else PaddleSequential(),
        )
        size = sampler.batch_size * nranks
    cut = {
        "batch_size": size * accumulation,
        "num_data_ranks": ranks,
        "accumulation": accumulation,
    }
    planned = _planned(options, data, shuffle=shuffle, tail=tail, **cut)
    planned.deal = deal
    return source(batches=planned, batch_size=planned.plan.batch_size)


def _ordering(options: LoaderOptions) -> Ordering:
    """Return the order that the user asks for, or that of a plain DataLoader."""
    shuffle, dataset = options.shuffle, options.dataloader.dataset
    if shuffle is None:
        shuffle = (
            type(getattr(options.dataloader.batch_sampler, "sampler", None))
            is paddle.io.RandomSampler
        )
    ordering = find_ordering(shuffle, dataset)
    return dataset.ordering(ordering) if isinstance(dataset, Mixture) else ordering


def is_plain(batch_sampler: Any) -> bool:
    """True if a batch sampler is what `DataLoader(batch_size=, shuffle=)` makes, with nothing of the user's."""
    sampler: Any = (
        batch_sampler.sampler if type(batch_sampler) is paddle.io.BatchSampler else None
    )
    if type(sampler) is paddle.io.RandomSampler:
        return (
            not sampler.replacement
            and sampler._num_samples is None
            and sampler.generator is None
        )
    return type(sampler) is paddle.io.SequenceSampler


def knows_no_rank(batch_sampler: Any) -> bool:
    """True if nothing in a batch sampler, also one inside others, is the user's: it cannot draw for a rank alone."""
    sampler = batch_sampler
    while type(sampler) is paddle.io.BatchSampler:
        sampler = sampler.sampler
    of_paddle = type(sampler) in (paddle.io.RandomSampler, paddle.io.SequenceSampler)
    return of_paddle and getattr(sampler, "generator", None) is None


def _check_own_order(options: LoaderOptions, tail: Tail) -> None:
    """Refuse what a loader with a sampler of its own, or data that is split already, cannot have."""
    sampler = options.dataloader.batch_sampler
    name = type(sampler).__name__
    order = f"the order is that of the loader's own {name}; or give a DataLoader without a sampler of its own."
    options.refuse(
        batch_size=f"the loader has its own {name}, {DECIDES}", shuffle=order
    )
    if sampler is None:
        raise ArgumentError(
            "is_dataset_splitted=True needs a DataLoader with a batch size, got one with batch_size=None. "
            "Leave is_dataset_splitted at False: each item is a global batch, of which each rank takes its rows."
        )
    if options.tail is not None and tail.pads and getattr(sampler, "drop_last", False):
        raise ArgumentError(
            f"tail={options.tail!r}: the loader's {name} has drop_last=True and drops its last, short "
            "batch itself. Build it with drop_last=False, or leave tail at None."
        )


def _planned(options: LoaderOptions, dataset: Any, **settings: Any) -> PlanBatches:
    """Return an order that this library makes; `settings` are the fields of its `ShardPlan`."""
    sizes = None
    if options.batch_size is not None:
        ranks, times = settings["num_data_ranks"], settings["accumulation"]
        sizes = BatchSizes(
            tuple((int(first), int(rows) * times) for first, rows in options.batch_size)
        )
        for _, size in sizes.entries:
            check_batch_size(size, ranks, times)
        settings["batch_size"] = sizes.entries[0][1]
    plan = _plan(dataset, seed=options.seed, **settings)
    if isinstance(dataset, Mixture) and plan.num_served < plan.num_samples:
        say_once(DROPPED_OF_MIXTURE, plan.num_samples - plan.num_served)
    return PlanBatches(
        plan,
        dataset.fingerprint() if isinstance(dataset, Mixture | Packed) else None,
        sizes,
        dataset,
    )


def _check_unsplit(sampler: Any) -> None:
    """Refuse torch's `DistributedSampler`, and what is derived from it, where data is split here."""
    for one in samplers(sampler):
        parts = getattr(one, "num_replicas", 1)
        if isinstance(parts, int) and parts > 1 and hasattr(one, "rank"):
            raise SplitError(
                f"the loader's {type(one).__name__} draws for rank={one.rank} of num_replicas={parts}, and would be "
                "split again. Leave it out: paddle.io.DataLoader(dataset, batch_size=rows of all ranks, shuffle=True). "
                "Or, if it cuts for the data ranks of these meshes, say is_dataset_splitted=True."
            )


def _users(
    options: LoaderOptions,
    num_data_ranks: int,
    accumulation: int,
    tail: Tail,
    deal: Deal | None,
    mine: int | None,
) -> UserBatches:
    """Return the order of the user's own sampler, or of the batches that each data rank has for itself.

    `mine` is this data rank, if the data is split already.
    """
    dataset = options.dataloader.dataset
    sampler = options.dataloader.batch_sampler
    size = getattr(sampler, "batch_size", None)
    consecutive = type(sampler) is paddle.io.BatchSampler
    nominal = size * accumulation if isinstance(size, int) else None
    num_steps = None
    if nominal is not None:
        check_batch_size(nominal, num_data_ranks, accumulation)
        if consecutive and length_or_none(sampler.sampler) is not None:
            # It yields single indices, so its length tells how many batches there are, and whether the last is short.
            cut = {
                "batch_size": nominal,
                "num_data_ranks": num_data_ranks,
                "accumulation": accumulation,
            }
            num_steps = _plan(sampler.sampler, tail=tail, **cut).num_steps
    lengths: dict[str, int] = {}  # without the batch size, which may change
    if mine is not None and owner_of(sampler) is not None:
        lengths = {"data_rank": mine}  # another one's sampler stands elsewhere
    if mine is None:
        of = {
            "num_samples": dataset,
            "sampler_length": getattr(sampler, "sampler", None),
        }
        of |= {} if nominal is not None else {"num_batches": sampler}
        lengths = {
            name: length
            for name, one in of.items()
            if (length := length_or_none(one)) is not None
        }
        drawn = getattr(
            of["sampler_length"], "num_samples", None
        )  # of Paddle's WeightedRandomSampler `len` may fail
        if "sampler_length" not in lengths and isinstance(drawn, int):
            lengths["sampler_length"] = drawn
    return UserBatches(
        batch_sampler=sampler,
        num_data_ranks=num_data_ranks,
        tail=tail,
        nominal_size=nominal,
        num_steps=num_steps,
        accumulation=accumulation if mine is None else 1,
        seed=options.seed,
        generators=generators_of(),
        around=on_cpu,
        takes_epoch=isinstance(sampler, paddle.io.DistributedBatchSampler),
        consecutive=consecutive,
        dataset=dataset,
        lengths=lengths,
        deal=deal,
    )


def _plan(data: Any, **settings: Any) -> ShardPlan:
    """Return the plan of a data set, or of a sampler of single indices; refuse one that serves nothing."""
    try:
        length = len(data)
    except Exception as error:  # whatever the user's __len__ raises
        raise ArgumentTypeError(
            f"the data set {type(data).__name__} has no length ({error}); give it a __len__. A stream has none: give "
            "the DataLoader a paddle.io.IterableDataset or a Stream (Stream.of, Stream.huggingface)."
        ) from error
    if length == 0:
        raise ArgumentError(
            f"the {type(data).__name__} is empty: an empty data set cannot be sharded. Check its path and filters."
        )
    if length > MAX_SAMPLES:
        raise ArgumentError(
            f"the {type(data).__name__} has {length} samples, more than 2^62. {NO_REPEAT}"
        )
    plan = ShardPlan(num_samples=length, **settings)
    if plan.num_steps == 0:
        raise ArgumentError(
            f"tail={plan.tail!r} leaves no batch: the loader's {type(data).__name__} has {length} samples and the "
            f"global batch {plan.batch_size}. Use a smaller batch, tail='pad' or 'fill', or drop_last=False."
        )
    return plan


def _check_split(sampler: Any, layouts: Sequence[FieldLayout]) -> int:
    """Check that a loader which is split already was split for these meshes; return the data ranks."""
    mine = [layout for layout in layouts if layout.on_mesh]
    counts = {layout.num_data_ranks for layout in mine or layouts[:1]}
    data_ranks = {layout.data_rank for layout in mine}
    if len(counts) > 1 or len(data_ranks) > 1:
        raise SplitError(
            "the data is split already, and a rank reads one part of it only, but shard_dims gives global rank "
            f"{layouts[0].global_rank} the data ranks {sorted(data_ranks)} of {sorted(counts)} for different fields. "
            "Give all fields the same axes, and order the meshes alike."
        )
    count = counts.pop()
    num_ranks = getattr(sampler, "nranks", None)
    if num_ranks is None:
        return count
    name = type(sampler).__name__
    if num_ranks != count:
        raise SplitError(
            f"the loader's {name} splits the data into nranks={num_ranks} parts, but shard_dims gives {count} data "
            f"ranks. Use num_replicas={count} and the data rank as rank, not the world size and the global rank; or "
            "give a plain BatchSampler and let this loader split."
        )
    if mine and sampler.local_rank != mine[0].data_rank:
        raise SplitError(
            f"the loader's {name} reads part local_rank={sampler.local_rank}, but global rank {mine[0].global_rank} "
            f"has data rank {mine[0].data_rank} on the mesh. Use rank={mine[0].data_rank}, or give a plain "
            "BatchSampler and let this loader split."
        )
    return count
