"""What becomes of a batch of which samples cannot be read, where that is not to end the run?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from paddle_shard.plan.handlers import raise_if_a_handlers

_TRIED = 64
"""Samples of the data set that are tried, where none of a batch can be read."""


class Patched(NamedTuple):
    """A batch, some rows of which hold the data of other samples."""

    batch: Any
    skipped: list[tuple[int, str]]
    """(row, which sample and why)."""


def read_skipping(
    indices: Sequence[Any],
    read: Callable[[Any], Any],
    others: Iterable[Any],
    collate: Callable[[list[Any]], Any],
) -> Patched:
    """Read samples one by one; in the row of one that fails stands the first of the batch that does not.

    What stands there depends on the batch and the data set alone, so that replicas have the same.

    Args:
        indices: Of the samples.
        read: Returns a sample.
        others: Indices to try where none of these can be read.
        collate: Makes a batch of samples; where it fails, each sample that it fails on alone counts as unreadable.

    Raises:
        ValueError: No sample can be read.
        Exception: What `collate` raised, if that is no single sample's fault.
    """
    samples: list[Any] = []
    failed: dict[int, str] = {}  # not the exceptions: their frames hold the iterator, which would not end
    for row, index in enumerate(indices):
        try:
            samples.append(read(index))
        except Exception as error:
            raise_if_a_handlers(error)
            samples.append(None)
            failed[row] = _text(error)
    try:
        if not failed:
            return Patched(collate(samples), [])
        return _patched(indices, samples, failed, read, others, collate)
    except Exception as error:
        raise_if_a_handlers(error)
        for row, sample in enumerate(samples):
            if row not in failed:
                try:
                    collate([sample])
                except Exception as error:
                    raise_if_a_handlers(error)
                    failed[row] = _text(error)
        return _patched(indices, samples, failed, read, others, collate)


def _patched(
    indices: Sequence[Any],
    samples: list[Any],
    failed: dict[int, str],
    read: Callable[[Any], Any],
    others: Iterable[Any],
    collate: Callable[[list[Any]], Any],
) -> Patched:
    good = next(([sample] for row, sample in enumerate(samples) if row not in failed), None) or [
        _first_readable(read, others, collate, failed)
    ]
    rows = [good[0] if row in failed else sample for row, sample in enumerate(samples)]
    told = [(row, f"sample {indices[row]!r}: {why}") for row, why in sorted(failed.items())]
    return Patched(collate(rows), told)


def _first_readable(
    read: Callable[[Any], Any], others: Iterable[Any], collate: Callable[[list[Any]], Any], failed: dict[int, str]
) -> Any:
    for index, _ in zip(others, range(_TRIED), strict=False):
        try:
            sample = read(index)
            collate([sample])
        except Exception as error:
            raise_if_a_handlers(error)
            continue
        return sample
    raise ValueError(f"{next(iter(failed.values()))}; and no other sample was read that its row could hold")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
