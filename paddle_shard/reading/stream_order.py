"""Steps of a stream, and the requests that a rank sends to its readers for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import numpy as np

from paddle_shard.data.external import ExternalSource
from paddle_shard.data.samplers.plan_batches import Batches
from paddle_shard.data.stages.cut import Stripe
from paddle_shard.data.stages.stage import Opening, Stage
from paddle_shard.errors import StateError
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.parts import PartsPlan, chunks_of
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Step, Steps
from paddle_shard.reading.chunk_reader import ChunkRequest

_UNREAD = {"shard": None, "rows": 0, "library": None}
"""State of a data rank's own stream at the beginning of an epoch."""

_numbers = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder(Batches):
    """The global batches of a stream, and the parts of them that this rank reads.

    Its samples have no numbers, so its steps name parts and positions.
    """

    steps_unknown: ClassVar[str] = (
        "the number of batches of a stream shows only at its end. Give num_batches= for epochs of a known length, "
        "or a source that knows its counts."
    )

    stage: Stage
    """The stage that opens the stream's parts."""
    plan: PartsPlan
    """The parts of which batches are made. If items are whole batches, they are the rows of a single part."""
    seed: int
    parts: tuple[int, ...]
    """Parts that this rank holds. If items are whole batches: (0,), or the data rank if another library reads."""
    num_workers: int
    """Number of worker processes that read; 0: the main process reads."""
    whole_items: bool = False
    """True if each item is a whole batch. Then each step is read by one of the readers, in turns."""
    split_over: int | None = None
    """Number of data ranks, if each has a stream of its own. Such a run is bound to this number."""

    @property
    def chunks(self) -> list[tuple[int, ...]]:
        """The parts of each reader that reads a share of every step."""
        return chunks_of(self.parts, self.num_workers)

    def read_rows(self) -> Rows:
        """Return the rows of a global batch that this rank reads, ascending."""
        return self.plan.rows_of(self.parts)

    def places(self) -> list[Rows]:
        """Return, for each chunk of a step, the positions of its rows among the rows that this rank reads."""
        if self.whole_items:
            return [np.zeros(1, np.int64)]
        return [
            np.searchsorted(self.read_rows(), self.plan.rows_of(parts))
            for parts in self.chunks
        ]

    # The order

    def steps(
        self, start: LoaderState, *_for_an_index: Any, compared: bool
    ) -> Steps:
        """Yield the steps of this rank from a position on, forever: who knows the end stops.

        Args:
            start: The position.
            _for_an_index: Further arguments of `IndexBatches.steps`.
            compared: True if the samples are compared with those that other readers of the stream read.
        """
        plan = self.plan
        requests = self._first_requests(start, compared)
        number = start.steps
        while True:
            sent = requests
            if self.whole_items:
                sent = [requests[(number - start.steps) % len(requests)]]
            yield Step(
                epoch=start.epoch,
                number=number,
                num_rows=0 if self.whole_items else plan.batch_size,
                micro_size=0 if self.whole_items else plan.micro_rows,
                num_positions=plan.batch_size,
                parts=tuple(request._replace(step=number) for request in sent),
            )
            number += 1

    def _first_requests(
        self, start: LoaderState, compared: bool
    ) -> list[ChunkRequest]:
        """Return the first request to each reader of an iteration; the later ones differ only in their step."""
        opening = replace(
            self.opening(start), skip=start.samples // self.plan.num_parts
        )
        request = ChunkRequest(
            iterator_number=next(_numbers),
            opening=opening,
            step=start.steps,
            first_step=start.steps,
            plan=self.plan,
            compared=compared,
        )
        if self.whole_items:
            return self._requests_in_turns(start, request)
        return [
            request._replace(
                opening=replace(opening, parts=parts), repeat=self.plan.repeats
            )
            for parts in self.chunks
        ]

    def _requests_in_turns(
        self, start: LoaderState, request: ChunkRequest
    ) -> list[ChunkRequest]:
        """Return the first request to each reader if items are whole batches, which the readers read in turns."""
        num_readers = max(1, self.num_workers)
        local = self._local_state(start)
        library_state = (
            None if local is None or self.plan.repeats else local["library"]
        )
        request = request._replace(
            stride=num_readers,
            whole_items=True,
            # A stream that all ranks read alike was repeated before it was cut.
            repeat=self.plan.repeats and local is not None,
            local_rows=None if local is None else local["rows"],
        )
        requests = []
        for step in range(start.steps, start.steps + num_readers):
            parts, num_parts = self._turn(step % num_readers, num_readers)
            turn = replace(
                request.opening,
                parts=parts,
                num_parts=num_parts,
                skip=step // num_readers if library_state is None else 0,
                state=library_state,
            )
            requests.append(request._replace(opening=turn, first_step=step))
        return requests

    def _turn(
        self, reader: int, num_readers: int
    ) -> tuple[tuple[int, ...], int]:
        """Return (parts of a reader, number of all parts); another library reads the part of the data rank."""
        if isinstance(self.stage, ExternalSource):
            return self.parts, self.split_over or 1
        return (reader,), num_readers

    def _local_state(self, start: LoaderState) -> dict[str, Any] | None:
        """Return the state of a data rank's own stream; None if all ranks read the same stream.

        Raises:
            StateError: It is the state of another data rank.
        """
        if self.split_over is None:
            return None
        local = dict(start.sampler or _UNREAD)
        is_other = local["shard"] not in (None, *self.parts)
        if is_other and isinstance(self.stage, ExternalSource):
            raise StateError(
                f"state is of data rank {local['shard']}, but this rank reads as data rank {self.parts[0]}. Each "
                "data rank's own library has a state of its own: save it on every rank, and load that."
            )
        return local

    def resume(self, state: LoaderState) -> None:
        """See `Batches`."""
        if (
            isinstance(self.stage, ExternalSource)
            and state.steps
            and not state.ended
        ):
            self.stage.check_resume(repeats=self.plan.repeats)

    def opening(self, start: LoaderState) -> Opening:
        """Return how all parts are opened at the beginning of the epoch of a position."""
        plan = self.plan
        # Of another uncut stream, the batch size at the epoch's start decides on the parts, also after a resume.
        batch_size = plan.batch_size
        if start.segments and not self.is_recut:
            batch_size = start.segments[0][1]
        stripe = max(1, batch_size // plan.accumulation // plan.num_parts)
        parts = tuple(range(plan.num_parts))
        return Opening(
            parts=parts,
            num_parts=len(parts),
            stripe=stripe,
            origin=start.samples if self.is_recut else 0,
            seed=self.seed,
            epoch=start.epoch,
        )

    @property
    def is_recut(self) -> bool:
        """True if a resume may cut the rest of the stream into other parts: the batches are its next samples."""
        is_shared = self.split_over is None and not self.whole_items
        return (
            isinstance(self.stage, Stripe)
            and is_shared
            and not self.plan.repeats
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that the order depends on."""
        plan = self.plan
        fingerprint: dict[str, Any] = {
            "stream": self.stage.fingerprint(),
            "seed": self.seed,
            "tail": str(plan.tail),
        }
        if not self.whole_items and not self.is_recut:
            fingerprint["num_parts"] = plan.num_parts
        if plan.num_batches is not None:
            fingerprint["num_batches"] = plan.num_batches
        if self.split_over is not None:
            fingerprint["num_data_ranks"] = self.split_over
        return fingerprint

    # Its end

    def known_steps(self, start: LoaderState) -> int | None:
        """See `Batches`; it is the same on every rank."""
        plan = self.plan
        # also for another tail, or a batch size for which more is left
        if start.ended:
            return start.steps
        if plan.num_batches is not None:
            return max(start.steps, plan.num_batches)
        if self.split_over is not None:
            return None
        lengths = self.stage.lengths(self.opening(start))
        if lengths is None:
            return None
        whole = plan.num_steps(lengths)  # also checks what the tail demands
        if not start.samples:
            return whole
        left = [
            max(0, length - start.samples // plan.num_parts)
            for length in lengths
        ]
        return start.steps + plan.tail.num_steps(left, plan.samples_per_part)

    @property
    def read_by_all(self) -> bool:
        """True if each reader reads the whole stream and keeps its own samples of it."""
        return self.split_over is None and any(
            isinstance(stage, Stripe) for stage in self.stage.line()
        )
