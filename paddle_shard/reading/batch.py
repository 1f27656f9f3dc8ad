"""Batches: what was read for a step, and how the chunks of several readers are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.core.collate import Texts
from paddle_shard.core.trees import is_sequence, rebuild
from paddle_shard.errors import DifferentDataError
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.step import Ids, Mask, SamplerStep, Step
from paddle_shard.reading.tensors import arrays_of, as_array, dtype_of


class Chunk(NamedTuple):
    """Some rows of a step, as one reader returns them."""

    value: Any
    """The collated rows; None if rows are missing and were not filled."""
    is_padding: bytes | None = None
    """One byte for each row: 1 if the row is padding, filled or not. None: as the step says."""
    has_new: bool = True
    """True if a row comes from the first round of its part."""
    state: Any = None
    """State to resume after this step, if the source has a state of its own."""
    skipped: Sequence[tuple[int, str]] = ()
    """(row, reason) of samples that could not be read. Such a row holds the data of another sample."""
    profile: Sequence[str] = ()
    """Samples of the worker's work since its last answer, a category each (`reading/profile.py`)."""
    digest: int = 0
    """Digest of what all readers of the stream have read up to here; 0 if each reads its own data."""


_NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows of a step that this rank reads, on their way from the reader to the user.

    A row is valid, padding, or skipped: its sample could not be read.
    """

    step: Step
    value: Any
    """The batch: arrays, then tensors, at last distributed tensors. None if rows are missing and were not filled."""
    is_padding: Mask | None
    """Mask of the padding among the rows that were read; None: there is none."""
    is_skipped: Mask | None = None
    """Mask of the rows whose sample could not be read; None: there are none."""
    has_new: bool = True
    """True if a row comes from the first round of its part."""
    digest: int = 0
    """Digest of what was read or selected so far, for the ranks to compare."""
    owned: bool = True
    """True if nothing else refers to its arrays, so that tensors may share their memory."""
    is_first: bool = False
    """True for the first step of its epoch iterator."""
    profile: Sequence[str] = ()
    """Samples of a worker's work while it read the batch, a category each."""
    finish: Callable[[], Any] | None = None
    """Returns the placed value, if that is left to the thread of the training loop; None: it is placed."""
    num_valid: int = 0
    """Rows of this process that are valid."""
    num_skipped: int = 0
    """Rows of this process whose sample could not be read, without padding."""
    num_padding: int = 0
    delivered_ids: tuple[Ids, int] = ((), 0)
    """The ids of the valid samples in this process's slice, and the number of skipped ones."""
    exhausted: bool = False
    """True if it holds nothing new, and nothing new will come."""
    placed: Any = None
    """The recipe by which it is placed (`placement.recipe.BatchRecipe`); None if nothing could be read for it."""
    summary: dict[str, Any] | None = None
    """Summary of the batch for the ranks to compare; None: this one is not compared."""

    @property
    def is_whole(self) -> bool:
        """True if no row is padding."""
        return self.is_padding is None or not self.is_padding.any()

    @property
    def is_empty(self) -> bool:
        """True if every row is padding."""
        return self.is_padding is not None and bool(self.is_padding.all())

    @property
    def num_rows(self) -> int:
        """Number of rows that this process reads."""
        return len(self.placed.rows.read)

    def _masks(self) -> tuple[Mask, Mask]:
        """Return which of the rows that were read are valid, and which are skipped."""
        is_padding = np.zeros(self.num_rows, bool)
        if self.is_padding is not None:
            # An item that is a whole batch is padding or not as a whole.
            is_padding |= self.is_padding
        is_skipped = np.zeros(self.num_rows, bool)
        if self.is_skipped is not None:
            is_skipped |= self.is_skipped & ~is_padding
        return ~(is_padding | is_skipped), is_skipped

    def valid(self) -> Mask:
        """Return one bool for each row that was read: True if the row is valid."""
        return self._masks()[0]

    def count(self, layout: Any) -> None:
        """Count its rows, and note the samples that this process delivers.

        Args:
            layout: Layout of the field whose rows this rank reads, of which it delivers a slice; None: it delivers
                whatever it reads.
        """
        ids = self.step.ids
        num_rows = self.num_valid = self.num_rows
        self.delivered_ids = ids, 0
        is_whole = self.is_padding is None and self.is_skipped is None
        if not is_whole:
            is_valid, is_skipped = self._masks()
            self.num_valid = int(is_valid.sum())
            self.num_skipped = int(is_skipped.sum())
            self.num_padding = num_rows - self.num_valid - self.num_skipped
        if layout is None or len(ids) != num_rows:
            return
        rows = (
            self.placed.rows.positions(layout) if layout.on_mesh else _NO_ROWS
        )
        if is_whole and len(rows) == num_rows:
            return
        num_skipped = 0
        if not is_whole:
            num_skipped = int(is_skipped[rows].sum())
            rows = rows[is_valid[rows]]
        own = (
            ids[rows]
            if isinstance(ids, np.ndarray)
            else [ids[row] for row in rows.tolist()]
        )
        self.delivered_ids = own, num_skipped


