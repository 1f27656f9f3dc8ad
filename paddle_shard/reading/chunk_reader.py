"""Chunk readers: read the parts of a stream that a reader holds, and fill missing rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any

import numpy as np

from paddle_shard.data.stages.cut import FAILED_AT, Stripe
from paddle_shard.data.stages.stage import Opening, Stage, Stated, Unreadable
from paddle_shard.data.stages.steps import in_rounds
from paddle_shard.errors import BatchStructureError, PaddleShardError
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.step import MOST_STAND_INS, SamplerStep
from paddle_shard.reading.batch import Batch, Chunk, take_rows
from paddle_shard.reading.digest import TurnDigests
from paddle_shard.reading.reader import HowToRead, Reader
from paddle_shard.reading.tensors import num_rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """A reader's share of a step: some rows of each part that it holds."""

    pass_number: int
    """Number of the pass. A reader starts over when it gets a request of another pass."""
    opening: Opening
    """The parts, and where the pass begins in them."""
    step: int
    """Step of the epoch."""
    first_step: int
    """First step that this reader serves in the pass."""
    stride: int = 1
    """Number of steps from one step that this reader serves to the next."""
    plan: PartsPlan
    """How the step is made of its parts."""
    repeat: bool = False
    """True if a part that has ended is opened again; the plan does not tell, as a stream may be repeated before it is
    cut."""
    whole_items: bool = False
    """True if each sample is a whole batch, so samples are not put together."""
    local_rows: int | None = None
    """If a sample is a rank's own batch, its number of rows; 0: the first batch tells. None: it is no such batch."""
    compared: bool = False
    """True if the samples are compared with those that other readers of the same stream read."""

    @property
    def pad(self) -> bool:
        """True if missing rows are filled."""
        return self.plan.ending.pads and not self.plan.repeats

    @property
    def position(self) -> int:
        """Number of samples of each part before this step."""
        return (
            self.opening.skip
            + (self.step - self.first_step) // self.stride * self.plan.samples_per_part
        )

    @property
    def indices(self) -> list[tuple[int, int]]:
        """(part, position) of the first sample of each part."""
        return [(part, self.position) for part in self.opening.parts]


_NOTHING = object()


