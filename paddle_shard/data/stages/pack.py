"""Packing of documents into rows of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.core.checks import check_count, holds
from paddle_shard.data.stages.stage import (
    Opening,
    Samples,
    Transform,
    Unreadable,
    windows,
)
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.packing import MAX_WINDOW, Packing, Piece

MADE = ("position_ids", "segment_ids", "cu_seqlens", "max_seqlen")
"""Fields that are made for each row."""

Fields = Mapping[str, npt.NDArray[Any]]
"""Name -> an array with an entry for each token."""


def tokens_of(document: Any, key: str) -> Any:
    """Return the tokens of a document: itself, or its field with a name.

    Raises:
        TypeError: It is text.
        ValueError: It has no such field.
    """
    if isinstance(document, dict) and key not in document:
        raise ValueError(
            f"the document has no field {key!r}; its fields are {list(document)}. Pass the name of the tokens' "
            "field as key."
        )
    tokens = document[key] if isinstance(document, dict) else document
    if isinstance(tokens, str | bytes):
        raise TypeError(
            f"a document is text, {tokens[:20]!r}; give the numbers of its tokens."
        )
    return tokens


_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The form of packed rows; `data.packed.Packed` describes their fields."""

    length: int
    """Tokens of a row."""
    most_pieces: int
    """Most pieces of a row; it gives the size of `cu_seqlens`."""
    key: str
    """Field of the tokens, in documents that are dicts."""
    labels: str | None
    """Field to add with the next token of each token; None: no such field."""
    ignore_index: int
    """Label where there is no next token."""
    pad_values: Mapping[str, float]
    """For each field, the number that fills the end of a row."""

    def __post_init__(self) -> None:
        check_count("ignore_index", self.ignore_index, _INT64.min, _INT64.max)
        if self.labels is not None and not (
            self.labels and isinstance(self.labels, str)
        ):
            raise ArgumentError(
                f"labels must be the name of a field or None, got {self.labels!r}."
            )
        if self.key in MADE or self.labels in (*MADE, self.key):
            raise ArgumentError(
                f"key={self.key!r} and labels={self.labels!r} must differ from each other and from {MADE}."
            )

    def fields(self, document: Any, what: str) -> Fields:
        """Return the fields of a document that have an entry for each token, and the labels.

        Args:
            document: An array of tokens, or a dict.
            what: Name of the document, for messages.

        Raises:
            ValueError: It has a field that is made here.
        """
        values = (
            document if isinstance(document, dict) else {self.key: document}
        )
        tokens = np.asarray(tokens_of(values, self.key))
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(
                f"{what} has {self.key!r} of dtype {tokens.dtype} and shape {list(tokens.shape)}; the tokens of a "
                "document are ints, of one dim."
            )
        fields = {}
        for name, value in values.items():
            if (
                isinstance(value, str | bytes)
                or np.shape(value)[:1] != tokens.shape
            ):
                continue
            array = np.asarray(value)
            # Paddle would take uint16 for bfloat16.
            is_wide = array.dtype.kind == "u" and array.dtype.itemsize > 1
            fields[name] = array.astype(np.int64) if is_wide else array
        taken = sorted(fields.keys() & {*MADE, self.labels})
        if taken:
            raise ValueError(
                f"{what} has the fields {taken} already, which packing makes itself."
            )
        if self.labels is not None:
            following = np.full(len(tokens), self.ignore_index, np.int64)
            following[:-1] = tokens[1:]
            fields[self.labels] = following
        return fields

    def row(
        self, pieces: Sequence[tuple[str, Fields, Piece]]
    ) -> dict[str, Any]:
        """Return a row of some pieces, one after the other.

        Args:
            pieces: For each piece the name of its document, for messages, the document's fields, and the piece.

        Raises:
            ValueError: The pieces differ in their fields, or in the dtype or shape of an entry.
        """
        first, fields, _ = pieces[0]
        form = _forms(fields)
        for name, fields, _ in pieces:
            if _forms(fields) != form:
                raise ValueError(
                    f"{name} has the fields {_forms(fields)}, but {first} has {form}: (dtype, shape of an entry) of "
                    "those with an entry for each token. Give all documents the same, and leave the others out."
                )
        unknown = sorted(self.pad_values.keys() - form.keys())
        if unknown:
            raise ValueError(
                f"pad_values names {unknown}, which rows do not have; there are {sorted(form)}."
            )
        sizes = [piece.end - piece.first for _, _, piece in pieces]
        padding = self.length - sum(sizes)
        pads = {self.labels or "labels": self.ignore_index, **self.pad_values}
        row: dict[str, Any] = {}
        for name, (dtype, shape) in form.items():
            pad = pads.get(name, 0)
            if pad and dtype.kind in "iub" and not holds(dtype.name, pad):
                raise ValueError(
                    f"pad_values: field {name!r} is {dtype}, which cannot hold {pad!r}."
                )
            values = [
                fields[name][piece.first : piece.end]
                for _, fields, piece in pieces
            ]
            row[name] = np.concatenate(
                [*values, np.full((padding, *shape), pad, dtype)]
            )
        segments = [*range(1, len(sizes) + 1), 0]
        positions = [np.arange(size) for size in sizes]
        cu_seqlens = np.full(self.most_pieces + 2, self.length, np.int32)
        cu_seqlens[: len(segments)] = np.cumsum([0, *sizes])
        row["position_ids"] = np.concatenate(
            [*positions, np.zeros(padding, np.int64)]
        )
        row["segment_ids"] = np.repeat(
            np.array(segments, np.int32), [*sizes, padding]
        )
        row["cu_seqlens"] = cu_seqlens
        row["max_seqlen"] = np.int32(max(*sizes, padding))
        return row


def _forms(fields: Fields) -> dict[str, Any]:
    return {
        name: (value.dtype, value.shape[1:]) for name, value in fields.items()
    }


def check_long(long: str) -> None:
    """Reject an unknown way to treat documents that are longer than a row."""
    if long not in ("split", "drop"):
        raise ArgumentError(
            f"pack: long must be 'split' or 'drop', got {long!r}."
        )


@dataclass(eq=False)
class Pack(Transform):
    """Packs windows of documents of a part into rows. Rows to be skipped are still read, as their number is not known.

    A document that cannot be read is a row that cannot be read, after the rows of its window.
    """

    counted = False
    makes_several = True
    name = "pack"
    settings = ("rows.length", "window", "long", "rows.key", "rows.labels")
    rows: PackedRows
    """The form of the rows."""
    window: int
    """Documents of a part that are packed together."""
    long: str
    """What to do with a document that is longer than a row."""

    def transform(self, items: Samples, part: int, opening: Opening) -> Samples:
        """Yield the rows of one window after the other, each window packed like a data set of its own."""
        first = 0
        for window in windows(items, self.window):
            bad = []
            documents = []
            for number, document in enumerate(window, first):
                if isinstance(document, Unreadable):
                    bad.append(document)
                    continue
                name = f"document {number} of its part"
                documents.append((name, self.rows.fields(document, name)))
            sizes = np.array([self._size(fields) for _, fields in documents])
            if sizes.any():
                packing = Packing(sizes, self.rows.length, MAX_WINDOW)
                for row in range(packing.num_rows):
                    yield self.rows.row(
                        [
                            (*documents[piece.document], piece)
                            for piece in packing.pieces(row)
                        ]
                    )
            yield from bad
            first += len(window)

    def _size(self, fields: Fields) -> int:
        """Return how many tokens of a document are packed."""
        size = len(fields[self.rows.key])
        is_dropped = self.long == "drop" and size > self.rows.length
        return 0 if is_dropped else size
