"""Remainder policies (`tail=`): what happens to data that does not fill the last global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paddle_shard.errors import ArgumentError, UnequalEndsError

EndOfStream = Literal["deliver", "exhausted", "end"]
"""Action for a batch at the end of a stream; see `Tail.end_of_stream`."""


class Tail(str):
    """One way to end an epoch: a string that says what happens at the end. It is equal to its name.

    No code decides by a tail's name.
    """

    pads = False
    """True if it adds rows that are not valid."""
    fills = False
    """True if it adds them up to the full batch size."""
    drops = False
    """True if it may leave a short last batch out."""
    refuses = False
    """True if it is an error that data does not fill its last batch."""
    repeats = False
    """True if a part of a stream that has ended is read again until the longest has ended."""

    def __new__(cls, name: str, **traits: bool) -> Tail:
        """Return the tail with a name; `traits` are the attributes in which it differs from these."""
        tail = super().__new__(cls, name)
        tail.__dict__.update(traits)
        return tail

    def num_rows(self, rest: int, batch_size: int, unit: int) -> int:
        """Return the number of rows of a short last batch; 0 if it is dropped.

        Args:
            rest: Samples that are left for it, at least 1.
            batch_size: Rows of a full batch; 0 if batches have no fixed size.
            unit: The padding unit; the rows of every batch are a multiple of it.
        """
        if self.drops:
            return 0
        padded = rest + -rest % unit
        return max(batch_size, padded) if self.fills else padded

    def num_steps(self, lengths: Sequence[int], size: int) -> int:
        """Return the number of steps of an epoch of a stream whose parts have these lengths.

        Args:
            lengths: Samples of each part.
            size: Samples of each part that a step consumes.
        """
        if self.drops:
            return min(lengths) // size
        return -(-max(lengths) // size)

    def end_of_stream(
        self, *, is_whole: bool, has_new: bool, is_empty: bool
    ) -> EndOfStream:
        """Return whether a rank goes on after it has read a batch of a stream whose length is not known.

        A whole batch with new samples is no end. Otherwise, parts of this rank have ended, and the tail decides.

        Args:
            is_whole: The batch has all its rows.
            has_new: At least one row is a new sample, neither padding nor of a part that was opened again.
            is_empty: The batch has no row that is valid.

        Returns:
            "deliver": deliver the batch. "exhausted": this rank has no new sample from this batch on, so the pass ends
            at the first batch for which all ranks return "exhausted", and until then the batch is delivered. "end":
            the pass ends before this batch on all ranks.

        Raises:
            UnequalEndsError: The tail is "error", and the parts end at different times or within a batch.

        Examples:
            >>> short = {"is_whole": False, "has_new": True, "is_empty": False}
            >>> TAILS["pad"].end_of_stream(**short), TAILS["drop"].end_of_stream(**short)
            ('deliver', 'end')
            >>> TAILS["repeat"].end_of_stream(is_whole=True, has_new=False, is_empty=False)
            'exhausted'
        """
        if is_whole and has_new:
            return "deliver"
        if self.pads or self.repeats:
            return "deliver" if has_new and not is_empty else "exhausted"
        if self.refuses and not is_empty:
            raise UnequalEndsError(
                "tail='error': the stream's parts do not end together with a whole batch. Choose tail='pad', 'drop' "
                "or 'repeat', or num_batches=."
            )
        return "end"


PAD = Tail("pad", pads=True)
"""A short batch is padded up to the padding unit. A stream continues to the end of its longest part. Invalid rows are
copies of the first samples of the same epoch's order; in a stream, of the part's first sample."""
FILL = Tail("fill", pads=True, fills=True)
DROP = Tail("drop", drops=True)
"""A stream ends before the first batch that is short in any part."""
REPEAT = Tail("repeat", repeats=True)
ERROR = Tail("error", refuses=True)

INDEX_TAILS = (PAD, FILL, DROP, ERROR)
"""Those that data sets with an index can use."""
STREAM_TAILS = (PAD, DROP, REPEAT, ERROR)
"""Those that streams can use, whose parts end at different times."""
TAILS = {str(tail): tail for tail in (*INDEX_TAILS, *STREAM_TAILS)}
"""All tails, by name."""


def find_tail(
    tail: str | None, *, stream: bool = False, drop_last: bool = False
) -> Tail:
    """Return the tail with a name.

    Args:
        tail: The user's argument; None: `drop_last` decides.
        stream: True if the data is a stream.
        drop_last: The DataLoader's `drop_last`.

    Raises:
        ArgumentError: This data cannot use it, or there is no such tail.

    Examples:
        >>> find_tail("fill").pads, find_tail(None, drop_last=True)
        (True, 'drop')
    """
    if tail is None:
        return DROP if drop_last else PAD
    usable = STREAM_TAILS if stream else INDEX_TAILS
    if tail not in usable:
        names = ", ".join(map(repr, usable))
        data = "a stream" if stream else "data with an index"
        raise ArgumentError(
            f"tail must be one of {names} for {data}, got {tail!r}."
        )
    return TAILS[tail]
