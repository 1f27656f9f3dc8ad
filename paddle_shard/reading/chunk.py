"""What does a reader deliver for a step of a stream, and how are the chunks of several workers joined to a slice?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.stages.opening import Opening
from paddle_shard.tree import is_sequence, leaves, rebuild


class Dispatched(NamedTuple):
    """Samples that the main process has read for a reader."""

    samples: Mapping[int, Sequence[tuple[int, Any]]]
    """Part -> (round, sample) for each of its samples."""
    spare: Mapping[int, Sequence[Any]]
    """Part -> its first samples, for some parts. Missing rows are filled with them."""
    why: str = ""
    """Why there are no spare samples."""
    first: bytes = b""
    """First samples of some parts, which tell what is usual. Pickled on their own, as each may be processed twice."""


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
    lengths_vary: bool = False
    """True if rows may differ in length, but in nothing else. They are padded when they are placed."""
    compared: bool = False
    """True if the samples are compared with those that other readers of the same stream read."""
    dispatched: Dispatched | bytes | None = None
    """The samples, pickled or not, if the main process has read them; None: the reader reads them."""
    failure: ReadFailure | None = None
    """The failure, if the main process could not read the samples."""

    @property
    def epoch(self) -> int:
        """Epoch of the pass."""
        return self.opening.epoch

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


class Chunk(NamedTuple):
    """Some rows of a step."""

    batch: Any
    """The collated rows; None if rows are missing and were not filled."""
    real: bytes
    """One byte for each row: 1 if the row is real, 0 if it is missing or was filled."""
    fresh: bool
    """True if a row comes from the first round of its part."""
    state: Any = None
    """State to resume the pass after this step, if the source has a state of its own."""
    skipped: Sequence[tuple[int, str]] = ()
    """(row, why) of samples that could not be read. Such a row holds the data of another sample."""
    why: str = ""
    """Why missing rows could not be filled."""
    digest: int = 0
    """Digest of what all readers of the stream have read up to here; 0 if each reads its own data."""


class Slice(NamedTuple):
    """The rows of a step that a rank reads."""

    batch: Any
    real: npt.NDArray[np.bool_]
    fresh: bool
    state: Any = None
    skipped: npt.NDArray[np.bool_] | None = None
    """Mask of the rows whose sample could not be read; None: there are none."""
    why: str = ""
    """Why missing rows could not be filled."""
    digest: int = 0
    """Digest of its chunks, which have the same."""

    @property
    def whole(self) -> bool:
        """True if no row is missing."""
        return bool(self.real.all())

    @property
    def empty(self) -> bool:
        """True if every row is missing."""
        return not self.real.any()


NO_STAND_IN = (
    "tail='pad': no sample can stand in for this rank's missing rows ({}). Use tail='drop', or more samples than parts."
)

Gather = Callable[[Sequence[Any], Rows], Any]
"""Joins tensors along their first dim and takes rows of the result."""
Even = Callable[[Sequence[Any]], Sequence[Any]]
"""Pads the rows of several batches to the same length, if lengths may differ."""


def as_they_are(batches: Sequence[Any]) -> Sequence[Any]:
    """Return the batches unchanged, as their rows must be alike."""
    return batches


@dataclass(slots=True)
class Joiner:
    """Joins the chunks of a step, in the order of the global batch's rows."""

    places: Sequence[Rows]
    """For each chunk, the places of its rows in the slice."""
    gather: Gather
    even: Even = as_they_are
    _order: Rows = field(init=False)
    _in_order: bool = field(init=False)

    def __post_init__(self) -> None:
        self._order = np.argsort(np.concatenate(self.places), kind="stable")
        self._in_order = bool((self._order == np.arange(len(self._order))).all())

    def join(self, chunks: Sequence[Chunk]) -> Slice:
        """Return the slice.

        Raises:
            ValueError: The chunks differ in structure or in the shape of a row; the text says where.
            LookupError: Some rows are real, and no sample can fill the missing ones.
        """
        found = self._joined(chunks)._replace(digest=chunks[0].digest)
        if not any(chunk.skipped for chunk in chunks):
            return found
        skipped = np.zeros(len(found.real), np.bool_)
        for chunk, place in zip(chunks, self.places, strict=True):
            skipped[place[[row for row, _ in chunk.skipped]]] = True
        return found._replace(skipped=skipped)

    def _joined(self, chunks: Sequence[Chunk]) -> Slice:
        fresh = any(chunk.fresh for chunk in chunks)
        real = np.concatenate([np.frombuffer(chunk.real, np.bool_) for chunk in chunks])
        real = real[self._order] if len(real) == len(self._order) else real  # not so in a rank's own batch
        there = [chunk.batch is not None for chunk in chunks]
        if not all(there):
            why = next((chunk.why for chunk in chunks if chunk.why), "")
            if why and real.any():
                raise LookupError(NO_STAND_IN.format(why))
            return Slice(None, real, fresh, chunks[0].state, why=why)
        if len(chunks) == 1 and self._in_order:
            return Slice(chunks[0].batch, real, fresh, chunks[0].state)
        sizes = [len(place) for place in self.places]
        batches = self.even([chunk.batch for chunk in chunks])
        return Slice(take_rows(batches, sizes, self._order, self.gather), real, fresh)