@lru_cache(maxsize=64)
def _row_places(num_parts: int, size: int, stripe: int) -> tuple[tuple[int, int], ...]:
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
        self._pass_number: int | None = None
        self._next_step = 0
        self._parts: list[Iterator[tuple[int, Any]]] = []
        self._padding = Padding(stage, Opening(parts=(0,), num_parts=1))
        self._digests = TurnDigests()
        self._state: Any = None

    def close(self) -> None:
        """Drop the open parts."""
        self._pass_number, self._parts = None, []

    def _begin(self, asked: ChunkRequest) -> None:
        """Open the parts at a step: the first of the pass, unless another reader has read those before it."""
        opening = replace(
            asked.opening,
            seed_generators=self.rng.seed,
            skip_errors=self._how.skip_errors,
        )
        self._pass_number, self._next_step, self._parts = (
            asked.pass_number,
            asked.step,
            [],
        )
        self._state, whole = opening.state, asked.whole_items
        here = replace(opening, skip=asked.position)
        # Whole batches that several readers take in turns are made up for by the first one of the stream.
        fills = here.uncut(here.skip) if asked.stride > 1 else here
        self._padding = Padding(self._stage, fills, whole=whole)
        self._digests = TurnDigests(
            1 if whole else opening.num_parts * opening.stripe, apart=whole
        )
        # Readers that repeat their parts may begin a round at different steps. If samples become several after the cut,
        # a position does not tell how far a reader must have read.
        line = list(self._stage.line())
        after_the_cut = list(
            takewhile(lambda stage: not isinstance(stage, Stripe), line)
        )
        several, uncut = (
            any(stage.makes_several for stage in after_the_cut),
            len(after_the_cut) < len(line),
        )
        seen = (
            self._digests.see
            if asked.compared and uncut and not (asked.repeat or several)
            else None
        )
        # The digests are of all that was read since the pass began.
        opening = here if seen is None else replace(opening, seen=seen)
        self._parts = in_rounds(self._stage, opening, None if asked.repeat else 1)
        for _ in range(opening.skip, asked.position):
            for items in self._parts:
                next(items, None)

    def _rows(self, asked: ChunkRequest, at: dict[str, Any], *, look: bool) -> Chunk:
        """See `Reader`. Requests of a pass come in the order of their steps."""
        at["what"] = f"opening parts {list(asked.opening.parts)}"
        if asked.pass_number != self._pass_number:
            self._begin(asked)
        if asked.step != self._next_step:
            raise AssertionError(
                f"step {asked.step} was asked for, but step {self._next_step} is next"
            )
        self._next_step += asked.stride
        columns, fresh = self._columns(asked, at)
        parts = asked.opening.parts
        position = asked.position
        size = asked.plan.samples_per_part
        num_valid = list(map(len, columns))
        is_whole = min(num_valid) == size
        why = "" if is_whole else self._fill(columns, asked, at)

        # Rows of the batch, micro-batch by micro-batch: (number of the part here, sample of the step).
        places = _row_places(len(parts), size, asked.plan.stripe)
        value = None
        skipped: list[tuple[int, str]] = []
        num_rows = 1
        if min(map(len, columns)) == size:  # else rows are missing
            samples = [columns[part][row] for part, row in places]
            failed: dict[int, str] = {}
            if self._how.skip_errors:
                failed = {
                    row: one.why
                    for row, one in enumerate(samples)
                    if isinstance(one, Unreadable)
                }
            if self._placeholder is None and len(failed) == len(
                samples
            ):  # no sample was readable so far
                with contextlib.suppress(LookupError):
                    self._placeholder = self._padding.of(parts[0])
            at.update(what=f"collating {len(samples)} samples", index=None)
            if (
                self._collate_fn is not None and self.rng.seeds
            ):  # the same for all readers of the step
                self.rng.seed(asked.opening.key(0, "collate", asked.step))
            value, skipped = self._collated(
                samples,
                failed,
                whole=asked.whole_items,
                name_of=lambda row: self._named(
                    parts[places[row][0]], position + places[row][1], asked
                ),
            )
            skipped = [
                (row, reason)
                for row, reason in skipped
                if places[row][1] < num_valid[places[row][0]]
            ]
            if asked.local_rows is not None:
                num_rows = num_rows_of(value)
        valid = None
        if skipped or not is_whole or asked.local_rows is not None:
            valid = bytes([row < num_valid[part] for part, row in places] * num_rows)
        state = None
        if asked.local_rows is not None:
            state = {
                "shard": parts[0],
                "rows": asked.local_rows,
                "library": self._state,
            }
        digest = (
            self._digests.until((position + size - 1) // asked.opening.stripe)
            if asked.compared
            else 0
        )
        return Chunk(value, valid, fresh, state, skipped, why, digest=digest)

    def _columns(
        self, asked: ChunkRequest, at: dict[str, Any]
    ) -> tuple[list[list[Any]], bool]:
        """Return the samples of each part, as many as there are, and whether any is of the part's first round."""
        columns: list[list[Any]] = []
        fresh = False
        size = asked.plan.samples_per_part
        for part, items in zip(asked.opening.parts, self._parts, strict=True):
            found: list[tuple[int, Any]] = []
            try:
                found.extend(islice(items, size))
            except BaseException:
                number = asked.position + len(found)
                at.update(
                    what=f"reading sample {number} of part {part}", index=(part, number)
                )
                raise
            fresh = fresh or bool(found and found[0][0] == 0)
            column = [sample for _, sample in found]
            if column and isinstance(column[-1], Stated):
                self._state = column[-1].state
                column = [stated.sample for stated in column]
            columns.append(column)
            self._padding.note(part, column, ended=len(column) < size)
        return columns, fresh

    def _fill(
        self, columns: list[list[Any]], asked: ChunkRequest, at: dict[str, Any]
    ) -> str:
        """Fill missing rows if the request says so; return why they cannot be filled."""
        delivers = any(columns)
        for part, column in zip(asked.opening.parts, columns, strict=True):
            missing = asked.plan.samples_per_part - len(column)
            if not asked.pad or not missing:
                continue
            at.update(
                what=f"finding what stands in the missing rows of part {part}",
                index=None,
            )
            try:
                column += [self._padding.of(part)] * missing
            except Exception as error:
                if delivers:
                    raise
                return str(error)
        return ""

    def _named(self, part: int, number: int, asked: ChunkRequest) -> str:
        """Return the name of a sample, for messages."""
        origin = (
            None
            if asked.whole_items
            else self._stage.origin(asked.opening, part, number)
        )
        return f"sample {number} of part {part}" + (f" ({origin})" if origin else "")

    def _explain(
        self, error: BaseException, asked: ChunkRequest, at: dict[str, Any]
    ) -> None:
        at["indices"] = tuple(asked.indices)
        index = getattr(error, FAILED_AT, None)
        if (
            index is not None
        ):  # it failed before the cut, perhaps at another reader's sample
            at.update(what=f"reading sample {index[1]} of part {index[0]}", index=index)
        elif at["index"] is not None and not isinstance(error, PaddleShardError):
            part, number = at["index"]
            at["what"] = f"reading {self._named(part, number, asked)}"


class Padding:
    """Fills missing rows of a part with its own first sample, or with that of the lowest part that has one.

    Samples that cannot be read are passed over. So the choice depends on the order alone, not on which reader holds
    which parts, nor on where the pass began. The first samples that a pass reads are kept. If it begins later, and for
    other readers' parts, the stream is opened again.
    """

    def __init__(self, stage: Stage, opening: Opening, *, whole: bool = False) -> None:
        """Set up; nothing is opened yet.

        Args:
            stage: The stage that opens the parts.
            opening: The opening of the pass.
            whole: True if each sample is a whole batch. Then only the opened part may fill rows.
        """
        self._stage = stage
        self._whole = whole
        self._opening = replace(opening, skip=0, state=None)
        self._begins_first = opening.skip == 0 and opening.state is None
        """True if the pass begins with the first samples of the parts."""
        self._first: dict[int, Any] = {}

    def note(self, part: int, samples: Sequence[Any], *, ended: bool) -> None:
        """Note the samples of a part that the pass has read next, and whether the part has ended after them."""
        if self._begins_first and part not in self._first:
            first = next(_readable(samples), _NOTHING)
            if ended or first is not _NOTHING:
                self._first[part] = first

    def of(self, part: int) -> Any:
        """Return the sample that fills a part's rows.

        Raises:
            LookupError: Every part is empty, or none of its samples can be read.
        """
        for candidate in (
            self._opening.parts
            if self._whole
            else (part, *range(self._opening.num_parts))
        ):
            if candidate not in self._first:
                opening = replace(self._opening, parts=(candidate,))
                opened = self._stage.open(opening)[0]
                most = MOST_STAND_INS if self._stage.endless else None
                self._first[candidate] = next(_readable(islice(opened, most)), _NOTHING)
            if self._first[candidate] is not _NOTHING:
                return self._first[candidate]
        raise LookupError("every part is empty, or none of its samples can be read")


def _readable(samples: Iterator[Any] | Sequence[Any]) -> Iterator[Any]:
    for sample in samples:
        found = sample.sample if isinstance(sample, Stated) else sample
        if not isinstance(found, Unreadable):
            yield found


class OwnBatches:
    """Makes up for what is missing in a pass whose items are whole batches, whichever worker has read them.

    Where a rank's own data has ended, it gets its first batch of the epoch again. If each rank has batches of its own,
    each of them gets as many rows as the first one.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._first: Any = None

    def complete(self, found: Batch, request: ChunkRequest) -> None:
        """Complete a batch in place.

        Raises:
            BatchStructureError: It has more rows than the first.
        """
        if request.step == 0 and request.pad:
            self._first = found.value
        if (
            found.value is None and self._first is not None
        ):  # a stream that can be read once is not opened again
            found.value, found.owned = self._first, False
        if request.local_rows is None:
            return
        rows = 0 if found.value is None else num_rows_of(found.value)
        wanted = self._num_rows = self._num_rows or request.local_rows or rows
        if rows > wanted:
            raise BatchStructureError(
                f"a batch of {rows} rows came after batches of {wanted}: every rank's batches must have as many rows, "
                "and only its last may have fewer."
            )
        found.step = replace(
            found.step,
            sampler=SamplerStep(state={**found.step.sampler.state, "rows": wanted}),
        )
        if rows < wanted or found.empty:
            real = 0 if found.empty else rows
            found.real = np.arange(wanted) < real
        if found.value is not None and rows < wanted:
            fills = request.pad or request.repeat
            found.value = (
                take_rows(
                    [found.value], [rows], np.minimum(np.arange(wanted), rows - 1)
                )
                if fills
                else None
            )
