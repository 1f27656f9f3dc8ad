"""Mixing of several streams, each with its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from paddle_shard.data.files.files import FileVersion
from paddle_shard.data.stages.cut import FAILED_AT
from paddle_shard.data.stages.stage import (
    WHOLE,
    Lengths,
    Opening,
    Samples,
    Stage,
)
from paddle_shard.data.stages.steps import Rounds, in_rounds
from paddle_shard.plan.mixture import NEVER, Draws
from paddle_shard.plan.parts import nothing_to_repeat
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.weights import Segment, shares_of

_BLOCK = 4096
"""Positions of which the sources are computed at once."""


@lru_cache(maxsize=16)
def _draws_of(segments: tuple[Segment, ...], num_parts: int) -> Draws:
    # The last of those that begin alike.
    firsts = {-(-segment.first // num_parts): segment for segment in segments}
    return Draws(
        tuple(
            segment._replace(first=first) for first, segment in firsts.items()
        )
    )


class Mix(Stage):
    """The source of a stream that draws part p from part p of other streams, by a `WeightedInterleave`.

    A part of a stream that has ended is opened again, in its next round. With stop="first", a part of the mixture ends
    where it would open the first stream again; with stop="all", where it would open the last one again.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        segments: Sequence[Segment],
        stop: str,
    ) -> None:
        """Set up the stage.

        Args:
            stages: The streams, by name; each can open a part, or is cut.
            segments: The integer weight of each, by the first sample of the epoch.
            stop: "first" or "all".
        """
        columns = zip(*(segment.weights for segment in segments), strict=True)
        self._weights = {
            name: list(weights)
            for name, weights in zip(stages, columns, strict=True)
            if any(weights)
        }
        """For each source, its weight in each segment."""
        self._stages = {name: stages[name] for name in self._weights}
        self._firsts = [segment.first for segment in segments]
        self._segments = tuple(
            map(
                Segment, self._firsts, zip(*self._weights.values(), strict=True)
            )
        )
        self._every = stop == "all"
        # Without an end: any source, or, with "first", every one.
        are_endless = [stage.endless for stage in self._stages.values()]
        self.endless = any(are_endless) if self._every else all(are_endless)
        # The fewest files of a source of which no part can have less than one file.
        uncounted = [
            stage.source.num_shards
            for stage in self._stages.values()
            if stage.lengths(WHOLE) is None
        ]
        self.num_shards = min(filter(None, uncounted), default=None)

    cuts = True
    """Each stream can open a part."""

    @property
    def label(self) -> str:
        """Its sources, with their shares at the beginning."""
        return f"Mix of {shares_of(self._stages, self._segments)}"

    def _draws(self, opening: Opening) -> Draws:
        """Return the draws of a part: each part has its share of a segment's samples."""
        return _draws_of(self._segments, opening.num_parts)

    def open(self, opening: Opening) -> list[Samples]:
        """Return the samples of each part."""
        draws = self._draws(opening)
        counts = draws.counts(opening.skip).tolist()
        sources = []
        for (name, stage), num_drawn in zip(
            self._stages.items(), counts, strict=True
        ):
            request = replace(
                self._opening(opening, name),
                # The sample before shows whether the source has been opened again.
                skip=max(0, num_drawn - 1),
            )
            sources.append(in_rounds(stage, request, None, name))
        if opening.rng.seeds:
            opening.rng.unread_sources.update(
                (self, number) for number in range(len(sources))
            )
        return [
            self._mixed(of_part, counts, opening, draws)
            for of_part in zip(*sources, strict=True)
        ]

    def _opening(self, opening: Opening, name: str) -> Opening:
        """Return the opening of a source, which has random numbers of its own."""
        return replace(
            opening, seed=derive_seed("source", name, opening.seed), seen=None
        )

    def _mixed(
        self,
        sources: Sequence[Rounds],
        counts: Sequence[int],
        opening: Opening,
        draws: Draws,
    ) -> Samples:
        """Yield the samples of a part, given the samples of each source, and how many are before the position."""
        num_ends = len(sources) if self._every else 1
        ended = {
            number
            for number, num_drawn in enumerate(counts)
            if num_drawn and next(sources[number])[0]
        }
        if len(ended) >= num_ends:  # it ended before this position
            return
        unread = opening.rng.unread_sources
        for first in count(opening.skip, _BLOCK):
            numbers, _ = draws.sources_at(np.arange(first, first + _BLOCK))
            for number in numbers.tolist():
                try:
                    round_number, sample = next(sources[number])
                except Exception as error:
                    # It counts the samples of the source, not of the mixture.
                    error.__dict__.pop(FAILED_AT, None)
                    raise
                if round_number:
                    ended.add(number)
                    if len(ended) >= num_ends:
                        return
                if unread:
                    unread.discard((self, number))
                yield sample

    def lengths(self, opening: Opening) -> Lengths:
        """Return the length of each part; None if a length that decides it is not known."""
        if self.endless:
            return None
        draws = self._draws(opening)
        ends = []
        for number, (name, stage) in enumerate(self._stages.items()):
            if stage.endless:
                continue
            lengths = stage.lengths(self._opening(opening, name))
            if lengths is None:
                return None
            if 0 in lengths:
                part = opening.parts[lengths.index(0)]
                raise nothing_to_repeat(part, opening.num_parts, name)
            ends.append(draws.positions(number, np.array(lengths)))
        decide = np.max if self._every else np.min
        lengths_of_parts: list[int] = decide(np.array(ends), axis=0).tolist()
        return None if NEVER in lengths_of_parts else lengths_of_parts

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the source of a sample, and its place in a file if that is known."""
        [source], [number_in_source] = self._draws(opening).sources_at(
            np.array([number])
        )
        name = list(self._stages)[int(source)]
        of_source = self._opening(opening, name)
        place = self._stages[name].origin(
            of_source, part, int(number_in_source)
        )
        return ", ".join(filter(None, (f"source {name!r}", place)))

    def files_identity(self) -> list[FileVersion]:
        """Return that of all sources, with the source's name before each file's."""
        return [
            (f"{name}: {file}", size, tag)
            for name, stage in self._stages.items()
            for file, size, tag in stage.source.files_identity()
        ]

    def fingerprint(self) -> list[Any]:
        """Return the names, weights and fingerprints of the sources."""
        sources = [
            [name, self._weights[name], stage.fingerprint()]
            for name, stage in self._stages.items()
        ]
        stop = "all" if self._every else "first"
        return [["mixture", stop, self._firsts, sources]]
