"""What happens to data that does not fill the last global batch?"""

from __future__ import annotations

from collections.abc import Sequence

from paddle_shard.errors import ArgumentError


class Tail(str):
    """One way to end an epoch: a string with methods that say what happens at the end. It is equal to its name.

    To add one, write a subclass here and add a row to `TAILS`. Nothing else in the library names a tail.
    """

    __slots__ = ()

    for_indices = True
    """True if data sets with an index can use it."""
    for_streams = True
    """True if streams, whose parts end at different times, can use it."""
    pads = False
    """True if it adds rows that are not valid."""
    drops = False
    """True if it may leave a short last batch out."""
    refuses = False
    """True if data that does not fill its last batch is an error."""
    repeats = False
    """True if a part of a stream that has ended is read again until the longest has ended."""

    def num_rows(self, rest: int, batch_size: int, unit: int) -> int:
        """Return the number of rows of a short last batch; 0 if it is dropped.

        Args:
            rest: Samples that are left for it, at least 1.
            batch_size: Rows of a full batch; 0 if batches have no fixed size.
            unit: The padding unit; the rows of every batch are a multiple of it.
        """
        return rest + -rest % unit

    def num_steps(self, lengths: Sequence[int], size: int) -> int:
        """Return the number of steps of an epoch of a stream whose parts have these lengths.

        Args:
            lengths: Samples of each part.
            size: Samples of each part that a step consumes.
        """
        return -(-max(lengths) // size)


class Pad(Tail):
    """Serve a short batch, padded with invalid rows. A stream continues to the end of its longest part.

    Padding goes up to the padding unit. Invalid rows are copies of the first samples of the same epoch's order; in a
    stream, of the part's first sample.
    """

    __slots__ = ()
    pads = True


class Fill(Tail):
    """Fill a short batch up to the full size with invalid rows."""

    __slots__ = ()
    pads, for_streams = True, False

    def num_rows(self, rest: int, batch_size: int, unit: int) -> int:
        """See `Tail`."""
        return max(batch_size, super().num_rows(rest, batch_size, unit))


class Drop(Tail):
    """Do not serve a short batch. A stream ends before the first batch that is short in any part."""

    __slots__ = ()
    drops = True

    def num_rows(self, rest: int, batch_size: int, unit: int) -> int:
        """See `Tail`."""
        return 0

    def num_steps(self, lengths: Sequence[int], size: int) -> int:
        """See `Tail`."""
        return min(lengths) // size


class Repeat(Tail):
    """Reopen a part of a stream that has ended, until the longest has ended."""

    __slots__ = ()
    repeats, for_indices = True, False


class Error(Tail):
    """Refuse data that does not fill its last batch, and streams whose parts do not end together."""

    __slots__ = ()
    refuses = True


TAILS: dict[str, Tail] = {
    tail: tail for tail in (Pad("pad"), Fill("fill"), Drop("drop"), Repeat("repeat"), Error("error"))
}
"""All tails, by name."""
INDEX_TAILS = tuple(tail for tail in TAILS.values() if tail.for_indices)
STREAM_TAILS = tuple(tail for tail in TAILS.values() if tail.for_streams)


def find_tail(tail: str | None, *, stream: bool = False, drop_last: bool = False) -> Tail:
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
        return TAILS["drop" if drop_last else "pad"]
    known = STREAM_TAILS if stream else INDEX_TAILS
    found = TAILS.get(tail) if isinstance(tail, str) else None
    if found is None or found not in known:
        others = ", ".join(map(repr, known))
        raise ArgumentError(f"tail must be one of {others}{' for a stream' if stream else ''}, got {tail!r}.")
    return found
