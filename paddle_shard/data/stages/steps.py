"""Stages that map, filter, batch, shuffle and repeat the samples of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import itemgetter
from typing import Any

import numpy as np

from paddle_shard.data.stages.stage import (
    Lengths,
    Opening,
    Samples,
    Stage,
    Transform,
    Unreadable,
    windows,
)
from paddle_shard.plan.parts import nothing_to_repeat
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation

Rounds = Iterator[tuple[int, Any]]
"""(round, sample) for each sample of a part that is reopened when it has ended."""


@dataclass(eq=False)
class Map(Transform):
    """Calls a function for each sample; skipped samples cost no call.

    The global generators are seeded before each call from (seed, epoch, round, part, number of the sample), so a
    random function gives the same result for any number of workers, and after a resume.
    """

    function: Callable[[Any], Any]
    """Called with a sample."""

    def transform(self, items: Samples, part: int, opening: Opening) -> Samples:
        """Yield the results of the function."""
        key = opening.key(part, "map", self.depth)
        function = self.function
        rng = opening.rng
        for number, item in enumerate(items, opening.skip):
            # After `items` has run, which may seed the generators, too.
            if rng.seeds:
                rng.seed(key, number)
            yield opening.call(function, item)
            if not (rng.seeds or opening.skip_errors):  # nor later in this pass
                break
        for item in items:
            try:
                result = function(item)
            except Exception as error:
                result = opening.failed(item, error)
            yield result

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the origin of the sample before the change."""
        return self.upstream.origin(opening, part, number)


@dataclass(eq=False)
class Filter(Transform):
    """Keeps the samples for which a function is true. Samples to be skipped are still read and tested."""

    counted = False
    name = "filter"
    predicate: Callable[[Any], bool]
    """Called with a sample; True keeps it."""

    def transform(self, items: Samples, part: int, opening: Opening) -> Samples:
        """Yield the samples that are kept."""
        key = opening.key(part, "filter", self.depth)
        for number, item in enumerate(items):
            opening.rng.seed(key, number)
            keep = opening.call(
                lambda sample: bool(self.predicate(sample)), item
            )
            if keep:
                yield keep if isinstance(keep, Unreadable) else item


