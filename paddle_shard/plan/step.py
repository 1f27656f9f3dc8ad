"""Steps: what one rank reads, and what the saved state records after it.

An order yields the global batches of an epoch (`GlobalBatch`). `rank_steps` makes the steps of one rank from them. It
is the only place where the order, skipped steps (`skip_steps=`), balanced rows (`balance=`) and the rows of a rank come
together. It asks `GlobalBatch.valid`, which `global_batches` of a plan or the user's sampler provides, which rows are
valid. For a stream, the readers decide that (`reading/chunk_reader.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.balance import Load
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.skips import Ranges, is_in

Mask = npt.NDArray[np.bool_]
Ids = Sequence[Any] | Rows
"""Indices into the data set, of any type; an array if all are ints."""

RowsOf = Callable[[int, int], "Rows | range"]
"""Returns which rows of a global batch a rank reads, given (rows of the batch, rows of a micro-batch). They ascend, and
with micro-batches have gaps: of 8 rows in micro-batches of 4, the first of 2 ranks reads 0, 1, 4 and 5."""


MOST_PLACEHOLDERS = 64
"""Number of samples, the first of the data set or of a part, that are tried to find one that can be read."""


class SamplerStep(NamedTuple):
    """State of the user's own sampler, or of a library that reads, after a step."""

    drawn: Ids = ()
    """Samples that the sampler drew for all ranks, without padding."""
    state: Any = None
    """State of the sampler, or of the library, after the step."""
    is_last: bool | None = None
    """True if the sampler is known to end after the step; None if the plan decides."""


NO_SAMPLER = SamplerStep()
"""A step of an order that is not the user's."""


class Step(NamedTuple):
    """The samples that this rank reads at one step of an epoch, and what the saved state records after it."""

    epoch: int
    number: int
    """Step of the epoch, from 0."""
    num_rows: int
    """Rows of the global batch, padding included; 0 if that shows only when it is read."""
    micro_size: int
    """Rows of each of its micro-batches; 0 if that shows only when it is read."""
    num_positions: int
    """Positions of the epoch's order that the global batch serves: its rows without padding."""
    ids: Ids = ()
    """For data with an index, the sample of each row that this rank reads; one if an item is a whole batch."""
    valid: Mask | None = None
    """Mask of the rows of this rank that are valid; None: all, as far as is known before they are read."""
    skipped: tuple[int, int] = (0, 0)
    """(steps, samples) skipped immediately before this step."""

    # Of one feature each

    parts: tuple[Any, ...] = ()
    """For a stream, what each of this rank's readers reads (`reading.chunk_reader.ChunkRequest`)."""
    sampler: SamplerStep = NO_SAMPLER
    """For the user's own sampler, or a library that reads."""
    load: Load = (0.0, 0.0)
    """`balance=`: (largest, mean) cost of a data rank."""
    digest: int = 0
    """`verify=`: digest of what the sampler has drawn so far, or of how rows are balanced; the same on all ranks."""

    def to_read(self) -> Step:
        """Return the step without what only the state needs, to send it to a worker."""
        if self.sampler is NO_SAMPLER:
            return self
        return self._replace(valid=None, sampler=NO_SAMPLER)


class GlobalBatch(NamedTuple):
    """The samples of one global batch, the same on every rank. Only the ids that a rank asks for are computed."""

    number: int
    """Step of the epoch, from 0."""
    num_rows: int
    """Rows, padding included."""
    micro_size: int
    """Rows of each of its micro-batches."""
    num_positions: int
    """See `Step`."""
    take: Callable[[Rows | range], Ids]
    """Returns the ids at some rows of the global batch, which may have gaps and be in any order."""
    valid: Callable[[Rows], Mask] | None = None
    """Returns which of some rows, with gaps and in any order, are valid; None: all are."""
    sampler: SamplerStep = NO_SAMPLER
    """See `Step`."""


BalanceRows = Callable[[Ids, int], tuple[Rows, Load]]
"""Returns the rows of a global batch in the order in which data ranks take them, and (largest, mean) cost of a data
rank, given (ids, rows of a micro-batch); see `balance.balanced_rows`."""


Steps = Generator[Step, None, tuple[int, int]]
"""Yields steps, and returns the (steps, samples) that are skipped after the last one."""


def as_ids(indices: Ids) -> Rows:
    """Return numbers for a data set's indices: ints unchanged, others from a hash of their `repr`."""
    if isinstance(indices, np.ndarray):
        return indices
    try:
        ids = np.array(indices)
    except ValueError:  # tuples of several lengths
        ids = np.array(None)
    if ids.dtype.kind == "i" and ids.ndim == 1:
        return ids.astype(np.int64, copy=False)
    numbers = [
        index if isinstance(index, int) else derive_seed("id", index)
        for index in indices
    ]
    return np.array(numbers, dtype=object).astype(np.uint64).view(np.int64)


def rank_steps(
    batches: Iterable[GlobalBatch],
    epoch: int,
    rows_of: RowsOf,
    *,
    skips: Ranges = (),
    balance_rows: BalanceRows | None = None,
    compared: bool = False,
) -> Steps:
    """Yield the steps of one rank for some global batches of an epoch, without those that are skipped.

    It may run in any thread, any number of steps ahead.

    Args:
        batches: The global batches.
        epoch: The epoch.
        rows_of: The rows that the rank reads.
        skips: The skipped steps of the epoch.
        balance_rows: Assigns rows to data ranks by cost; None: they stay in their order.
        compared: True if the steps carry a digest, by which ranks see that they draw and balance alike.
    """
    skipped = no_steps = (0, 0)
    digest = 0
    for batch in batches:
        if skips and is_in(skips, batch.number):
            skipped = (skipped[0] + 1, skipped[1] + batch.num_positions)
            continue
        take = batch.take
        rows = rows_of(batch.num_rows, batch.micro_size)
        load = (0.0, 0.0)
        if compared and len(batch.sampler.drawn):
            digest = zlib.crc32(
                as_ids(take(range(batch.num_rows))).tobytes(), digest
            )
        if balance_rows is not None:
            order, load = balance_rows(
                take(range(batch.num_rows)), batch.micro_size
            )
            rows = order[np.asarray(rows, np.int64)]
            digest = zlib.crc32(order.tobytes(), digest) if compared else 0
        valid = None
        if batch.valid is not None:
            valid = batch.valid(np.asarray(rows, np.int64))
            valid = None if valid.all() else valid
        yield Step(
            epoch=epoch,
            number=batch.number,
            num_rows=batch.num_rows,
            micro_size=batch.micro_size,
            num_positions=batch.num_positions,
            ids=take(rows),
            valid=valid,
            skipped=skipped,
            sampler=batch.sampler,
            load=load,
            digest=digest,
        )
        skipped = no_steps
    return skipped
