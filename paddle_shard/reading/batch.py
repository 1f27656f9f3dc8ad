"""Batches: what was read for a step, and how the chunks of several readers are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.core.trees import is_sequence, rebuild
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.step import Ids, Mask, Step
from paddle_shard.reading.tensors import arrays_of, as_array, dtype_of


class Chunk(NamedTuple):
    """What one reader returns for a step: some rows of it."""

    value: Any
    """The collated rows; None if rows are missing and were not filled."""
    real: bytes | None = None
    """One byte for each row: 1 if the row is real, 0 if it is missing or was filled. None: as the step says."""
    fresh: bool = True
    """True if a row comes from the first round of its part."""
    state: Any = None
    """State to resume the pass after this step, if the source has a state of its own."""
    skipped: Sequence[tuple[int, str]] = ()
    """(row, why) of samples that could not be read. Such a row holds the data of another sample."""
    why: str = ""
    """Why missing rows could not be filled."""
    used_rng_late: bool = False
    """True if reading used the global generators here, and did not in the first batch of the pass."""
    profile: Mapping[str, float] | None = None
    """What the worker did since its last answer, by category (`reading/profile.py`); None: it was not sampled."""
    digest: int = 0
    """Digest of what all readers of the stream have read up to here; 0 if each reads its own data."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows of a step that this rank reads, on their way from the reader to the user."""

    step: Step
    value: Any
    """The batch: arrays, then tensors, at last distributed tensors. None if rows are missing and were not filled."""
    real: Mask | None
    """Mask of the real rows among those that were read; None: all are real."""
    skipped: Mask | None = None
    """Mask of the rows whose sample could not be read; None: there are none."""
    fresh: bool = True
    """True if a row comes from the first round of its part."""
    why: str = ""
    """Why missing rows could not be filled."""
    digest: int = 0
    """Digest of what was read or drawn so far, for the ranks to compare."""
    owned: bool = True
    """True if nothing else refers to its arrays, so that tensors may share their memory."""
    is_first: bool = False
    """True for the first step of its pass."""
    profile: Mapping[str, float] | None = None
    """What a worker did while it read the batch, by category; None: it was not sampled."""
    finish: Callable[[], Any] | None = None
    """Returns the placed value, if that is left to the thread of the training loop; None: it is placed."""
    num_valid: int = 0
    """Rows of this process that are real."""
    num_skipped: int = 0
    """Rows of this process that the order serves, and whose sample could not be read."""
    delivered_ids: tuple[Ids, int] = ((), 0)
    """The samples of this process's slice without padding, and how many more could not be read; see `own_ids`."""
    exhausted: bool = False
    """True if it holds nothing new, and nothing new will come."""

    placed: Any = None
    """How the batch is placed (`place.placer.BatchRecipe`); it stays None if nothing could be read for it."""
    summary: dict[str, Any] | None = None
    """Summary of the batch for the ranks to compare; None: this one is not compared."""

    @property
    def whole(self) -> bool:
        """True if no row is missing."""
        return self.real is None or bool(self.real.all())

    @property
    def empty(self) -> bool:
        """True if every row is missing."""
        return self.real is not None and not self.real.any()

    @property
    def num_rows(self) -> int:
        """Number of rows that this process reads."""
        return len(self.placed.rows.read)

    def served(self) -> Mask:
        """Return one bool for each row that was read: True if the order serves a sample there."""
        if self.real is None:
            return np.ones(self.num_rows, bool)
        if len(self.real) == self.num_rows:
            return self.real
        return np.full(
            self.num_rows, self.real[0]
        )  # an item that is a whole batch is real or not as a whole

    def valid(self) -> Mask:
        """Return one bool for each row that was read: True if the row is real."""
        found = self.served()
        return found if self.skipped is None else found & ~self.skipped

    def count(self) -> None:
        """Count its rows."""
        self.num_valid = self.num_rows
        self.num_skipped = 0
        if self.real is not None or self.skipped is not None:
            self.num_valid = int(np.count_nonzero(self.valid()))
            self.num_skipped = int(np.count_nonzero(self.served())) - self.num_valid

    def own_ids(self, layout: Any) -> tuple[Ids, int]:
        """Return the ids of the samples in this process's slice, without padding, and how many more were not read.

        Args:
            layout: Layout of the field whose rows this rank reads.
        """
        ids = self.step.ids
        if len(ids) != self.num_rows:
            return ids, 0
        if not layout.on_mesh:
            return [], 0
        rows = self.placed.rows.positions(layout)
        if len(rows) == len(ids) and self.real is None and self.skipped is None:
            return ids, 0
        valid = self.valid()[rows]
        num_lost = int(np.count_nonzero(self.served()[rows])) - int(
            np.count_nonzero(valid)
        )
        rows = rows[valid]
        return (
            ids[rows]
            if isinstance(ids, np.ndarray)
            else [ids[row] for row in rows.tolist()]
        ), num_lost


NO_STAND_IN = (
    "tail='pad': no sample can stand in for this rank's missing rows ({}). "
    "Use tail='drop', or more samples than parts."
)

Even = Callable[[Sequence[Any], str], Sequence[Any]]
"""Pads the rows of several arrays to the same length, if lengths may differ, given the path of their field."""


