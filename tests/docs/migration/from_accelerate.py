"""Lines for those who come from Accelerate."""

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.errors import ArgumentError
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.migration import ODD, case, flat, of_each_rank, real
from tests.docs.migration.claims import (
    chooses_epochs,
    counts_delivered,
    counts_real_rows,
    epochs_differ,
    resumes,
    seeds_differ,
)
from tests.helpers import Made, local, sharded

ACCELERATE = "From Accelerate"
PREPARED = {
    0: [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]],
    1: [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23]],
}
"""What Accelerate 1.15.0 gives each of two processes of 24 samples, with batches of 4, or of 8 with `split_batches`."""
OF_21 = {**PREPARED, 1: [[4, 5, 6, 7], [12, 13, 14, 15], [20, 0, 1, 2]]}
"""Of 21 samples."""


@case(ACCELERATE, "accelerator.prepare(DataLoader(data, batch_size=b))")
def same_rows(new, old):
    assert of_each_rank(new) == PREPARED


case(
    ACCELERATE,
    "accelerator.prepare(DataLoader(data, batch_size=b, shuffle=True))",
)(epochs_differ)


@case(ACCELERATE, "DataLoaderConfiguration(split_batches=True)")
def always_split(new, old):
    assert of_each_rank(new) == PREPARED
    with pytest.raises(ArgumentError, match="9"):
        sharded(new(B=9))


@case(ACCELERATE, "DataLoaderConfiguration(even_batches=True)")
def filled(new, old):
    given = DataLoader(ODD, batch_size=8)
    assert of_each_rank(lambda: given, **new()) == OF_21
    found = on_each_rank((0, 1), lambda: real(sharded(given, **new())))
    assert sorted(flat(found[0]) + flat(found[1])) == list(range(21)), (
        "the filling is marked"
    )


@case(
    ACCELERATE,
    "DataLoaderConfiguration(even_batches=False) with join_uneven_inputs",
)
def equal_steps(new, old):
    # the last batch has a row for one rank only
    given = DataLoader(Made(length=17), batch_size=8)
    found = on_each_rank(
        (0, 1), lambda: [local(batch) for batch in sharded(given, **new())]
    )
    assert (
        [len(batch) for batch in found[0]]
        == [len(batch) for batch in found[1]]
        == [4, 4, 1]
    )


def padded_to_the_longest(rows):
    longest = max(len(row["ids"]) for row in rows)
    return {
        "ids": np.array(
            [np.pad(row["ids"], (0, longest - len(row["ids"]))) for row in rows]
        )
    }


@case(
    ACCELERATE, "collate_fn= that pads to the longest row, pad_across_processes"
)
def as_long_as_the_longest(new, old):
    data = Made(lambda i: {"ids": np.full(1 + i, i)}, 24)
    whole = [
        batch["ids"].tolist()
        for batch in DataLoader(
            data, batch_size=8, collate_fn=padded_to_the_longest
        )
    ]
    given = DataLoader(data, batch_size=8, collate_fn=padded_to_the_longest)
    # Ranks that are simulated tell each other nothing: the longest row of each batch is rank 1's.
    found = on_each_rank(
        (0, 1),
        lambda: [local(batch["ids"]) for batch in sharded(given, **new())],
    )
    for mine, others, rows in zip(found[1], found[0], whole, strict=True):
        assert mine == rows[4:]
        assert [row + [0] * 4 for row in others] == rows[:4]


case(ACCELERATE, "accelerator.gather_for_metrics(values)")(counts_real_rows)


@case(ACCELERATE, "accelerator.skip_first_batches(loader, step)")
def next_sample(new, old):
    resumes(new)
    resumes(new, workers=2)


case(ACCELERATE, "DataLoaderConfiguration(use_stateful_dataloader=True)")(
    counts_delivered
)
case(
    ACCELERATE,
    "DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)",
)(seeds_differ)
case(ACCELERATE, "loader.set_epoch(epoch)")(chooses_epochs)