@dataclass(eq=False)
class Group(Transform):
    """Makes lists of `size` samples of a part; the last one may be shorter."""

    name = "batch"
    settings = ("size",)
    size: int
    """At least 1."""

    def begin(self, skip: int) -> tuple[int, int]:
        """Return that lists are skipped by skipping their samples."""
        return skip * self.size, 0

    def transform(self, items: Samples, part: int, opening: Opening) -> Samples:
        """Yield the lists. One that holds a sample that cannot be read is replaced as a whole."""
        for group in windows(items, self.size):
            bad = [item for item in group if isinstance(item, Unreadable)]
            yield Unreadable(bad[0].why, tuple(group)) if bad else group

    def lengths(self, opening: Opening) -> Lengths:
        """Return the number of lists in each part."""
        lengths = self.upstream.lengths(opening)
        return lengths and [-(-length // self.size) for length in lengths]


class Unbatch(Transform):
    """Delivers the items of each sample one by one. Items to be skipped are still read."""

    counted = False
    makes_several = True
    name = "unbatch"

    def transform(self, items: Samples, part: int, opening: Opening) -> Samples:
        """Yield the items of the samples."""
        key = opening.key(part, "unbatch", self.depth)
        numbers = count()
        for group in items:
            if isinstance(group, Unreadable):
                yield from group.items or (group,)
                continue
            opening.rng.seed(key, next(numbers))
            try:
                for item in group:
                    yield item
                    opening.rng.seed(key, next(numbers))
            except Exception as error:  # its other items are not read
                yield opening.failed(group, error)


@dataclass(eq=False)
class Shuffle(Transform):
    """Permutes the samples of a part in windows, each with its own key.

    A window is read completely before its first sample is delivered, so a part holds up to `window` samples in
    memory. A resume needs no saved buffer: it reads less than one window again.
    """

    name = "shuffle"
    settings = ("window",)
    window: int
    """Number of samples that are mixed, at least 1."""

    def begin(self, skip: int) -> tuple[int, int]:
        """Return that whole windows are skipped, and the rest of a window is read."""
        rest = skip % self.window
        return skip - rest, rest

    def transform(self, items: Samples, part: int, opening: Opening) -> Samples:
        """Yield the samples of one window after the other."""
        # Its number counts only the shuffles before it: then stages that keep the order can be added to a run.
        number = sum(
            isinstance(stage, Shuffle) for stage in self.upstream.line()
        )
        key = opening.key(part, "window", number)
        first = opening.skip // self.window
        for window, samples in enumerate(windows(items, self.window), first):
            permuted = Permutation(
                len(samples), derive_key(key, window, size=64)
            )
            for place in permuted(np.arange(len(samples))).tolist():
                sample = samples[place]
                samples[place] = None  # release delivered samples
                yield sample


@dataclass(eq=False)
class Repeat(Transform):
    """Reads each part several times; if it is shuffled, each time in another order."""

    name = "repeat"
    settings = ("times",)
    times: int | None = None
    """How often to read, at least once; None: without an end."""

    def __post_init__(self) -> None:
        self.endless = self.times is None or self.upstream.endless

    def open(self, opening: Opening) -> list[Samples]:
        """Return the samples of each part, round after round."""
        rounds = in_rounds(self.upstream, opening, self.times)
        return [map(itemgetter(1), items) for items in rounds]

    def lengths(self, opening: Opening) -> Lengths:
        """Return the number of samples of all rounds; None if there is no end or a length is not known."""
        if self.times is None:
            return None
        lengths = self.upstream.lengths(opening)
        return lengths and [self.times * length for length in lengths]


def in_rounds(
    stage: Stage, opening: Opening, times: int | None, source: str = ""
) -> list[Rounds]:
    """Open parts so that each is reopened when it has ended.

    Args:
        stage: The stage to open.
        opening: The opening of the first round; `skip` counts over all rounds.
        times: Number of rounds; None: without an end.
        source: Name of the source of a mixture, for the error if a part has no sample.

    Returns:
        For each part, pairs of the round, from 0, and the sample.
    """
    num_dropped = opening.skip
    begins = dict.fromkeys(opening.parts, (0, 0))
    lengths = stage.lengths(opening)
    # else, how many rounds these are shows as they are read
    if lengths is not None:
        for part, length in zip(opening.parts, lengths, strict=True):
            begins[part] = divmod(opening.skip, length or 1)
        num_dropped = 0
    rounds = _Rounds(stage, opening, begins, times, source)
    return [
        islice(rounds.items(part), num_dropped, None) for part in opening.parts
    ]


@dataclass(slots=True, eq=False)
class _Rounds:
    """Rounds of some parts. Those that begin a round at the same sample are opened together and share one read."""

    stage: Stage
    opening: Opening
    begins: Mapping[int, tuple[int, int]]
    """Part -> (round, samples of it that are skipped)."""
    times: int | None
    """See `in_rounds`."""
    source: str
    """See `in_rounds`."""
    open_parts: dict[tuple[int, int], dict[int, Samples]] = field(
        default_factory=dict
    )
    """(round, samples that are skipped) -> the parts that are opened there and not read yet."""

    def items(self, part: int) -> Rounds:
        """Yield (round, sample) of a part."""
        begin, skip = self.begins[part]
        numbers = (
            count(begin) if self.times is None else range(begin, self.times)
        )
        for number in numbers:
            is_empty = not skip
            items = self._open(part, (number, skip))
            skip = 0
            for item in items:
                is_empty = False
                yield number, item
            if is_empty and self.times is None:
                raise nothing_to_repeat(
                    part, self.opening.num_parts, self.source
                )

    def _open(self, part: int, place: tuple[int, int]) -> Samples:
        """Return a part of a round; open it with all parts that come to the same place."""
        if place not in self.open_parts:
            number, skip = place
            parts = tuple(
                other
                for other, begin in self.begins.items()
                if begin == place or (begin < place and not skip)
            )
            opening = self.opening
            request = replace(
                opening,
                parts=parts,
                round=opening.round * (self.times or 1) + number,
                skip=skip,
                # Parts may begin at several places: `seen` would be called for a sample more than once.
                seen=None if skip else opening.seen,
            )
            samples = zip(parts, self.stage.open(request), strict=True)
            self.open_parts[place] = dict(samples)
        parts_there = self.open_parts[place]
        items = parts_there.pop(part)
        if not parts_there:
            del self.open_parts[place]
        return items
