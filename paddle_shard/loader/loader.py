"""What does the user hold, and what do trainers see as its `batch_sampler`?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle.io
from paddle.distributed.auto_parallel.api import (
    ShardDataloader as PaddleShardDataloader,
)

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.loader import stopping
from paddle_shard.loader.assembly import setup_of
from paddle_shard.loader.begin import begin
from paddle_shard.loader.compat import asked_by_to_static, mend_process_mesh
from paddle_shard.loader.iteration import (
    ShardIterator,
    describe,
    warn_if_batches_differ,
)
from paddle_shard.loader.options import LoaderOptions
from paddle_shard.loader.placing import PassSetup
from paddle_shard.loader.step_pass import StepPass
from paddle_shard.plan.certificate import Certificate
from paddle_shard.plan.mixture import Drawn
from paddle_shard.plan.shard_plan import ShardPlan, Where
from paddle_shard.plan.state import LoaderState
from paddle_shard.ranks.agreeing import fails_on_all_ranks


def _ranks_of(
    it: ShardDataloader | ShardBatchSampler, *_: Any, **__: Any
) -> list[tuple[int, ...]]:
    return [it._run.ranks]


@dataclass
class _Shared:
    """What a loader and all that its calls return have in common, and change."""

    setup: PassSetup
    described: tuple[LoaderState, StepPass] | None = None
    """A position, and a pass from there whose first batch was looked at: it cannot perhaps be read again."""


class ShardDataloader(PaddleShardDataloader):
    """Batches of a DataLoader as distributed tensors. Make one with `shard_dataloader`.

    `iter(loader)` makes a new, independent `ShardIterator` over the current epoch. When an iterator reaches its end,
    the loader moves to the next epoch. `loader()` works, too, and `next(loader())` takes a first batch.

    Attributes:
        given: What `shard_dataloader` was given: a DataLoader, a stream, or batches.
        dataset: The data set of the DataLoader.
        batch_size: Number of samples that a data rank reads in a step, before gradient accumulation; None if batches
            differ in size. With a schedule of sizes, that at the start of the run.
        batch_sampler: This rank's batches of indices, with `set_epoch`.
        seed: Seed of the order and of the random numbers of samples.
        timeout: Seconds for which another rank may be silent.
        is_dataset_splitted: True if each data rank reads rows of its own.
        stats: Counts of what was delivered to this rank, and where the time went; see `LoaderStats`.
    """

    def __init__(self, options: LoaderOptions) -> None:
        """See `shard_dataloader`."""
        # Paddle's constructor is not called: it is what this class puts right.
        mend_process_mesh()
        setup = setup_of(options)
        source = setup.source
        self._shared, self._run = _Shared(setup), setup.run
        self._next_of: tuple[int, ShardIterator] | None = None
        """The iterator of `next(loader)`, and the first pass of the run when it was made: a load begins another."""
        self.given, self.dataset, self.stats = (
            options.dataloader,
            setup.options.dataloader.dataset,
            setup.stats,
        )
        self.seed, self.timeout, self.is_dataset_splitted = (
            options.seed,
            options.timeout,
            source.split,
        )
        self.dense_tensor_idx = options.dense_tensor_idx
        self.batch_size = None
        if source.batch_size is not None:
            ranks = 1 if source.split else setup.own_layout.num_data_ranks
            self.batch_size = source.batch_size // source.accumulation // ranks
        self.batch_sampler = ShardBatchSampler(setup, self.batch_size)
        # Trainers look for the sampler behind the DataLoader, too, where Paddle's class has it.
        self._dataloader = setup.reading.dataloader
        self._dataloader.batch_sampler = self.batch_sampler

    @property
    def _input_keys(self) -> Any:
        """The keys to deliver in passes that begin from now on. Trainers assign them."""
        return self._shared.setup.placer.input_keys

    @_input_keys.setter
    def _input_keys(self, keys: Any) -> None:
        setup = self._shared.setup
        self._shared.setup = replace(
            setup, placer=replace(setup.placer, input_keys=keys)
        )

    def __repr__(self) -> str:
        source, own, plan = (
            self._shared.setup.source,
            self._shared.setup.own_layout,
            self.plan,
        )
        order = (
            "sequential"
            if source.custom_sampler is None
            else type(source.custom_sampler).__name__
        )
        if source.stream is not None and not source.item_is_batch:
            order = f"stream in {source.stream.plan.num_parts} parts"
        if (
            source.custom_sampler is None
            and plan is not None
            and not plan.ordering.is_identity
        ):
            order = f"shuffle={plan.ordering.name!r}, seed {self.seed}"
        return (
            f"{type(self).__name__}({type(self.dataset).__name__}, {order}, global batch {source.batch_size}, "
            f"tail {source.tail!r}, split over {list(own.data_axis_names)} = "
            f"{own.num_data_ranks} data ranks of the mesh "
            f"{dict(zip(own.layout.axes, own.layout.shape, strict=True))}, epoch {self.epoch}"
            + (f", {self.stats.who_reads})" if self.stats.who_reads else ")")
        )

    def __len__(self) -> int:
        return self._run.num_batches()

    @fails_on_all_ranks(_ranks_of, "iter(loader)")
    def __iter__(self) -> ShardIterator:
        return ShardIterator(self._shared.setup, repr(self), self._take_described())

    def _take_described(self) -> StepPass | None:
        """Return the pass whose first batch was looked at, if the run still stands where it begins."""
        described, self._shared.described = self._shared.described, None
        if described is not None and described[0] != self._run.start():
            described[1].close()
            return None
        return None if described is None else described[1]

    def _first_batch(self) -> Any:
        """Return the first batch of the current epoch without delivering it."""
        shared, start, described = (
            self._shared,
            self._run.start(),
            self._take_described(),
        )
        if described is None:
            described = begin(shared.setup, start)
        shared.described = start, described
        try:
            return described.peek()
        except BaseException as error:
            if not isinstance(error, Exception):  # a batch may have been read by halves
                shared.described = None
                described.close()
            raise

    def __call__(self) -> ShardDataloader:
        """Return this loader with a `next` of its own: all else, the epoch and the position too, is one and the same.

        Trainers call the loader once, enumerate the result every epoch, and ask it for what they would ask the loader;
        `dist.to_static` takes one `next` of it.
        """
        # A shallow copy: both have one `_Shared`, one run and one `stats`, and so one position.
        other = copy(self)
        other._next_of = None
        return other

    def __next__(self) -> Any:
        """Return the next batch of a pass that continues from `next` to `next`; after its end or a load, of another."""
        if asked_by_to_static():
            warn_if_batches_differ(self._shared.setup.source, self.plan)
            return describe(self._first_batch)
        if self._next_of is not None and self._next_of[0] < self._run.first_pass:
            self._next_of[1].close()
            self._next_of = None
        if self._next_of is None:
            self._next_of = self._run.first_pass, iter(self)
        try:
            return next(self._next_of[1])
        except StopIteration:
            self._next_of = None
            raise

    def close(self) -> None:
        """End persistent workers; open iterators keep theirs."""
        if self._shared.described is not None:
            self._shared.described[1].close()
        self._shared.setup.reading.close()

    @property
    def stop_requested(self) -> bool:
        """True at the same step on all ranks of the meshes, after any of them got a SIGTERM; it stays True.

        The first use, which must be on the main thread, has SIGTERM noted: it does not end the process any more. A
        handler that you had installed before is called as well; one that you install later replaces it. The ranks
        tell each other with the next step that they announce, up to eight steps ahead of the one that is delivered,
        so no call of yours is collective. After the last step of an epoch, it is the first step of the next. All
        loaders over the same ranks become True together.

        Raises:
            ArgumentError: This rank is on none of the meshes, so nobody tells it.

        Examples:
            >>> for inputs, labels in loader:  # doctest: +SKIP
            ...     train(inputs, labels)
            ...     if loader.stop_requested:
            ...         checkpoints.save(step, model=model, data=loader)
            ...         sys.exit(143)
        """
        setup = self._shared.setup
        if not setup.own_layout.on_mesh:
            raise ArgumentError(
                f"stop_requested: global rank {setup.own_layout.global_rank} is on none of the loader's meshes, so "
                "nobody tells it. Ask on the ranks of the meshes, and send it what they say."
            )
        stopping.listen()
        return stopping.is_requested(setup.agreeing_ranks)

    @property
    def plan(self) -> ShardPlan | None:
        """The order of the run, without the data; None if a sampler of your own decides it."""
        return self._run.plan

    @property
    def epoch(self) -> int:
        """The epoch that the next iterator will serve."""
        return self._run.epoch

    @fails_on_all_ranks(_ranks_of)
    def set_epoch(self, epoch: int, **others: Any) -> None:
        """Choose the epoch of the iterators that are made from now on.

        Args:
            epoch: 0 or more. The order is a function of the epoch and the seed.
            others: Further arguments for the `set_epoch` of a sampler of your own.
        """
        self._run.set_epoch(epoch, others)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run: a small dict for JSON, `paddle.save` or a checkpoint.

        It counts the batches that the newest iterator has delivered, not those that were prefetched. It is local: no
        rank waits for another. After the last batch of an epoch it is the end of that epoch; after the
        `StopIteration` it is the beginning of the next. Save it beside the model, and give it to `load_state_dict` of
        a loader on any mesh, with any number of workers and any batch size.
        """
        return self._run.save()

    @fails_on_all_ranks(_ranks_of)
    def load_state_dict(
        self, state: Mapping[str, Any], *, override: Collection[str] = ()
    ) -> None:
        """Resume from a saved position: iterators of its epoch begin with the next sample.

        The position is used until one of them reaches its end. Later iterators over the same epoch serve all of it.
        Iterators that were made before the load no longer move the run.

        Args:
            state: A result of `state_dict`, of this run or another.
            override: Names of fields of the state's fingerprint that may differ from this loader's; "data" to resume
                with other data.

        Raises:
            StateError: The state is damaged, of another version, or of a run with another order. When the first
                iterator begins: of other data.
        """
        self._run.resume_from(state, override)

    def where(
        self, *, sample: int | tuple[str, int], epoch: int | None = None
    ) -> Where | list[Where] | None:
        """Return where a sample is delivered; see `ShardPlan.where`.

        Of a `Mixture`, a sample may be delivered several times in an epoch, or not at all: it is a list then.

        Args:
            sample: Index of the sample in the data set; of a `Mixture`, (name of the source, index in it).
            epoch: The epoch; None: the current one.
        """
        return self._run.where(sample, epoch)

    def sources(self) -> Mapping[str, Drawn]:
        """Return what the run has drawn of each source of a `Mixture`, up to the last batch that was delivered.

        Samples of skipped steps, and those that the tail of an earlier epoch dropped, keep their place in
        the mixture, so they count as drawn. `certificate().sources` counts what an epoch delivers.

        Returns:
            Name -> what was drawn, with the attributes `drawn`, `share`, `weight` and `epochs`, over all ranks and
            epochs of the run; no rank waits for another.

        Raises:
            ArgumentError: The data set is no `Mixture`.
        """
        return self._run.sources()

    @fails_on_all_ranks(_ranks_of)
    def certificate(self) -> Certificate:
        """Return a proof of which samples the run has delivered in the epoch of its last batch.

        Right after a load, that is the epoch of the loaded state. `set_epoch` does not change it until a batch of the
        new epoch is delivered. In the middle of an epoch, the certificate lists what is still missing.

        The call is collective: every rank of the meshes calls it, at the same step. It counts every batch of the epoch
        that any iterator of this loader has delivered since the loader was made or has loaded a state, and what that
        state says of the epoch: samples that were delivered before the stop, also on another mesh or with another batch
        size. An epoch that was left and begun again, two iterators over it at once, or a `next(iter(loader))` to see a
        batch have delivered samples twice, so the certificate is not exact. Call it before each `state_dict` that other
        ranks may load, so that the state knows what all ranks have delivered.

        With a sampler of your own, it proves that each sample was delivered as often as the sampler drew it, to one
        data rank each time, up to the end of the sampler, and that all ranks drew alike. It cannot know what the
        sampler should have drawn, nor what the tail dropped.

        Raises:
            ArgumentError: Of streams, of data sets of whole batches, and where a sampler of your own splits the data,
                samples have no number that all ranks know.
        """
        return self._run.certificate()


