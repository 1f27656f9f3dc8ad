"""How do samples become the rows of a batch, if a collate_fn or a sample may fail?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddle_shard.collate import collate
from paddle_shard.errors import described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.tensors import arrays_of, is_tensor
from paddle_shard.tree import TEXT, leaves

TRIED = 64
"""Number of samples that are tried to find one that can be read."""

RAGGED = (
    "Give shard_dataloader pad_to={field: ('longest', value)}: rows are padded to the longest of all "
    "ranks. Or pad to a fixed length in the collate_fn; or make whole global batches, which every rank reads: "
    ".batch(B).map(collate_fn) of a Stream, or items that are batches."
)
"""The ways out for a collate_fn that pads to the longest row."""


def collate_rows(samples: Sequence[Any], collate_fn: Callable[[Any], Any] | None, *, rows_are_split: bool) -> Any:
    """Return samples as rows of one batch.

    Args:
        samples: One or more.
        collate_fn: The user's, or None to stack them with `collate`.
        rows_are_split: True if other rows of the global batch are collated elsewhere.

    Raises:
        ValueError: The rows are split, and a row's shape depends on its neighbours.
    """
    if collate_fn is None:
        return collate(samples, _stack_tensors)
    batch = collate_fn(samples)
    if rows_are_split:
        _refuse_lengths_of_neighbours(samples, batch, collate_fn)
    return batch


def _stack_tensors(samples: Sequence[Any]) -> Any:
    """Stack tensors as arrays: the framework's own operators are not safe in a forked worker."""
    if not all(is_tensor(sample) for sample in samples):
        raise TypeError(f"cannot stack {type(samples[0]).__name__}; give the loader a collate_fn.")
    return np.stack([sample.numpy() for sample in samples])


def _refuse_lengths_of_neighbours(samples: Sequence[Any], batch: Any, collate_fn: Callable[[Any], Any]) -> None:
    """Raise if a row's shape depends on its neighbours, since other data ranks would get another length.

    A collate that pads to its longest row is found by collating the smallest sample alone. Lengths that
    agree within every rank and differ between them cannot be seen from here.
    """
    sizes = [
        sum(len(leaf) if isinstance(leaf, TEXT) else math.prod(getattr(leaf, "shape", ())) for leaf in leaves(sample))
        for sample in samples
    ]
    if min(sizes) == max(sizes):
        return
    smallest = samples[sizes.index(min(sizes))]
    try:
        alone = collate_fn([smallest])
    except Exception as error:  # a collate that wants several samples: nothing can be told
        raise_if_a_handlers(error)
        return
    together, single = ([tuple(array.shape[1:]) for array in arrays_of(made)] for made in (batch, alone))
    if together != single:
        raise ValueError(
            f"the collate_fn pads to the longest row of what it is given: row shapes {together} for this "
            f"slice, but {single} for its smallest sample alone. Other data ranks collate other rows, so the "
            f"global batch would be ragged. {RAGGED}"
        )


def collate_skipping(
    samples: Sequence[Any],
    failed: dict[int, str],
    collate: Callable[[list[Any]], Any],
    stand_in: Callable[[], Any],
    name_of: Callable[[int], str],
) -> Any:
    """Return a batch of samples; another sample replaces each one that cannot be read or collated.

    Args:
        samples: One for each row; those of rows in `failed` are not used.
        failed: Row -> why its sample could not be read. Rows whose samples cannot be collated alone are added.
        collate: Makes a batch of a list of samples.
        stand_in: Returns a sample of the data set that can be read, if no sample of the batch can; or raises
            `LookupError`.
        name_of: Returns the name of a row's sample, for messages.

    Raises:
        ValueError: No sample can be read; or samples that can each be collated alone do not fit together, which is an
            error of the data or of the collate function that skipping would hide.
    """

    def filled() -> list[Any]:
        good = next((sample for row, sample in enumerate(samples) if row not in failed), None)
        try:
            other = stand_in() if len(failed) == len(samples) else good
        except LookupError:
            why = next(iter(failed.values()))
            raise ValueError(f"{why}; and no other sample was read that its row could hold") from None
        return [other if row in failed else sample for row, sample in enumerate(samples)]

    def fails(rows: list[Any]) -> str:
        """Return why some samples cannot be collated; empty if they can."""
        try:
            collate(rows)
        except Exception as error:  # it is not kept: its frames hold the iterator, which would not end
            raise_if_a_handlers(error)
            return described(error)
        return ""

    rows = filled()
    try:
        return collate(rows)
    except Exception as error:
        raise_if_a_handlers(error)
        why = described(error)
    known = len(failed)
    alone = {row: fails([sample]) for row, sample in enumerate(samples) if row not in failed}
    failed.update({row: reason for row, reason in alone.items() if reason})
    if len(failed) > known:
        return collate(filled())
    good = [row for row in range(len(samples)) if row not in failed]
    # The first row that cannot be collated together with those before it.
    odd = next((row for at, row in enumerate(good) if fails([samples[one] for one in good[: at + 1]])), None)
    where = f"{name_of(odd)} does not fit to the samples before it" if odd is not None else "they do not fit together"
    raise ValueError(
        f"{why}: each sample can be collated alone, but {where}. on_error='skip' leaves out samples that raise; rows "
        "that differ in shape or fields are an error. Mend them in the data set or in the collate_fn."
    )
