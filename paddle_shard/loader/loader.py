"""The loader that users hold, and the `batch_sampler` that trainers find in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import paddle.io
from paddle.distributed.auto_parallel.api import (
    ShardDataloader as PaddleShardDataloader,
)

from paddle_shard.data.stream import Stream
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.loader import stopping
from paddle_shard.loader.begin import begin
from paddle_shard.loader.compat import asked_by_to_static
from paddle_shard.loader.iteration import (
    ShardIterator,
    check_batches_alike,
    describe_inputs,
)
from paddle_shard.loader.setup import LoaderSetup
from paddle_shard.loader.step_pass import StepPass
from paddle_shard.plan.certificate import Certificate
from paddle_shard.plan.mixture import Drawn
from paddle_shard.plan.shard_plan import ShardPlan, Where
from paddle_shard.plan.state import LoaderState
from paddle_shard.ranks.agreeing import fails_on_all_ranks
from paddle_shard.reading.executor import InlineExecutor


def _ranks_of(
    loader: ShardDataloader | ShardBatchSampler, *_: Any, **__: Any
) -> list[tuple[int, ...]]:
    return [loader._run.ranks]


class ShardDataloader(PaddleShardDataloader):
    """Batches of a DataLoader as distributed tensors. Make one with `shard_dataloader`.

    `iter(loader)` makes a new, independent `ShardIterator` over the current epoch. When an iterator reaches its end,
    the loader moves to the next epoch. `loader()` works, too, and `next(loader())` takes a first batch.

    Attributes:
        given: What `shard_dataloader` was given: a DataLoader, a stream, or batches.
        dataset: The data set of the DataLoader.
        batch_size: Number of samples that a data rank reads in a step, before gradient accumulation; None if batches
            differ in size. With a schedule of sizes, that at the start of the run.
        batch_sampler: The sizes of this rank's batches and `set_epoch`, for trainers; it cannot be iterated.
        seed: Seed of the order and of the random numbers of samples.
        timeout: Seconds for which another rank may be silent.
        is_dataset_splitted: True if each data rank reads rows of its own.
        stats: Counts of what was delivered to this rank, and where the time went; see `LoaderStats`.
    """

    def __init__(self, setup: LoaderSetup, given: Any, *, seed: int) -> None:
        """See `shard_dataloader`."""
        # Paddle's constructor is not called: it is what this class puts right.
        source = setup.source
        self._setup = setup
        self._run = setup.run
        self._peeked: tuple[LoaderState, StepPass] | None = None
        """A position, and the steps from there, whose first batch `dist.to_static` has looked at."""
        self._wrap: Callable[[ShardIterator], Any] | None = None
        """Wraps the next iterator, as a trainer's callback does."""
        self._next_iterator: ShardIterator | None = None
        """The iterator of `next(loader)`."""
        self.given = given
        self.dataset = setup.dataloader.dataset
        self.stats = setup.stats
        self.seed = seed
        self.timeout = setup.timeout
        self.is_dataset_splitted = source.split
        self.dense_tensor_idx = setup.placer.dense_tensor_idx
        self.batch_size = None
        if source.batch_size is not None:
            num_data_ranks = (
                1 if source.split else setup.row_layout.num_data_ranks
            )
            self.batch_size = (
                source.batch_size // source.accumulation // num_data_ranks
            )
        self.batch_sampler = ShardBatchSampler(setup, self.batch_size)
        # Trainers look for the sampler behind the DataLoader, too, where Paddle's class has it.
        self._dataloader = setup.reading.dataloader
        self._dataloader.batch_sampler = self.batch_sampler

    @property
    def _input_keys(self) -> Any:
        """The keys to deliver by iterators that begin from now on. Trainers assign them."""
        return self._setup.placer.input_keys

    @_input_keys.setter
    def _input_keys(self, keys: Any) -> None:
        setup = self._setup
        placer = replace(setup.placer, input_keys=keys)
        self._setup = replace(setup, placer=placer)

    def __repr__(self) -> str:
        source = self._setup.source
        row_layout = self._setup.row_layout
        is_stream = isinstance(self.dataset, Stream)
        order = source.batches.fingerprint()
        entries = [
            repr(self.dataset) if is_stream else type(self.dataset).__name__,
            *(f"{name} {value!r:.200}" for name, value in order.items()),
            f"global batch {source.batch_size}",
            f"split over {list(row_layout.data_axis_names)} = "
            f"{row_layout.num_data_ranks} data ranks of the mesh {row_layout.layout.sizes}",
            f"epoch {self.epoch}",
            str(self._setup.replicas),
        ]
        return f"{type(self).__name__}({', '.join(filter(None, entries))})"

    def __len__(self) -> int:
        return self._run.num_batches()

    @fails_on_all_ranks(_ranks_of, "iter(loader)")
    def __iter__(self) -> ShardIterator:
        iterator = ShardIterator(self._setup, self._take_peeked())
        if self._wrap is None:
            return iterator
        wrapped: ShardIterator = self._wrap(iterator)
        self._wrap = None
        return wrapped

    def _take_peeked(self) -> StepPass | None:
        """Return the steps whose first batch was peeked at, if the run still is where they begin."""
        peeked = self._peeked
        self._peeked = None
        if peeked is None:
            return None
        start, step_pass = peeked
        if start != self._run.start() or not step_pass.is_of_this_process:
            step_pass.close()
            return None
        return step_pass

    def _first_batch(self) -> Any:
        """Return the first batch of the current epoch without delivering it."""
        start = self._run.start()
        step_pass = self._take_peeked() or begin(self._setup, start)
        self._peeked = (start, step_pass)
        try:
            return step_pass.peek()
        except BaseException as error:
            # a batch may have been read in part
            if not isinstance(error, Exception):
                self._peeked = None
                step_pass.close()
            raise

    def __call__(self) -> ShardDataloader:
        """Return this loader, whose `next` begins again: trainers call the loader once, and iterate the result."""
        self._next_iterator = None
        return self

    def __next__(self) -> Any:
        """Return the next batch of an iterator that continues from `next` to `next`.

        After its end, a load, or `loader()`, the next call begins another iterator.
        """
        if asked_by_to_static():
            check_batches_alike(self._setup.source, self.plan)
            InlineExecutor.has_static_program = True
            return describe_inputs(self._first_batch)
        if self._next_iterator is None:
            self._next_iterator = iter(self)
        try:
            return next(self._next_iterator)
        except StopIteration:
            self._next_iterator = None
            raise

    def close(self) -> None:
        """End persistent workers; open iterators keep theirs."""
        peeked = self._peeked
        self._peeked = None
        if peeked is not None:
            peeked[1].close()
        self._setup.reading.close()

    @property
    def stop_requested(self) -> bool:
        """True at the same step on all ranks of the meshes, after any of them got a SIGTERM; it stays True.

        The first use, which must be on the main thread, installs a handler: SIGTERM no longer ends the process. A
        handler that you had installed before is called as well; one that you install later replaces it. The ranks send
        the request with the steps that they announce, up to eight steps ahead of the one that is delivered, so no call
        is collective. After the last step of an epoch, it is the first step of the next. All loaders over the same
        ranks become True together.

        Raises:
            ArgumentError: This rank is on none of the meshes.

        Examples:
            >>> for inputs, labels in loader:  # doctest: +SKIP
            ...     train(inputs, labels)
            ...     if loader.stop_requested:
            ...         checkpoints.save(step, model=model, data=loader)
            ...         sys.exit(143)
        """
        setup = self._setup
        if not setup.row_layout.on_mesh:
            raise ArgumentError(
                f"stop_requested: global rank {setup.row_layout.global_rank} is on none of the loader's meshes and "
                "does not receive the signal. Ask on the ranks of the meshes, and send it their answer."
            )
        stopping.listen()
        return stopping.is_requested(setup.ranks)

    @property
    def valid(self) -> NoReturn:
        """The valid rows are those of an iterator: `batches = iter(loader)`, then `batches.valid` after each batch."""
        raise AttributeError(
            "valid: several iterators may be over this loader, and each has its own batch. Write batches = "
            "iter(loader); for batch in batches: batches.valid."
        )

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
        self._next_iterator = None

    def where(
        self, *, sample: int | tuple[str, int], epoch: int | None = None
    ) -> Where | list[Where] | None:
        """Return where a sample is delivered; see `ShardPlan.where`.

        For a `Mixture`, a sample may be delivered several times in an epoch, or not at all: it is a list then.

        Args:
            sample: Index of the sample in the data set; of a `Mixture`, (name of the source, index in it).
            epoch: The epoch; None: the current one.
        """
        return self._run.where(sample, epoch)

    def sources(self) -> Mapping[str, Drawn]:
        """Return what the run has drawn of each source of a `Mixture`, up to the last batch that was delivered.

        Samples of skipped steps, and those that the tail of an earlier epoch dropped, keep their place in
        the mixture, so they count as drawn.

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

        The call is collective: every rank of the meshes calls it, at the same step. In the middle of an epoch, the
        certificate lists what is still missing. Right after a load, the epoch is that of the loaded state.

        It counts every batch of the epoch that any iterator of this loader has delivered since the loader was made, and
        what the loaded state knows of the epoch: samples that were delivered before the stop, also on another mesh or
        with another batch size. An epoch that was left and begun again has delivered samples twice, so its certificate
        is not exact. Call it before each `state_dict` that other ranks may load, so that the state knows what all ranks
        have delivered.

        With a sampler of your own, it proves that each sample was delivered as often as the sampler drew it, to one
        data rank each time, and that all ranks drew alike.

        Raises:
            ArgumentError: Samples have no number that all ranks know: a stream, a data set of whole batches, or data
                that a sampler of your own splits.
        """
        return self._run.certificate()


