"""Stages of a stream, and the request to open some of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from paddle_shard.data.files.files import FileVersion
from paddle_shard.data.sample_rng import SampleRng
from paddle_shard.errors import ArgumentError, described
from paddle_shard.plan.seeding import derive_seed

_NO_GENERATORS = SampleRng(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Some parts of a stream, to be read from a given position.

    The samples of a part depend on (seed, epoch, round, part) alone. They do not depend on who opens the part, or on
    the other parts that are opened with it.
    """

    parts: tuple[int, ...]
    """The parts to open, ascending. A reader opens all its parts at once, so that they can share one read."""
    num_parts: int
    """P, the number of parts of all readers together."""
    stripe: int = 1
    """Consecutive samples of an uncut stream that go to one part, if the stream is cut in turns."""
    seed: int = 0
    """Seed of the run."""
    epoch: int = 0
    """The epoch."""
    round: int = 0
    """Number of times that the parts were already read to their end in this epoch."""
    skip: int = 0
    """Samples of each part to leave out at its beginning."""
    origin: int = 0
    """Samples of an uncut stream before the first turn of the parts; a resume begins the turns at its position."""
    state: Any = None
    """State of the library that reads, after the last delivered sample; `skip` counts from there."""
    rng: SampleRng = _NO_GENERATORS
    """Seeds the global random generators before each call of the user's code."""

    seen: Callable[[int, Sequence[Any]], None] | None = None
    """Called with (number of the first sample, samples) for each turn at the cut of a stream that all readers read."""

    skip_errors: bool = False
    """True if a sample on which the user's code fails becomes an `Unreadable` and the stream continues."""

    def uncut(self, skip: int) -> Opening:
        """Return the opening of the whole stream, which is part 0 of 1."""
        return replace(self, parts=(0,), num_parts=1, skip=skip)

    def key(self, part: int, *purpose: Any) -> int:
        """Return a seed for one purpose in a part."""
        return derive_seed(self.seed, self.epoch, self.round, part, *purpose)

    def call(self, function: Callable[[Any], Any], sample: Any) -> Any:
        """Return the result of the user's function for a sample; `Unreadable` if it fails and errors are skipped."""
        if isinstance(sample, Unreadable):
            # without a group's items, which are unchanged
            return Unreadable(sample.why)
        try:
            return function(sample)
        except Exception as error:
            return self.failed(sample, error)

    def failed(self, sample: Any, error: Exception) -> Unreadable:
        """Return what replaces a sample on which the user's function has failed, or raise the error."""
        if isinstance(sample, Mapping) and "__key__" in sample:
            # The place of a tar's sample in the stream does not name it.
            url = str(sample.get("__url__", "")).partition("?")[0]
            where = f"sample {sample['__key__']!r} of {url.rpartition('/')[2]}"
            error.__dict__["of_sample"] = f" ({where})"
        if not self.skip_errors:
            raise error
        return Unreadable(described(error))

    def seeded(self, items: Samples, part: int, first: int = 0) -> Samples:
        """Yield the items of the user's code after the first `skip`; the generators are seeded before each but item 0.

        For item 0 they go on where the making of `items` has left them. An order may be drawn by a thread, as by that
        of Paddle's DataLoader, before or after the first item is requested.

        Args:
            items: The items, from number `first` on, made after the generators were seeded.
            part: Whose items they are.
            first: Number of the first item.
        """
        key = self.key(part, "source")
        rng = self.rng
        begin = first + self.skip
        if first:
            rng.seed(key, first)
        for number, item in enumerate(items, first):
            if number >= begin:
                yield item
            if not rng.seeds:  # nor later in this pass
                yield from islice(items, max(0, begin - number - 1), None)
                return
            rng.seed(key, number + 1)


WHOLE = Opening(parts=(0,), num_parts=1)
"""A whole stream, as one part."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Replaces a sample of a part on which the user's code has failed.

    It is never given to a function of the user: stages pass it on, and the result of a stage is an `Unreadable`, too.
    """

    why: str
    items: tuple[Any, ...] = ()
    """If this replaces a group, the samples of the group; at least one is an `Unreadable`."""


class Stated(NamedTuple):
    """A sample, and the state of the library that read it; reading resumes after the sample."""

    sample: Any
    state: Any


def windows(items: Samples, size: int) -> Iterator[list[Any]]:
    """Yield lists of the next `size` items; the last one may be shorter."""
    while window := list(islice(items, size)):
        yield window


Samples = Iterator[Any]
"""Samples of a part, from a position on."""
Lengths = list[int] | None
"""Number of samples of each part; None if it is known only at the end."""


