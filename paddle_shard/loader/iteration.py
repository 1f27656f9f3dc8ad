"""Iterators that users hold: deliver the batches of one epoch, one by one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import paddle
from paddle.profiler import RecordEvent
from paddle.profiler.timer import benchmark
from paddle.profiler.utils import in_profiler_mode

from paddle_shard.core.checks import listed
from paddle_shard.core.trees import leaves
from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import (
    ArgumentError,
    BatchStructureError,
    PaddleShardError,
    described,
)
from paddle_shard.loader.begin import begin
from paddle_shard.loader.setup import LoaderSetup
from paddle_shard.loader.step_pass import StepPass, past_end_error
from paddle_shard.placement.device import DeviceWatch
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.ranks.agreeing import report_failure
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.source import Source

_MUCH = 0.1
"""Share of padding or dropped data from which on it is logged."""
_MOST_TEXT = 300
"""Characters of an error that a later call repeats."""


class ShardIterator:
    """An iterator over one epoch. Any number of them are independent of each other.

    Attributes:
        epoch: The epoch, fixed when the iterator is made.
        start: The position in the epoch at which the iterator began.
    """

    def __init__(
        self, setup: LoaderSetup, peeked: StepPass | None = None
    ) -> None:
        """Begin to read.

        Args:
            setup: Setup of the loader.
            peeked: The steps from the present position, if their first batch was looked at.
        """
        self._setup = setup
        self.start = setup.run.start()
        self.epoch = self.start.epoch
        self._current: Batch | None = None
        self._failure = ""
        place = setup.dataloader.places[0]
        self._maker = TensorMaker(place)
        self._watch = DeviceWatch.of(place)
        # By this Paddle's profiler knows whose reading it times. It keeps it, so it is not this object.
        self._timed = SimpleNamespace(_dataset=setup.dataloader.dataset)
        self._timer = benchmark()
        self._counts = setup.stats.begin_pass()
        self._profiler = setup.stats.profiler
        # It does not refer to this object, so that abandoning the iterator ends its workers at once.
        self._steps = begin(setup, self.start) if peeked is None else peeked
        # At last: the run counts what it delivers until it is closed.
        self._progress = setup.run.begin(self.start)

    @property
    def step(self) -> int:
        """Number of steps of the epoch so far, including those before a resume and skipped ones."""
        return self._progress.position.steps

    def __repr__(self) -> str:
        state = "closed" if self._progress.closed else "open"
        return f"{type(self).__name__}(epoch {self.epoch}, step {self.step}, {state})"

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            DataReadError: A sample could not be read, transformed or collated; of a stream, by any rank.
            BatchStructureError: The batch does not fit the meshes.
            PeerLostError: Another rank died, is silent, or has left its loop.
        """
        progress = self._progress
        if progress.closed:
            # a loop that tries again would take it for the end of the epoch
            if self._failure:
                raise PaddleShardError(
                    f"this iterator has failed before ({self._failure}), and delivers no more. To go on behind the "
                    "batches that were delivered: loader.load_state_dict(loader.state_dict()), and iter(loader) again."
                )
            raise StopIteration
        counts = self._counts
        profiler = self._profiler
        asked_at = time.perf_counter()
        before = progress.delivered_at
        if before:
            counts.step_seconds += asked_at - before
            if self._watch is not None:
                self._watch.step_queued()
        profiler.is_waiting = True
        try:
            if self._timer.current_event or in_profiler_mode():
                batch = self._next_profiled()
            else:
                batch = next(self._steps)
            if batch.placed is None:
                raise past_end_error()
        except BaseException as error:
            counts.wait_seconds += time.perf_counter() - asked_at
            self._finish(error)
            raise
        profiler.is_waiting = False
        if not before:  # after the workers were forked
            profiler.start()
        progress.delivered_at = delivered_at = time.perf_counter()
        counts.wait_seconds += delivered_at - asked_at
        if self._watch is not None and self._watch.is_busy():
            counts.hidden_seconds += delivered_at - asked_at
        counts.add(batch)
        # Last, and in two assignments: a signal's handler may save the state at any moment.
        self._current = batch
        self._setup.run.delivered(progress, batch.step, *batch.delivered_ids)
        return batch.value

    def _next_profiled(self) -> Batch:
        """Return the next batch, and report its duration to Paddle's profiler and timer."""
        timer = self._timer
        timer.check_if_need_record(self._timed)
        timer.before_reader()
        with RecordEvent("paddle_shard: next batch"):
            batch = next(self._steps)
        timer.after_reader()
        return batch

    def _finish(self, error: BaseException) -> None:
        """Close at the end of the epoch, or after a failure; name the step in the error."""
        run = self._setup.run
        # by a signal handler or another thread
        was_closed = self._progress.closed
        self.close()
        if was_closed and isinstance(error, StopIteration | PaddleShardError):
            raise StopIteration from None  # batches of the epoch may be left
        if isinstance(error, StopIteration):
            try:
                run.finished(self._progress, *self._steps.feed.skipped_at_end())
            except Exception as failure:  # of the user's sampler
                report_failure(
                    "the end of its loop failed", failure, self._setup.ranks
                )
                raise
            _warn_if_uneven(self._setup)
            return
        self._failure = described(error).partition("\n")[0][:_MOST_TEXT]
        run.failed(self._progress, error)
        if isinstance(error, BatchStructureError):
            raise BatchStructureError(
                f"epoch {self.epoch}, step {self.step}: {error}"
            ) from None

    @property
    def valid(self) -> Any:
        """bool[rows] of the last delivered batch: True for a valid row, False for padding and skipped samples.

        It is placed like the rows of the batch's last field, so `(metric * valid).sum() / valid.sum()` is exact.
        """
        batch = self._current
        if batch is None:
            raise PaddleShardError(
                "valid: no batch has been delivered yet; call next() first."
            )
        recipe = batch.placed
        return recipe.rows.valid(batch.valid(), recipe.last, self._maker)

    def close(self) -> None:
        """End the workers and threads; safe to call again. Abandoning the iterator does it, too.

        If a signal handler or another thread calls it while `next` waits, `next` raises `StopIteration`. The epoch
        does not count as finished, and `state_dict` stays that of the last batch.
        """
        self._progress.closed = True
        self._setup.stats.end_pass(self._counts)
        self._steps.close()

    def __enter__(self) -> ShardIterator:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Workers and threads are ended when the process begins to end.
        if hasattr(self, "_progress") and not ending():
            self.close()