def joined(
    step: Step,
    chunks: Sequence[Chunk],
    places: Sequence[Rows],
    even: Even | None = None,
) -> Batch:
    """Return the rows that all readers of a rank have read for a step, in the order of the global batch's rows.

    Args:
        step: The step.
        chunks: What its readers returned, as arrays if there are several.
        places: For each chunk, the places of its rows in the batch; not used if there is one chunk, which is in order.
        even: Pads the rows of several chunks to one length; None: they must be alike.

    Raises:
        ValueError: The chunks differ in structure or in the shape of a row; the text says where.
        LookupError: Some rows are real, and no sample can fill the missing ones.
    """
    one = chunks[0] if len(chunks) == 1 else _one_of(chunks, places, even)
    if one.state is not None:
        step = replace(step, sampler_state=one.state)
    found = Batch(
        step=step, value=one.value, real=step.valid, fresh=one.fresh, why=one.why
    )
    found.profile = next((chunk.profile for chunk in chunks if chunk.profile), None)
    found.digest = one.digest or step.digest
    if one.real is not None:
        found.real = np.frombuffer(one.real, np.bool_)
    if one.value is None and one.why and not found.empty:
        raise LookupError(NO_STAND_IN.format(one.why))
    if one.skipped:
        found.skipped = np.zeros(
            len(step.ids) if found.real is None else len(found.real), np.bool_
        )
        found.skipped[[row for row, _ in one.skipped]] = True
    return found


def _one_of(
    chunks: Sequence[Chunk], places: Sequence[Rows], even: Even | None
) -> Chunk:
    """Return the chunk that one reader of all parts would have returned."""
    order = np.argsort(np.concatenate(places), kind="stable")
    sizes = list(map(len, places))
    real: bytes | None = None
    if any(chunk.real is not None for chunk in chunks):
        masks = b"".join(
            chunk.real or bytes([1]) * size
            for chunk, size in zip(chunks, sizes, strict=True)
        )
        real = np.frombuffer(masks, np.uint8)[order].tobytes()
    value = None
    if not any(chunk.value is None for chunk in chunks):
        value = take_rows([chunk.value for chunk in chunks], sizes, order, even)
    skipped = [
        (int(place[row]), why)
        for chunk, place in zip(chunks, places, strict=True)
        for row, why in chunk.skipped
    ]
    return chunks[0]._replace(
        value=value,
        real=real,
        fresh=any(chunk.fresh for chunk in chunks),
        skipped=skipped,
        why=next((chunk.why for chunk in chunks if chunk.why), ""),
    )


def take_rows(
    batches: Sequence[Any],
    sizes: Sequence[int],
    rows: Rows,
    even: Even | None = None,
    path: str = "",
) -> Any:
    """Return some rows of several batches, joined one after the other.

    Args:
        batches: Batches of the same structure. In a single one, what has no row for each sample stays as it is.
        sizes: Number of rows of each batch.
        rows: The rows to take, counted over all batches.
        even: Pads the rows of several arrays to one length; None: they must be alike.
        path: Path of this field in the batches, for messages.

    Raises:
        ValueError: The batches differ in structure or in the shape of a row; the text says where.
    """
    first = batches[0]
    if isinstance(first, Mapping):
        _check_alike([sorted(map(str, batch)) for batch in batches], "keys", path)
        columns = {key: [batch[key] for batch in batches] for key in first}
        return rebuild(
            first,
            {
                key: take_rows(c, sizes, rows, even, f"{path}[{key!r}]")
                for key, c in columns.items()
            },
        )
    if hasattr(first, "shape"):
        if [tuple(batch.shape[:1]) for batch in batches] != [(size,) for size in sizes]:
            if len(batches) == 1:
                return first
            raise ValueError(
                f"field {path or 'batch'}: workers collated shapes {[list(batch.shape) for batch in batches]} for "
                f"{list(sizes)} rows. A collate_fn must make one row a sample; add what is the same for all samples in "
                "the training loop."
            )
        if even is not None:
            batches = even(batches, path)
        _check_alike(
            [(list(batch.shape[1:]), dtype_of(batch)) for batch in batches],
            "row shape and dtype",
            path,
        )
        return np.concatenate([as_array(batch) for batch in batches])[rows]
    if not is_sequence(first):
        _check_alike(
            [(type(batch).__name__, batch) for batch in batches],
            "value, without a row for each sample",
            path,
        )
        return first
    if [len(batch) for batch in batches] == list(sizes) and not any(
        True for _ in arrays_of(batches)
    ):
        items = [item for batch in batches for item in batch]
        return [items[row] for row in rows.tolist()]
    _check_alike([len(batch) for batch in batches], "number of fields", path)
    fields = enumerate(zip(*batches, strict=True))
    return rebuild(
        first,
        [take_rows(column, sizes, rows, even, f"{path}[{i}]") for i, column in fields],
    )


def _check_alike(values: Sequence[Any], what: str, path: str) -> None:
    if any(value != values[0] for value in values):
        raise ValueError(
            f"field {path or 'batch'}: the rows that different workers collated do not fit together: they differ in "
            f"{what}: {', '.join(dict.fromkeys(map(str, values)))}. A collate_fn must make rows that do not depend on "
            "their neighbours. Pad them to a fixed length, or give shard_dataloader pad_to= for this field."
        )
