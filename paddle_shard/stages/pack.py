"""How are the documents of a part packed into rows of one length?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.packing import MAX_WINDOW, fitted
from paddle_shard.plan.parts import check_count
from paddle_shard.stages.opening import Opening, Unreadable
from paddle_shard.stages.packed_rows import Fields, PackedRows
from paddle_shard.stages.search import Search
from paddle_shard.stages.stage import Stage

LONG = ("split", "drop", "error")
"""What can be done with a document that is longer than a row."""


class Pack(Stage):
    """Packs windows of documents of a part into rows. Rows to be skipped are still read, as their number is not known.

    A document that cannot be read is a row that cannot be read, after the rows of its window.
    """

    makes_several: ClassVar[bool] = True

    def __init__(self, upstream: Stage, rows: PackedRows, window: int, long: str) -> None:
        """Set up the stage.

        Args:
            upstream: The stage that yields documents.
            rows: The form of the rows.
            window: Documents of a part that are packed together.
            long: What to do with a document that is longer than a row.
        """
        check_count("length", rows.length)
        check_count("window", window)
        if window > MAX_WINDOW:
            raise ArgumentError(f"pack: window must be at most {MAX_WINDOW}, got {window}.")
        if long not in LONG:
            raise ArgumentError(f"pack: long must be one of {', '.join(map(repr, LONG))}, got {long!r}.")
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._rows, self._window, self._long = upstream, rows, window, long

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the rows of each part."""
        opened = self._upstream.open(replace(opening, skip=0))
        return [
            islice(self._packed(items, part, opening), opening.skip, None)
            for part, items in zip(opening.parts, opened, strict=True)
        ]

    def lengths(self, opening: Opening) -> None:
        """Return None: the lengths are not known."""
        return

    def fingerprint(self) -> list[Any]:
        """Add the form of the rows."""
        rows = self._rows
        return [*self._upstream.fingerprint(), ["pack", rows.length, self._window, self._long, rows.key, rows.labels]]

    def _packed(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        rounds, search, number = opening.rounds, Search(opening, part, "pack"), 0
        while True:
            before = rounds[part]
            documents = list(islice(items, self._window))
            rounds[part], behind = before, rounds[part]  # a window that was read is no progress yet
            if not documents:
                return
            bad = [document for document in documents if isinstance(document, Unreadable)]
            pieces, names = self._pieces(documents, number)
            number += len(documents)
            yield from self._rows_of(pieces, names)
            yield from bad
            rounds[part] = behind
            if pieces or bad:
                search.kept()
            else:
                search.dropped()

    def _pieces(self, documents: list[Any], number: int) -> tuple[list[Fields], list[str]]:
        """Return the pieces of a window's documents, and the document of each, for messages."""
        length, pieces, names = self._rows.length, list[Fields](), list[str]()
        for at, document in enumerate(documents, number):
            if isinstance(document, Unreadable):
                continue
            what = f"document {at} of its part"
            fields = self._rows.fields(document, what)
            size = len(fields[self._rows.key])
            if size > length and self._long == "error":
                raise ValueError(
                    f"{what} has {size} tokens, more than a row of {length}. Use long='split' or 'drop', or a longer "
                    "row."
                )
            if size <= length or self._long == "split":
                for first in range(0, size, length):
                    pieces.append({name: value[first : first + length] for name, value in fields.items()})
                    names.append(what)
        return pieces, names

    def _rows_of(self, pieces: list[Fields], names: list[str]) -> Iterator[dict[str, Any]]:
        for first in range(0, len(pieces), MAX_WINDOW):  # long documents may have many pieces
            some, called = pieces[first : first + MAX_WINDOW], names[first : first + MAX_WINDOW]
            sizes = np.array([len(piece[self._rows.key]) for piece in some], np.int64)
            rows, num_rows = fitted(sizes, self._rows.length)
            order = np.argsort(rows, kind="stable")
            ends = np.cumsum(np.bincount(rows, minlength=num_rows))
            for chosen in np.split(order, ends[:-1]):
                yield self._rows.row([some[at] for at in chosen.tolist()], [called[at] for at in chosen.tolist()])
