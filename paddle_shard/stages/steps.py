"""How are the samples of a part changed, kept, grouped, shuffled and repeated?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice, repeat
from typing import Any, ClassVar

import numpy as np

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.parts import check_count
from paddle_shard.plan.seeding import derive_key, mix
from paddle_shard.plan.shuffle import Permutation
from paddle_shard.stages.stage import Opening, Search, Stage, Unreadable, leave_sample


class Map(Stage):
    """Calls a function for each sample; skipped samples cost no call.

    The global generators are seeded before each call from (seed, epoch, round, part, number of the sample), so a
    random function gives the same result for any number of workers, and after a resume.
    """

    def __init__(self, upstream: Stage, function: Callable[[Any], Any]) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._function = upstream, function

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the changed samples of each part."""
        opened = self._upstream.open(opening)
        return [self._changed(items, part, opening) for part, items in zip(opening.parts, opened, strict=True)]

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the origin of the sample before the change."""
        return self._upstream.origin(opening, part, number)

    def _changed(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        key, function, seed = opening.key(part, "map", self.depth), self._function, opening.seed_generators
        for number in count(opening.skip):
            try:
                item = next(items)  # before seeding, because it runs code that seeds the generators, too
            except StopIteration:
                return
            seed(mix(key, number))
            yield opening.tried(function, item)


class Filter(Stage):
    """Keeps the samples for which a function is true. Samples to be skipped are still read and tested."""

    def __init__(self, upstream: Stage, predicate: Callable[[Any], bool]) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._predicate = upstream, predicate

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the kept samples of each part."""
        opened = self._upstream.open(replace(opening, skip=0))
        return [
            islice(self._kept(items, part, opening), opening.skip, None)
            for part, items in zip(opening.parts, opened, strict=True)
        ]

    def lengths(self, opening: Opening) -> None:
        """Return None: the lengths are not known."""
        return

    def fingerprint(self) -> list[Any]:
        """Add this stage."""
        return [*self._upstream.fingerprint(), ["filter"]]

    def _kept(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        key, predicate, seed = opening.key(part, "filter", self.depth), self._predicate, opening.seed_generators
        search = Search(opening, part, "filter")
        for number in count():
            try:
                item = next(items)
            except StopIteration:
                return
            seed(mix(key, number))
            keep = opening.tried(lambda one: bool(predicate(one)), item)
            if not isinstance(keep, Unreadable) and not keep:
                search.dropped()
                continue
            search.kept()
            yield keep if isinstance(keep, Unreadable) else item


_END = object()


class Batch(Stage):
    """Makes lists of `size` samples of a part; the last one may be shorter."""

    def __init__(self, upstream: Stage, size: int) -> None:
        check_count("size", size)
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._size = upstream, size

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the parts' lists."""
        opened = self._upstream.open(replace(opening, skip=opening.skip * self._size))
        return [self._grouped(items) for items in opened]

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the number of lists in each part."""
        found = self._upstream.lengths(opening)
        return None if found is None else [-(-length // self._size) for length in found]

    def fingerprint(self) -> list[Any]:
        """Add the size."""
        return [*self._upstream.fingerprint(), ["batch", self._size]]

    def _grouped(self, items: Iterator[Any]) -> Iterator[list[Any] | Unreadable]:
        while group := list(islice(items, self._size)):
            bad = [item for item in group if isinstance(item, Unreadable)]
            yield Unreadable(bad[0].why, tuple(group)) if bad else group


class Unbatch(Stage):
    """Delivers the items of each sample one by one. Items to be skipped are still read."""

    makes_several: ClassVar[bool] = True

    def __init__(self, upstream: Stage) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream = upstream

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the items of the samples of each part."""
        opened = self._upstream.open(replace(opening, skip=0))
        return [
            islice(self._items(items, part, opening), opening.skip, None)
            for part, items in zip(opening.parts, opened, strict=True)
        ]

    def lengths(self, opening: Opening) -> None:
        """Return None: the lengths are not known."""
        return

    def fingerprint(self) -> list[Any]:
        """Add this stage."""
        return [*self._upstream.fingerprint(), ["unbatch"]]

    def _items(self, groups: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        rounds, search = opening.rounds, Search(opening, part, "unbatch")
        numbers = count()
        while True:
            before = rounds[part]
            try:
                group = next(groups)
            except StopIteration:
                return
            rounds[part], behind = before, rounds[part]  # a group that was read is no progress yet
            found = False
            for item in self._of(group, part, opening, numbers):
                found = True
                yield item
            rounds[part] = behind
            if found:
                search.kept()
            else:
                search.dropped()

    def _of(self, group: Any, part: int, opening: Opening, numbers: Iterator[int]) -> Iterator[Any]:
        if isinstance(group, Unreadable):
            yield from group.items or (group,)
            return
        if isinstance(group, list | tuple):
            yield from group
            return
        key = opening.key(part, "unbatch", self.depth)
        items = opening.tried(iter, group)  # may be a generator, which runs the user's code for each item
        while not isinstance(items, Unreadable):
            if not isinstance(group, Sequence):
                opening.seed_generators(mix(key, next(numbers)))
            item = opening.tried(lambda rest: next(rest, _END), items)
            if item is _END:
                return
            yield item
            if isinstance(item, Unreadable):  # the items after it cannot be read
                return
        yield items


class Shuffle(Stage):
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
        check_count("window", window)
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._window = upstream, window
        # Count only the shuffles before it: then stages that keep the order can be added to a run.
        self.number: int = sum(isinstance(stage, Shuffle) for stage in upstream.line())

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the shuffled samples of each part."""
        first = opening.skip // self._window
        opened = self._upstream.open(replace(opening, skip=first * self._window))
        return [
            islice(self._mixed(items, part, opening, first), opening.skip % self._window, None)
            for part, items in zip(opening.parts, opened, strict=True)
        ]

    def fingerprint(self) -> list[Any]:
        """Add the window."""
        return [*self._upstream.fingerprint(), ["shuffle", self._window]]

    def _mixed(self, items: Iterator[Any], part: int, opening: Opening, first: int) -> Iterator[Any]:
        rounds = opening.rounds
        for window in count(first):
            before = rounds[part]
            held: list[Any] = list(islice(items, self._window))
            rounds[part], behind = before, rounds[part]  # a window that was read is no progress yet
            if not held:
                return
            key = derive_key(opening.key(part, "window", self.number), window, size=64)
            order = Permutation(len(held), key)(np.arange(len(held), dtype=np.int64)).tolist()
            for number in order:
                item, held[number] = held[number], None  # release delivered samples
                yield item
            rounds[part] = behind


class Repeat(Stage):
    """Reads each part several times; if it is shuffled, each time in another order."""

    def __init__(self, upstream: Stage, times: int | None = None) -> None:
        """Set up the stage.

        Args:
            upstream: The stage to repeat.
            times: How often to read; None: without an end.
        """
        if times is not None:
            check_count("times", times)
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._times = upstream, times

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the samples of each part, round after round."""
        return [(item for _, item in items) for items in in_rounds(self._upstream, opening, self._times)]

    @property
    def endless(self) -> bool:
        """True if the parts have no end: `times` is None, or the stage before is endless."""
        return self._times is None or self._upstream.endless

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the number of samples of all rounds; None if there is no end or a length is not known."""
        if self._times is None:
            return None
        total = [0] * len(opening.parts)
        for number in range(self._times):
            one = self._upstream.lengths(_of_round(opening, number, self._times))
            if one is None:
                return None
            total = [a + b for a, b in zip(total, one, strict=True)]
        return total

    def fingerprint(self) -> list[Any]:
        """Add the number of times."""
        return [*self._upstream.fingerprint(), ["repeat", self._times]]


def in_rounds(
    stage: Stage, opening: Opening, times: int | None, first: Mapping[int, Iterator[Any]] | None = None
) -> list[Iterator[tuple[int, Any]]]:
    """Open parts so that each is reopened when it has ended.

    Args:
        stage: The stage to open.
        opening: The opening of the first round; `skip` counts over all rounds.
        times: Number of rounds; None: without an end.
        first: The parts of the first round, if they are already open at their beginning.

    Returns:
        For each part, pairs of the round, from 0, and the sample.
    """
    if times == 1:
        items = stage.open(opening) if first is None else [first[part] for part in opening.parts]
        return [zip(repeat(0), one, strict=False) for one in items]
    opened: dict[int, dict[int, Iterator[Any]]] = {} if first is None else {0: dict(first)}

    def of_round(number: int, part: int) -> Iterator[Any]:
        if number not in opened:  # for all parts at once, so that they read the source only once
            parts = stage.open(_of_round(opening, number, times))
            opened[number] = dict(zip(opening.parts, parts, strict=True))
        items = opened[number].pop(part)
        if not opened[number] and number:
            del opened[number]
        return items

    def rounds(part: int) -> Iterator[tuple[int, Any]]:
        skip = opening.skip
        for number in range(times) if times is not None else count():
            one = replace(_of_round(opening, number, times), parts=(part,))
            lengths = stage.lengths(one)
            if lengths is not None and skip >= lengths[0] > 0:
                skip -= lengths[0]
                continue
            if lengths is not None and skip:
                # This opens each part alone, so `seen` would be called for the same sample once per part.
                items, found, skip = stage.open(replace(one, skip=skip, seen=leave_sample))[0], True, 0
            else:
                items, found = of_round(number, part), False
            for item in items:
                found = True
                if skip:
                    skip -= 1
                else:
                    yield number, item
            if times is not None:
                continue
            # Files may go to other parts in each round: a part has seen the whole source after `num_parts` rounds.
            opening.rounds[part] = (number + 1) // opening.num_parts
            if not found:
                raise ArgumentError(
                    f"part {part} of {opening.num_parts} has no sample to repeat. Use fewer parts "
                    "(in_parts()), or tail='pad' or 'drop'."
                )

    return [rounds(part) for part in opening.parts]


def _of_round(opening: Opening, number: int, times: int | None) -> Opening:
    state = opening.state if number == 0 else None
    return replace(opening, round=opening.round * (times or 1) + number, skip=0, state=state)