class Stage:
    """The source of a stream, or a stage after it (`Transform`). The defaults suit a source.

    A source defines `open`, and each other method whose result differs from the default.
    """

    upstream: Stage | None = None
    """The stage before it; None for a source."""
    cuts = False
    """True if it can open a part without reading the others, or if it cuts the stream."""
    endless = False
    """True if its parts have no end."""
    makes_several = False
    """True if one sample may become several. Then a position in a part does not tell how much was read for it."""

    @property
    def label(self) -> str:
        """Its name in the `repr` of a stream."""
        return type(self).__name__

    def line(self) -> Iterator[Stage]:
        """Yield this stage and those before it, the source last."""
        stage: Stage | None = self
        while stage is not None:
            yield stage
            stage = stage.upstream

    @property
    def source(self) -> Stage:
        """The first stage of its stream."""
        return [*self.line()][-1]

    @property
    def depth(self) -> int:
        """Number of stages before it; gives each stage its own random numbers."""
        return len([*self.line()]) - 1

    def open(self, opening: Opening) -> list[Samples]:
        """Return an iterator over each opened part, which begins after `opening.skip` samples."""
        raise NotImplementedError

    def lengths(self, opening: Opening) -> Lengths:
        """Return the number of samples of each part without skipping; None if it is known only at the end."""
        return None

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the place in a file of a part's sample, counted from 0, for messages; None if unknown."""
        return None

    def fingerprint(self) -> list[Any]:
        """Return what the samples and their order depend on: JSON-able, one entry per stage that matters."""
        return []

    # For sources only

    def files_identity(self) -> list[FileVersion]:
        """Return (name, size in bytes, version tag) of each file of a source, by which other data is detected.

        The tag is an ETag or a time of modification. Sources without files return what else they know by name, or
        nothing. It is computed on demand: remote files cost a request each.
        """
        return []

    once = False
    """True if it can be opened only once."""
    num_shards: int | None = None
    """Number of files of the stream; None if it is not made of files."""


class PartsSource(Stage):
    """A source that can open a part without reading the others."""

    cuts = True

    def open(self, opening: Opening) -> list[Samples]:
        """Return the samples of each part."""
        return [self.part(part, opening) for part in opening.parts]

    def part(self, part: int, opening: Opening) -> Samples:
        """Return the samples of a part."""
        raise NotImplementedError

    def lengths(self, opening: Opening) -> Lengths:
        """Return None: lengths are known only at the end. The loader asks before any batch.

        Raises:
            ArgumentError: There are fewer shards than parts, of which each needs at least one.
        """
        num_parts = opening.num_parts
        if self.num_shards is not None and self.num_shards < num_parts:
            raise ArgumentError(
                f"in_parts({num_parts}): {self.num_shards} shards cannot be assigned to {num_parts} parts, which need "
                f"one each. Ways that work: in_parts() with at most {self.num_shards}; more shards (of Hugging Face: "
                "dataset.reshard()); counted samples, so that files are cut in the middle (counts=True; for tars an "
                "index file, index=, made by `paddle-shard index`); or an uncut stream (Stream.of(...)), of which each "
                "reader reads all."
            )
        return None


@dataclass(eq=False)
class Transform(Stage):
    """A stage that makes the samples of a part from those of the same part before it. The defaults suit 1 : 1.

    A subclass defines `transform`, and `begin` if it can begin in the middle of a part other than sample by sample. One
    that reads the stream in another way overrides `open`.
    """

    upstream: Stage = field()
    """The stage before it."""
    counted = True
    """True if it makes as many samples as it gets. If not, and `lengths` says nothing else, that shows at the end."""
    name = ""
    """Its name in the fingerprint; empty if neither the order nor the number of samples depends on it."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes on which the order or the number of samples depends."""

    def __post_init__(self) -> None:
        self.endless = self.upstream.endless

    def transform(self, items: Samples, part: int, opening: Opening) -> Samples:
        """Yield what becomes of the samples of a part.

        Args:
            items: The samples of the stage before, from `opening.skip` on.
            part: The part.
            opening: How the stage before was opened.
        """
        raise NotImplementedError

    def begin(self, skip: int) -> tuple[int, int]:
        """Return how to begin after `skip` samples of a part.

        Args:
            skip: Samples of this stage to leave out.

        Returns:
            How many samples the stage before leaves out, and how many of what is made then are dropped here.
        """
        return (skip, 0) if self.counted else (0, skip)

    def open(self, opening: Opening) -> list[Samples]:
        """Return what becomes of the samples of each part."""
        first, num_dropped = self.begin(opening.skip)
        before = replace(opening, skip=first)
        opened = zip(opening.parts, self.upstream.open(before), strict=True)
        samples_of_parts = [
            self.transform(items, part, before) for part, items in opened
        ]
        if not num_dropped:
            return samples_of_parts
        return [
            islice(samples, num_dropped, None) for samples in samples_of_parts
        ]

    def lengths(self, opening: Opening) -> Lengths:
        """Return the lengths of the stage before, if they do not change."""
        # Also for other stages: it rejects parts that would have no file.
        lengths = self.upstream.lengths(opening)
        return lengths if self.counted else None

    def fingerprint(self) -> list[Any]:
        """Return that of the stage before, and what this one adds."""
        before = self.upstream.fingerprint()
        settings = [attrgetter(name)(self) for name in self.settings]
        return [*before, [self.name, *settings]] if self.name else before
