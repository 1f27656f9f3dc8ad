"""Which epoch of its source does a draw of a mixture belong to?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paddle_shard.plan.segments import Segment
from paddle_shard.plan.shuffle import Indices


class SourceEpochs:
    """Which epoch of its source a draw belongs to, for sources that may grow during a run.

    The epoch that a source has begun when it grows ends with the old length; the next one has the new length.
    """

    def __init__(self, segments: Sequence[Segment], counts: Callable[[int], Indices]) -> None:
        """Set up the layers: the first draw, its epoch and the length of the epochs from there on, for each source.

        Args:
            segments: The segments of the run.
            counts: Returns how often each source is drawn before a position of the run.
        """
        first, *others = segments
        zero = np.zeros(len(first.lengths), np.int64)
        self._layers = [(zero, zero, np.array(first.lengths, np.int64))]
        self._lengths = np.maximum(self._layers[0][2], 1)  # no division by that of a source that is not there
        for segment in others:
            start, epoch, before = self._layers[-1]
            lengths = np.array(segment.lengths, np.int64)
            changed = (lengths != before) & (lengths > 0)  # a source that is gone keeps the length that it had
            if not changed.any():
                continue
            drawn = counts(segment.first) - start
            begun = np.where(before > 0, -(-drawn // np.maximum(before, 1)), 0)  # epochs, also one that is not over
            self._layers.append(
                (
                    np.where(changed, start + begun * before, start),
                    np.where(changed, epoch + begun, epoch),
                    np.where(changed, lengths, before),
                )
            )

    def at(self, sources: Indices, draws: Indices) -> tuple[Indices, Indices, Indices]:
        """Return, for some draws, the epoch of the source, its length, and the place in it."""
        if len(self._layers) == 1:  # each source begins at its first draw
            length = self._lengths.take(sources)
            rounds = draws // length
            return rounds, length, draws - rounds * length
        start, epoch, length = (values[sources] for values in self._layers[-1])
        for layer in self._layers[-2::-1]:
            earlier = draws < start
            if not earlier.any():
                break
            for values, older in zip((start, epoch, length), layer, strict=True):
                values[earlier] = older[sources[earlier]]
        rounds, places = np.divmod(draws - start, np.maximum(length, 1))
        return epoch + rounds, length, places

    def draw(self, source: int, epoch: int, place: int) -> int | None:
        """Return the number of a draw; None if the epoch has no such place."""
        for start, first, length in self._layers[::-1]:
            if epoch >= first[source] and length[source]:
                if place >= length[source]:
                    return None
                return int(start[source] + (epoch - first[source]) * length[source] + place)
        return None
