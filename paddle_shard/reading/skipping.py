"""What happens to a batch if some of its samples cannot be read or collated, and errors are skipped?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paddle_shard.errors import described
from paddle_shard.plan.handlers import raise_if_a_handlers

TRIED = 64
"""Number of samples that are tried to find one that can be read."""


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
        stand_in: Returns a sample of the data set that can be read, if no sample of the batch can.
        name_of: Returns the name of a row's sample, for messages.

    Raises:
        ValueError: Samples that can each be collated alone do not fit together: that is an error of the data or of
            the collate function, which skipping would hide.
    """

    def filled() -> list[Any]:
        good = next((sample for row, sample in enumerate(samples) if row not in failed), None)
        other = stand_in() if len(failed) == len(samples) else good
        return [other if row in failed else sample for row, sample in enumerate(samples)]

    why, rows = "", filled()
    try:
        return collate(rows)
    except Exception as error:  # it is not kept: its frames hold the iterator, which would not end
        raise_if_a_handlers(error)
        why = described(error)
    known = len(failed)
    for row, sample in enumerate(samples):
        if row not in failed:
            try:
                collate([sample])
            except Exception as error:
                raise_if_a_handlers(error)
                failed[row] = described(error)
    if len(failed) > known:
        return collate(filled())
    odd = _first_that_does_not_fit(samples, failed, collate)
    where = f"{name_of(odd)} does not fit to the samples before it" if odd is not None else "they do not fit together"
    raise ValueError(
        f"{why}: each sample can be collated alone, but {where}. on_error='skip' leaves out samples that raise; rows "
        "that differ in shape or fields are an error. Mend them in the data set or in the collate_fn."
    )


def _first_that_does_not_fit(
    samples: Sequence[Any], failed: dict[int, str], collate: Callable[[list[Any]], Any]
) -> int | None:
    """Return the first row that cannot be collated together with those before it."""
    good: list[Any] = []
    for row, sample in enumerate(samples):
        if row in failed:
            continue
        good.append(sample)
        try:
            collate(list(good))
        except Exception as error:
            raise_if_a_handlers(error)
            return row
    return None
