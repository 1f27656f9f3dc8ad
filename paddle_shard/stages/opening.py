"""What are a stream's source and its stages asked for?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from paddle_shard.errors import described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.seeding import derive_seed, mix


def _leave_generators(seed: int) -> None:
    """Seed nothing."""


def leave_sample(number: int, sample: Any) -> None:
    """Look at nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Some parts of a stream, to be read from a position on.

    What stands in a part is a function of (seed, epoch, round, part) alone: not of who opens it, nor of the
    other parts that are opened with it.
    """

    parts: tuple[int, ...]
    """The parts to open, ascending; a reader opens all that it holds at once, so that they can share a reading."""
    num_parts: int
    """P, of all readers together."""
    stripe: int = 1
    """Samples of an uncut stream that go to one part, one after the other, where it is cut by turns."""
    seed: int = 0
    """Of the run."""
    epoch: int = 0
    """The epoch."""
    round: int = 0
    """How often the parts were read to their end before, in this epoch."""
    skip: int = 0
    """Samples of each part to leave out at its beginning."""
    state: Any = None
    """Of the library that reads, as of the last sample that was delivered; `skip` counts from there."""
    seed_generators: Callable[[int], None] = _leave_generators
    """Seeds the global random generators with a number in [0, 2^64); called before each piece of the user's code."""

    seen: Callable[[int, Any], None] = leave_sample
    """Told (number, sample) of each sample of a stream that all readers read whole, where it is cut."""

    skip_errors: bool = False
    """Whether a sample that the user's code fails on is an `Unreadable`, not the end."""

    dispatched: Mapping[int, Iterator[Any]] = field(default_factory=dict)
    """What each part is dispatched, where another has read it (`RoundRobin`)."""

    rounds: Counter[int] = field(default_factory=Counter)
    """For each part, the whole rounds of an endless source that it had seen before the sample that was delivered last.

    The stages on the way keep it; it belongs to this opening, and is 0 where a part has an end."""

    def uncut(self, skip: int) -> Opening:
        """Return the opening of the whole stream, which is part 0 of 1."""
        return replace(self, parts=(0,), num_parts=1, skip=skip, rounds=Counter())

    def key(self, part: int, *purpose: Any) -> int:
        """Return a seed for something that is done in a part."""
        return derive_seed(self.seed, self.epoch, self.round, part, *purpose)

    def tried(self, function: Callable[[Any], Any], sample: Any) -> Any:
        """Return what the user's function makes of a sample; `Unreadable` where it fails and errors are skipped."""
        if not self.skip_errors:
            return function(sample)
        if isinstance(sample, Unreadable):
            return Unreadable(sample.why)  # of a group, the function has not changed the other samples
        try:
            return function(sample)
        except Exception as error:
            raise_if_a_handlers(error)
            return Unreadable(described(error))

    def drawn(self, items: Iterator[Any], key: int) -> Iterator[Any]:
        """Yield what the user's code yields, without the first `skip`; the generators are seeded before each item."""
        for number in count():
            self.seed_generators(mix(key, number))
            try:
                item = next(items)
            except StopIteration:
                return
            if number >= self.skip:
                yield item


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands in a part where a sample would, of which the user's code could not make one.

    No function of the user's is given one: stages pass it on, and what is made of it is one, too.
    """

    why: str
    items: tuple[Any, ...] = ()
    """Of a group: its samples, of which at least one is an `Unreadable`."""


class Stated(NamedTuple):
    """A sample and the state of the library that read it, which goes on behind it."""

    sample: Any
    state: Any
