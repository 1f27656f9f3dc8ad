"""A size holds from the first batch that begins at its sample or later, and no batch is cut."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.shard_plan import BatchSizes
from tests.trials import trials

schedules = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)),
    min_size=1,
    max_size=5,
    unique_by=lambda entry: entry[0],
).map(
    lambda entries: tuple(
        (first if at else 0, size)
        for at, (first, size) in enumerate(sorted(entries))
    )
)


def due(schedule, sample):
    """The size that is due at a sample of the run."""
    return [size for first, size in schedule if first <= sample][-1]


def batches_of(segments, at, end):
    """(first position, size) of each whole or short batch from a position on."""
    found, starts = [], [first for first, _ in segments[1:]] + [end]
    for (first, size), stop in zip(segments, starts, strict=True):
        found += [(begin, size) for begin in range(first, stop, size)]
    return [batch for batch in found if batch[0] >= at]


@settings(max_examples=trials(300))
# two entries inside one batch
@example(schedule=((0, 8), (25, 4), (26, 8)), length=50, epochs=1)
@given(schedule=schedules, length=st.integers(1, 80), epochs=st.integers(1, 4))
def test_batch_sizes_are_those_due_when_a_batch_begins(
    schedule, length, epochs
):
    for epoch in range(epochs):
        segments = BatchSizes(schedule).segments(
            origin=epoch * length, position=0, end=length
        )
        position, wanted = 0, []
        while position < length:
            wanted.append((position, due(schedule, epoch * length + position)))
            position += wanted[-1][1]
        assert batches_of(segments, 0, length) == wanted


@settings(max_examples=trials(300))
@given(
    schedule=schedules,
    length=st.integers(1, 80),
    origin=st.integers(0, 40),
    data=st.data(),
)
def test_batch_sizes_after_a_resume_are_those_without_it(
    schedule, length, origin, data
):
    sizes = BatchSizes(schedule)
    straight = batches_of(
        sizes.segments(origin=origin, position=0, end=length), 0, length
    )
    at = data.draw(st.sampled_from([first for first, _ in straight]))

    assert batches_of(
        sizes.segments(origin=origin, position=at, end=length), at, length
    ) == [batch for batch in straight if batch[0] >= at]


@pytest.mark.parametrize(
    "entries", [(), ((1, 4),), ((0, 4), (0, 8)), ((0, 4), (9, 8), (5, 8))]
)
def test_batch_sizes_begin_at_0_and_ascend(entries):
    with pytest.raises(
        ArgumentError, match="must begin at sample 0 and ascend"
    ):
        BatchSizes(entries)
