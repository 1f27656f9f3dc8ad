"""How does a user iterate over one pass, batch by batch?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.profiler import RecordEvent

from paddle_shard.delivery.begin import index_pass, stream_pass, unequal_ends
from paddle_shard.delivery.pending import Pending
from paddle_shard.delivery.setup import PassSetup
from paddle_shard.delivery.stats import PassClock
from paddle_shard.errors import (
    ArgumentError,
    BatchStructureError,
    DataReadError,
    PaddleShardError,
    UnequalEndsError,
)
from paddle_shard.loader.progress_bar import ProgressBar
from paddle_shard.loader.uneven import say_if_uneven
from paddle_shard.reading.chunk import NO_STAND_IN


class ShardIterator:
    """One pass over one epoch. Any number of passes are independent of each other.

    Attributes:
        epoch: The epoch, fixed when the iterator is made.
        start: The position in the epoch at which the pass began.
    """

    def __init__(self, setup: PassSetup, *, look: bool = False) -> None:
        """Start the pass.

        Args:
            setup: Of the loader whose epoch it is.
            look: If True, only the first batch is looked at, and the user's own sampler is left as it is.
        """
        self._setup = setup
        self.start = start = setup.run.start()
        self.epoch = start.epoch
        if not look:
            setup.run.say_if_begun_again(start)
        self._progress = setup.run.begin(start)
        self._closed, self._look = False, look
        self._current: Pending | None = None
        self._clock = PassClock(setup.stats)
        self._bar = None
        if setup.options.progress and not look and dist.get_rank() == 0:
            self._bar = ProgressBar(start.epoch, self._progress.num_steps, start.steps)
        # The pass does not refer to this object, so that abandoning it ends its workers at once.
        self._pass: Any = stream_pass(setup, start) if setup.source.stream else index_pass(setup, start, look)

    def hand_out(self) -> None:
        """Become the loader's newest iterator, after its first batch was looked at."""
        self.start = self._setup.run.start()
        self._progress.hand_out(self.start)

    @property
    def step(self) -> int:
        """Number of batches of the epoch that were delivered so far, including those before a resume."""
        return self._progress.steps

    @property
    def outdated(self) -> bool:
        """True if the loader has loaded a state since: the iterator no longer moves the run."""
        return self._setup.run.is_outdated(self._progress)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"{type(self).__name__}(epoch {self.epoch}, step {self.step}, {state}, of {self._setup.name})"

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            DataReadError: A sample could not be read, transformed or collated; of a stream, by any rank.
            BatchStructureError: The batch does not fit the meshes.
            PeerLostError: Another rank died, is silent, or has left its loop.
        """
        if self._closed:
            raise StopIteration
        entered = self._clock.enter()
        try:
            return self._deliver(entered)
        except StopIteration:
            self.close()
            self._clock.end(entered)
            if not self._look:
                self._setup.run.finished(self._progress)
                say_if_uneven(self._setup, self.epoch)
            raise
        except UnequalEndsError as error:
            self.close()
            raise unequal_ends(self._setup, error) from None
        except BatchStructureError as error:
            self.close()
            raise BatchStructureError(f"epoch {self.epoch}, step {self.step}: {error}") from None
        except BaseException:
            self.close()
            raise

    def _deliver(self, entered: float) -> Any:
        with RecordEvent("paddle_shard: next batch"):
            found = next(self._pass)
        if found is None:
            raise DataReadError(NO_STAND_IN.format("the run was resumed past the end of the stream"))
        placed, pending = found
        if self._look:  # nothing is delivered
            return placed
        ids = pending.own_ids(self._setup.own_layout)
        if self._bar is not None:
            self._bar.step(self._setup.stats.epoch.starved, 1 + pending.batch.passed[0])
        self._clock.leave(
            entered,
            rows=pending.num_rows(),
            samples=pending.num_real_rows(),
            num_bytes=pending.num_bytes,
            skipped=pending.num_skipped(),
            load=pending.batch.load,
        )
        # Last, and in two assignments: a signal's handler may save the state at any moment.
        self._current = pending
        self._setup.run.delivered(self._progress, pending.batch, ids)
        return placed

    def peek(self) -> Any:
        """Return the first batch of a stream without delivering it."""
        return self._pass.peek()[0]

    @property
    def valid(self) -> Any:
        """bool[rows] for the batch that was delivered last: True for a real row, False for padding.

        It is placed like the rows of the batch's last field, so `(metric * valid).sum() / valid.sum()` is exact.
        """
        if self._current is None:
            raise PaddleShardError("valid: no batch has been delivered yet; call next() first.")
        assert self._current.rows is not None
        assert self._current.layout is not None
        return self._setup.placer.valid(self._current.valid(), self._current.rows, self._current.layout)

    def close(self) -> None:
        """End the workers and threads of the pass; safe to call again. Abandoning the iterator does it, too."""
        self._closed = self._progress.closed = True
        if self._bar is not None:
            self._bar.close()
        self._pass.close()

    def __enter__(self) -> ShardIterator:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_pass") and not ending():  # workers and threads are ended when the process begins to end
            self.close()


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
        raise ArgumentError("dist.to_static needs a batch to describe the inputs, but the loader has none.") from None
    if isinstance(batch, tuple):
        batch = list(batch)  # Paddle takes the label off with pop()
    if not isinstance(batch, list | dict) or len(batch) < 2:
        raise BatchStructureError(
            f"dist.to_static takes batches that are a list or a dict of at least two fields, the label last; "
            f"this loader's are {type(batch).__name__}"
            + (f" of {len(batch)}." if isinstance(batch, list | dict) else ".")
        )
    others = [path for path, leaf in _leaves(batch, "batch") if not isinstance(leaf, paddle.Tensor)]
    if others:
        raise BatchStructureError(
            f"dist.to_static takes tensors and lists of them only, but {', '.join(others)} are none. Take them "
            "out of the batch with a collate_fn, or give to_static an input_spec."
        )
    return batch


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and path == "batch":
        for key, child in value.items():
            yield from _leaves(child, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from _leaves(child, f"{path}[{number}]")
    else:
        yield path, value
