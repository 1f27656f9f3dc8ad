"""Which positions and samples does a user want to leave out?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.inputs.source import Source
from paddle_shard.plan.mixture import Mixing, sample_ids
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.skips import Stretch
from paddle_shard.plan.state import LoaderState


def stretches_of(
    steps: Iterable[int], start: LoaderState, plan: ShardPlan | None, source: Source, end: int | None
) -> Iterator[Stretch]:
    """Yield the positions of some steps.

    Args:
        steps: The steps.
        start: The position of the run in their epoch.
        plan: The order, unless the user's own sampler decides it.
        source: What the passes read.
        end: Steps of the epoch; None if that is not known.

    Raises:
        ArgumentTypeError: A step is not an int.
        ArgumentError: A step was delivered, does not exist, or its positions are not known.
    """
    epoch, sampler = start.epoch, source.custom_sampler
    # Of each batch; nobody knows whether those of another sampler have as many samples.
    batch_size = 1 if source.item_is_batch else None
    if type(sampler) is paddle.io.BatchSampler:
        batch_size = source.batch_size
    for step in _listed("steps", steps, "list or range of ints"):
        step = _number("a step must be an int", step)
        if not start.steps <= step or (end is not None and step >= end):
            past = f"; the run is at step {start.steps}" if start.steps else ""
            last = "the last" if end is None else end - 1
            raise ArgumentError(f"skip: epoch {epoch} has steps {start.steps} to {last} left{past}, got {step}.")
        if plan is not None:
            first, stop = plan.first_position(step=step), plan.first_position(step=step + 1)
            yield epoch, first, min(stop, plan.num_positions)
        elif batch_size is not None:
            first = start.samples + (step - start.steps) * batch_size
            yield epoch, first, first + batch_size
        else:
            raise ArgumentError(
                f"skip(steps=): the {type(sampler).__name__} may make batches of different sizes, so it is not "
                "known which samples they hold. Give their ids: skip(samples=)."
            )


def numbers_of(samples: Iterable[Any], plan: ShardPlan | None, length: int) -> Iterator[int | str]:
    """Yield the ids of samples that a user names.

    Args:
        samples: Indices in the data set; of a mixture (source, index); with a sampler of your own, what it yields.
        plan: The order, unless the user's own sampler decides it.
        length: Samples of the data set that has this order. An epoch that was begun before it has grown has fewer.

    Raises:
        ArgumentError: There is no such sample.
        ArgumentTypeError: It is not an int or a text.
    """
    for sample in _listed("samples", samples, "list of samples"):
        if plan is not None and isinstance(plan.ordering, Mixing):
            source, index = plan.ordering.numbers_of(sample)
            yield int(sample_ids(source, 0, index))
        elif isinstance(sample, str) and plan is None:
            yield sample
        else:
            number = _number("a sample must be an index in the data set", sample)
            if number < 0 or (plan is not None and number >= length):
                most = "" if plan is None else f" below {length}"
                raise ArgumentError(f"skip: a sample must be an index in the data set, 0 or more{most}, got {sample}.")
            yield number


def _listed(name: str, values: Any, kind: str) -> Iterable[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ArgumentTypeError(f"skip: {name} must be a {kind}, got {values!r}.")
    return values


def _number(rule: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"skip: {rule}, got {value!r}.")
    return int(value)
