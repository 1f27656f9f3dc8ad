"""Chunk readers: read the parts of a stream that a reader holds, and fill missing rows."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, repeat
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.data.stages.cut import FAILED_AT, Stripe
from paddle_shard.data.stages.stage import (
    Opening,
    Stage,
    Stated,
    Unreadable,
)
from paddle_shard.data.stages.steps import in_rounds
from paddle_shard.errors import BatchStructureError, PaddleShardError
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.step import MOST_PLACEHOLDERS, SamplerStep
from paddle_shard.reading.batch import Batch, Chunk, take_rows
from paddle_shard.reading.digest import TurnDigests
from paddle_shard.reading.reader import HowToRead, Reader
from paddle_shard.reading.tensors import num_rows_of


class ChunkRequest(NamedTuple):
    """A reader's share of a step: some rows of each part that it holds."""

    iterator_number: int
    """Number of the pass. A reader starts over when it gets a request of another pass."""
    opening: Opening
    """The parts, and where the pass begins in them."""
    step: int
    """Step of the epoch."""
    first_step: int
    """First step that this reader serves in the pass."""
    plan: PartsPlan
    """The parts of which the step is made."""
    stride: int = 1
    """Number of steps from one step that this reader serves to the next."""
    repeat: bool = False
    """True if a part that has ended is opened again; the plan does not tell, as a stream may be repeated before it is
    cut."""
    whole_items: bool = False
    """True if each sample is a whole batch, so samples are not put together."""
    local_rows: int | None = None
    """If a sample is a rank's own batch, its number of rows; 0: not known yet. None: it is no such batch."""
    compared: bool = False
    """True if the samples are compared with those that other readers of the same stream read."""

    @property
    def pad(self) -> bool:
        """True if missing rows are filled."""
        return self.plan.tail.pads and not self.plan.repeats

    @property
    def position(self) -> int:
        """Number of samples of each part before this step."""
        return (
            self.opening.skip
            + (self.step - self.first_step)
            // self.stride
            * self.plan.samples_per_part
        )

    @property
    def indices(self) -> list[tuple[int, int]]:
        """(part, position) of the first sample of each part."""
        return [(part, self.position) for part in self.opening.parts]


_NOTHING = object()


@lru_cache(maxsize=64)
def _row_places(
    num_parts: int, size: int, stripe: int
) -> tuple[tuple[int, int], ...]:
    """Return (number of the part, sample of the step in it) of each row that a reader reads.

    Args:
        num_parts: Parts that the reader holds.
        size: Samples of each part in a step.
        stripe: Samples of each part in a micro-batch.
    """
    return tuple(
        (part, row)
        for first in range(0, size, stripe)
        for part in range(num_parts)
        for row in range(first, first + stripe)
    )


