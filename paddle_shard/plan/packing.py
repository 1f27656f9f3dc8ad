"""Packing: the documents that make up rows of a fixed length, so that little of a row is padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from paddle_shard.core.checks import check_count, check_lengths
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.order import Indices

MAX_WINDOW = 1 << 16
"""Most pieces of a window: their numbers in it take 2 bytes."""

_MOST_PIECES = 1 << 32
"""Most pieces of a plan, which would take 40 GB."""

_FEWER = 0.2
"""Share of the rows that are left to be opened later, when it is known what does not fit into the first ones."""
_PAIR = MAX_WINDOW
_ONE_BY_ONE = 1 / 16
"""Share of a window's pieces, the shortest ones, that are placed one by one."""
_ROWS = 64
"""Fewest rows that take a piece in a round; with fewer, the pieces are placed one by one."""


def fitted(lengths: Indices, length: int) -> tuple[Indices, int]:
    """Return the row of each piece, and the number of rows: nearly as few as best fit needs.

    Rows are numbered in the order of their first pieces.

    Rows begin with the longest pieces. In each round, every row takes the longest piece that fits, no piece twice. What
    fits into no row opens new ones. The shortest pieces are placed by best fit, one by one. A round takes numpy some
    microseconds for all rows, where best fit takes one for each piece.

    Args:
        lengths: int64[n], each in [1, length].
        length: Length of a row.

    Examples:
        >>> rows, num_rows = fitted(np.array([3, 8, 5, 4]), 8)
        >>> num_rows, rows.tolist()
        (3, [0, 1, 0, 2])
    """
    # One sorted array of (length, number) of the pieces, and one of (space, number) of the rows, each pair in an int.
    pieces = np.sort(lengths * _PAIR + np.arange(len(lengths)))
    row_of = np.empty(len(pieces), np.int64)
    few = int(len(pieces) * _ONE_BY_ONE)
    num_rows = 0
    rows = np.empty(0, np.int64)
    while len(pieces) > few:
        space = rows // _PAIR
        last = np.searchsorted(pieces, (space + 1) * _PAIR) - 1
        place = np.arange(len(rows))
        # Rows are in the order of their space: each takes a piece before that of the next row.
        ahead = last - place
        last = np.minimum.accumulate(ahead[::-1])[::-1] + place
        first = int(np.searchsorted(last, 0))
        if len(rows) - first >= _ROWS:
            taken = last[first:]
            fits = rows[first:]
            chosen = pieces[taken]
            row_of[chosen % _PAIR] = fits % _PAIR
            pieces = np.delete(pieces, taken)
            fits -= chosen // _PAIR * _PAIR
        else:
            rows_of_tokens = (pieces // _PAIR).sum() / length
            wanted = int(rows_of_tokens * (1 - _FEWER))
            number = min(len(pieces), wanted)
            if number < _ROWS:
                break
            chosen = pieces[-number:]
            pieces = pieces[:-number]
            new = num_rows + np.arange(number)
            row_of[chosen % _PAIR] = new
            space = length - chosen // _PAIR
            rows = np.concatenate([rows, space * _PAIR + new])
            num_rows += number
        rows = np.sort(rows)
        # Rows without space for the shortest piece are full.
        shortest = pieces[0] // _PAIR if len(pieces) else length + 1
        rows = rows[np.searchsorted(rows, shortest * _PAIR) :]

    num_rows = _fit_best(pieces, rows.tolist(), row_of, num_rows, length)

    # Number the rows in the order of their first pieces.
    first_pieces = np.empty(num_rows, np.int64)
    first_pieces[row_of[::-1]] = np.arange(len(row_of))[::-1]
    renumbered = np.argsort(np.argsort(first_pieces))
    return renumbered[row_of], num_rows


def _fit_best(
    pieces: Indices,
    spaces: list[int],
    row_of: Indices,
    num_rows: int,
    length: int,
) -> int:
    """Put pieces into rows by best fit, one by one, the longest first; return the number of rows.

    Args:
        pieces: (length, number) of each piece, ascending.
        spaces: (space, number) of each row that is open, ascending.
        row_of: The row of each piece, which is filled in.
        num_rows: Rows so far.
        length: Length of a row.
    """
    for pair in pieces[::-1].tolist():
        size, piece = divmod(pair, _PAIR)
        place = bisect_left(spaces, size * _PAIR)
        if place == len(spaces):
            spaces.append(length * _PAIR + num_rows)
            num_rows += 1
        space, row = divmod(spaces.pop(place), _PAIR)
        row_of[piece] = row
        if space > size:
            insort(spaces, (space - size) * _PAIR + row)
    return num_rows


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a stretch of a long one."""

    document: int
    """Index of the document."""
    first: int
    """Its first token."""
    end: int
    """The token after its last one."""


class Packing:
    """The rows of packed documents: a function of their lengths, of the row's length and of the window.

    The documents are cut into pieces of at most a row. Each window of consecutive pieces is packed by `fitted`. Every
    token is in one row, once. The plan takes about 2 bytes a piece and 8 bytes a row, beside the lengths.

    Examples:
        >>> packing = Packing(np.array([3, 20, 5, 4]), length=8)
        >>> packing.num_rows, packing.pieces(0)
        (4, [Piece(document=0, first=0, end=3), Piece(document=2, first=0, end=5)])
        >>> packing.padding
        0.0
    """

    def __init__(
        self, lengths: Indices, length: int, window: int = 4096
    ) -> None:
        """Plan all rows, in about 0.2 us a piece.

        Args:
            lengths: int[number of documents], each 0 or more.
            length: Length of a row, at least 1.
            window: Pieces that are packed together, in [1, 65536].

        Raises:
            ArgumentError: An argument is out of range, or there is no token.
        """
        lengths = check_lengths(lengths)
        self.length = check_count("length", length, most=1 << 40)
        self.window = check_count("window", window, most=MAX_WINDOW)
        self.lengths = lengths
        self.num_tokens = int(lengths.sum(dtype=np.int64))
        """Tokens of all documents."""
        if self.num_tokens == 0:
            raise ArgumentError(
                "the documents have no token: there is nothing to pack. Check their path and filters."
            )
        counts = -(-lengths.astype(np.int64) // self.length)
        self.num_pieces = int(counts.sum())
        """Documents, and the stretches of long ones."""
        if self.num_pieces > _MOST_PIECES:
            raise ArgumentError(
                f"lengths: the longest document has {int(lengths.max())} tokens, and all together fill "
                f"{self.num_pieces} pieces of up to {self.length}, more than a plan can hold. Are these tokens?"
            )
        self._first_piece = None
        if (counts != 1).any():
            self._first_piece = np.concatenate([[0], np.cumsum(counts)])
        orders = []
        sizes = []
        for first in range(0, self.num_pieces, self.window):
            stop = min(first + self.window, self.num_pieces)
            _, begins, ends = self._cut(np.arange(first, stop))
            rows, num_rows = fitted(ends - begins, self.length)
            orders.append(np.argsort(rows, kind="stable").astype(np.uint16))
            sizes.append(np.bincount(rows, minlength=num_rows))
        per_row = np.concatenate(sizes)
        self.most_pieces = int(per_row.max())
        """Pieces of the row that has most of them."""
        self._order = np.concatenate(orders)
        self._begin = np.concatenate([[0], np.cumsum(per_row)])
        self.num_rows = len(self._begin) - 1
        """Number of rows."""
        self.padding = 1 - self.num_tokens / (self.num_rows * self.length)
        """Share of all places that hold no token."""

    def pieces(self, row: int) -> list[Piece]:
        """Return the pieces of a row, in the order of the documents.

        Args:
            row: In `range(num_rows)`.
        """
        begin, end = self._begin[row : row + 2].tolist()
        window = begin // self.window * self.window
        cut = self._cut(window + self._order[begin:end].astype(np.int64))
        return [Piece(*piece) for piece in np.transpose(cut).tolist()]

    def _cut(self, numbers: Indices) -> tuple[Indices, Indices, Indices]:
        """Return the document of each piece, its first token there, and the token after its last one."""
        if self._first_piece is None:  # no document is longer than a row
            return (
                numbers,
                np.zeros_like(numbers),
                self.lengths[numbers].astype(np.int64),
            )
        documents = np.searchsorted(self._first_piece, numbers, "right") - 1
        begins = (numbers - self._first_piece[documents]) * self.length
        return (
            documents,
            begins,
            np.minimum(
                self.lengths[documents].astype(np.int64), begins + self.length
            ),
        )
