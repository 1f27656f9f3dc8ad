"""Packing of documents into rows of one length."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from paddle_shard.core.checks import check_count, holds
from paddle_shard.data.stages.stage import (
    Opening,
    Stage,
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
    """
    tokens = document[key] if isinstance(document, dict) else document
    if isinstance(tokens, str | bytes):
        raise TypeError(
            f"a document is text, {tokens[:20]!r}; give the numbers of its tokens."
        )
    return tokens


_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The form of packed rows; `sources.packed.Packed` describes their fields."""

    length: int
    """Tokens of a row."""
    most_pieces: int
    """Most pieces of a row; it gives the size of `cu_seqlens`."""
    key: str = "input_ids"
    """Field of the tokens, in documents that are dicts."""
    labels: str | None = None
    """Field to add with the next token of each token; None: no such field."""
    ignore_index: int = -100
    """Label where there is no next token."""
    pad_values: Mapping[str, float] = field(default_factory=dict)
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

    def fields(
        self, document: Any, what: str, names: Collection[str] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the fields of a document that have an entry for each token, and the labels.

        Args:
            document: An array of tokens, or a dict.
            what: Name of the document, for messages.
            names: Names of these fields, if they are known.

        Raises:
            ValueError: It has a field that is made here, or has no entry for each token in a field of `names`.
        """
        given = document if isinstance(document, dict) else {self.key: document}
        tokens = np.asarray(tokens_of(given, self.key))
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(
                f"{what} has {self.key!r} of dtype {tokens.dtype} and shape {list(tokens.shape)}; the tokens of a "
                "document are ints, of one dim."
            )
        found = {
            name: np.asarray(value)
            for name, value in given.items()
            if not isinstance(value, str | bytes)
            and np.shape(value)[:1] == tokens.shape[:1]
        }
        for name, array in found.items():
            if (
                array.dtype.kind == "u" and array.dtype.itemsize > 1
            ):  # Paddle would take uint16 for bfloat16
                found[name] = array.astype(np.int64)
        if taken := sorted(set(found) & {*MADE, self.labels}):
            raise ValueError(
                f"{what} has the fields {taken} already, which packing makes itself."
            )
        if names is not None:
            if missing := sorted(set(names) - set(found)):
                raise ValueError(
                    f"{what} has {len(tokens)} tokens, but not as many entries in {missing}, as other documents have. "
                    "Leave these fields out of the documents, or give them an entry for each token."
                )
            found = {
                name: value
                for name, value in found.items()
                if name in names or name == self.key
            }
        if self.labels is not None:
            following = np.full(len(tokens), self.ignore_index, np.int64)
            following[:-1] = tokens[1:]
            found[self.labels] = following
        return found

    def row(
        self, pieces: Sequence[tuple[Fields, Piece]], names: Sequence[str]
    ) -> dict[str, Any]:
        """Return a row of some pieces, one after the other.

        Args:
            pieces: The fields of each piece's document, and the piece.
            names: Name of each document, for messages.

        Raises:
            ValueError: The pieces differ in their fields, or in the dtype or shape of an entry.
        """
        pads = dict(self.pad_values)
        if self.labels is not None:
            pads.setdefault(self.labels, self.ignore_index)
        first, sizes = pieces[0][0], [piece.end - piece.first for _, piece in pieces]
        row: dict[str, Any] = {}
        for name, value in first.items():
            pad = pads.get(name, 0)
            if pad and value.dtype.kind in "iub" and not holds(value.dtype.name, pad):
                raise ValueError(
                    f"pad_values: field {name!r} is {value.dtype}, which cannot hold {pad!r}."
                )
            row[name] = np.full((self.length, *value.shape[1:]), pad, value.dtype)
        end = 0
        for what, (fields, piece), size in zip(names, pieces, sizes, strict=True):
            if fields.keys() != first.keys():
                raise ValueError(
                    f"{what} has the fields {sorted(fields)}, but {names[0]} has {sorted(first)}: those with an "
                    "entry for each token. Leave the other fields out of the documents."
                )
            for name, value in fields.items():
                entry, wanted = (
                    (value.dtype, value.shape[1:]),
                    (row[name].dtype, row[name].shape[1:]),
                )
                if entry != wanted:
                    raise ValueError(
                        f"field {name!r} of {what} has entries of {entry[0]} and shape {list(entry[1])}, but that of "
                        f"{names[0]} has {wanted[0]} and shape {list(wanted[1])}."
                    )
                row[name][end : end + size] = value[piece.first : piece.end]
            end += size
        if unknown := sorted(set(self.pad_values) - set(row)):
            raise ValueError(
                f"pad_values names {unknown}, which rows do not have; there are {sorted(row)}."
            )
        begins = np.cumsum([0, *sizes])
        row["position_ids"] = np.zeros(self.length, np.int64)
        row["position_ids"][:end] = np.arange(end) - np.repeat(begins[:-1], sizes)
        row["segment_ids"] = np.zeros(self.length, np.int32)
        row["segment_ids"][:end] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        row["cu_seqlens"] = np.full(self.most_pieces + 2, self.length, np.int32)
        row["cu_seqlens"][: len(begins)] = begins
        row["max_seqlen"] = np.int32(max(*sizes, self.length - end))
        return row


