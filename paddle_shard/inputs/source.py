"""What order does the given DataLoader stand for, and is it split already?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import paddle.io

from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError
from paddle_shard.inputs.costs import SampleCosts, costs_of
from paddle_shard.inputs.generators import PaddleGenerator
from paddle_shard.inputs.options import LoaderOptions, check_no_balance, check_no_batch_sizes
from paddle_shard.place.field import FieldLayout
from paddle_shard.plan.balance import dealt
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.order import Ordering
from paddle_shard.plan.orders import PaddleOrdering, PaddleSequential, find_ordering
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.stretches import BatchSizes
from paddle_shard.plan.tails import TAILS, Tail, find_tail
from paddle_shard.samplers import PlanBatches, UserBatches
from paddle_shard.samplers.randomness import NumpyGenerator, PythonGenerator
from paddle_shard.say_once import say_once
from paddle_shard.sources.mixture import DROPPED_OF_MIXTURE, Mixture
from paddle_shard.sources.packed import Packed

if TYPE_CHECKING:
    from paddle_shard.inputs.stream_setup import StreamSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The order of a DataLoader, read once at construction."""

    batches: Any
    """The order: `IndexBatches`, or `StreamBatches`."""
    batch_size: int | None
    """Rows of the global batch, at the start of the run if there is a schedule; None if batches differ in size."""
    accumulation: int = 1
    split: bool = False
    """True if the loader of every data rank has rows of its own."""
    item_is_batch: bool = False
    """True if an item of the data set is a whole global batch (`batch_size=None`)."""
    tail: Tail = TAILS["pad"]
    custom_sampler: Any = None
    """The user's batch sampler, if it decides on the order."""
    stream: StreamSetup | None = None
    """The way a stream is read, for data without an index."""
    costs: SampleCosts | None = None
    """The cost of each sample, if rows are dealt to data ranks by cost."""


def read_source(options: LoaderOptions, layouts: Sequence[FieldLayout]) -> Source:
    """Return the order of a DataLoader, checked against the meshes.

    Raises:
        ArgumentTypeError: Not a DataLoader.
        ArgumentError: Something in it cannot be honoured.
    """
    found = _source(options, layouts)
    if options.balance is None:
        return found
    if found.split or found.item_is_batch:
        check_no_balance(options, "is split already" if found.split else "has whole batches (batch_size=None)")
    ranks = math.lcm(*(layout.num_data_ranks for layout in layouts))
    costs = costs_of(options.balance, options.dataloader.dataset)
    batches = copy(found.batches)
    object.__setattr__(batches, "deal", partial(dealt, num_data_ranks=ranks, costs_of=costs))
    return replace(found, batches=batches, costs=costs)


def _source(options: LoaderOptions, layouts: Sequence[FieldLayout]) -> Source:
    dataloader, seed, tail, shuffle = options.dataloader, options.seed, options.tail, options.shuffle
    is_dataset_splitted = options.is_dataset_splitted
    _check_kind(dataloader)
    sampler = dataloader.batch_sampler
    chosen = find_tail(tail, drop_last=bool(getattr(sampler, "drop_last", False)))
    ordering = _ordering(shuffle, dataloader)
    # PaddleNLP's distributed sampler is not Paddle's, but says what part it reads just the same.
    parts = getattr(sampler, "nranks", 1)
    already_split = isinstance(sampler, paddle.io.DistributedBatchSampler) or (isinstance(parts, int) and parts > 1)
    num_data_ranks = math.lcm(*(layout.num_data_ranks for layout in layouts))
    accumulation = getattr(sampler, "_acc_steps", 1)
    if not (is_dataset_splitted or already_split):
        if sampler is None:
            check_no_batch_sizes(options, "whole batches (batch_size=None)")
            return _items(dataloader, accumulation, ordering, seed, chosen)
        if _is_plain(sampler):
            return _planned(options, num_data_ranks, accumulation, ordering, chosen)
    check_no_batch_sizes(options, f"its own {type(sampler).__name__}")
    if shuffle is not None:
        raise ArgumentError(
            f"shuffle={shuffle}: the order is that of the loader's own {type(sampler).__name__}. "
            "Leave shuffle at None, or give a DataLoader without a sampler of its own."
        )
    if is_dataset_splitted or already_split:
        if sampler is None:
            raise ArgumentError(
                "is_dataset_splitted=True needs a DataLoader with a batch size, got one with batch_size=None. "
                "Leave is_dataset_splitted at False: each item is a global batch, of which each rank takes its rows."
            )
        own_data_ranks = _check_split(sampler, layouts)
        if type(sampler) is paddle.io.DistributedBatchSampler:
            return _paddles(sampler, own_data_ranks, accumulation, seed, chosen)
        num_data_ranks = 1
    if tail is not None and chosen.pads and getattr(sampler, "drop_last", False):
        raise ArgumentError(
            f"tail={tail!r}: the loader's {type(sampler).__name__} has drop_last=True and drops its last, short "
            "batch itself. Build it with drop_last=False, or leave tail at None."
        )
    split = is_dataset_splitted or already_split
    return _custom(sampler, dataloader.dataset, num_data_ranks, accumulation, seed, chosen, split=split)


