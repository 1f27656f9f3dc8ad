"""What happens to a batch if some of its samples cannot be read or collated, and errors are skipped?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.errors import described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.tree import is_sequence

COMPARED = 8
"""Number of samples that are compared to find out what is usual."""
TRIED = 64
"""Number of samples that are tried to find some that can be read."""

_VALUES = "OSUV"
"""numpy's kinds of arrays whose items are not numbers."""
_ENOUGH = 4
"""Fewest samples that show what is usual."""

Collate = Callable[[list[Any]], Any]


class Patched(NamedTuple):
    """A batch in which some rows hold the data of other samples."""

    batch: Any
    skipped: list[tuple[int, str]]
    """(row, text with the sample and the reason) for each such row."""


@dataclass(frozen=True, slots=True)
class Usual:
    """A description of most samples. It does not depend on the reader, so all readers refuse the same samples."""

    sample: Any
    form: tuple[Any, ...] = ()
    """Structure of the sample's row of a batch, if all rows must have it; empty if they may differ."""
    of_one_size: bool = False
    """True if three samples in four have rows of the same shape too; data in buckets has not."""

    @classmethod
    def of(cls, samples: Sequence[Any], collate: Collate, *, alike: bool, lengths_vary: bool = False) -> Usual | None:
        """Return the usual sample: the first one whose row is like that of most.

        Args:
            samples: Some samples, the same ones for every reader.
            collate: Makes a batch of samples.
            alike: True if the rows of a batch must be alike.
            lengths_vary: True if their shapes may differ.
        """
        found = [(sample, _form_of(sample, collate)) for sample in samples]
        found = [(sample, form) for sample, form in found if form]
        if not found:
            return cls(samples[0]) if samples else None
        loose, strict = [_without_sizes(form) for _, form in found], [form for _, form in found]
        counts = [(loose.count(a), strict.count(b)) for a, b in zip(loose, strict, strict=True)]
        best = counts.index(max(counts))
        of_one_size = not lengths_vary and 4 * counts[best][1] >= 3 * max(len(samples), _ENOUGH)
        form = strict[best] if of_one_size else loose[best]
        most = 2 * counts[best][0] > max(len(samples), _ENOUGH)
        return cls(found[best][0], form if alike and most else (), of_one_size)

    def allows(self, batch: Any) -> bool:
        """Return True if the rows of a batch are like the usual one."""
        form = (row_like(batch),)
        return not self.form or (form if self.of_one_size else _without_sizes(form)) == self.form


def usual_of(samples: Sequence[Any], collate: Collate, collate_fn: Any, request: Any) -> Usual | None:
    """Return what is usual among samples, for a request whose rows must be alike in some way.

    Args:
        samples: Some samples, the same ones for every reader.
        collate: Makes a batch of samples.
        collate_fn: The user's; None: rows are stacked, so they must have one shape.
        request: A `ReadRequest` or `ChunkRequest`, which tells what is done with the rows.
    """
    varies = request.lengths_vary and collate_fn is not None
    alike = collate_fn is None or request.rows_are_split or varies
    return Usual.of(samples, collate, alike=alike, lengths_vary=varies)


def row_like(batch: Any) -> Any:
    """Return what a row of a batch is like: its structure, and the shape of each array's row."""
    if isinstance(batch, Mapping):
        return {key: row_like(value) for key, value in batch.items()}
    if hasattr(batch, "shape"):
        return None if isinstance(batch, np.ndarray) and batch.dtype.kind in _VALUES else tuple(batch.shape[1:])
    if is_sequence(batch):
        found = [row_like(value) for value in batch]
        return found if any(one is not None for one in found) else None  # values, as many as there are rows
    return None


def _without_sizes(form: Any) -> Any:
    """Return the same, with the number of dims in place of each shape."""
    if isinstance(form, dict):
        return {key: _without_sizes(value) for key, value in form.items()}
    if isinstance(form, list):
        return [_without_sizes(value) for value in form]
    if isinstance(form, tuple):
        return tuple(_without_sizes(one) if isinstance(one, dict | list | tuple) else 0 for one in form)
    return form


def _form_of(sample: Any, collate: Collate) -> tuple[Any, ...]:
    """Return a tuple with what a sample's row is like; an empty one if the sample cannot be collated."""
    try:
        return (row_like(collate([sample])),)
    except Exception as error:
        raise_if_a_handlers(error)
        return ()