class ShardBatchSampler(paddle.io.DistributedBatchSampler):
    """What trainers look for in a loader: the sizes of this rank's batches, and `set_epoch`.

    `batch_size`, `nranks` and `local_rank` are a data rank's; `set_epoch` is the loader's; other attributes
    are those of the sampler that the loader was given, of whose class it is for `isinstance`, too.
    """

    def __init__(self, setup: LoaderSetup, batch_size: int | None) -> None:
        # Not Paddle's: its constructor would look for a rank of its own.
        self._run = setup.run
        self._given = setup.dataloader.batch_sampler
        self.dataset = setup.dataloader.dataset
        row_layout = setup.row_layout
        self.nranks = row_layout.num_data_ranks
        self.local_rank = row_layout.data_rank if row_layout.on_mesh else 0
        self.batch_size = batch_size
        self.drop_last = setup.source.tail.drops
        self.shuffle = bool(getattr(self._given, "shuffle", False))
        self._acc_steps = setup.source.accumulation

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

    def __iter__(self) -> NoReturn:
        raise ArgumentTypeError(
            "batch_sampler: this loader does not read by it. Iterate over the loader itself; loader.plan, and the "
            "command paddle-shard, show the indices of a step."
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
        # must stand behind its `consumed_samples` then, which not all of them set, and is not shown before.
        attributes = self.__dict__
        given = attributes.get("_given")
        if given is not None and getattr(given, "consumed_samples", None) != 0:
            # also in later epochs, which begin at 0
            attributes["_shown_class"] = type(given)
        shown: type = attributes.get("_shown_class", type(self))
        return shown

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask for dunder names, and for others before `__init__` has run: without an end.
        if name.startswith("__") or "_given" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._given, name)