def _ordering(shuffle: Any, dataloader: Any) -> Ordering:
    """Return the order that the user asks for, or that of a plain DataLoader."""
    if shuffle is None:
        sampler = getattr(dataloader.batch_sampler, "sampler", None)
        shuffle = type(sampler) is paddle.io.RandomSampler
    ordering = find_ordering(shuffle, dataloader.dataset)
    return dataloader.dataset.ordering(ordering) if isinstance(dataloader.dataset, Mixture) else ordering


def _check_kind(dataloader: Any) -> None:
    from paddle.distributed.auto_parallel.api import ShardDataloader

    if isinstance(dataloader, ShardDataloader):
        raise SplitError(
            f"dataloader is sharded already (a {type(dataloader).__name__}); sharding it again would lose data. "
            "Give the paddle.io.DataLoader that it was made from."
        )
    if not isinstance(dataloader, paddle.io.DataLoader):
        raise ArgumentTypeError(
            f"dataloader must be a paddle.io.DataLoader, got {type(dataloader).__name__}: {dataloader!r}."
        )


def _is_plain(batch_sampler: Any) -> bool:
    """True if a batch sampler is what `DataLoader(batch_size=, shuffle=)` makes, with nothing of the user's."""
    if type(batch_sampler) is not paddle.io.BatchSampler:
        return False
    sampler = batch_sampler.sampler
    if type(sampler) is paddle.io.SequenceSampler:
        return True
    return (
        type(sampler) is paddle.io.RandomSampler
        and not sampler.replacement
        and sampler._num_samples is None
        and sampler.generator is None
    )