def _warn_if_uneven(setup: LoaderSetup) -> None:
    """Log, at the end of an epoch of a stream, which share of the rows was padding: once, and if it is more."""
    stream = setup.source.stream
    if stream is None or stream.whole_items or not stream.plan.tail.pads:
        return
    counts = setup.stats.epoch
    rows = counts.samples + counts.padding + counts.skipped
    if counts.padding * counts.batches < rows:  # less than a whole batch
        return
    share = counts.padding / max(1, rows)
    if share > max(_MUCH, setup.stats.most_uneven):
        setup.stats.most_uneven = share
        warn_once(
            f"tail='pad': {share:.0%} of this rank's rows were padding, since the stream's {stream.plan.num_parts} "
            "parts end at different times. A filter leaves parts of different lengths, and so do shards that are not "
            "counted, of which a part reads whole ones: count files (counts=True; for tars index=, made by "
            "`paddle-shard index`), use fewer parts (in_parts()), or many shards of one size. With tail='repeat' or "
            "num_batches= nothing is lost."
        )


def check_batches_alike(source: Source, plan: ShardPlan | None) -> None:
    """Reject a last batch of another size, on which a static program fails."""
    if source.split or plan is None:
        return
    rows = plan.num_rows(step=plan.num_steps - 1)
    if rows != plan.batch_size:
        raise ArgumentError(
            f"tail={source.tail!r}: the last batch of an epoch has {rows} rows and the others {plan.batch_size}, but "
            "dist.to_static compiles a program for one size, which fails on another. Give shard_dataloader "
            "tail='fill' (the padding is False in .valid) or tail='drop'."
        )


def describe_inputs(first_batch: Callable[[], Any]) -> Any:
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
    has_fields = isinstance(batch, list | dict) and len(batch) > 1
    kinds = [type(leaf).__name__ for leaf in leaves(batch)]
    if not has_fields or not all(map(_is_distributed, leaves(batch))):
        raise BatchStructureError(
            "dist.to_static takes batches that are a list or a dict of at least two fields, the label last, and "
            f"distributed tensors and lists of them only; this loader's are {type(batch).__name__} of {listed(kinds)}. "
            "Take other fields out with a collate_fn, or give to_static an input_spec; leave out local=True."
        )
    return batch


def _is_distributed(leaf: Any) -> bool:
    return isinstance(leaf, paddle.Tensor) and leaf.is_dist()
