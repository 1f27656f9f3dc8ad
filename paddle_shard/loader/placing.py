"""Placing: make distributed tensors of a batch that was read, and digest it for the other ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.io

from paddle_shard.core.forks import no_fork
from paddle_shard.core.trees import leaves, named_leaves
from paddle_shard.data.samplers.user_batches import UserBatches
from paddle_shard.errors import DataReadError
from paddle_shard.loader.setup import LoaderSetup
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import as_ids
from paddle_shard.plan.tails import Tail
from paddle_shard.ranks.batch_check import summary
from paddle_shard.reading.batch import NO_PLACEHOLDER, Batch
from paddle_shard.reading.digest import WHOLE, digest
from paddle_shard.reading.executor import MAKING_TENSORS, read_error
from paddle_shard.reading.tensors import as_array, becomes_tensor


class Placing:
    """Places the batches of one epoch iterator.

    With `pad_to`, its leaves stay local until the lengths of all ranks are known.
    """

    def __init__(self, setup: LoaderSetup, start: LoaderState) -> None:
        """Initialize.

        Args:
            setup: Setup of the loader.
            start: Where the iterator begins.
        """
        self._setup = setup
        self._start = start
        self._maker = TensorMaker(setup.dataloader.places[0])
        self._sliced_layout = setup.sliced_layout
        self._is_alone = setup.is_alone

    def __call__(self, batch: Batch) -> Batch:
        """Place a batch, or leave the rest to `batch.finish` if only the training thread may do it.

        It runs before the step is announced to the other ranks, so whatever is raised here is raised by all of them.
        """
        setup = self._setup
        if setup.compared_ranks is not None:
            self._summarize(batch)
        step = batch.step
        try:
            with no_fork:
                recipe, parts = setup.placer.recipe(
                    batch.value, step, setup.rows.of
                )
                finish = recipe.begin(
                    parts, batch.owned, self._maker, is_alone=self._is_alone
                )
                if recipe.is_host and self._maker.is_on_cpu:
                    batch.value = finish()
                else:
                    batch.value = None
                    batch.finish = finish
        except Exception as error:
            raise read_error(error, step, MAKING_TENSORS) from None
        batch.placed = recipe
        batch.count(self._sliced_layout)
        return batch

    def _summarize(self, batch: Batch) -> None:
        """Digest a batch, if the ranks compare this step. Nothing is on a device yet, so nothing is copied back."""
        setup = self._setup
        number = batch.step.number
        every = setup.verify
        is_wanted = batch.is_first or (
            isinstance(every, int) and number % every == 0
        )
        if not is_wanted or batch.value is None:
            return
        ids = np.asarray(batch.step.ids).tolist()
        if setup.source.stream is not None:
            key = f"parts {setup.source.stream.parts}"
        else:
            key = f"{zlib.crc32(repr(ids).encode())} of {len(ids)}"
        # these rows hold other samples than their own
        if batch.is_skipped is not None:
            key += f" but for {np.flatnonzero(batch.is_skipped).tolist()}"
        if self._may_draw_for_one_rank():
            arrays = [("the sampler's indices", as_ids(ids))]
        else:
            named = named_leaves(batch.value, "", _is_list_of_values)
            arrays = [(path, _comparable(leaf)) for path, leaf in named]
        batch.summary = summary(
            arrays,
            step=number,
            first=batch.is_first,
            key=key,
            num_steps=setup.source.batches.known_steps(self._start),
        )

    def _may_draw_for_one_rank(self) -> bool:
        """Return whether it is unknown if the sampler of split data draws for its data rank alone."""
        source = self._setup.source
        return (
            source.split
            and isinstance(source.batches, UserBatches)
            and isinstance(
                source.custom_sampler, paddle.io.DistributedBatchSampler
            )
            and not source.batches.rank_seed
        )


def place_stream(
    batch: Batch,
    *,
    policy: Tail,
    is_begun: bool,
    num_steps: int | None,
    place: Callable[[Batch], Batch],
) -> Batch:
    """Return a batch of a stream, placed if it holds anything; end the iterator as the remainder policy says.

    Args:
        batch: The batch.
        policy: The remainder policy.
        is_begun: True if the iterator does not begin with the epoch.
        num_steps: Steps of the iterator; None: not known.
        place: Places a batch.

    Raises:
        StopIteration: The epoch ends before it.
        UnequalEndsError: The parts end at different times, which the policy forbids.
        DataReadError: Rows are missing that should be there.
    """
    if num_steps is not None:  # a known end needs no agreement
        batch.exhausted = batch.value is None and batch.is_empty
    else:
        end = policy.end_of_stream(
            is_whole=batch.is_whole,
            has_new=batch.has_new,
            is_empty=batch.is_empty,
        )
        if end == "end":
            raise StopIteration
        batch.exhausted = end == "exhausted"
    if batch.value is not None:
        return place(batch)
    if not policy.pads:  # only possible if the end was known
        raise DataReadError(
            "a part of the stream has fewer samples than its source said it would have, and tail='drop' does not "
            "make rows up. Count the source again (its index may be of older files)."
        )
    if not (is_begun and batch.is_empty):
        raise DataReadError(NO_PLACEHOLDER.format(_NO_SAMPLE))
    return batch  # resumed past the end: there is nothing to deliver


_NO_SAMPLE = (
    "every part is empty, none of its samples can be read, or the stream cannot be opened again, as one that can be "
    "read only once"
)


def _is_list_of_values(value: Any) -> bool:
    """Return whether a list has an item for each row, such as a text, and no tensors."""
    return isinstance(value, list) and not any(
        map(becomes_tensor, leaves(value))
    )


def _comparable(leaf: Any) -> np.ndarray[Any, Any]:
    """Return the array of a leaf; for other leaves, digests: one for each item of a list or array."""
    if becomes_tensor(leaf):
        array: np.ndarray[Any, Any] = (
            leaf.numpy() if isinstance(leaf, paddle.Tensor) else as_array(leaf)
        )
        return array
    if isinstance(leaf, list | np.ndarray):
        return np.array([digest(item, 0, WHOLE) for item in leaf], np.uint32)
    return np.array(digest(leaf, 0, WHOLE), np.uint32)