def _planned(options: LoaderOptions, num_data_ranks: int, accumulation: int, ordering: Ordering, tail: Tail) -> Source:
    sampler, seed = options.dataloader.batch_sampler, options.seed
    sizes = None
    if options.batch_size is not None:
        sizes = BatchSizes(tuple((int(first), int(rows) * accumulation) for first, rows in options.batch_size))
        for _, size in sizes.entries:
            check_batch_size(size, num_data_ranks, accumulation)
    plan = ShardPlan(
        num_samples=_length(sampler.sampler.data_source),
        batch_size=sampler.batch_size * accumulation if sizes is None else sizes.entries[0][1],
        num_data_ranks=num_data_ranks,
        shuffle=ordering,
        seed=seed,
        tail=tail,
        accumulation=accumulation,
    )
    if plan.num_steps == 0:
        raise ArgumentError(
            f"tail={str(tail)!r} leaves no batch: the data set has {plan.num_samples} samples and the global batch "
            f"{plan.batch_size}. Use a smaller batch, or tail='pad' or 'fill'."
        )
    if isinstance(sampler.sampler.data_source, Mixture) and plan.num_served < plan.num_samples:
        say_once(DROPPED_OF_MIXTURE, plan.num_samples - plan.num_served)
    advice = plan.ordering.advice(plan.num_samples, num_data_ranks, max(1, plan.batch_size // plan.accumulation))
    if advice is not None:
        warnings.warn(advice, stacklevel=5)
    batches = PlanBatches(plan, _data_fingerprint(sampler.sampler.data_source), sizes)
    return Source(batches=batches, batch_size=plan.batch_size, accumulation=accumulation, tail=tail)


def _data_fingerprint(dataset: Any) -> dict[str, Any]:
    """Return what the samples of a data set of this library depend on; empty for others."""
    found = dataset.fingerprint() if isinstance(dataset, Mixture | Packed) else {}
    return {"packed": found} if found else {}


def _paddles(sampler: Any, num_data_ranks: int, accumulation: int, seed: int, tail: Tail) -> Source:
    """Return the order of Paddle's own sampler over all its ranks; each takes the slice that the sampler gives it."""
    plan = ShardPlan(
        num_samples=_length(sampler.dataset),
        batch_size=sampler.batch_size * sampler.nranks * accumulation,
        num_data_ranks=num_data_ranks,
        shuffle=PaddleOrdering() if sampler.shuffle else PaddleSequential(),
        seed=seed,
        tail=tail,
        accumulation=accumulation,
    )
    return Source(
        batches=PlanBatches(plan),
        batch_size=plan.batch_size,
        accumulation=accumulation,
        tail=tail,
        custom_sampler=sampler,
    )


def _items(dataloader: Any, accumulation: int, ordering: Ordering, seed: int, tail: Tail) -> Source:
    plan = ShardPlan(
        num_samples=_length(dataloader.dataset),
        batch_size=1,
        num_data_ranks=1,
        shuffle=ordering,
        seed=seed,
    )
    return Source(
        batches=PlanBatches(plan),
        batch_size=None,
        accumulation=accumulation,
        item_is_batch=True,
        tail=tail,
    )


def _custom(
    sampler: Any, dataset: Any, num_data_ranks: int, accumulation: int, seed: int, tail: Tail, *, split: bool
) -> Source:
    size = getattr(sampler, "batch_size", None)
    nominal = size * accumulation if isinstance(size, int) else None
    if nominal is not None:
        check_batch_size(nominal, num_data_ranks, accumulation)
    num_steps = None
    length = _length_or_none(sampler.sampler) if type(sampler) is paddle.io.BatchSampler else None
    if length is not None and nominal is not None:
        # The sampler yields single indices, so its length tells whether the last batch is short.
        full, rest = divmod(length, nominal)
        num_steps = full + (rest > 0 and tail.num_rows(rest, nominal, num_data_ranks * accumulation) > 0)
        if length == 0:
            raise ArgumentError(
                f"the loader's {type(sampler.sampler).__name__} has no samples: there is nothing to serve. Check the "
                "path and filters of the data set, on every rank."
            )
        if num_steps == 0:
            raise ArgumentError(
                f"tail={str(tail)!r} leaves no batch: the loader's {type(sampler.sampler).__name__} has {length} "
                f"samples and the global batch {nominal}. Use a smaller batch, or drop_last=False."
            )
        if rest and tail.refuses:
            raise ArgumentError(
                f"tail='error': the {full * nominal + rest} samples of the loader's "
                f"{type(sampler.sampler).__name__} do not fill its last batch of {nominal}. "
                "Choose tail='pad', 'fill' or 'drop'."
            )
    batches = UserBatches(
        batch_sampler=sampler,
        num_data_ranks=num_data_ranks,
        tail=tail,
        nominal_size=nominal,
        num_steps=num_steps,
        accumulation=1 if split else accumulation,
        seed=seed,
        generators=(NumpyGenerator(), PythonGenerator(), PaddleGenerator()),
        takes_epoch=isinstance(sampler, paddle.io.DistributedBatchSampler),
        consecutive=type(sampler) is paddle.io.BatchSampler,
        dataset=dataset,
        lengths={} if split else _lengths(sampler, dataset, sized=nominal is not None),
    )
    return Source(
        batches=batches,
        batch_size=nominal,
        accumulation=accumulation,
        split=split,
        tail=tail,
        custom_sampler=sampler,
    )


def _lengths(sampler: Any, dataset: Any, *, sized: bool) -> dict[str, int]:
    """Return the lengths of the data and its samplers. The batch size, which may change, is left out."""
    found = {"num_samples": dataset, "sampler_length": getattr(sampler, "sampler", None)}
    if not sized:
        found["num_batches"] = sampler
    lengths = {name: _length_or_none(of) for name, of in found.items()}
    return {name: int(length) for name, length in lengths.items() if length is not None}


def _length_or_none(something: Any) -> int | None:
    try:
        return len(something)
    except Exception as error:  # no __len__, or one that raises: Paddle's own WeightedRandomSampler with a list
        raise_if_a_handlers(error)
        return None


def _length(dataset: Any) -> int:
    try:
        length = len(dataset)
    except Exception as error:  # whatever the user's __len__ raises
        raise_if_a_handlers(error)
        raise ArgumentTypeError(
            f"the data set {type(dataset).__name__} has no length ({error}); give it a __len__."
        ) from error
    if length == 0:
        raise ArgumentError(
            f"the {type(dataset).__name__} is empty: an empty data set cannot be sharded. Check its path and filters."
        )
    return length


def _check_split(sampler: Any, layouts: Sequence[FieldLayout]) -> int:
    """Check that a loader which is split already was split for these meshes; return the data ranks."""
    mine = [layout for layout in layouts if layout.on_mesh]
    data_ranks = {layout.data_rank for layout in mine}
    counts = {layout.num_data_ranks for layout in mine or layouts[:1]}
    if len(counts) > 1:
        raise SplitError(
            "the data is split already, so every field on a rank must be split alike, but shard_dims splits "
            f"them over {' and '.join(map(str, sorted(counts)))} data ranks. A field that differs from rank to "
            "rank cannot be replicated: give all fields the same axes."
        )
    count = counts.pop()
    if len(data_ranks) > 1:
        raise SplitError(
            f"the data is split already, but global rank {mine[0].global_rank} has the data ranks "
            f"{sorted(data_ranks)} on the meshes of different fields, and reads one part only. Order the meshes alike."
        )
    num_ranks = getattr(sampler, "nranks", None)
    if num_ranks is None:
        return count
    if num_ranks != count:
        raise SplitError(
            f"the loader's {type(sampler).__name__} splits the data into nranks={num_ranks} parts, but shard_dims "
            f"gives {count} data ranks. Use num_replicas={count} and the data rank as rank, not the world "
            "size and the global rank; or give a plain BatchSampler and let this loader split."
        )
    if mine and sampler.local_rank != mine[0].data_rank:
        raise SplitError(
            f"the loader's {type(sampler).__name__} reads part local_rank={sampler.local_rank}, but global rank "
            f"{mine[0].global_rank} has data rank {mine[0].data_rank} on the mesh. Use rank={mine[0].data_rank}, "
            "or give a plain BatchSampler and let this loader split."
        )
    return count
