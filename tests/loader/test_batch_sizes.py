"""A batch size by schedule: the same samples, in batches that grow; resumed on any mesh."""

import numpy as np
import pytest
from paddle.io import BatchSampler, DataLoader, IterableDataset

import paddle_shard
from paddle_shard.errors import ArgumentError, BatchSizeError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, mesh, sharded


def make(
    at=ONE, *, batch_size, length=50, accumulation=1, data=Made, **options
):
    sampler = BatchSampler(data(length=length), batch_size=4, shuffle=True)
    sampler._acc_steps = accumulation
    return sharded(
        DataLoader(data(length=length), batch_sampler=sampler),
        at,
        batch_size=batch_size,
        **options,
    )


def real(batches, most=None):
    found = []
    while most is None or len(found) < most:
        try:
            batch = next(batches)
        except StopIteration:
            break
        found.append(
            batch._local_value()
            .numpy()[batches.valid._local_value().numpy()]
            .tolist()
        )
    return found


def test_batch_size_schedule_may_change_at_a_resume():
    loader = make(batch_size=[(0, 4), (10, 8)])
    with iter(loader) as batches:
        before = real(batches, 4)
        state = loader.state_dict()
    assert [len(rows) for rows in before] == [4, 4, 4, 8]

    other = make(batch_size=[(0, 2), (24, 6)])
    other.load_state_dict(state)
    after = real(iter(other))
    assert [len(rows) for rows in after] == [2, 2, 6, 6, 6, 6, 2]
    assert other.certificate().exact
    assert sorted(row for rows in before + after for row in rows) == list(
        range(50)
    )


def test_schedule_counts_rows_as_the_dataloader_does():
    loader = make(mesh([0, 1]), batch_size=[(0, 4), (16, 6)], accumulation=2)

    assert (loader.batch_size, len(loader)) == (2, 5)
    # of data rank 0; of the last 10, in two parts
    assert [len(rows) for rows in real(iter(loader))] == [
        4,
        4,
        6,
        6,
        6,
    ]
    place = loader.where(sample=7, epoch=0)
    rows = on_each_rank(
        range(2),
        lambda: real(
            iter(
                make(mesh([0, 1]), batch_size=[(0, 4), (16, 6)], accumulation=2)
            )
        ),
    )
    assert rows[place.data_rank][place.step][place.row] == 7


class Endless(IterableDataset):
    def __iter__(self):
        return iter([np.arange(2)])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (64, "batch_size must be a list of"),
        ("64", "batch_size must be a list of"),
        ([64], "batch_size must be a list of"),
        ([(0, 0)], "batch_size must be a list of"),
        ([(0, 4.0)], "batch_size must be a list of"),
        ([(0, True)], "batch_size must be a list of"),
        ([(8, 4)], "must begin at sample 0 and ascend, got [8]"),
        ([], "must begin at sample 0"),
    ],
)
def test_bad_schedule_is_named(given, says):
    with pytest.raises(ArgumentError) as caught:
        make(batch_size=given)
    assert says in str(caught.value)


def test_batch_size_schedule_must_split_evenly():
    with pytest.raises(
        BatchSizeError,
        match="a global batch of 5 cannot be split evenly over 2 data ranks",
    ):
        make(mesh([0, 1]), batch_size=[(0, 4), (9, 5)])


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (
            DataLoader(Endless(), batch_size=2),
            "a stream's samples have no number",
        ),
        (DataLoader(Made(), batch_size=None), "each item is a whole batch"),
        (
            DataLoader(
                Made(),
                batch_sampler=paddle_shard.BucketBatchSampler(
                    np.ones(16, int), batch_size=4
                ),
            ),
            "which decides the size of its batches",
        ),
    ],
)
def test_schedule_is_refused_where_others_make_the_batches(loader, why):
    with pytest.raises(ArgumentError, match=f"^batch_size=.*{why}"):
        sharded(loader, ONE, batch_size=[(0, 4)])
