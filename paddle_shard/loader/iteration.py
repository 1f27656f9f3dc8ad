"""How does a user iterate over one pass, batch by batch, and what is said of it at its end, or before it?"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import paddle
from paddle.profiler import RecordEvent
from paddle.profiler.timer import benchmark
from paddle.profiler.utils import in_profiler_mode

from paddle_shard.core.trees import named_leaves
from paddle_shard.core.warn_once import say_once
from paddle_shard.data.files.shards import ShardSource
from paddle_shard.errors import (
    ArgumentError,
    BatchStructureError,
    DataReadError,
    PaddleShardError,
    UnequalEndsError,
    described,
)
from paddle_shard.loader.begin import begin, unequal_ends
from paddle_shard.loader.placing import PassSetup
from paddle_shard.loader.step_pass import StepPass
from paddle_shard.placement.device import DeviceWatch
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.state import LoaderState
from paddle_shard.ranks.agreeing import tell_failed
from paddle_shard.reading.batch import NO_STAND_IN, Batch
from paddle_shard.reading.source import Source

_MUCH = 0.1
"""Share of dropped data from which on it is logged."""
_MOST_TEXT = 300
"""Characters of an error that a later call repeats."""
_MORE_ALIKE = (
    "Parts are alike if their files are counted (counts=True; for tars index=, made by `paddle-shard index`), if there "
    "are fewer parts (in_parts()), or many files of one size. With tail='repeat' or num_batches= nothing is lost."
)


class ShardIterator:
    """One pass over one epoch. Any number of passes are independent of each other.

    Attributes:
        epoch: The epoch, fixed when the iterator is made.
        start: The position in the epoch at which the pass began.
    """

    def __init__(
        self, setup: PassSetup, loader: str, begun: StepPass | None = None
    ) -> None:
        """Start the pass.

        Args:
            setup: Of the loader whose epoch it is.
            loader: Its `repr`.
            begun: A pass from the present position, whose first batch was looked at; None: a new one.
        """
        self._setup = setup
        self._loader = loader
        self.start = setup.run.start()
        self.epoch = self.start.epoch
        self._current: Batch | None = None
        self._failed = ""
        self._valid: tuple[Batch, Any] | None = None
        place = setup.options.dataloader.places[0]
        self._make = TensorMaker(place)
        self._watch = DeviceWatch(place)
        # By this Paddle's profiler knows whose reading it times. It keeps it, so it is not this object.
        self._timed = SimpleNamespace(_dataset=setup.options.dataloader.dataset)
        self._handed = 0.0
        """When the newest batch was handed to the user, by `time.perf_counter`."""
        self._counts = setup.stats.begin_pass()
        self._profiler = setup.stats.profiler
        # The pass does not refer to this object, so that abandoning it ends its workers at once.
        self._pass = begin(setup, self.start) if begun is None else begun
        self._progress = setup.run.begin(
            self.start
        )  # at last: the run counts what it delivers until it is closed

    @property
    def step(self) -> int:
        """Number of steps of the epoch so far, including those before a resume and skipped ones."""
        return self._progress.at.steps

    def __repr__(self) -> str:
        state = "closed" if self._progress.closed else "open"
        return f"{type(self).__name__}(epoch {self.epoch}, step {self.step}, {state}, of {self._loader})"

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            DataReadError: A sample could not be read, transformed or collated; of a stream, by any rank.
            BatchStructureError: The batch does not fit the meshes.
            PeerLostError: Another rank died, is silent, or has left its loop.
        """
        if self._progress.closed:
            if (
                self._failed
            ):  # a loop that tries again would take it for the end of the epoch
                raise PaddleShardError(
                    f"this iterator has failed before ({self._failed}), and delivers no more. To go on behind the "
                    "batches that were delivered: loader.load_state_dict(loader.state_dict()), and iter(loader) again."
                )
            raise StopIteration
        asked = time.perf_counter()
        if self._handed:
            self._counts.step_seconds += asked - self._handed
            self._watch.step_queued()
        profiler = self._profiler
        profiler.is_waiting = True
        try:
            batch = (
                self._next_profiled()
                if benchmark().current_event or in_profiler_mode()
                else next(self._pass)
            )
            if batch.placed is None:
                raise DataReadError(
                    NO_STAND_IN.format("the run was resumed past the end of the stream")
                )
        except StopIteration:
            self._finish(asked)
            raise
        except BaseException as error:
            self._fail(asked, error)
            raise
        profiler.is_waiting = False
        if not self._handed:  # after the workers were forked
            profiler.start()
        self._handed = handed = time.perf_counter()
        counts = self._counts
        counts.wait_seconds += handed - asked
        if self._watch.is_busy():
            counts.hidden_seconds += handed - asked
        counts.add(batch)
        # Last, and in two assignments: a signal's handler may save the state at any moment.
        self._current = batch
        self._setup.run.delivered(self._progress, batch.step, *batch.delivered_ids)
        return batch.value

    def _next_profiled(self) -> Batch:
        """Return the next batch, and tell Paddle's profiler and its timer how long it took."""
        timer = benchmark()
        timer.check_if_need_record(self._timed)
        timer.before_reader()
        with RecordEvent("paddle_shard: next batch"):
            batch = next(self._pass)
        timer.after_reader()
        return batch

    def _finish(self, asked: float) -> None:
        """Note that the pass has come to its end."""
        setup = self._setup
        self._counts.wait_seconds += time.perf_counter() - asked
        self.close()
        try:
            setup.run.finished(self._progress, *self._pass.skipped_at_end())
        except (
            Exception
        ) as error:  # by the user's sampler; the others hear of it in their next loop
            tell_failed("the end of its loop failed", error, setup.agreeing_ranks)
            raise
        say_if_uneven(setup, self.epoch)

    def _fail(self, asked: float, error: BaseException) -> None:
        """Note that the pass has failed, and name the step in the error."""
        setup = self._setup
        self._counts.wait_seconds += time.perf_counter() - asked
        self.close()
        if isinstance(error, Exception):
            self._failed = described(error).partition("\n")[0][:_MOST_TEXT]
        setup.run.failed(self._progress, error)
        if isinstance(error, UnequalEndsError):
            raise unequal_ends(setup, error) from None
        if isinstance(error, BatchStructureError):
            raise BatchStructureError(
                f"epoch {self.epoch}, step {self.step}: {error}"
            ) from None

    @property
    def valid(self) -> Any:
        """bool[rows] for the batch that was delivered last: True for a real row, False for padding.

        It is placed like the rows of the batch's last field, so `(metric * valid).sum() / valid.sum()` is exact.
        """
        if self._current is None:
            raise PaddleShardError(
                "valid: no batch has been delivered yet; call next() first."
            )
        found = self._current
        if (
            self._valid is None or self._valid[0] is not found
        ):  # made once a batch: it is a copy to the device
            self._valid = (
                found,
                found.placed.rows.valid(found.valid(), found.placed.last, self._make),
            )
        return self._valid[1]

    def close(self) -> None:
        """End the workers and threads of the pass; safe to call again. Abandoning the iterator does it, too."""
        self._progress.closed = True
        self._setup.stats.end_pass(self._counts)
        self._pass.close()

    def __enter__(self) -> ShardIterator:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if (
            hasattr(self, "_progress") and not ending()
        ):  # workers and threads are ended when the process begins to end
            self.close()