class ChunkReader(Reader):
    """Serves the requests of one pass after another, in the order of the steps.

    It runs in a worker, or in the main process if there are no workers. It keeps the parts of its pass open.
    """

    def __init__(
        self,
        stage: Stage,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        how: HowToRead,
    ) -> None:
        """Set up the reader.

        Args:
            stage: The stage that opens the parts.
            dataset: See `Reader`.
            collate_fn: See `Reader`.
            how: See `Reader`.
        """
        super().__init__(dataset, collate_fn, how)
        self._stage = stage
        self._request: Any = None
        """The newest request."""
        self._pass_number: int | None = None
        self._parts: Sequence[Iterator[Any]] = []
        """For each part its samples, or if parts are repeated, pairs of the round and the sample."""
        self._padding: Padding
        self._digests: TurnDigests
        self._state: Any = None

    def read(
        self, request: Any, worker: int | None, *, is_first: bool = False
    ) -> Any:
        """See `Reader`. A number stands for a request like the one before, for that step."""
        if isinstance(request, int):
            request = self._request._replace(step=request)
        self._request = request
        return super().read(request, worker, is_first=is_first)

    def close(self) -> None:
        """Drop the open parts."""
        self._pass_number = None
        self._parts = []

    def _begin(self, request: ChunkRequest) -> None:
        """Open the parts at a step: the first of the iterator, unless another reader has read those before it."""
        is_whole = request.whole_items
        opening = replace(
            request.opening,
            rng=self.rng,
            skip_errors=self._how.skip_errors,
        )
        self._pass_number = request.iterator_number
        self.rng.unread_sources.clear()
        self.owns_arrays = self._collate_fn is None and not is_whole
        self._state = opening.state
        at_request = replace(opening, skip=request.position)
        # Whole batches that several readers take in turns are padded with the first one of the stream.
        first = (
            at_request.uncut(request.position)
            if request.stride > 1
            else at_request
        )
        self._padding = Padding(self._stage, first, whole=is_whole)
        turn = 1 if is_whole else opening.num_parts * opening.stripe
        self._digests = TurnDigests(turn, apart=is_whole)
        if request.compared and not request.repeat and self._counts_after_cut():
            # The digests are of all that was read since the iterator began.
            opening = replace(opening, seen=self._digests.see)
        else:
            opening = at_request
        self._parts = (
            in_rounds(self._stage, opening, None)
            if request.repeat
            else self._stage.open(opening)
        )
        for _ in range(opening.skip, request.position):
            for items in self._parts:
                next(items, None)

    def _counts_after_cut(self) -> bool:
        """Return whether a position determines how far each reader has read of a stream that all of them read.

        It does not if samples become several after the cut. (Nor if parts are repeated: readers may begin a round at
        different steps.)
        """
        for stage in self._stage.line():
            if isinstance(stage, Stripe):
                return True
            if stage.makes_several:
                return False
        return False

    def _rows(self, request: ChunkRequest) -> Chunk:
        """See `Reader`. Requests of an iterator come in the order of their steps."""
        parts = request.opening.parts
        if request.iterator_number != self._pass_number:
            self._action = f"opening parts {list(parts)}"
            self._begin(request)
        columns, has_new = self._columns(request)
        size = request.plan.samples_per_part
        num_read = list(map(len, columns))
        is_whole = min(num_read) == size
        if request.pad and not is_whole:
            self._fill(columns, request)

        # Rows of the batch, micro-batch by micro-batch: (number of the part here, sample of the step).
        places = _row_places(len(parts), size, request.plan.stripe)
        padding = bytes(len(places))
        if not is_whole:
            padding = bytes(row >= num_read[part] for part, row in places)
        value = None
        skipped: list[tuple[int, str]] = []
        if is_whole or min(map(len, columns)) == size:  # else rows are missing
            samples = [columns[part][row] for part, row in places]
            value, skipped = self._collated_samples(samples, places, request)
            skipped = [(row, text) for row, text in skipped if not padding[row]]
        state = None
        if request.local_rows is not None:
            state = {
                "shard": parts[0],
                "rows": request.local_rows,
                "library": self._state,
            }
        is_known = is_whole and not skipped and request.local_rows is None
        digest = 0
        if request.compared:
            opening = request.opening
            before = opening.origin // opening.num_parts
            last = (request.position - before + size - 1) // opening.stripe
            if request.whole_items:
                last = request.position * opening.num_parts + parts[0]
            digest = self._digests.until(last)
        return Chunk(
            value,
            None if is_known else padding,
            has_new,
            state,
            skipped,
            digest=digest,
        )

    def _collated_samples(
        self,
        samples: list[Any],
        places: Sequence[tuple[int, int]],
        request: ChunkRequest,
    ) -> tuple[Any, list[tuple[int, str]]]:
        """Return the batch of some samples, and (row, reason) of the rows that hold another sample."""
        self._action = f"collating {len(samples)} samples"
        if self._collate_fn is not None and self.rng.seeds:
            # The same for all readers of the step.
            self.rng.seed(request.opening.key(0, "collate", request.step))
        if request.whole_items:
            return self._whole_batch(samples[0]), []
        if not self._how.skip_errors:
            return self._collate(samples), []
        parts = request.opening.parts
        if self._placeholder is None and all(
            isinstance(sample, Unreadable) for sample in samples
        ):
            with contextlib.suppress(LookupError):
                self._placeholder = self._padding.of(parts[0])

        def name_of(row: int) -> str:
            part, number = places[row]
            return self._name_of(
                parts[part], request.position + number, request
            )

        return self._collated(samples, name_of)

    def _columns(self, request: ChunkRequest) -> tuple[list[list[Any]], bool]:
        """Return the samples of each part, as many as there are, and whether any is of the part's first round."""
        size = request.plan.samples_per_part
        parts = request.opening.parts
        columns: list[list[Any]] = [[] for _ in parts]
        # One call for all parts: there may be as many as there are rows.
        unread = iter(self._parts)
        shares = map(islice, unread, repeat(size))
        try:
            deque(map(list.extend, columns, shares), maxlen=0)
        except BaseException:
            failed = len(parts) - length_hint(unread) - 1
            number = request.position + len(columns[failed])
            self._at(parts[failed], number)
            raise
        has_new = any(columns)
        if request.repeat:
            has_new = any(
                number == 0 for column in columns for number, _ in column[:1]
            )
            columns = [[sample for _, sample in column] for column in columns]
        # a library's only part
        if columns[0] and isinstance(columns[0][-1], Stated):
            self._state = columns[0][-1].state
            columns = [[stated.sample for stated in columns[0]]]
        self._padding.note(parts, columns, size)
        return columns, has_new

    def _fill(self, columns: list[list[Any]], request: ChunkRequest) -> None:
        """Fill missing rows; they stay missing if no sample can fill them and no other rows were read."""
        is_delivered = any(columns)
        for part, column in zip(request.opening.parts, columns, strict=True):
            self._action = f"padding part {part}"
            missing = request.plan.samples_per_part - len(column)
            try:
                column += [self._padding.of(part)] * missing if missing else []
            except Exception:
                if is_delivered:
                    raise
                return

    def _name_of(self, part: int, number: int, request: ChunkRequest) -> str:
        """Return the name of a sample, for messages."""
        origin = None
        if not request.whole_items:
            origin = self._stage.origin(request.opening, part, number)
        return f"sample {number} of part {part}" + (
            f" ({origin})" if origin else ""
        )

    def _at(self, part: int, number: int) -> None:
        self._index = part, number
        self._action = f"reading sample {number} of part {part}"

    def _explain(self, error: BaseException, request: ChunkRequest) -> None:
        """See `Reader`."""
        index = getattr(error, FAILED_AT, None)
        if index is not None:
            # It failed before the cut, perhaps at another reader's sample.
            self._at(*index)
        elif self._index is not None and not isinstance(
            error, PaddleShardError
        ):
            part, number = self._index
            self._action = f"reading {self._name_of(part, number, request)}"


