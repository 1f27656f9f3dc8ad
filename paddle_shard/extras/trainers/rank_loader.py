"""`RankLoader`: reads, through `shard_dataloader`, a DataLoader that a trainer has cut for data ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.io
from paddle.io.dataloader.dataloader_iter import _DataLoaderIterBase

from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.stream import Stream
from paddle_shard.errors import SplitError
from paddle_shard.loader.loader import ShardBatchSampler, ShardDataloader
from paddle_shard.plan.state import LoaderState
from paddle_shard.run.run import gathered

PACKAGES = ("paddleformers", "paddlefleet", "paddlenlp")
"""Packages with trainers like Hugging Face's."""
_SHARD = "IterableDatasetShard"
"""The data set with which PaddleNLP's and PaddleFormers' trainers cut a stream."""
_IN_ORDER: dict[str, dict[str, Any]] = {
    "MappingBatchSampler": {},
    "MappingDistributedBatchSampler": {},
    "DistributedBatchSampler": {},
    "LastBatchPaddingSampler": {"tail": "fill"},
}
"""Samplers of these packages that cut the data in its order, or shuffled: their rows are split again, none is lost."""
_SECONDS = 120.0
"""Seconds for which a rank waits for the data ranks of the others."""
_KEPT = (
    "collate_fn",
    "num_workers",
    "places",
    "prefetch_factor",
    "timeout",
    "use_buffer_reader",
    "use_shared_memory",
    "worker_init_fn",
)
"""Attributes of a DataLoader that a loader of the whole data takes over."""


class RankLoader:
    """Reads a DataLoader that is cut for data ranks, so that ranks make equal steps and each row comes once.

    Attributes:
        sharded: The loader that reads.
        follows_sampler: True if the trainer sets the position on its sampler.
    """

    def __init__(
        self, dataloader: paddle.io.DataLoader, sharded: ShardDataloader
    ) -> None:
        """Initialize.

        Args:
            dataloader: The trainer's.
            sharded: The loader that reads in its place.
        """
        self.sharded = sharded
        self.follows_sampler = sharded.given is not dataloader
        self._left_epoch: int | None = None
        """The epoch of a loop that has not come to its end. The next loop begins the next epoch, as Paddle's do."""
        self._dataset = dataloader.dataset
        self._sampler = dataloader.batch_sampler
        self._ignored_label = getattr(
            dataloader.collate_fn, "label_pad_token_id", None
        )

    def __str__(self) -> str:
        sampler = self.sharded.batch_sampler
        return f"as local tensors of {sampler.nranks} data ranks"

    def __len__(self) -> int:
        """Return the steps of an epoch.

        Raises:
            TypeError: The trainer's sampler decides on the rows and has no length. It may have no end.
        """
        if self.sharded.plan is None:
            return len(self._sampler)
        return len(self.sharded)

    def __iter__(self) -> Iterator[Any]:
        return _RankIterator(self._dataset, self._sampler, self._batches())

    def _batches(self) -> Iterator[Any]:
        if self.follows_sampler:
            self._move_to_sampler()
        elif self._left_epoch == self.sharded.epoch:
            self.sharded.set_epoch(self.sharded.epoch + 1)
        self._left_epoch = self.sharded.epoch
        batches = iter(self.sharded)
        counts = self.sharded.stats.epoch
        num_invalid = 0
        for batch in batches:
            if counts.padding + counts.skipped > num_invalid:
                num_invalid = counts.padding + counts.skipped
                self._ignore_invalid_rows(batch, batches)
            yield batch
        self._left_epoch = None
        self._finish(counts.samples)

    def _move_to_sampler(self) -> None:
        """Move to the epoch and sample at which the trainer has set its sampler."""
        sampler = self._sampler
        epoch = getattr(sampler, "epoch", self.sharded.epoch)
        if epoch == self._left_epoch:
            epoch += 1
        consumed = getattr(sampler, "consumed_samples", 0)
        if consumed:
            warn_once(
                f"patch_paddle: the trainer resumes after {consumed} samples of epoch {epoch}, which it has counted "
                "from its steps. With another batch size, accumulation or number of ranks than before, samples are "
                "repeated or left out: add paddle_shard.TrainerCallback() to the trainer's callbacks."
            )
            rows = sampler.batch_size * sampler.nranks
            state = LoaderState(
                epoch=epoch,
                samples=consumed,
                steps=consumed // rows,
                segments=((0, rows),),
                fingerprint=self.sharded.state_dict()["fingerprint"],
            )
            self.sharded.load_state_dict(state.to_dict())
        self.sharded.set_epoch(epoch)

    def _ignore_invalid_rows(self, batch: Any, batches: Any) -> None:
        """Give the labels of invalid rows the number that the loss ignores."""
        if self._ignored_label is None or not isinstance(batch, dict):
            return
        labels = batch.get("labels")
        if isinstance(labels, paddle.Tensor):
            valid = batches.valid.reshape([-1] + [1] * (labels.ndim - 1))
            ignored = paddle.full_like(labels, self._ignored_label)
            batch["labels"] = paddle.where(valid, labels, ignored)

    def _finish(self, num_samples: int) -> None:
        """Move the trainer's sampler and data set to the end of an epoch."""
        # `evaluate()` asks it how many rows there were
        if type(self._dataset).__name__ == _SHARD:
            world = dist.get_world_size()
            counts = gathered(
                num_samples,
                tuple(range(world)),
                _SECONDS,
                "the end of an epoch",
            )
            replicas = world // self._dataset.num_processes
            self._dataset.num_examples = sum(counts) // replicas
        elif self.follows_sampler:
            self._sampler.epoch = self.sharded.epoch
            self._sampler.consumed_samples = 0