def take_rows(batches: Sequence[Any], sizes: Sequence[int], rows: Rows, gather: Gather, path: str = "") -> Any:
    """Return some rows of several batches, joined one after the other.

    Args:
        batches: Batches of the same structure.
        sizes: Number of rows of each batch.
        rows: The rows to take, counted over all batches.
        gather: Joins tensors and takes rows of them.
        path: Path of this field in the batches, for messages.

    Raises:
        ValueError: The batches differ in structure or in the shape of a row; the text says where.
    """
    first = batches[0]
    if isinstance(first, Mapping):
        _check_alike([sorted(map(str, batch)) for batch in batches], "keys", path)
        columns = {key: [batch[key] for batch in batches] for key in first}
        return rebuild(
            first, {key: take_rows(c, sizes, rows, gather, f"{path}[{key!r}]") for key, c in columns.items()}
        )
    if hasattr(first, "shape"):
        if [batch.shape[0] if len(batch.shape) else None for batch in batches] != list(sizes):
            raise ValueError(
                f"what different workers collated cannot be joined{f' at field {path}' if path else ''}: shapes "
                f"{[list(batch.shape) for batch in batches]} for {list(sizes)} rows. A collate_fn must make one row a "
                "sample; add what is the same for all samples in the training loop."
            )
        _check_alike([(list(batch.shape[1:]), str(batch.dtype)) for batch in batches], "row shape and dtype", path)
        if isinstance(first, np.ndarray):  # of objects or the like, which no tensor can hold
            return np.concatenate(batches)[rows]
        return gather(batches, rows)
    if not is_sequence(first):
        if any(type(batch) is not type(first) or batch != first for batch in batches):
            raise ValueError(
                f"what different workers collated cannot be joined{f' at field {path}' if path else ''}: it has no row "
                f"for each sample, and is not the same: {', '.join(dict.fromkeys(map(repr, batches)))}."
            )
        return first
    if [len(batch) for batch in batches] == list(sizes) and not any(_holds_tensors(batch) for batch in batches):
        flat = [item for batch in batches for item in batch]
        return [flat[row] for row in rows.tolist()]
    _check_alike([len(batch) for batch in batches], "number of fields", path)
    fields = enumerate(zip(*batches, strict=True))
    return rebuild(first, [take_rows(column, sizes, rows, gather, f"{path}[{i}]") for i, column in fields])


def _check_alike(found: Sequence[Any], what: str, path: str) -> None:
    if any(value != found[0] for value in found):
        raise ValueError(
            f"the rows that different workers collated do not fit together{f' at field {path}' if path else ''}: "
            f"they differ in {what}: {', '.join(dict.fromkeys(map(str, found)))}. A collate_fn must make rows that "
            "do not depend on their neighbours. Pad them to a fixed length, or give shard_dataloader pad_to= and "
            "pad_values= for this field."
        )


def _holds_tensors(value: Any) -> bool:
    return any(hasattr(leaf, "shape") for leaf in leaves(value))