class Padding:
    """Fills missing rows of a part with its own first sample, or with that of the lowest part that has one.

    Samples that cannot be read are passed over. So the choice depends on the order alone, not on which reader holds
    which parts, nor on where the pass began. The first samples that a pass reads are kept. If it begins later, and for
    other readers' parts, the stream is opened again.
    """

    def __init__(self, stage: Stage, opening: Opening, *, whole: bool) -> None:
        """Set up; nothing is opened yet.

        Args:
            stage: The stage that opens the parts.
            opening: The opening of the pass.
            whole: True if each sample is a whole batch. Then only the opened part may fill rows.
        """
        self._stage = stage
        self._whole = whole
        self._opening = replace(opening, skip=0, origin=0, state=None)
        self._notes_first = opening.skip == 0 and opening.state is None
        """True if the pass begins with the first samples of the parts, and not all of them are noted."""
        self._first: dict[int, Any] = {}

    def note(
        self, parts: Sequence[int], columns: Sequence[Sequence[Any]], size: int
    ) -> None:
        """Note the samples of some parts that were read next; a part with fewer than `size` has ended."""
        if not self._notes_first:
            return
        for part, column in zip(parts, columns, strict=True):
            if part not in self._first:
                first = _first_readable(column)
                if first is not _NOTHING or len(column) < size:
                    self._first[part] = first
        self._notes_first = len(self._first) < len(parts)

    def of(self, part: int) -> Any:
        """Return the sample that fills a part's rows.

        Raises:
            LookupError: Every part is empty, or none of its samples can be read.
        """
        candidates = (part, *range(self._opening.num_parts))
        for candidate in self._opening.parts if self._whole else candidates:
            if candidate not in self._first:
                opening = replace(self._opening, parts=(candidate,))
                samples = self._stage.open(opening)[0]
                most = MOST_PLACEHOLDERS if self._stage.endless else None
                self._first[candidate] = _first_readable(islice(samples, most))
            if self._first[candidate] is not _NOTHING:
                return self._first[candidate]
        raise LookupError(
            "every part is empty, or none of its samples can be read"
        )


def _first_readable(samples: Iterable[Any]) -> Any:
    """Return the first sample that could be read, or `_NOTHING`."""
    for item in samples:
        sample = item.sample if isinstance(item, Stated) else item
        if not isinstance(sample, Unreadable):
            return sample
    return _NOTHING


class OwnBatches:
    """Completes the batches of an iterator whose items are whole batches, whichever worker has read them.

    Where a rank's own data has ended, it gets its first batch of the epoch again. If each rank has batches of its own,
    each of them gets as many rows as the first one.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._first: Any = None

    def complete(self, batch: Batch, request: ChunkRequest) -> None:
        """Complete a batch in place.

        Raises:
            BatchStructureError: It has more rows than the first.
        """
        if request.step == 0 and request.pad:
            self._first = batch.value
        if batch.value is None and self._first is not None:
            # A stream that can be read once is not opened again.
            batch.value = self._first
            batch.owned = False
        if request.local_rows is None:
            return
        rows = 0 if batch.value is None else num_rows_of(batch.value)
        wanted = self._num_rows = self._num_rows or request.local_rows or rows
        if rows > wanted:
            raise BatchStructureError(
                f"a batch of {rows} rows came after batches of {wanted}: every rank's batches must have as many rows, "
                "and only its last may have fewer."
            )
        state = {**batch.step.sampler.state, "rows": wanted}
        batch.step = batch.step._replace(sampler=SamplerStep(state=state))
        places = np.arange(wanted)
        if rows < wanted or batch.is_empty:
            batch.is_padding = places >= (0 if batch.is_empty else rows)
        if batch.value is not None and rows < wanted:
            is_filled = request.pad or request.repeat
            rows_taken = np.minimum(places, rows - 1)
            batch.value = (
                take_rows([batch.value], [rows], rows_taken)
                if is_filled
                else None
            )