LONG = ("split", "drop", "error")
"""What can be done with a document that is longer than a row."""


class Pack(Transform):
    """Packs windows of documents of a part into rows. Rows to be skipped are still read, as their number is not known.

    A document that cannot be read is a row that cannot be read, after the rows of its window.
    """

    counted: ClassVar[bool] = False
    makes_several: ClassVar[bool] = True

    def __init__(
        self, upstream: Stage, rows: PackedRows, window: int, long: str
    ) -> None:
        """Set up the stage.

        Args:
            upstream: The stage that yields documents.
            rows: The form of the rows.
            window: Documents of a part that are packed together.
            long: What to do with a document that is longer than a row.
        """
        check_count("length", rows.length)
        check_count("window", window, most=MAX_WINDOW)
        if long not in LONG:
            raise ArgumentError(
                f"pack: long must be one of {', '.join(map(repr, LONG))}, got {long!r}."
            )
        super().__init__(
            upstream, "pack", rows.length, window, long, rows.key, rows.labels
        )
        self._rows, self._window, self._long = rows, window, long

    def made(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        """Yield the rows of one window after the other, each window packed like a data set of its own."""
        number = 0
        for documents in windows(items, self._window):
            bad = [
                document for document in documents if isinstance(document, Unreadable)
            ]
            names = [
                f"document {at} of its part"
                for at in range(number, number + len(documents))
            ]
            read = [
                {}
                if isinstance(document, Unreadable)
                else self._rows.fields(document, what)
                for document, what in zip(documents, names, strict=True)
            ]
            sizes = np.array(
                [
                    self._size(fields, what)
                    for fields, what in zip(read, names, strict=True)
                ],
                np.int64,
            )
            if sizes.any():
                packing = Packing(sizes, self._rows.length, MAX_WINDOW)
                for row in range(packing.num_rows):
                    pieces = packing.pieces(row)
                    yield self._rows.row(
                        [(read[piece.document], piece) for piece in pieces],
                        [names[piece.document] for piece in pieces],
                    )
            yield from bad
            number += len(documents)

    def _size(self, fields: Fields, what: str) -> int:
        """Return how many tokens of a document are packed; 0 if it was not read."""
        size, length = len(fields.get(self._rows.key, ())), self._rows.length
        if size <= length or self._long == "split":
            return size
        if self._long == "drop":
            return 0
        raise ValueError(
            f"{what} has {size} tokens, more than a row of {length}. Use long='split' or 'drop', or a longer row."
        )
