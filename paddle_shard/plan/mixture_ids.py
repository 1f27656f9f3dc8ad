"""Which id does a sample of a mixture have?"""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_shard.plan.shuffle import Indices

MAX_SOURCES = 1 << 12
"""Most sources of a mixture."""
MAX_LENGTH = 1 << 40
"""Most samples of one source."""

ROUNDS = 1 << 9
"""Number of epochs of a source whose ids differ."""
_MARK = 1 << 61


# An id has, from its highest bit: a mark, the source's epoch modulo 512, the source, the index in the source.


def sample_ids(sources: Indices, epochs: Indices, indices: Indices) -> Indices:
    """Return the ids of samples: int64, as many as there are sources.

    An id holds the source's epoch, modulo 512, beside the source and the index. So a sample that is drawn again in the
    same epoch of the mixture has another id, and other random numbers.
    """
    return _MARK + ((epochs % ROUNDS) << 52) + (sources << 40) + indices


def is_sample_id(index: int) -> bool:
    """Return whether an index is the id of a source's sample, and not a position of the mixture."""
    return index >= _MARK


def source_and_index(sample: Any) -> tuple[Any, Any]:
    """Return the number of the source, and the index in it, of a sample's id, or of an array of ids."""
    return (sample >> 40) % MAX_SOURCES, sample % MAX_LENGTH


def without_epoch(samples: Indices) -> Indices:
    """Return ids without the epoch of their source; ids of other data sets as they are."""
    return np.where(samples >= _MARK, samples & ~np.int64((ROUNDS - 1) << 52), samples)


def epoch_number(sample: int) -> int:
    """Return the source's epoch of a sample's id, modulo 512."""
    return (sample >> 52) % ROUNDS
