"""How are several streams read as one, each with its weight?"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from paddle_shard.core.warn_once import say_once
from paddle_shard.data.stages.cut import FAILED_AT
from paddle_shard.data.stages.stage import Opening, Stage
from paddle_shard.data.stages.steps import in_rounds
from paddle_shard.plan.mixture import Draws
from paddle_shard.plan.parts import nothing_to_repeat
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.weights import Segment

_BLOCK = 4096
"""Positions of which the sources are computed at once."""
_NEVER = 1 << 62
"""Position of the end of a source that is not drawn to its end."""


@lru_cache(maxsize=16)
def _draws_of(segments: tuple[Segment, ...], num_parts: int) -> Draws:
    firsts = {
        -(-segment.first // num_parts): segment for segment in segments
    }  # the last of those that begin alike
    return Draws(
        tuple(segment._replace(first=first) for first, segment in firsts.items())
    )


class Mix(Stage):
    """The source of a stream that draws part p from part p of other streams, in the order of a
    `WeightedInterleave`.

    A part of a stream that has ended is opened again, in its next round. With stop="first", a part of the mixture ends
    where it would open the first stream again; with stop="all", where it would open the last one again.
    """

    def __init__(
        self, stages: Mapping[str, Stage], segments: Sequence[Segment], stop: str
    ) -> None:
        """Set up the stage.

        Args:
            stages: The streams, by name; each can open a part, or is cut.
            segments: The integer weight of each, by the first sample of the epoch.
            stop: "first" or "all".
        """
        drawn = [
            number
            for number in range(len(stages))
            if any(segment.weights[number] for segment in segments)
        ]
        self._stages = {
            name: stage
            for number, (name, stage) in enumerate(stages.items())
            if number in drawn
        }
        self._names = list(self._stages)
        self._segments = tuple(
            Segment(first, tuple(weights[number] for number in drawn))
            for first, weights in segments
        )
        self._every = stop == "all"
        # No end comes: of any source, or with "first" of every one.
        self.endless = (any if self._every else all)(
            stage.endless for stage in self._stages.values()
        )
        # Fewest files of a source, if a part cannot have less than one.
        one = Opening(parts=(0,), num_parts=1)
        shards = [
            stage.source.num_shards
            for stage in self._stages.values()
            if stage.lengths(one) is None
        ]
        self.num_shards = min(
            (number for number in shards if number is not None), default=None
        )

    cuts = True
    """Each stream can open a part."""

    def _draws(self, opening: Opening) -> Draws:
        """Return the draws of a part: each part has its share of a segment's samples."""
        return _draws_of(self._segments, opening.num_parts)

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the samples of each part."""
        draws = self._draws(opening)
        counts = draws.counts(opening.skip).tolist()
        opened = []
        for (name, stage), drawn in zip(self._stages.items(), counts, strict=True):
            back = int(
                drawn > 0
            )  # the draw before tells whether the source has been opened again by now
            one = replace(self._opening(opening, name), skip=drawn - back)
            opened.append((back, in_rounds(stage, one, None, name)))
        mixed = []
        for at, part in enumerate(opening.parts):
            tells = (
                part == 0 and not self._every
            )  # where one source ends, others may not have come to their end
            mixed.append(
                self._mixed(
                    [(back, parts[at]) for back, parts in opened],
                    opening.skip,
                    draws,
                    tells=tells,
                )
            )
        return mixed

    def _opening(self, opening: Opening, name: str) -> Opening:
        """Return the opening of a source, which has random numbers of its own."""
        return replace(
            opening, seed=derive_seed("source", name, opening.seed), seen=None
        )

    def _mixed(
        self,
        sources: list[tuple[int, Iterator[tuple[int, Any]]]],
        skip: int,
        draws: Draws,
        *,
        tells: bool,
    ) -> Iterator[Any]:
        ended = {
            at for at, (back, items) in enumerate(sources) if back and next(items)[0]
        }
        ends_at = len(sources) if self._every else 1
        if len(ended) >= ends_at:  # it ended before this position
            return
        items_of = [items for _, items in sources]
        for first in count(skip, _BLOCK):
            for position, at in enumerate(
                draws.at(np.arange(first, first + _BLOCK))[0].tolist(), first
            ):
                try:
                    number, item = next(items_of[at])
                except StopIteration:
                    return
                except Exception as error:
                    with contextlib.suppress(
                        AttributeError
                    ):  # it counts the samples of the source, not of the mixture
                        delattr(error, FAILED_AT)
                    raise
                if number and at not in ended:
                    ended.add(at)
                    if len(ended) >= ends_at:
                        if tells:
                            self._say_what_is_left(
                                items_of, draws.counts(position).tolist(), ended
                            )
                        return
                yield item

    def _say_what_is_left(
        self,
        items_of: Sequence[Iterator[tuple[int, Any]]],
        drawn: Sequence[int],
        ended: Collection[int],
    ) -> None:
        """Log which sources are not read to their end in an epoch, since the next one begins them anew."""
        left = []
        for at, (name, stage) in enumerate(self._stages.items()):
            if at not in ended and not stage.endless:
                with contextlib.suppress(
                    Exception
                ):  # one that cannot be read is of no importance any more
                    if next(items_of[at])[0] == 0:
                        left.append(
                            f"{name!r} ({drawn[at]} samples of a part were read)"
                        )
        if left:
            say_once(
                "Stream.mixture(stop='first'): an epoch ends with the source %s, and has not come to the end of %s. "
                "The next epoch begins all of them anew, and never reads what lies behind, unless their order is "
                "another. stop='all', or weights that are in proportion to the lengths, read all of them.",
                " and ".join(repr(self._names[at]) for at in sorted(ended)),
                " and ".join(left),
            )

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the length of each part; None if a length that decides it is not known."""
        if self.endless:
            return None
        ends = []
        draws = self._draws(opening)
        for at, (name, stage) in enumerate(self._stages.items()):
            found = [] if stage.endless else stage.lengths(self._opening(opening, name))
            if found is None:
                return None
            if 0 in found:
                raise nothing_to_repeat(
                    opening.parts[found.index(0)], opening.num_parts, name
                )
            if found:
                positions = draws.positions(at, np.array(found, np.int64))
                ends.append(np.where(positions < 0, _NEVER, positions))
        lengths = (np.max if self._every else np.min)(np.array(ends), axis=0)
        return None if (lengths == _NEVER).any() else list(lengths.tolist())

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the source of a sample, and its place in a file if that is known."""
        sources, numbers = self._draws(opening).at(np.array([number], np.int64))
        name = self._names[int(sources[0])]
        found = self._stages[name].origin(
            self._opening(opening, name), part, int(numbers[0])
        )
        return f"source {name!r}" + ("" if found is None else f", {found}")

    @property
    def most_even_parts(self) -> int | None:
        """Fewest parts to which the files of a source can be assigned evenly."""
        found = [stage.source.most_even_parts for stage in self._stages.values()]
        return min((parts for parts in found if parts is not None), default=None)

    @property
    def files(self) -> list[str]:
        """The first files of each source."""
        return [
            f"{name}: {file}"
            for name, stage in self._stages.items()
            for file in stage.source.files
        ]

    def files_identity(self) -> tuple[tuple[str, int, str], ...]:
        """Return that of all sources, with the source's name before each file's."""
        return tuple(
            (f"{name}: {file}", size, tag)
            for name, stage in self._stages.items()
            for file, size, tag in stage.files_identity()
        )

    def fingerprint(self) -> list[Any]:
        """Return the names, weights and fingerprints of the sources."""
        parts = zip(*(segment.weights for segment in self._segments), strict=True)
        sources = [
            [name, list(of_source), stage.fingerprint()]
            for (name, stage), of_source in zip(
                self._stages.items(), parts, strict=True
            )
        ]
        firsts = [segment.first for segment in self._segments]
        return [["mixture", "all" if self._every else "first", firsts, sources]]
