"""What does the user hold?"""

from __future__ import annotations

from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import ShardDataloader as PaddleShardDataloader

from paddle_shard.delivery.begin import begin
from paddle_shard.delivery.replicas import replicas_of
from paddle_shard.delivery.rows import LoaderRows
from paddle_shard.delivery.setup import PassSetup
from paddle_shard.delivery.stats import LoaderStats
from paddle_shard.delivery.step_pass import StepPass
from paddle_shard.errors import DataReadError
from paddle_shard.inputs.generators import generators
from paddle_shard.inputs.options import LoaderOptions, check_no_stream_options, checked_prefetch
from paddle_shard.inputs.source import read_source
from paddle_shard.inputs.stream_source import as_stream_loader, read_stream
from paddle_shard.loader.compat import asked_by_to_static, in_auto_dp_mode, mend_process_mesh
from paddle_shard.loader.description import shown, warn_if_batches_differ
from paddle_shard.loader.facts import check_agree, check_ranks, facts_of, ranks_of
from paddle_shard.loader.iteration import ShardIterator, describe
from paddle_shard.loader.run_methods import RunMethods
from paddle_shard.loader.sampler_view import ShardBatchSampler
from paddle_shard.place.field import assignment
from paddle_shard.place.local_tensor import TensorMaker
from paddle_shard.place.placer import BatchPlacer
from paddle_shard.plan.handlers import raised_by_a_handler
from paddle_shard.plan.state import LoaderState
from paddle_shard.position.run import Run
from paddle_shard.ranks.batch_check import BatchCheck, checked_verify
from paddle_shard.reading.chunk import NO_STAND_IN, as_they_are
from paddle_shard.reading.reader import HowToRead
from paddle_shard.reading.reading import Reading, StreamReading


class _OwnNext:
    """The one attribute that `loader()` has for itself."""

    __slots__ = ("_next_of",)
    _next_of: ShardIterator | None


