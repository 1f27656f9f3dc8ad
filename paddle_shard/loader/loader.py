"""What does the user hold?"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import ShardDataloader as PaddleShardDataloader

from paddle_shard.errors import ArgumentError, ArgumentTypeError, BatchStructureError
from paddle_shard.loader.compat import in_auto_dp_mode, mend_process_mesh
from paddle_shard.loader.generators import generators
from paddle_shard.loader.iteration import LoaderCall, ShardIterator
from paddle_shard.loader.progress import PassProgress
from paddle_shard.loader.sampler_view import ShardBatchSampler
from paddle_shard.loader.source import read_source
from paddle_shard.place.assignment import assignment
from paddle_shard.place.placer import BatchPlacer, BatchRows
from paddle_shard.plan.coverage import Certificate, certify, expected_of_plan
from paddle_shard.plan.partition import nearest_multiples
from paddle_shard.plan.shard_plan import ShardPlan, Where
from paddle_shard.plan.state import LoaderState
from paddle_shard.reading.user_loader import UserLoader
from paddle_shard.replicas.split_check import SplitCheck
from paddle_shard.samplers import PlanBatches
from paddle_shard.samplers.plan_batches import resumed_plan

mend_process_mesh()


class ShardDataloader(PaddleShardDataloader):
    """Batches of a DataLoader as distributed tensors; make one with `shard_dataloader`.

    Iterating makes a new, independent `ShardIterator` over the current epoch; when one has come to its end,
    the loader moves to the next epoch. `loader()` works too, and `next(loader())` takes a first batch.

    Attributes:
        batch_size: Samples that a data rank reads at a step, before gradient accumulation; None where the
            batches differ in size.
        batch_sampler: This rank's batches of indices, with `set_epoch`.
        seed: Of the order and of the samples' random numbers.
    """

    def __init__(
        self,
        dataloader: Any,
        meshes: Any,
        input_keys: Sequence[str] | None = None,
        shard_dims: Any = None,
        is_dataset_splitted: bool = False,
        dense_tensor_idx: Sequence[Sequence[int]] | None = None,
        *,
        shuffle: bool | str | None = None,
        seed: int = 0,
        tail: str | None = None,
        placements: Any = None,
        seed_paddle: bool = False,
    ) -> None:
        """See `shard_dataloader`."""
        # Paddle's constructor is not called: it is what this class puts right.
        if is_dataset_splitted and shard_dims is None:
            raise ArgumentError(
                "is_dataset_splitted=True needs shard_dims: over which axes of the mesh is the data split?"
            )
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentError(f"seed must be an int, got {seed!r}.")
        auto_dp = in_auto_dp_mode()
        assigned = assignment(meshes, input_keys, shard_dims, placements, dist.get_rank(), replicated_in_name=auto_dp)
        self._placer = BatchPlacer(assigned, dense_tensor_idx)
        layouts = self._placer.layouts
        self._own_layout = next((layout for layout in layouts if layout.on_mesh), layouts[0])
        self._source = read_source(
            dataloader,
            layouts,
            is_dataset_splitted=bool(is_dataset_splitted),
            shuffle=shuffle,
            seed=seed,
            tail=tail,
        )
        self.seed = seed
        self._given = dataloader
        self._meshes, self._input_keys, self._shard_dims = meshes, input_keys, shard_dims
        self.dense_tensor_idx = dense_tensor_idx
        self._epoch = self._sampler_epoch = getattr(self._source.custom_sampler, "epoch", 0)
        if not isinstance(self._epoch, int):
            self._epoch = self._sampler_epoch = 0
        own, compared = self._own_layout, hasattr(self._source.custom_sampler, "nranks") or auto_dp
        self._split_check: SplitCheck | None = None
        if self._source.split and not compared and own.on_mesh and own.num_data_ranks > 1:
            self._split_check = SplitCheck(own.layout, own.data_axes, own.global_rank)
        self._rows_of_size: dict[tuple[int, int], BatchRows] = {}
        self._resumed = LoaderState()
        self._newest: PassProgress | None = None
        self._complete: PassProgress | None = None
        self._num_steps: int | None = None
        self._call: LoaderCall | None = None
        place = dataloader.places[0]
        self._reading = UserLoader(
            dataloader,
            generators(with_paddle=seed_paddle),
            stack_tensors=paddle.stack,
            to_tensor=lambda array: paddle.to_tensor(array, place=place),
        )
        size = self._source.batch_size
        self.batch_size = None
        if size is not None:
            ranks = 1 if self._source.split else self._own_layout.num_data_ranks
            self.batch_size = size // self._source.accumulation // ranks
        self.batch_sampler = ShardBatchSampler(self)
        self._dataloader = self._reading.dataloader
        self._dataloader.batch_sampler = self.batch_sampler

    @property
    def dataset(self) -> Any:
        """The data set of the given DataLoader."""
        return self._given.dataset

    @property
    def plan(self) -> ShardPlan | None:
        """The order of the run, pure and without the data; None where a sampler of the user's decides it."""
        batches = self._source.batches
        return batches.plan if isinstance(batches, PlanBatches) and not self._source.item_is_batch else None

    def __repr__(self) -> str:
        layout, source = self._own_layout, self._source
        axes = [layout.layout.axes[axis] for axis in layout.data_axes]
        order = type(source.custom_sampler).__name__ if source.custom_sampler is not None else "sequential"
        if self.plan is not None and self.plan.shuffle:
            order = f"shuffled with seed {self.seed}"
        return (
            f"{type(self).__name__}({type(self.dataset).__name__}, {order}, global batch {source.batch_size}, "
            f"tail {source.tail!r}, split over {axes} = {layout.num_data_ranks} data ranks of the mesh "
            f"{dict(zip(layout.layout.axes, layout.layout.shape, strict=True))}, epoch {self.epoch})"
        )

    @property
    def epoch(self) -> int:
        """The epoch that the next iterator will serve."""
        if self._source.custom_sampler is not None:
            # Users set the epoch of the sampler that they made, too.
            now = getattr(self._source.custom_sampler, "epoch", self._sampler_epoch)
            if now != self._sampler_epoch and isinstance(now, int):
                self._epoch = self._sampler_epoch = now
        return self._epoch

    def set_epoch(self, epoch: int, **others: Any) -> None:
        """Choose the epoch of the iterators made from now on.

        Args:
            epoch: 0 or more; the order is a function of it and the seed.
            others: For the `set_epoch` of a sampler of the user's own.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
            raise ArgumentError(f"epoch must be an int >= 0, got {epoch!r}.")
        sampler = self._source.custom_sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(int(epoch), **others)
            self._sampler_epoch = getattr(sampler, "epoch", self._sampler_epoch)
        elif others:
            raise ArgumentError(f"set_epoch: the loader's sampler takes no {sorted(others)}.")
        self._epoch = int(epoch)

    # The run: where it stands, and going on from there

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: a small dict for JSON, `paddle.save` or a checkpoint.

        It counts what was delivered by the newest iterator that has delivered anything, not what was read
        ahead. It is local: no rank waits for another. After the last batch of an epoch it stands at the epoch's
        end; after the `StopIteration`, at the beginning of the next. Save it beside the model, and give it to
        `load_state_dict` of a loader on any mesh, with any number of workers or batch size.
        """
        return self._standing().to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, override: Collection[str] = ()) -> None:
        """Go on from a saved position: iterators of its epoch begin with the next sample.

        Args:
            state: What `state_dict` returned, in this run or another.
            override: Names of fields of the state's fingerprint that may differ from this loader's.

        Raises:
            StateError: It is damaged, of another version, or of a run with another order.
        """
        self._resumed = LoaderState.from_dict(state, self._fingerprint, override)
        self._newest = None
        self.set_epoch(self._resumed.epoch)

    def where(self, *, sample: int, epoch: int | None = None) -> Where | None:
        """Return where a sample is delivered; see `ShardPlan.where`. Of the current epoch if None is given."""
        plan, epoch = self.plan, self.epoch if epoch is None else epoch
        if plan is None:
            raise ArgumentError(
                f"where: the order is that of the loader's {type(self._source.custom_sampler).__name__}, "
                "which cannot be asked for a sample."
            )
        if self._resumed.epoch == epoch:
            plan = resumed_plan(plan, self._resumed)
        return plan.where(epoch=epoch, sample=sample)

    def certificate(self) -> Certificate:
        """Return what the run has delivered of the current epoch, or of the last one if that is complete.

        Collective: every rank calls it, at the same step. It covers what was delivered before a stop, on
        another mesh, with another batch size, too; call it before each `state_dict` that may be loaded by other
        ranks, so that the state holds what all of them have delivered.
        """
        progress = self._newest or self._complete or self._progress_from(self._start())
        legs = progress.legs()
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered: list[Any] = []
            dist.all_gather_object(gathered, legs)
            legs = [leg for of_rank in gathered for leg in of_rank]
        end, expected = self._expected(progress.epoch)
        certificate, merged = certify(legs, progress.epoch, end, expected)
        progress.close_legs(merged)
        return certificate

    def _expected(self, epoch: int) -> tuple[int, Any]:
        plan = self.plan
        if plan is None:
            raise ArgumentError(
                f"certificate: the order is that of the loader's {type(self._source.custom_sampler).__name__}, "
                "which says nothing about how often a sample should be delivered."
            )
        if self._resumed.epoch == epoch:
            plan = resumed_plan(plan, self._resumed)
        return plan.num_served, expected_of_plan(plan, epoch)

    @property
    def _fingerprint(self) -> dict[str, Any]:
        return self._source.batches.fingerprint()

    def _start(self) -> LoaderState:
        """Where an iterator that is made now begins."""
        epoch = self.epoch
        return self._resumed if self._resumed.epoch == epoch else LoaderState(epoch=epoch)

    def _standing(self) -> LoaderState:
        if self._newest is not None:
            return self._newest.state(self._fingerprint)
        return replace(self._start(), fingerprint=self._fingerprint)

    def _progress_from(self, start: LoaderState) -> PassProgress:
        own = self._own_layout
        return PassProgress(start, self._source.batch_size, own.data_rank if own.on_mesh else None, own.num_data_ranks)

    def _delivered(self, progress: PassProgress, pending: Any) -> None:
        if self._newest is None or progress.number > self._newest.number:
            self._newest = progress
        ids, rows = pending.indices, pending.rows
        if not self._source.item_is_batch:
            valid = pending.valid()
            mine = rows.positions(self._own_layout) if self._own_layout.on_mesh else np.empty(0, np.int64)
            if len(mine) < len(ids) or not valid.all():
                ids = [ids[position] for position in mine[valid[mine]].tolist()]
        progress.deliver(pending.batch.num_real, ids, pending.batch.sampler_state)
        progress.ended = progress.steps == self._steps_of(progress.epoch)

    def _steps_of(self, epoch: int) -> int | None:
        plan = self.plan
        if plan is not None:
            return (resumed_plan(plan, self._resumed) if self._resumed.epoch == epoch else plan).num_steps
        if self._num_steps is None:
            try:
                self._num_steps = len(self)
            except ArgumentTypeError:
                self._num_steps = -1
        return self._num_steps

    def _finished(self, progress: PassProgress) -> None:
        if progress.epoch == self.epoch:
            self._epoch = progress.epoch + 1
            self._complete, self._newest = progress, None

    def __len__(self) -> int:
        return len(self._source.batches)

    def __iter__(self) -> ShardIterator:
        return ShardIterator(self)

    def __call__(self) -> LoaderCall:
        """Return an object that starts a fresh pass whenever it is iterated, and has a `next` of its own."""
        return LoaderCall(self)

    def __next__(self) -> Any:
        if self._call is None:
            self._call = LoaderCall(self)
        return next(self._call)

    def close(self) -> None:
        """End persistent workers; open iterators keep theirs."""
        self._reading.close()

    def _rows(self, num_rows: int, micro_size: int) -> BatchRows:
        key = num_rows, micro_size
        if key not in self._rows_of_size:
            if len(self._rows_of_size) > 64:
                self._rows_of_size.clear()
            self._rows_of_size[key] = BatchRows(num_rows, micro_size, self._placer.layouts)
        return self._rows_of_size[key]

    def _split_rows(self, num_local_rows: int) -> BatchRows:
        return BatchRows(num_local_rows * self._own_layout.num_data_ranks, None, [self._own_layout])

    def _check_split(self, batch: Any) -> None:
        check, self._split_check = self._split_check, None
        if check is not None:
            check.run(leaf.numpy() for leaf in _tensors(batch))

    def _item_rows(self, batch: Any) -> BatchRows:
        """Return the rows of a batch that was read whole."""
        unit = max(layout.num_data_ranks for layout in self._placer.layouts) * self._source.accumulation
        num_rows = next((leaf.shape[0] for leaf in _tensors(batch) if leaf.shape), unit)
        if any(num_rows % (layout.num_data_ranks * self._source.accumulation) for layout in self._placer.layouts):
            sizes = " or ".join(map(str, nearest_multiples(num_rows, unit)))
            raise BatchStructureError(
                f"an item of the data set is a global batch of {num_rows} rows, which {unit} data ranks cannot "
                f"split evenly. Nearest sizes that they can: {sizes}."
            )
        micro_size = num_rows // self._source.accumulation
        return BatchRows(num_rows, micro_size, self._placer.layouts, whole=True)

    def _warn_if_batches_differ(self) -> None:
        source = self._source
        if source.tail != "pad" or source.batch_size is None or source.split:
            return
        plan = self.plan
        if plan is not None and plan.num_rows(step=plan.num_steps - 1) != plan.batch_size:
            warnings.warn(
                f"the last batch of an epoch has {plan.num_rows(step=plan.num_steps - 1)} rows and the others "
                f"{plan.batch_size}: a static program is compiled for one size and fails on another. "
                "Give shard_dataloader tail='fill' (rows are marked in .valid) or tail='drop'.",
                stacklevel=4,
            )


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        for child in value.values():
            yield from _tensors(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _tensors(child)
    elif isinstance(value, paddle.Tensor):
        yield value
