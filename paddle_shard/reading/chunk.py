"""What does each reader read for a step of a stream, and how are the chunks of several readers joined to a batch?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_shard.errors import BatchStructureError
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch, Chunk
from paddle_shard.reading.tensors import arrays_of, as_array, num_rows_of
from paddle_shard.stages.stage import Opening
from paddle_shard.tree import is_sequence, rebuild


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """A reader's share of a step: some rows of each part that it holds."""

    number: int
    """Number of the pass. A reader starts over when it gets a request of another pass."""
    opening: Opening
    """The parts, and where the pass begins in them."""
    step: int
    """Step of the epoch."""
    first_step: int
    """First step that this reader serves in the pass."""
    stride: int = 1
    """Number of steps from one step that this reader serves to the next."""
    stripe: int
    """Rows of a micro-batch that come from one part."""
    accumulation: int = 1
    """Micro-batches in the step."""
    pad: bool = False
    """True if missing rows are filled."""
    repeat: bool = False
    """True if a part that has ended is opened again."""
    whole_items: bool = False
    """True if each sample is a whole batch, so samples are not put together."""
    local_rows: int | None = None
    """If a sample is a rank's own batch, its number of rows; 0: the first batch tells. None: it is no such batch."""
    skip_errors: bool = False
    """True if a sample on which the user's code fails becomes an invalid row."""
    rows_are_split: bool = False
    """True if other rows of the global batch are collated elsewhere."""
    compared: bool = False
    """True if the samples are compared with those that other readers of the same stream read."""

    @property
    def samples_per_part(self) -> int:
        """Number of samples of each part."""
        return self.stripe * self.accumulation

    @property
    def position(self) -> int:
        """Number of samples of each part before this step."""
        return self.opening.skip + (self.step - self.first_step) // self.stride * self.samples_per_part

    @property
    def indices(self) -> list[tuple[int, int]]:
        """(part, position) of the first sample of each part."""
        return [(part, self.position) for part in self.opening.parts]


NO_STAND_IN = (
    "tail='pad': no sample can stand in for this rank's missing rows ({}). Use tail='drop', or more samples than parts."
)

Even = Callable[[Sequence[Any], str], Sequence[Any]]
"""Pads the rows of several arrays to the same length, if lengths may differ, given the path of their field."""


def as_they_are(arrays: Sequence[Any], path: str) -> Sequence[Any]:
    """Return the arrays unchanged, as their rows must be alike."""
    return arrays


def joined(step: Step, chunks: Sequence[Chunk], places: Sequence[Rows] | None, even: Even = as_they_are) -> Batch:
    """Return the rows that all readers of a rank have read for a step, in the order of the global batch's rows.

    Args:
        step: The step.
        chunks: What its readers returned, as arrays if there are several.
        places: For each chunk, the places of its rows in the batch; None: there is one chunk, in order.
        even: Pads the rows of several chunks to one length.

    Raises:
        ValueError: The chunks differ in structure or in the shape of a row; the text says where.
        LookupError: Some rows are real, and no sample can fill the missing ones.
    """
    one = chunks[0] if places is None else _one_of(chunks, places, even)
    if one.state is not None:
        step = replace(step, sampler_state=one.state)
    found = Batch(step=step, value=one.value, real=step.real, fresh=one.fresh, why=one.why)
    found.digest = one.digest or step.digest
    if one.real is not None:
        found.real = np.frombuffer(one.real, np.bool_)
    if one.value is None and one.why and not found.empty:
        raise LookupError(NO_STAND_IN.format(one.why))
    if one.skipped:
        found.skipped = np.zeros(len(step.ids) if found.real is None else len(found.real), np.bool_)
        found.skipped[[row for row, _ in one.skipped]] = True
    return found


