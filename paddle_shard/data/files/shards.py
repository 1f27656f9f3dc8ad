"""Cutting a list of files into parts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypedDict

import numpy as np

from paddle_shard.core.checks import check_flag
from paddle_shard.data.files.ahead import LIMIT
from paddle_shard.data.files.files import (
    FileErrorContext,
    FileVersion,
    Path,
    identity,
    is_remote,
    redacted,
    version_of,
    within_their_folder,
)
from paddle_shard.data.stages.stage import (
    Lengths,
    Opening,
    PartsSource,
    Samples,
    Unreadable,
)
from paddle_shard.errors import (
    ArgumentError,
    ShardReadError,
    described,
)
from paddle_shard.plan.order import Indices
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import permutation

RECOUNT = "count again (make the stream again; for an index file: `paddle-shard index URL... -o index.json`)"

ShardRange = tuple[int, int, int | None]
"""(shard, first sample to read, sample to stop before; None: the shard's end)."""


class FileOptions(TypedDict, total=False):
    """The options of all streams of files; `Stream.lines` describes them."""

    shuffle_shards: bool
    cache_dir: Path | None


class ShardSource(PartsSource):
    """Files of samples ("shards"), assigned to the parts, whatever process reads a part.

    If the samples of each shard are counted, the shards are concatenated in their order and cut evenly, also in the
    middle of a file, so that the parts' lengths differ by at most one. Otherwise, shard i of the order belongs to part
    i mod P. Nothing is opened before a part is read.
    """

    def __init__(
        self,
        names: Sequence[str],
        read: Callable[[str, int, int], Samples],
        *,
        files: Sequence[str] | None = None,
        counts: Sequence[int] | None = None,
        shuffle_shards: bool = True,
    ) -> None:
        """Set up the source.

        Args:
            names: The shards, each once: paths, URLs, or any names that `read` understands.
            read: Called with a name, a number of samples to skip, and a number of bytes that it may read ahead; returns
                an iterator over the other samples. Each call must give the same samples. An exception replaces a sample
                that cannot be read, if the next can.
            files: The file that contains each shard, if a shard is less than a file; None: each shard is a file.
            counts: Number of samples of each shard. With counts, parts are equal, their lengths are known, and skipping
                is cheap. A shard with fewer or more samples is an error when its end is read.
            shuffle_shards: If True, permute the shards, in another order in each epoch and round.

        Raises:
            ArgumentError: There is no name, or names are not distinct.
        """
        self._names = list(names)
        if not self._names:
            raise ArgumentError("paths must name at least one file, got [].")
        name, times = Counter(self._names).most_common(1)[0]
        if times > 1:
            raise ArgumentError(
                f"paths names {redacted(name)!r} more than once, so its samples would be delivered as often. "
                "Name each file once; .repeat() reads the stream again."
            )
        self.num_shards: int = len(self._names)
        self._counts = None if counts is None else np.asarray(counts)
        self._total = sum(counts or ())
        self._files = self._names if files is None else list(files)
        self._read = read
        self._shuffle = check_flag("shuffle_shards", shuffle_shards)

    def lengths(self, opening: Opening) -> Lengths:
        """Return the lengths of the parts; None if the shards are not counted."""
        if self._counts is None:
            return super().lengths(opening)
        cuts = [self._cut(part, opening.num_parts) for part in opening.parts]
        return [stop - start for start, stop in cuts]

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the shard and the sample's number in it; None if the shards are not counted."""
        if self._counts is None:
            return None
        for shard, offset, _ in self._cut_out(
            self._counts, opening, part, number
        ):
            return f"sample {offset} of {redacted(self._names[shard])}"
        return None

    def files_identity(self) -> list[FileVersion]:
        """See `Stage`. Shards that are no files have no entry."""
        return identity(list(dict.fromkeys(self._files)))

    @cached_property
    def _digest(self) -> str:
        """Digest of the counts, and of the names within their common folder."""
        # Files that are not counted are identified by their sizes, if these cost no request.
        sizes: Any = (
            [
                ("size", None if is_remote(file) else version_of(file)[0])
                for file in self._files
            ]
            if self._counts is None
            else self._counts.tolist()
        )
        files = zip(within_their_folder(self._files), sizes, strict=True)
        return derive_key(list(files), size=16).hex()

    def fingerprint(self) -> list[Any]:
        """Return what the order depends on."""
        return [["shards", len(self._names), self._digest, self._shuffle]]

    def part(self, part: int, opening: Opening) -> Samples:
        """See `PartsSource`."""
        if self._counts is None:
            shards = self._order(opening)[part :: opening.num_parts].tolist()
            segments: Iterator[ShardRange] = (
                (shard, 0, None) for shard in shards
            )
            num_dropped = opening.skip
        else:  # they can be skipped without reading them
            segments = self._cut_out(self._counts, opening, part, opening.skip)
            num_dropped = 0
        samples = chain.from_iterable(self._pieces(segments, opening))
        yield from islice(samples, num_dropped, None)

    def _order(self, opening: Opening) -> Indices:
        numbers = np.arange(len(self._names))
        if not self._shuffle:
            return numbers
        purpose = ("shards", opening.seed, opening.epoch, opening.round)
        return permutation(len(numbers), *purpose)(numbers)

    def _cut(self, part: int, num_parts: int) -> tuple[int, int]:
        return self._total * part // num_parts, self._total * (
            part + 1
        ) // num_parts

    def _cut_out(
        self, counts: Indices, opening: Opening, part: int, skip: int
    ) -> Iterator[ShardRange]:
        """Return the pieces of the ordered shards that lie in a part, after its first `skip` samples."""
        start, stop = self._cut(part, opening.num_parts)
        order = self._order(opening)
        # Samples at which each shard begins and ends, if all shards are laid end to end in this order.
        ends = np.cumsum(counts[order])
        begins = ends - counts[order]
        firsts = np.maximum(begins, start + skip)
        stops = np.minimum(ends, stop)
        pieces = np.stack([order, firsts - begins, stops - begins], axis=1)
        return map(tuple, pieces[firsts < stops].tolist())

    def _pieces(
        self, segments: Iterator[ShardRange], opening: Opening
    ) -> Iterator[Samples]:
        """Yield the samples of each piece; while one is read, the shards of the next two are opened."""
        limit = LIMIT // len(opening.parts)
        begun = (
            (segment, self._read(self._names[segment[0]], segment[1], limit))
            for segment in segments
        )
        pieces = deque(islice(begun, 2))
        while pieces:
            pieces.extend(islice(begun, 1))
            yield self._piece(*pieces.popleft(), opening)

    def _piece(
        self, segment: ShardRange, items: Samples, opening: Opening
    ) -> Samples:
        """Read a piece of a shard."""
        shard, begin, end = segment
        name = self._names[shard]
        length = None if self._counts is None else int(self._counts[shard])
        offset = begin
        with FileErrorContext(name, "reading sample", lambda: offset):
            for item in items:
                if isinstance(item, Exception):
                    if not opening.skip_errors:
                        raise item
                    item = Unreadable(f"{redacted(name)}: {described(item)}")
                offset += 1
                # Before the last sample is delivered, since no other one may be requested.
                if offset == length:
                    num_more = sum(1 for _ in items)
                    if num_more:
                        raise _miscounted(name, length + num_more, length)
                yield item
                if offset == end:
                    return
            if end is not None:
                bound = "at most " if offset == begin > 0 else ""
                raise _miscounted(name, offset, length, bound)


def _miscounted(
    name: str, num_samples: int, length: int | None, bound: str = ""
) -> ShardReadError:
    return ShardReadError.of(
        f"{redacted(name)} has {bound}{num_samples} samples, but its count says {length}. It has changed since, or was "
        f"counted otherwise: {RECOUNT}.",
        redacted(name),
        min(num_samples, length or 0),
    )