NO_PLACEHOLDER = (
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
        DifferentDataError: The readers of one stream have read different data.
        ValueError: The chunks differ in structure or in the shape of a row; the text says where.
    """
    chunk = chunks[0]
    if len(chunks) > 1:
        if any(other.digest != chunk.digest for other in chunks):
            raise DifferentDataError(
                f"step {step.number}: the workers of this rank have read different data, though each reads the "
                "same stream and keeps its own rows. Seed what draws random numbers in it alike in all of them. "
                "Leave a split among the workers (by worker_init_fn, or by their number) to this loader."
            )
        chunk = _joined_chunk(chunks, places, even)
    if chunk.state is not None:
        step = step._replace(sampler=SamplerStep(state=chunk.state))
    is_padding = None if step.valid is None else ~step.valid
    if chunk.is_padding is not None:
        is_padding = np.frombuffer(chunk.is_padding, np.bool_)
    batch = Batch(
        step=step,
        value=chunk.value,
        is_padding=is_padding,
        has_new=chunk.has_new,
        digest=chunk.digest or step.digest,
        profile=chunk.profile,
    )
    if chunk.skipped:
        num_rows = len(step.ids) if is_padding is None else len(is_padding)
        skipped = [row for row, _ in chunk.skipped]
        batch.is_skipped = np.isin(np.arange(num_rows), skipped)
    return batch


def _joined_chunk(
    chunks: Sequence[Chunk], places: Sequence[Rows], even: Even | None
) -> Chunk:
    """Return the chunk that one reader of all parts would have returned."""
    order = np.argsort(np.concatenate(places), kind="stable")
    sizes = list(map(len, places))
    masks = b"".join(
        chunk.is_padding or bytes(size)
        for chunk, size in zip(chunks, sizes, strict=True)
    )
    is_padding = None
    if any(chunk.is_padding for chunk in chunks):
        is_padding = np.frombuffer(masks, np.uint8)[order].tobytes()
    values = [chunk.value for chunk in chunks]
    is_filled = not any(value is None for value in values)
    return chunks[0]._replace(
        value=take_rows(values, sizes, order, even) if is_filled else None,
        is_padding=is_padding,
        has_new=any(chunk.has_new for chunk in chunks),
        profile=next((chunk.profile for chunk in chunks if chunk.profile), ()),
        skipped=[
            (int(place[row]), reason)
            for chunk, place in zip(chunks, places, strict=True)
            for row, reason in chunk.skipped
        ],
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
        _check_alike(
            [sorted(map(str, batch)) for batch in batches], "keys", path
        )
        fields = {}
        for key in first:
            columns = [batch[key] for batch in batches]
            fields[key] = take_rows(
                columns, sizes, rows, even, f"{path}[{key!r}]"
            )
        return rebuild(first, fields)
    if hasattr(first, "shape"):
        return _take_rows_of_arrays(batches, sizes, rows, even, path)
    if not is_sequence(first):
        values = [(type(batch).__name__, batch) for batch in batches]
        _check_alike(values, "value, without a row for each sample", path)
        return first
    lengths = list(map(len, batches))
    is_fields = isinstance(first[0] if first else 0, Texts)
    has_arrays = next(arrays_of(batches), None) is not None
    if lengths == list(sizes) and not (is_fields or has_arrays):
        items = list(chain.from_iterable(batches))
        taken = [items[row] for row in rows.tolist()]
        return Texts(taken) if isinstance(first, Texts) else taken
    _check_alike(lengths, "number of fields", path)
    columns = [
        take_rows(column, sizes, rows, even, f"{path}[{number}]")
        for number, column in enumerate(zip(*batches, strict=True))
    ]
    return rebuild(first, columns)


def _take_rows_of_arrays(
    arrays: Sequence[Any],
    sizes: Sequence[int],
    rows: Rows,
    even: Even | None,
    path: str,
) -> Any:
    if [tuple(array.shape[:1]) for array in arrays] != [
        (size,) for size in sizes
    ]:
        if len(arrays) == 1:
            return arrays[0]
        raise ValueError(
            f"field {path or 'batch'}: workers collated shapes {[list(array.shape) for array in arrays]} for "
            f"{list(sizes)} rows. A collate_fn must make one row a sample; add what is the same for all samples in "
            "the training loop."
        )
    if even is not None:
        arrays = even(arrays, path)
    if len({(tuple(array.shape[1:]), array.dtype) for array in arrays}) > 1:
        forms = [(list(array.shape[1:]), dtype_of(array)) for array in arrays]
        _check_alike(forms, "row shape and dtype", path)
    return np.concatenate(list(map(as_array, arrays)))[rows]


def _check_alike(values: Sequence[Any], what: str, path: str) -> None:
    if any(value != values[0] for value in values):
        raise ValueError(
            f"field {path or 'batch'}: the rows that different workers collated do not fit together: they differ in "
            f"{what}: {', '.join(dict.fromkeys(map(str, values)))}. A collate_fn must make rows that do not depend on "
            "their neighbours. Pad them to a fixed length, or give shard_dataloader pad_to= for this field."
        )