class ShardDataloader(_OwnNext, RunMethods, PaddleShardDataloader):
    """Batches of a DataLoader as distributed tensors. Make one with `shard_dataloader`.

    `iter(loader)` makes a new, independent `ShardIterator` over the current epoch. When an iterator reaches its end,
    the loader moves to the next epoch. `loader()` works, too, and `next(loader())` takes a first batch.

    Attributes:
        batch_size: Number of samples that a data rank reads in a step, before gradient accumulation; None if batches
            differ in size. With a schedule of sizes, that at the start of the run.
        batch_sampler: This rank's batches of indices, with `set_epoch`.
        seed: Seed of the order and of the random numbers of samples.
        timeout: Seconds for which another rank may be silent.
        stats: Counts of what was delivered to this rank, and where the time went; see `LoaderStats`.
    """

    def __init__(self, options: LoaderOptions) -> None:
        """See `shard_dataloader`."""
        # Paddle's constructor is not called: it is what this class puts right.
        mend_process_mesh()
        meshes, shard_dims, placements = options.meshes, options.shard_dims, options.placements
        self._input_keys, self.dense_tensor_idx = options.input_keys, options.dense_tensor_idx
        self._meshes, self._shard_dims, self._original = meshes, shard_dims, options.dataloader
        auto_dp = in_auto_dp_mode()
        assigned = assignment(
            meshes, self._input_keys, shard_dims, placements, dist.get_rank(), replicated_in_name=auto_dp
        )
        self._placer = BatchPlacer(assigned, options.dense_tensor_idx)
        layouts = self._placer.layouts
        self._pad_to = options.padding()
        check_ranks(layouts)
        here = [layout for layout in layouts if layout.on_mesh] or layouts
        self._own_layout = own = max(here, key=lambda layout: layout.num_data_ranks)
        split = bool(options.is_dataset_splitted)
        stream = as_stream_loader(options.dataloader, split=split)
        self._options = options = options.of(options.dataloader if stream is None else stream, split=split)
        dataloader = options.dataloader
        if stream is None:
            check_no_stream_options(options)
            self._source = read_source(options, layouts)
        else:
            self._source = read_stream(options, layouts, own)
        check_agree(options, self._source, layouts)
        self.seed, self.timeout = options.seed, options.timeout
        dispatched = self._source.stream is not None and self._source.stream.dispatched
        self._prefetch, self._if_worth_it = checked_prefetch(options, stream=stream is not None, dispatched=dispatched)
        members, me = ranks_of(layouts), dist.get_rank()
        self._agreeing_ranks = members if options.agree and me in members else (me,)
        self._replicas = replicas_of(options, self._source, layouts, self._agreeing_ranks)
        self._facts = facts_of(self._source, layouts, dataloader.dataset, options.compared())
        """Settings that must be the same on all ranks."""
        self._given = dataloader
        self._run = Run(self._source, own, members, self.timeout)
        compared = hasattr(self._source.custom_sampler, "nranks") or auto_dp
        self._batch_check: BatchCheck | None = None
        verify = checked_verify(options.verify)
        self._verify = verify or 0
        if verify is not None and not self._source.split:
            self._batch_check = BatchCheck(None, getattr(dataloader.dataset, "sample_name", None))
        elif verify is not None and not compared and own.on_mesh and own.num_data_ranks > 1:
            self._batch_check = BatchCheck((own.layout, own.data_axes))
        make = TensorMaker(dataloader.places[0])
        self._rows = LoaderRows(self._source, self._placer, own)
        self._next_of = None
        self.stats = LoaderStats(self._replicas.__str__)
        self._described: tuple[LoaderState, StepPass] | None = None
        """A position, and a pass from there whose first batch was looked at: it cannot perhaps be read again."""
        drawn = generators(with_paddle=options.seed_paddle)
        worker_timeout = 0.9 * self.timeout  # less than the other ranks', so that they are told what it is
        how = HowToRead(
            generators=drawn,
            seed=self.seed,
            skip_errors=options.skip_errors,
            items_are_batches=self._source.item_is_batch,
            several=own.num_data_ranks > 1 and self._pad_to is None,
            split=self._source.split,
        )
        setup, even = self._source.stream, as_they_are if self._pad_to is None else self._pad_to.even
        read = None
        if setup is not None:
            read = StreamReading(stage=setup.stage, num_workers=setup.num_workers, places=setup.places(), even=even)
        self._reading = Reading(dataloader, how, make.copied, make.zero_copy, worker_timeout, read)
        self._dataloader = self._reading.dataloader
        size = self._source.batch_size
        self.batch_size = None
        if size is not None:
            ranks = 1 if self._source.split else self._own_layout.num_data_ranks
            self.batch_size = size // self._source.accumulation // ranks
        self.batch_sampler = ShardBatchSampler(dataloader, self._source, own, self._rows, self._run, self.batch_size)
        self._dataloader.batch_sampler = self.batch_sampler

    @property
    def dataset(self) -> Any:
        """The data set of the given DataLoader."""
        return self._given.dataset

    @property
    def is_dataset_splitted(self) -> bool:
        """True if each data rank reads rows of its own."""
        return self._source.split

    def reads(self, dataloader: Any) -> bool:
        """Return True if the loader was made from this DataLoader.

        Args:
            dataloader: Any object.
        """
        return self._original is dataloader

    def __repr__(self) -> str:
        name, who_reads = type(self).__name__, str(self._replicas)
        return shown(name, self.dataset, self._source, self.plan, self._own_layout, self.seed, self.epoch, who_reads)

    def __len__(self) -> int:
        return self._run.num_batches()

    def __iter__(self) -> ShardIterator:
        described, self._described = self._described, None
        if described is not None and described[0] == self._run.start():
            return ShardIterator(self._setup(), described[1])
        if described is not None:
            described[1].close()
        return ShardIterator(self._setup())

    def _setup(self) -> PassSetup:
        return PassSetup(
            options=self._options,
            source=self._source,
            dataloader=self._given,
            name=repr(self),
            placer=self._placer,
            own_layout=self._own_layout,
            rows=self._rows,
            reading=self._reading,
            run=self._run,
            stats=self.stats,
            input_keys=self._input_keys,
            pad_to=self._pad_to,
            agreeing_ranks=self._agreeing_ranks,
            facts=self._facts | {"changes of the order": self._run.history.to_json()},
            batch_check=self._batch_check,
            replicas=self._replicas,
            verify=self._verify,
            prefetch=self._prefetch,
            if_worth_it=self._if_worth_it,
        )

    def _first_batch(self) -> Any:
        """Return the first batch of the current epoch without delivering it."""
        if self._described is None or self._described[0] != self._run.start():
            if self._described is not None:
                self._described[1].close()
            start = self._run.start()
            self._described = start, begin(self._setup(), start)
        described = self._described[1]
        try:
            found = described.peek()
        except BaseException as error:
            if not isinstance(error, Exception) or raised_by_a_handler(error):  # who knows what was read
                self._described = None
                described.close()
            raise
        if found is None:
            raise DataReadError(NO_STAND_IN.format("the run was resumed past the end of the stream"))
        return found.value

    def __call__(self) -> ShardDataloader:
        """Return this loader with a `next` of its own: all else, the epoch and the position too, is one and the same.

        Trainers call the loader once, enumerate the result every epoch, and ask it for what they would ask the loader;
        `dist.to_static` takes one `next` of it.
        """
        other = object.__new__(type(self))
        other.__dict__, other._next_of = self.__dict__, None
        return other

    def __next__(self) -> Any:
        """Return the next batch of a pass that continues from `next` to `next`; after its end or a load, of another."""
        if asked_by_to_static():
            warn_if_batches_differ(self._source, self.plan)
            return describe(self._first_batch)
        if self._next_of is not None and self._next_of.outdated:
            self._next_of.close()
            self._next_of = None
        if self._next_of is None:
            self._next_of = iter(self)
        try:
            return next(self._next_of)
        except StopIteration:
            self._next_of = None
            raise

    def close(self) -> None:
        """End persistent workers; open iterators keep theirs."""
        if self._described is not None:
            self._described[1].close()
        self._reading.close()