def say_if_uneven(setup: PassSetup, epoch: int) -> None:
    """Log, at the end of a pass, how many rows of this rank were padding, or what was dropped: once, and if it is more.

    The files of a part may be others in each epoch.
    """
    stream = setup.source.stream
    stats = setup.stats
    if stream is None or stream.whole_items or stream.plan.repeats:
        return
    plan = stream.plan
    counts = stats.epoch
    rank = setup.own_layout.global_rank
    rows = counts.samples + counts.padding + counts.skipped
    padding = counts.padding / max(1, rows)
    if (
        plan.ending.pads and padding * counts.batches >= 1 and padding > stats.most_lost
    ):  # a whole batch
        stats.most_lost = padding
        say_once(
            f"tail='pad': {counts.padding} of the {rows} rows that rank {rank} was given in this epoch are padding, "
            f"because the stream's {plan.num_parts} parts end at different times. {_MORE_ALIKE}"
        )
    if plan.ending.drops and rank == 0 and isinstance(stream.stage.source, ShardSource):
        sizes = stream.stage.source.part_sizes(stream.opening(LoaderState(epoch=epoch)))
        dropped = plan.ending.lost(sizes) if sizes and any(sizes) else 0.0
        if dropped > max(_MUCH, stats.most_lost):
            stats.most_lost = dropped
            say_once(
                f"tail='drop': this loop had {counts.batches} batches, {counts.batches * plan.batch_size} rows, and "
                f"ended with the shortest of the stream's {plan.num_parts} parts: about {dropped:.0%} of the data, by "
                f"its files' sizes, was dropped. {_MORE_ALIKE}"
            )


def warn_if_batches_differ(source: Source, plan: ShardPlan | None) -> None:
    """Warn if the last batch of an epoch has another size, on which a static program fails."""
    if source.batch_size is None or source.split or plan is None:
        return
    rows = plan.num_rows(step=plan.num_steps - 1)
    sizes = sorted({size for _, size in plan.segments})
    if len(sizes) > 1:
        warnings.warn(
            f"batches have {' and '.join(map(str, sizes))} rows in this epoch: a static program is compiled for one "
            "size and fails on another. Compile it again when the size changes, or train dynamically.",
            stacklevel=4,
        )
    elif rows != plan.batch_size:
        warnings.warn(
            f"the last batch of an epoch has {rows} rows and the others {plan.batch_size}: a static program is "
            "compiled for one size and fails on another. Give shard_dataloader tail='fill' (rows are marked in "
            ".valid) or tail='drop'.",
            stacklevel=4,
        )


def describe(first_batch: Callable[[], Any]) -> Any:
    """Return one batch for `dist.to_static` to read shapes and placements from; the order does not move.

    Args:
        first_batch: Returns it without delivering it.

    Raises:
        BatchStructureError: Not what a static model takes: a list or dict of tensors, the label last.
    """
    try:
        batch = first_batch()
    except StopIteration:
        raise ArgumentError(
            "dist.to_static needs a batch to describe the inputs, but the loader has none."
        ) from None
    if isinstance(batch, tuple):
        batch = list(batch)  # Paddle takes the label off with pop()
    if not isinstance(batch, list | dict) or len(batch) < 2:
        raise BatchStructureError(
            f"dist.to_static takes batches that are a list or a dict of at least two fields, the label last; "
            f"this loader's are {type(batch).__name__}"
            + (f" of {len(batch)}." if isinstance(batch, list | dict) else ".")
        )
    # Of dicts, only the batch itself may be one.
    found = named_leaves(
        batch, "batch", lambda value: isinstance(value, dict) and value is not batch
    )
    others = [path for path, leaf in found if not isinstance(leaf, paddle.Tensor)]
    if others:
        raise BatchStructureError(
            f"dist.to_static takes tensors and lists of them only, but {', '.join(others)} are none. Take them "
            "out of the batch with a collate_fn, or give to_static an input_spec."
        )
    return batch
