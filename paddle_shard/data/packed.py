"""Documents of any length as rows of one length."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paddle_shard.core.checks import check_count, listed
from paddle_shard.data.arrays import IndexedData, check_indexed
from paddle_shard.data.stages.pack import (
    Fields,
    PackedRows,
    check_long,
    tokens_of,
)
from paddle_shard.errors import ArgumentError, described
from paddle_shard.plan.order import Fingerprint
from paddle_shard.plan.packing import Packing, Piece


class Packed:
    """Documents of any length, packed into rows of one length, for language models.

    Every token is in one row, once. The rows are a function of the lengths of the documents alone, so they are the same
    in every epoch and on every rank; `shuffle=True` of the loader shuffles the rows. A resume costs O(1), on any mesh.
    Rows can be mixed by weight: all sources of a `Mixture` may be `Packed`, and the weights are then shares of tokens.

    A row is a dict of numpy arrays, all of fixed shapes, as static models need:

    - `input_ids` (or `key`) and the other fields of the documents that have an entry for each token: `[length, ...]`.
      Padding at the end of a row is 0, or `pad_values`; that of `labels` is `ignore_index`.
    - `position_ids`, int64 `[length]`: the place of a token in its piece; 0 in padding.
    - `segment_ids`, int32 `[length]`: 1 for the first piece of the row, 2 for the next, ...; 0 in padding.
    - `cu_seqlens`, int32 `[max_pieces + 2]`: where each piece begins, then where the last one ends, then
      `length` up to the end of the array. Padding counts as a sequence, and sequences of no token follow it.
    - `max_seqlen`, int32: the longest of these sequences.
    - `labels`, if asked for: the next token of the same document; `ignore_index` for the last one and in padding.

    Examples:
        >>> documents = [np.arange(1, 4), np.arange(10, 15), np.arange(20, 22)]
        >>> packed = Packed(documents, length=6)
        >>> len(packed), packed[0]["input_ids"].tolist(), packed[0]["segment_ids"].tolist()
        (2, [1, 2, 3, 20, 21, 0], [1, 1, 1, 2, 2, 0])
        >>> packed[0]["cu_seqlens"].tolist(), packed[1]["cu_seqlens"].tolist()
        ([0, 3, 5, 6], [0, 5, 6, 6])
    """

    def __init__(  # noqa: PLR0913
        self,
        documents: IndexedData,
        length: int,
        *,
        lengths: Sequence[int] | npt.NDArray[Any] | None = None,
        key: str = "input_ids",
        long: Literal["split", "drop"] = "split",
        labels: str | None = None,
        ignore_index: int = -100,
        pad_values: Mapping[str, float] | None = None,
        window: int = 4096,
        max_pieces: int | None = None,
    ) -> None:
        """Plan the rows, from the lengths of the documents.

        Args:
            documents: A data set with `__len__` and `__getitem__`: arrays of tokens, or dicts of arrays.
            length: Tokens of a row.
            lengths: The tokens of each document. None: all documents are read once to count them; to count once for all
                runs, keep the attribute `lengths` in a file (`np.save`).
            key: Field of the tokens, in documents that are dicts.
            long: What to do with a document that is longer than a row. "split": it is cut into rows, and what is left
                over is packed like a document. "drop": it is left out.
            labels: Name of a field to add with the next token of each token, such as "labels". None: no such field.
            ignore_index: Label where there is no next token.
            pad_values: For each field, the number that fills the end of a row; 0 for fields that are not named.
            window: Documents that are packed together, at most 65536. A row's documents are near each other in the data
                set. A larger window leaves less padding.
            max_pieces: Most pieces of a row, which gives the size of `cu_seqlens`. None: those of the row that has most
                of them. The sources of a mixture, and data that grows, need one number.

        Raises:
            ArgumentTypeError: The documents have no length or index, or an argument has another type.
            ArgumentError: An argument is out of range, or nothing is left.
        """
        check_indexed(
            "Packed: documents",
            documents,
            "A stream is packed by its stage pack().",
        )
        check_long(long)
        self.documents = documents
        """The documents, as given."""
        counts = _count_tokens(documents, lengths, key)
        self.lengths = counts
        """The tokens of each document, also of those that are in no row."""
        too_long = counts > check_count("Packed: length", length)
        self.num_dropped = int(too_long.sum()) if long == "drop" else 0
        """Documents that were left out since they are longer than a row."""
        if self.num_dropped:
            counts = np.where(too_long, 0, counts)
        self.packing = Packing(counts, length, window)
        """The plan of the rows: which pieces of which documents each row holds."""
        most = self.packing.most_pieces
        if max_pieces is None:
            max_pieces = most
        if check_count("Packed: max_pieces", max_pieces) < most:
            raise ArgumentError(
                f"Packed: max_pieces={max_pieces}, but a row holds {most} pieces. Give max_pieces={most} or more, or "
                "leave it out."
            )
        windows = -(-self.packing.num_pieces // self.packing.window)
        self.block_size = max(1, self.packing.num_rows // windows)
        """Rows that hold documents near each other, for `shuffle="blocks"`."""
        self.rows = PackedRows(
            length=self.packing.length,
            most_pieces=int(max_pieces),
            key=key,
            labels=labels,
            ignore_index=ignore_index,
            pad_values=dict(pad_values or {}),
        )
        """The form of the rows; the same for all sources of a mixture."""

    def __len__(self) -> int:
        return self.packing.num_rows

    def __repr__(self) -> str:
        packing = self.packing
        return (
            f"Packed({len(self.documents)} documents, {packing.num_rows} rows of {packing.length}, "
            f"{packing.padding:.2%} padding)"
        )

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a row.

        Args:
            row: Its index, in `range(len(self))`.

        Raises:
            ValueError: A document has another length than was said, or other fields than the first of its row.
        """
        row = int(row)
        if not -len(self) <= row < len(self):
            raise IndexError(
                f"row {row} is out of range for {len(self)} packed rows"
            )
        pieces = self.packing.pieces(row % len(self))
        return self.rows.row([self._of_document(piece) for piece in pieces])

    def sample_name(self, row: int) -> str:
        """Return a row's number and documents, which errors and logs show.

        Args:
            row: What `__getitem__` takes.
        """
        documents = [
            str(piece.document)
            for piece in self.packing.pieces(int(row) % len(self))
        ]
        return f"row {int(row)} of documents [{listed(documents, 8)}]"

    def fingerprint(self) -> Fingerprint:
        """Return what the rows depend on, for a saved state: JSON-able."""
        return {
            "length": self.packing.length,
            "window": self.packing.window,
            "documents": zlib.crc32(
                np.ascontiguousarray(self.packing.lengths, np.int64).tobytes()
            ),
        }

    def _of_document(self, piece: Piece) -> tuple[str, Fields, Piece]:
        """Return the name of a piece's document, its fields that have an entry for each token, and the piece."""
        name = f"document {piece.document}"
        document = self.documents[piece.document]
        num_tokens = len(tokens_of(document, self.rows.key))
        expected = self.lengths[piece.document]
        if num_tokens != expected:
            raise ValueError(
                f"{name} has {num_tokens} tokens, but {expected} by lengths=. Count again (leave lengths= out). "
                "Documents of random length can be packed by Stream.pack."
            )
        return name, self.rows.fields(document, name), piece


def _count_tokens(documents: Any, lengths: Any, key: str) -> npt.NDArray[Any]:
    """Return the number of tokens of each document: int[number of documents].

    Args:
        documents: A data set with an index.
        lengths: These numbers; None: all documents are counted.
        key: Field of the tokens, in documents that are dicts.

    Raises:
        ArgumentError: There are more or fewer numbers than documents, or a document cannot be counted.
    """
    if lengths is not None:
        counts = np.asarray(lengths)
        if counts.shape != (len(documents),):
            raise ArgumentError(
                f"Packed: lengths must have an entry for each of the {len(documents)} documents, got shape "
                f"{list(counts.shape)}."
            )
        return counts
    counted = np.empty(len(documents), np.int64)
    for number in range(len(documents)):
        try:
            counted[number] = len(tokens_of(documents[number], key))
        except Exception as error:
            raise ArgumentError(
                f"Packed: the tokens of document {number} cannot be counted: {described(error)} (Or give "
                "their numbers of tokens, by lengths=.)"
            ) from error
    return counted