def spread_over(dataset: Any, seed: Callable[[int], None]) -> list[Any]:
    """Return some samples, spread evenly over a data set with an index; the same ones for every reader.

    Args:
        dataset: Samples that cannot be read are left out. If it has no length, nothing is read.
        seed: Seeds the global generators, for a sample's index.
    """
    length, samples = _length_of(dataset), list[Any]()
    evenly = dict.fromkeys(length * part // COMPARED for part in range(COMPARED))
    for index in dict.fromkeys([*evenly, *range(TRIED)]):
        if index >= length or (samples and index not in evenly):
            continue
        seed(index)
        try:
            samples.append(dataset[index])
        except Exception as error:
            raise_if_a_handlers(error)
    return samples


def _length_of(dataset: Any) -> int:
    try:
        return len(dataset) if hasattr(dataset, "__getitem__") else 0
    except Exception as error:  # no __len__, or one that raises
        raise_if_a_handlers(error)
        return 0


def read_skipping(
    indices: Sequence[Any],
    read: Callable[[Any], Any],
    collate: Collate,
    usual: Usual | None,
    named: Callable[[Any], Any],
) -> Patched:
    """Read samples one by one. The row of a sample that fails holds another sample.

    Args:
        indices: Indices of the samples.
        read: Returns a sample.
        collate: Makes a batch of samples.
        usual: What most samples of the data set are like, if any can be read.
        named: Returns the name of a sample, for messages.

    Raises:
        ValueError: No sample can be read.
        Exception: What `collate` raised, if it is not the fault of a single sample.
    """
    samples: list[Any] = []
    failed: dict[int, str] = {}  # not the exceptions: their frames hold the iterator, which would not end
    for row, index in enumerate(indices):
        try:
            samples.append(read(index))
        except Exception as error:
            raise_if_a_handlers(error)
            samples.append(None)
            failed[row] = described(error)
    batch = collate_skipping(samples, failed, usual, collate)
    if batch is None:
        raise ValueError(f"{next(iter(failed.values()))}; and no other sample was read that its row could hold")
    return Patched(batch, [(row, f"sample {named(indices[row])!r}: {why}") for row, why in sorted(failed.items())])


def collate_skipping(samples: Sequence[Any], failed: dict[int, str], usual: Usual | None, collate: Collate) -> Any:
    """Return a batch of samples. The usual sample replaces each one that cannot be read or collated.

    Args:
        samples: One for each row.
        failed: row -> reason, for samples that could not be read. Samples that cannot be collated are added here.
        usual: The usual sample; None: the samples are compared with each other.
        collate: Makes a batch of samples.

    Returns:
        The batch; None if no sample could be read.

    Raises:
        Exception: What `collate` raised, if it is not the fault of a single sample.
    """
    good = [sample for row, sample in enumerate(samples) if row not in failed]
    if usual is None and not good:
        return None

    def filled(other: Usual | None) -> list[Any]:
        stand_in = (usual if usual is not None and usual.of_one_size else other or usual or Usual(good[0])).sample
        return [stand_in if row in failed else sample for row, sample in enumerate(samples)]

    batch, why = _tried(filled(Usual(good[0]) if good else None), collate)
    if not why and (usual is None or usual.allows(batch)):
        return batch
    for row, sample in enumerate(samples):
        if row not in failed and (odd := _why_odd(usual, [sample], collate)):
            failed[row] = odd
    good = [sample for row, sample in enumerate(samples) if row not in failed]
    other = Usual.of(good, collate, alike=False) or usual
    if other is None:
        return None
    beside = usual if usual is not None and usual.of_one_size else other
    for row, sample in enumerate(samples):
        if row not in failed and (odd := _why_odd(usual, [beside.sample, sample], collate)):
            failed[row] = odd
    return collate(filled(other))


def _tried(samples: list[Any], collate: Collate) -> tuple[Any, str]:
    """Return (batch of samples, None), or (None, the reason why there is none)."""
    try:
        return collate(samples), ""
    except Exception as error:  # the exception is not kept: its frames hold the iterator, which would not end
        raise_if_a_handlers(error)
        return None, described(error)


def _why_odd(usual: Usual | None, samples: list[Any], collate: Collate) -> str:
    """Return the reason why samples cannot be rows of one batch; None if they can."""
    batch, why = _tried(samples, collate)
    if why or usual is None or usual.allows(batch):
        return why
    return f"its row is like {row_like(batch)}, that of most samples like {usual.form[0]}"
