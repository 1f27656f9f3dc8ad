"""`skip_steps`: steps of the run that are never read, on any mesh, after any resume; the certificate says so."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import (
    BatchSampler,
    DataLoader,
    DistributedBatchSampler,
    IterableDataset,
)

from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, mesh, sharded
from tests.trials import trials

LENGTH = 43


class Reads(Made):
    """Remembers which samples were read, in one process."""

    def __init__(self, length=LENGTH):
        super().__init__(length=length)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return np.array(index)


class Own(BatchSampler):
    """A sampler of the user's own, without a state."""


class Unsized(Own):
    """One that does not tell its length."""

    def __len__(self):
        raise TypeError("no length")


def make(at=ONE, batch_size=4, *, data=None, sampler=BatchSampler, **options):
    data = Made(length=LENGTH) if data is None else data
    sampler = sampler(data, batch_size=batch_size, shuffle=True)
    return sharded(DataLoader(data, batch_sampler=sampler), at, **options)


def rows_of(batches, most=None):
    """The real rows of this rank, of up to `most` batches."""
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


@settings(max_examples=trials(40))
@given(
    data_ranks=st.sampled_from([1, 2, 3]),
    each=st.integers(1, 4),
    ranges=st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 6)), max_size=4
    ),
    sampler=st.sampled_from([BatchSampler, Own, Unsized]),
    options=st.sampled_from(
        [{}, {"tail": "fill"}, {"tail": "drop"}, {"balance": np.arange(LENGTH)}]
    ),
)
def test_skip_steps_leave_all_other_steps_as_they_were(
    data_ranks, each, ranges, sampler, options
):
    at, size = mesh(list(range(data_ranks))), data_ranks * each
    skip_steps = [(first, first + count) for first, count in ranges]
    has_length = sampler is BatchSampler or (
        sampler is Own and options != {"tail": "drop"}
    )

    def epochs(**more):
        loader = make(at, size, sampler=sampler, **options, **more)
        found, steps_before = [], []
        for _ in range(3):
            num_batches = len(loader) if has_length else None
            state = loader.state_dict()
            assert state == json.loads(json.dumps(state))
            steps_before.append(state["steps_before"])
            with iter(loader) as batches:
                found.append(rows_of(batches))
            assert num_batches in (None, len(found[-1]))
        return found, steps_before

    straight = on_each_rank(range(data_ranks), epochs)
    skipping = on_each_rank(
        range(data_ranks), lambda: epochs(skip_steps=skip_steps)
    )
    num_steps = len(straight[0][0][0])
    for rank, (found, steps_before) in skipping.items():
        assert steps_before == [0, num_steps, 2 * num_steps]
        for epoch in range(3):
            kept = [
                rows
                for step, rows in enumerate(
                    straight[rank][0][epoch], epoch * num_steps
                )
                if not any(first <= step < end for first, end in skip_steps)
            ]
            assert found[epoch] == kept


@pytest.mark.parametrize("sampler", [BatchSampler, Own, Unsized])
def test_skip_steps_are_never_read_and_certified_exactly(sampler):
    data = Reads()
    loader = make(
        data=data,
        sampler=sampler,
        skip_steps=[(3, 5), (20, 22), (22, 33)],
        verify=None,
    )
    with iter(loader) as batches:
        delivered = [row for rows in rows_of(batches) for row in rows]
    first = loader.certificate()
    with iter(loader) as batches:
        rows_of(batches)
    second = loader.certificate()
    assert list(loader) == []
    third = loader.certificate()

    assert len(delivered) == len(set(delivered)) == LENGTH - 8
    assert set(data.read[: LENGTH - 8]) == set(delivered)
    assert (first.exact, first.num_samples, first.skipped) == (
        True,
        LENGTH - 8,
        8,
    ), first
    assert (second.exact, second.num_samples, second.skipped) == (
        True,
        LENGTH - 7,
        7,
    ), second
    assert (third.exact, third.num_samples, third.skipped) == (
        True,
        0,
        LENGTH,
    ), third
    assert loader.epoch == 3


@pytest.mark.parametrize("at", [1, 10, 11])
def test_state_before_skipped_steps_goes_on_behind_them(at):
    """Steps 9 and 10 end the first epoch."""
    straight, resumed = make(skip_steps=[(9, 13)]), make(skip_steps=[(9, 13)])
    batches = iter(straight)
    found = [rows_of(batches, min(at, 9))]
    if at == 11:
        assert next(batches, None) is None
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for _ in range(2):
        found.append(rows_of(iter(resumed)))

    whole = make(skip_steps=[(9, 13)])
    expected = [rows for _ in range(3) for rows in rows_of(iter(whole))]
    found = [rows for of_epoch in found for rows in of_epoch]
    assert found == expected[: len(found)]
    assert resumed.state_dict()["steps_before"] == (33 if at == 11 else 22)


def test_skip_steps_of_item_batches_and_of_split_data():
    whole = sharded(
        DataLoader(Made(lambda i: np.full((2, 1), i), 5), batch_size=None),
        ONE,
        skip_steps=[(1, 3)],
    )
    assert [batch._local_value().numpy()[0][0] for batch in whole] == [0, 3, 4]
    data = Made(length=12)
    sampler = DistributedBatchSampler(data, 4, num_replicas=1, rank=0)
    split = sharded(
        DataLoader(data, batch_sampler=sampler),
        ONE,
        skip_steps=[(1, 2)],
        is_dataset_splitted=True,
    )
    assert rows_of(iter(split)) == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_steps_of_the_run_that_nobody_knows_are_refused():
    loader = make(sampler=Unsized, skip_steps=[(3, 5)])
    loader.set_epoch(2)
    with pytest.raises(
        ArgumentError,
        match="skip_steps: the steps of the run before epoch 2 are not known",
    ):
        iter(loader)


def test_where_knows_the_skipped_steps():
    order = [row for rows in rows_of(iter(make())) for row in rows]
    loader = make(skip_steps=[(2, 4)])

    assert loader.where(sample=order[8]) is None
    assert loader.where(sample=order[16]).step == 4


@pytest.mark.parametrize(
    ("then", "now", "is_refused"),
    [
        ([(1, 3)], [(1, 3), (9, 12)], False),
        ([(1, 3)], [(1, 3), (6, 8)], False),
        ([(1, 3), (6, 8)], [(1, 3)], False),
        ([(1, 3)], [(1, 4)], True),
        ([(1, 3)], None, True),
        (None, [(4, 9)], True),
    ],
)
def test_resumed_run_may_skip_more_behind_its_position_only(
    then, now, is_refused
):
    loader = make(skip_steps=then)
    with iter(loader) as batches:
        rows_of(batches, 6 if then is None else 4)
    state = json.loads(json.dumps(loader.state_dict()))
    other = make(skip_steps=now)

    if is_refused:
        with pytest.raises(
            StateError,
            match=r"skip_steps: saved .*, now .*override=",
        ):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "ranges", [[(3, 3)], [(-1, 2)], [3, 4], "12", [(1, 2, 3)], [(1.0, 2)]]
)
def test_bad_ranges_are_named(ranges):
    with pytest.raises(
        ArgumentError,
        match=r"skip_steps must be a list of \(first step, step after the last\)",
    ):
        make(skip_steps=ranges)


def test_streams_are_refused():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(range(100))

    with pytest.raises(
        ArgumentError,
        match="skip_steps=.*: a stream's samples have no number",
    ):
        sharded(DataLoader(Endless(), batch_size=4), ONE, skip_steps=[(1, 2)])
