"""What does a rank request from its readers at each step of a stream?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from paddle_shard.errors import StateError
from paddle_shard.inputs.stream_batches import StreamBatches
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.parts import chunks_of
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Step
from paddle_shard.reading.chunk import ChunkRequest
from paddle_shard.stages import Map, Shuffle, Stripe
from paddle_shard.stages.stage import Opening, Stage

_UNREAD = {"shard": None, "rows": 0, "library": None}

_numbers = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSetup:
    """The parts of a stream that this rank reads, and the number of its workers."""

    batches: StreamBatches
    """The stream's order."""
    parts: tuple[int, ...]
    """Parts that this rank holds. If items are whole batches: (0,), or the data rank if another library reads."""
    num_workers: int
    """Number of worker processes that read; 0: the main process reads."""
    several: bool
    """True if other ranks read other rows."""
    skip_errors: bool = False
    """True if a sample on which the user's code fails becomes an invalid row."""
    foreign: bool = False
    """True if another library reads the data of a given data rank."""
    pads: bool = False
    """True if rows may differ in length, since they are padded when they are placed."""

    @property
    def stage(self) -> Stage:
        """The stage that opens the parts."""
        return self.batches.stage

    @property
    def read_by_all(self) -> bool:
        """True if each reader reads the whole stream and keeps its own samples of it."""
        striped = any(isinstance(stage, Stripe) for stage in self.stage.line())
        return striped and self.batches.split_over is None

    @property
    def ends_apart(self) -> int | None:
        """By how many steps the ends may differ that readers of one stream see; None: by any number."""
        # Map and Shuffle keep the number of samples.
        cut = next(stage for stage in self.stage.line() if not isinstance(stage, Map | Shuffle))
        if not isinstance(cut, Stripe) or self.batches.repeats:
            return None
        return 0 if self.batches.plan is None else 1

    @property
    def chunks(self) -> list[tuple[int, ...]]:
        """The parts of each reader."""
        return chunks_of(self.parts, self.num_workers)

    def read_rows(self) -> Rows:
        """Return the rows of a global batch that this rank reads, ascending."""
        assert self.batches.plan is not None
        return self.batches.plan.rows_of(self.parts)

    def places(self) -> list[Rows]:
        """Return, for each chunk, the positions of its rows among the rows that this rank reads."""
        plan = self.batches.plan
        if plan is None:
            return [np.zeros(1, np.int64)]
        return [np.searchsorted(self.read_rows(), plan.rows_of(parts)) for parts in self.chunks]

    def steps(self, start: LoaderState, compared: bool) -> Iterator[Step]:
        """Yield the steps of this rank from a position on, forever: who knows the end stops.

        Args:
            start: The position.
            compared: True if the samples are compared with those that other readers of the stream read.
        """
        plan, number = self.batches.plan, next(_numbers)
        parts = self._items(number, start, compared) if plan is None else self._rows(number, start, compared)
        size, micro_size = (0, 0) if plan is None else (plan.batch_size, plan.micro_rows)
        for step, of_readers in enumerate(parts, start.steps):
            yield Step(
                epoch=start.epoch,
                number=step,
                num_rows=size,
                micro_size=micro_size,
                num_real=1 if plan is None else size,
                parts=tuple(of_readers),
            )

    def _rows(self, number: int, start: LoaderState, compared: bool) -> Iterator[list[ChunkRequest]]:
        plan = self.batches.plan
        assert plan is not None
        opening = Opening(
            parts=self.parts,
            num_parts=plan.num_parts,
            stripe=self.batches.stripe(start),
            seed=self.batches.seed,
            epoch=start.epoch,
            skip=start.samples // plan.num_parts,
        )
        chunks = self.chunks
        for step in count(start.steps):
            yield [
                ChunkRequest(
                    number=number,
                    opening=replace(opening, parts=parts),
                    step=step,
                    first_step=start.steps,
                    stripe=plan.stripe,
                    accumulation=plan.accumulation,
                    pad=plan.ending.pads and not plan.repeats,
                    repeat=plan.repeats,
                    skip_errors=self.skip_errors,
                    rows_are_split=(self.several or len(chunks) > 1) and not self.pads,
                    compared=compared,
                )
                for parts in chunks
            ]

    def _items(self, number: int, start: LoaderState, compared: bool) -> Iterator[list[ChunkRequest]]:
        readers = max(1, self.num_workers)
        batches = self.batches
        local = dict(start.sampler or _UNREAD) if batches.split_over is not None else None
        if self.foreign and local and local["shard"] not in (None, *self.parts):
            raise StateError(
                f"state is of data rank {local['shard']}, but this rank reads as data rank {self.parts[0]}. Each data "
                "rank's own library has a state of its own: save it on every rank, and load that."
            )
        state = None if local is None or batches.repeats else local["library"]
        for step in count(start.steps):
            first = start.steps + (step - start.steps) % readers
            opening = Opening(
                parts=self.parts if self.foreign else (first % readers,),
                num_parts=batches.split_over or 1 if self.foreign else readers,
                seed=batches.seed,
                epoch=start.epoch,
                skip=first // readers if state is None else 0,
                state=state,
            )
            yield [
                ChunkRequest(
                    number=number,
                    opening=opening,
                    step=step,
                    first_step=first,
                    stride=readers,
                    stripe=1,
                    pad=batches.tail.pads and not batches.repeats,
                    repeat=batches.repeats and local is not None,
                    whole_items=True,
                    local_rows=None if local is None else local["rows"],
                    compared=compared,
                )
            ]