class ShardBatchSampler(paddle.io.DistributedBatchSampler):
    """This rank's batches of indices, as Paddle's own loader shows them to trainers.

    `batch_size`, `nranks` and `local_rank` are a data rank's; `set_epoch` is the loader's; other attributes
    are those of the sampler that the loader was given, of whose class it is for `isinstance`, too.
    """

    def __init__(self, setup: PassSetup, batch_size: int | None) -> None:
        # Not Paddle's: its constructor would look for a rank of its own.
        source, own = setup.source, setup.own_layout
        self._source, self._rows, self._run = source, setup.rows, setup.run
        self._given, self.dataset = (
            setup.options.dataloader.batch_sampler,
            setup.options.dataloader.dataset,
        )
        self.nranks = own.num_data_ranks
        self.local_rank = own.data_rank if own.on_mesh else 0
        self.batch_size = batch_size
        self.drop_last = source.tail.drops
        self.shuffle = bool(getattr(self._given, "shuffle", False))
        self._acc_steps = source.accumulation

    @property
    def epoch(self) -> int:
        """The loader's epoch."""
        return self._run.epoch

    @property
    def num_samples(self) -> int:
        """Samples of a data rank, as Paddle counts them."""
        return math.ceil(len(self.dataset) / self.nranks)

    @property
    def total_size(self) -> int:
        """Samples of all data ranks, as Paddle counts them."""
        return self.num_samples * self.nranks

    def __iter__(self) -> Iterator[list[Any]]:
        if self._source.stream is not None:
            raise ArgumentTypeError(
                "batch_sampler: the samples of a stream have no index. Iterate over the loader itself."
            )
        start = self._run.start(self.epoch)
        start = LoaderState(
            epoch=start.epoch, steps_before=start.steps_before
        )  # of the whole epoch
        for step in self._source.batches.steps(
            start, self._rows.to_read, self._run.skips(start)
        ):
            yield (
                step.ids.tolist()
                if isinstance(step.ids, np.ndarray)
                else list(step.ids)
            )

    def __len__(self) -> int:
        return self._run.num_batches()

    @fails_on_all_ranks(_ranks_of)
    def set_epoch(self, epoch: int = 0, **others: Any) -> None:
        """Set the loader's epoch; further arguments go to the `set_epoch` of the sampler that was given."""
        if asked_by_to_static(3):  # behind the decorator
            return  # describing the inputs has not moved the order
        self._run.set_epoch(epoch, others)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # `isinstance` asks this, too. PaddleNLP's trainers skip by reading, unless they find their own sampler here: it
        # must stand behind its `consumed_samples` then, which not all of them tell it, and is not shown before.
        known, given = self.__dict__, self.__dict__.get("_given")
        if given is not None and getattr(given, "consumed_samples", None) != 0:
            known["_shown"] = type(
                given
            )  # also in later epochs, where it begins at 0 again
        shown: type = known.get("_shown", type(self))
        return shown

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask for dunder names, and for others before `__init__` has run: without an end.
        if name.startswith("__") or "_given" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._given, name)
