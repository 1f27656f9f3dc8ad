"""Stages that map, filter, batch, shuffle and repeat the samples of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, repeat
from typing import Any, ClassVar

import numpy as np

from paddle_shard.core.checks import check_count
from paddle_shard.data.stages.stage import (
    Opening,
    Stage,
    Transform,
    Unreadable,
    windows,
)
from paddle_shard.plan.parts import nothing_to_repeat
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation


class Map(Transform):
    """Calls a function for each sample; skipped samples cost no call.

    The global generators are seeded before each call from (seed, epoch, round, part, number of the sample), so a
    random function gives the same result for any number of workers, and after a resume.
    """

    def __init__(self, upstream: Stage, function: Callable[[Any], Any]) -> None:
        super().__init__(upstream)
        self._function = function

    def made(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        """Yield the results of the function."""
        key, function, seed = (
            opening.key(part, "map", self.depth),
            self._function,
            opening.seed_generators,
        )
        for number, item in enumerate(items, opening.skip):
            seed(
                key, number
            )  # after `items` has run code that seeds the generators, too
            yield opening.tried(function, item)

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the origin of the sample before the change."""
        return self.upstream.origin(opening, part, number)


class Filter(Transform):
    """Keeps the samples for which a function is true. Samples to be skipped are still read and tested."""

    counted: ClassVar[bool] = False

    def __init__(self, upstream: Stage, predicate: Callable[[Any], bool]) -> None:
        super().__init__(upstream, "filter")
        self._predicate = predicate

    def made(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        """Yield the samples that are kept."""
        key = opening.key(part, "filter", self.depth)
        for number, item in enumerate(items):
            opening.seed_generators(key, number)
            keep = opening.tried(lambda sample: bool(self._predicate(sample)), item)
            if keep:
                yield keep if isinstance(keep, Unreadable) else item


class Batch(Transform):
    """Makes lists of `size` samples of a part; the last one may be shorter."""

    def __init__(self, upstream: Stage, size: int) -> None:
        super().__init__(upstream, "batch", size)
        self.size: int = check_count("size", size)

    def begin(self, skip: int) -> tuple[int, int]:
        """Return that lists are skipped by skipping their samples."""
        return skip * self.size, 0

    def made(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        """Yield the lists. One that holds a sample that cannot be read is replaced as a whole."""
        for group in windows(items, self.size):
            bad = [item for item in group if isinstance(item, Unreadable)]
            yield Unreadable(bad[0].why, tuple(group)) if bad else group

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the number of lists in each part."""
        found = self.upstream.lengths(opening)
        return None if found is None else [-(-length // self.size) for length in found]


class Unbatch(Transform):
    """Delivers the items of each sample one by one. Items to be skipped are still read."""

    counted: ClassVar[bool] = False
    makes_several: ClassVar[bool] = True

    def __init__(self, upstream: Stage) -> None:
        super().__init__(upstream, "unbatch")

    def made(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        """Yield the items of the samples."""
        key = opening.key(part, "unbatch", self.depth)
        numbers = count()
        for group in items:
            yield from self._items(group, opening, key, numbers)

    def _items(
        self, group: Any, opening: Opening, key: int, numbers: Iterator[int]
    ) -> Iterator[Any]:
        if isinstance(group, Unreadable):
            yield from group.items or (group,)
            return
        if isinstance(group, list | tuple):
            yield from group
            return
        items, end = opening.tried(iter, group), object()
        while not isinstance(items, Unreadable):
            opening.seed_generators(
                key, next(numbers)
            )  # a generator runs the user's code for each item
            item = opening.tried(lambda rest: next(rest, end), items)
            if item is end:
                return
            yield item
            if isinstance(item, Unreadable):  # the items after it cannot be read
                return
        yield items


class Shuffle(Transform):
    """Permutes the samples of a part in windows, each with its own key.

    A window is read completely before its first sample is delivered, so a part holds up to `window` samples in
    memory. A resume needs no saved buffer: it reads less than one window again.
    """

    def __init__(self, upstream: Stage, window: int) -> None:
        """Set up the stage.

        Args:
            upstream: The stage to shuffle.
            window: Number of samples that are mixed, at least 1.
        """
        super().__init__(upstream, "shuffle", window)
        self._window = check_count("window", window)

    def begin(self, skip: int) -> tuple[int, int]:
        """Return that whole windows are skipped, and the rest of a window is read."""
        rest = skip % self._window
        return skip - rest, rest

    def made(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        """Yield the samples of one window after the other."""
        # Its number counts only the shuffles before it: then stages that keep the order can be added to a run.
        number = sum(isinstance(stage, Shuffle) for stage in self.upstream.line())
        key = opening.key(part, "window", number)
        for window, held in enumerate(
            windows(items, self._window), opening.skip // self._window
        ):
            permuted = Permutation(len(held), derive_key(key, window, size=64))
            for at in permuted(np.arange(len(held), dtype=np.int64)).tolist():
                item, held[at] = held[at], None  # release delivered samples
                yield item


class Repeat(Transform):
    """Reads each part several times; if it is shuffled, each time in another order."""

    def __init__(self, upstream: Stage, times: int | None = None) -> None:
        """Set up the stage.

        Args:
            upstream: The stage to repeat.
            times: How often to read; None: without an end.
        """
        super().__init__(upstream, "repeat", times)
        self._times = None if times is None else check_count("times", times)
        self.endless = times is None or upstream.endless

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the samples of each part, round after round."""
        return [
            (item for _, item in items)
            for items in in_rounds(self.upstream, opening, self._times)
        ]

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the number of samples of all rounds; None if there is no end or a length is not known."""
        if self._times is None:
            return None
        rounds = [
            self.upstream.lengths(_of_round(opening, number, self._times))
            for number in range(self._times)
        ]
        known = [lengths for lengths in rounds if lengths is not None]
        return (
            [sum(of_part) for of_part in zip(*known, strict=True)]
            if len(known) == self._times
            else None
        )


def in_rounds(
    stage: Stage, opening: Opening, times: int | None, source: str = ""
) -> list[Iterator[tuple[int, Any]]]:
    """Open parts so that each is reopened when it has ended.

    Args:
        stage: The stage to open.
        opening: The opening of the first round; `skip` counts over all rounds.
        times: Number of rounds; None: without an end.
        source: Name of the source of a mixture, for the error if a part has no sample.

    Returns:
        For each part, pairs of the round, from 0, and the sample.
    """
    if times == 1:
        return [zip(repeat(0), items, strict=False) for items in stage.open(opening)]
    opened: dict[
        tuple[int, int], dict[int, Iterator[Any]]
    ] = {}  # [round, its first sample][part]: not begun yet

    def begin(part: int) -> tuple[int, int, int]:
        """Return the round with which a part begins, the first sample of it, and how many are read and dropped."""
        skip = opening.skip
        for number in count() if times is None else range(times):
            lengths = stage.lengths(
                replace(_of_round(opening, number, times), parts=(part,))
            )
            if lengths is None or not skip:
                return number, 0, skip
            if skip < lengths[0] or not lengths[0]:
                return number, skip, 0
            skip -= lengths[0]
        return times or 0, 0, 0

    begins = {part: begin(part) for part in opening.parts}

    def of_part(part: int) -> Iterator[tuple[int, Any]]:
        start, first, skip = begins[part]
        for number in count(start) if times is None else range(start, times):
            if (
                (number, first) not in opened
            ):  # for all parts that come by here, so that they read the source only once
                parts = tuple(
                    [
                        one
                        for one, at in begins.items()
                        if at[:2] == (number, first) or (at[0] < number and not first)
                    ]
                )
                # Parts may begin at several places, so `seen` would be called for a sample more than once.
                seen = None if first else opening.seen
                this = replace(
                    _of_round(opening, number, times),
                    parts=parts,
                    skip=first,
                    seen=seen,
                )
                opened[number, first] = dict(zip(parts, stage.open(this), strict=True))
            items, found = opened[number, first].pop(part), first > 0
            if not opened[number, first]:
                del opened[number, first]
            first = 0
            for item in items:
                found = True
                if skip:
                    skip -= 1
                else:
                    yield number, item
            if times is not None:
                continue
            if not found:
                raise nothing_to_repeat(part, opening.num_parts, source)

    return [of_part(part) for part in opening.parts]


def _of_round(opening: Opening, number: int, times: int | None) -> Opening:
    """Return the opening of a round from its beginning."""
    state = opening.state if number == 0 else None
    return replace(
        opening, round=opening.round * (times or 1) + number, skip=0, state=state
    )
