"""What does a rank read at a step, and what must the run remember after it?

An order yields the global batches of an epoch (`GlobalBatch`). `rank_steps` makes of them the steps of one rank. It is
the only place where the order, what the user leaves out (`skip`), the dealing of rows by cost (`balance=`) and the rows
of a rank come together, and so the only place that decides whether a row of data with an index is real. Of a stream,
the readers find out (`reading/chunk_reader.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.skips import Skips

Mask = npt.NDArray[np.bool_]
Ids = Sequence[Any] | npt.NDArray[np.int64]
"""Indices into the data set, of any type; an array if all are ints."""

RowsOf = Callable[[int, int], "Rows | range"]
"""Returns which rows of a global batch a rank reads, given (rows of the batch, rows of a micro-batch)."""


MOST_STAND_INS = 64
"""Number of samples, the first of the data set or of a part, that are tried to find one that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What this rank reads at one step of an epoch, and what the state must remember after it."""

    epoch: int
    number: int
    """Step of the epoch, from 0."""
    num_rows: int
    """Rows of the global batch, padding included; 0 if that shows only when it is read."""
    micro_size: int
    """Rows of each of its micro-batches; 0 if that shows only when it is read."""
    num_real: int
    """Positions of the epoch's order that the global batch serves."""
    ids: Ids = ()
    """Of data with an index: the sample of each row that this rank reads; a single one if an item is a whole batch."""
    parts: tuple[Any, ...] = ()
    """Of a stream: what each of this rank's readers reads (`reading.chunk_reader.ChunkRequest`)."""
    real: Mask | None = None
    """Which of the rows that this rank reads are real; None: all, as far as is known before they are read."""
    left_out: int = 0
    """Number of those rows that are not real because the user leaves their samples out."""
    passed: tuple[int, int] = (0, 0)
    """(steps, positions) directly before this step that are left out as a whole."""
    drawn: Ids = ()
    """Samples that the user's own sampler drew for all ranks, without padding and without those left out."""
    sampler_state: Any = None
    """State of the user's own sampler, or of the library that reads, after this step."""
    last: bool | None = None
    """True if the user's own sampler is known to end after this step; None if the plan tells."""
    load: tuple[float, float] = (0.0, 0.0)
    """(cost of the data rank that has most, mean cost of a data rank); zeros if rows are not dealt by cost."""
    digest: int = 0
    """Digest of what the user's sampler has drawn so far, or of how rows were dealt; the same on all ranks."""

    def to_read(self) -> Step:
        """Return the step without what only the state needs, to send it to a worker."""
        return replace(self, real=None, drawn=(), sampler_state=None) if self.sampler_state or len(self.drawn) else self


class GlobalBatch(NamedTuple):
    """The samples of one global batch, the same on every rank. It computes only the ids that a rank asks for."""

    step: Step
    """The step, without what a rank reads."""
    take: Callable[[Rows | range], Ids]
    """Returns the ids at some rows."""
    valid: Callable[[Rows], Mask] | None = None
    """Returns which of some rows are real; None: all are."""


Deal = Callable[[Ids, int], tuple[Rows, tuple[float, float]]]
"""Returns the rows of a global batch in the order in which data ranks take them, and (largest, mean) cost of a data
rank, given (ids, rows of a micro-batch); see `balance.dealt`."""


def as_ids(indices: Ids) -> npt.NDArray[np.int64]:
    """Return numbers for a data set's indices: ints unchanged, others from a hash of their `repr`."""
    if isinstance(indices, np.ndarray):
        return indices
    try:
        found = np.array(indices)
    except ValueError:  # tuples of several lengths
        found = np.array(None)
    if found.dtype.kind == "i" and found.ndim == 1:
        return found.astype(np.int64, copy=False)
    numbers = [index if isinstance(index, int) else derive_seed("id", index) for index in indices]
    return np.array(numbers, dtype=object).astype(np.uint64).view(np.int64)


def all_rows(num_rows: int, micro_size: int) -> range:
    """Return all rows of a global batch: the rows of a rank that reads it whole."""
    return range(num_rows)


def rank_steps(
    batches: Iterator[GlobalBatch],
    epoch: int,
    first: int,
    rows_of: RowsOf,
    *,
    skips: Skips,
    deal: Deal | None = None,
    compared: bool = False,
) -> Iterator[Step]:
    """Yield the steps of one rank over some global batches of an epoch. A batch that is left out whole is passed over.

    Args:
        batches: The global batches, the first of which begins at position `first`.
        epoch: The epoch.
        first: Position of the first row.
        rows_of: The rows that the rank reads.
        skips: What the user leaves out.
        deal: How rows are dealt by cost; None: they stay in their order.
        compared: True if the steps carry a digest, by which ranks see that they draw and deal alike.
    """
    concerned, passed, digest = skips.concerns(epoch), (0, 0), 0
    for batch in batches:
        out: Mask | None = None
        if concerned:
            num_rows, num_real = batch.step.num_rows, batch.step.num_real
            ids = batch.take(np.arange(num_rows))
            out = np.ones(num_rows, bool)  # padding too: its sample may be left out elsewhere in the epoch
            out[:num_real] = skips.rows(epoch, first, ids[:num_real])
            first += num_real
            if out[:num_real].all():
                passed = passed[0] + 1, passed[1] + num_real
                continue
            if not out.any():
                out = None
        step = _step(batch, rows_of, out, deal, digest if compared else None)
        digest = step.digest
        yield step if passed == (0, 0) else replace(step, passed=passed)
        passed = (0, 0)


def _take_kept(take: Callable[[Rows], Ids], out: Mask, rows: Rows | range) -> Ids:
    """Return the ids at some rows; the first row that is kept stands in for those that are left out."""
    at = np.asarray(rows, np.int64)
    return take(np.where(out[at], int(out.argmin()), at))


def _step(batch: GlobalBatch, rows_of: RowsOf, out: Mask | None, deal: Deal | None, digest: int | None) -> Step:
    """Return the step of a batch without the rows `out`.

    Args:
        batch: The global batch.
        rows_of: The rows that the rank reads.
        out: Which rows of the batch the user leaves out; None: none.
        deal: Deals rows by cost.
        digest: That of the pass before this step; None: steps carry none.
    """
    of_all, take, load = batch.step, batch.take, (0.0, 0.0)
    rows, drawn = rows_of(of_all.num_rows, of_all.micro_size), of_all.drawn
    if out is not None:
        take = partial(_take_kept, batch.take, out)
        drawn = np.asarray(drawn)[~out[: len(drawn)]] if len(drawn) else drawn
    if digest is not None and len(drawn):
        digest = zlib.crc32(as_ids(take(range(of_all.num_rows))).tobytes(), digest)
    if deal is not None:
        order, load = deal(take(range(of_all.num_rows)), of_all.micro_size)
        if digest is not None:
            digest = zlib.crc32(order.tobytes(), digest)
        rows = order[np.asarray(rows, np.int64)]
    real, left_out = None, 0
    if out is not None or batch.valid is not None:
        at = np.asarray(rows, np.int64)
        real = np.ones(len(at), bool) if batch.valid is None else batch.valid(at)
        if out is not None:
            left_out = int(np.count_nonzero(real & out[at]))
            real = real & ~out[at]
        real = None if real.all() else real
    return replace(of_all, ids=take(rows), real=real, left_out=left_out, drawn=drawn, load=load, digest=digest or 0)