def _one_of(chunks: Sequence[Chunk], places: Sequence[Rows], even: Even) -> Chunk:
    """Return the chunk that one reader of all parts would have returned."""
    order = np.argsort(np.concatenate(places), kind="stable")
    real = np.concatenate([np.frombuffer(chunk.real or b"", np.bool_) for chunk in chunks])[order]
    value = None
    if not any(chunk.value is None for chunk in chunks):
        value = take_rows([chunk.value for chunk in chunks], [len(place) for place in places], order, even)
    return chunks[0]._replace(
        value=value,
        real=real.tobytes(),
        fresh=any(chunk.fresh for chunk in chunks),
        skipped=[
            (int(place[row]), why) for chunk, place in zip(chunks, places, strict=True) for row, why in chunk.skipped
        ],
        why=next((chunk.why for chunk in chunks if chunk.why), ""),
    )


def take_rows(
    batches: Sequence[Any], sizes: Sequence[int], rows: Rows, even: Even = as_they_are, path: str = ""
) -> Any:
    """Return some rows of several batches, joined one after the other.

    Args:
        batches: Batches of the same structure. In a single one, what has no row for each sample stays as it is.
        sizes: Number of rows of each batch.
        rows: The rows to take, counted over all batches.
        even: Pads the rows of several arrays to one length.
        path: Path of this field in the batches, for messages.

    Raises:
        ValueError: The batches differ in structure or in the shape of a row; the text says where.
    """
    first, at = batches[0], f" at field {path}" if path else ""
    cannot = f"what different workers collated cannot be joined{at}"
    if isinstance(first, Mapping):
        _check_alike([sorted(map(str, batch)) for batch in batches], "keys", at)
        columns = {key: [batch[key] for batch in batches] for key in first}
        return rebuild(first, {key: take_rows(c, sizes, rows, even, f"{path}[{key!r}]") for key, c in columns.items()})
    if hasattr(first, "shape"):
        if [batch.shape[0] if len(batch.shape) else None for batch in batches] != list(sizes):
            if len(batches) == 1:
                return first
            raise ValueError(
                f"{cannot}: shapes {[list(batch.shape) for batch in batches]} for {list(sizes)} rows. A collate_fn "
                "must make one row a sample; add what is the same for all samples in the training loop."
            )
        batches = even(batches, path)
        _check_alike([(list(batch.shape[1:]), str(batch.dtype)) for batch in batches], "row shape and dtype", at)
        return np.concatenate([as_array(batch) for batch in batches])[rows]
    if not is_sequence(first):
        if any(type(batch) is not type(first) or batch != first for batch in batches[1:]):
            raise ValueError(
                f"{cannot}: it has no row for each sample, and is not the same: "
                f"{', '.join(dict.fromkeys(map(repr, batches)))}."
            )
        return first
    if [len(batch) for batch in batches] == list(sizes) and not any(True for _ in arrays_of(batches)):
        flat = [item for batch in batches for item in batch]
        return [flat[row] for row in rows.tolist()]
    _check_alike([len(batch) for batch in batches], "number of fields", at)
    fields = enumerate(zip(*batches, strict=True))
    return rebuild(first, [take_rows(column, sizes, rows, even, f"{path}[{i}]") for i, column in fields])


def _check_alike(found: Sequence[Any], what: str, at: str) -> None:
    if any(value != found[0] for value in found):
        raise ValueError(
            f"the rows that different workers collated do not fit together{at}: they differ in {what}: "
            f"{', '.join(dict.fromkeys(map(str, found)))}. A collate_fn must make rows that do not depend on their "
            "neighbours. Pad them to a fixed length, or give shard_dataloader pad_to= for this field."
        )


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
        if found.value is None and self._first is not None:  # a stream that can be read once is not opened again
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
        found.step = replace(found.step, sampler_state={**found.step.sampler_state, "rows": wanted})
        if rows < wanted or found.empty:
            real = 0 if found.empty else rows
            found.real = np.arange(wanted) < real
        if found.value is not None and rows < wanted:
            fills = request.pad or request.repeat
            found.value = take_rows([found.value], [rows], np.minimum(np.arange(wanted), rows - 1)) if fills else None