class _RankIterator(_DataLoaderIterBase):
    """An iterator for which trainers find what they find in Paddle's."""

    def __init__(
        self, dataset: Any, batch_sampler: Any, batches: Iterator[Any]
    ) -> None:
        # Not Paddle's: its constructor would begin to read.
        self._dataset = dataset
        self._batch_sampler = batch_sampler
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)


def read_rank_loader(
    dataloader: paddle.io.DataLoader,
    shard: Callable[..., ShardDataloader],
    *,
    is_whole: bool,
) -> RankLoader | None:
    """Return what reads in the place of a DataLoader; None if it is not cut for data ranks.

    Args:
        dataloader: The trainer's.
        shard: `shard_dataloader`, perhaps with defaults.
        is_whole: True if all ranks read all of the data.

    Raises:
        PaddleShardError: It is cut, and cannot be sharded.
    """
    dataset = dataloader.dataset
    sampler = dataloader.batch_sampler
    # A loader of global batches; or the cut one, if its own sampler decides on the rows.
    whole = dataloader
    options: dict[str, Any] = {}

    # A batch sampler that knows its rank, or that is made of a sampler which does.
    inner = getattr(sampler, "sampler", None)
    owners = (
        each
        for each in (sampler, inner)
        if getattr(each, "num_replicas", 1) > 1
    )
    owner: Any = next(owners, None)
    if type(dataset).__name__ == _SHARD:
        num_data_ranks = dataset.num_processes
        data_rank = dataset.process_index
        whole = _whole(
            dataloader,
            dataset.dataset,
            batch_size=dataset.batch_size * num_data_ranks,
            drop_last=dataset.drop_last,
        )
        if not isinstance(dataset.dataset, Stream):
            # Each worker would read all of it and collate, so pad, its own share of a batch.
            whole.num_workers = min(whole.num_workers, 1)
    elif isinstance(sampler, ShardBatchSampler):
        return None
    elif isinstance(getattr(sampler, "nranks", None), int):
        num_data_ranks = sampler.nranks
        data_rank = sampler.local_rank
    elif owner is not None:
        num_data_ranks = owner.num_replicas
        data_rank = owner.rank
        options = {"is_dataset_splitted": True}
    elif is_whole:
        num_data_ranks = 1
        data_rank = 0
    else:
        return None

    # A sampler that cuts the data in its order.
    name = type(sampler).__name__
    package = type(sampler).__module__.partition(".")[0]
    if name in _IN_ORDER and package in PACKAGES:
        # A sampler of one rank is made of a sampler of indices.
        source = sampler if inner is None else inner
        is_random = isinstance(source, paddle.io.RandomSampler)
        options = {"seed": getattr(source, "base_seed", 0), **_IN_ORDER[name]}
        whole = _whole(
            dataloader,
            dataset,
            batch_size=sampler.batch_size * num_data_ranks,
            shuffle=bool(getattr(source, "shuffle", is_random)),
            drop_last=sampler.drop_last,
        )

    mesh = _mesh_of(num_data_ranks, data_rank)
    sharded = shard(whole, mesh, shard_dims="data", local=True, **options)
    return RankLoader(dataloader, sharded)


def _whole(
    dataloader: paddle.io.DataLoader, dataset: Any, **options: Any
) -> paddle.io.DataLoader:
    """Return a loader of all of a data set, with the settings of one that is cut."""
    kept = {name: getattr(dataloader, name) for name in _KEPT}
    return paddle.io.DataLoader(
        dataset,
        persistent_workers=dataloader._persistent_workers,
        **kept,
        **options,
    )


def _mesh_of(num_data_ranks: int, data_rank: int) -> dist.ProcessMesh:
    """Return a mesh with a row for each data rank, of the global ranks that have it."""
    world = dist.get_world_size()
    data_ranks = list(range(world))
    if num_data_ranks != world:
        data_ranks = gathered(
            int(data_rank),
            tuple(data_ranks),
            _SECONDS,
            "the first loop over a DataLoader",
        )
    rows = [
        [rank for rank, other in enumerate(data_ranks) if other == number]
        for number in range(num_data_ranks)
    ]
    if len({len(row) for row in rows}) > 1:
        raise SplitError(
            f"the loaders of the ranks are cut for the data ranks {data_ranks} of {num_data_ranks}; each data rank "
            "needs as many ranks."
        )
    return dist.ProcessMesh(np.array(rows), dim_names=["data", "replica"])
