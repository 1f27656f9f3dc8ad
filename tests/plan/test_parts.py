"""Every row of a global batch belongs to one part, whoever holds it; a tail's steps are what a plain count says."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.core.checks import check_count
from paddle_shard.errors import ArgumentError, BatchSizeError
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.parts import MAX_PARTS, PartsPlan, choose_num_parts, chunks_of
from paddle_shard.plan.tails import STREAM_TAILS
from tests.trials import trials


@st.composite
def plans(draw, **fixed):
    ranks = draw(st.integers(1, 6))
    parts = ranks * draw(st.integers(1, 6))
    accumulation = draw(st.integers(1, 3))
    return PartsPlan(
        batch_size=parts * draw(st.integers(1, 4)) * accumulation,
        num_parts=parts,
        num_data_ranks=ranks,
        accumulation=accumulation,
        **fixed,
    )


# Rows and parts


@given(plan=plans())
def test_every_row_belongs_to_exactly_one_part_and_every_part_has_as_many(plan):
    rows = [plan.rows_of((part,)).tolist() for part in range(plan.num_parts)]

    assert sorted(row for part in rows for row in part) == list(range(plan.batch_size))
    assert {len(part) for part in rows} == {plan.samples_per_part}


@given(plan=plans())
def test_in_a_micro_batch_the_parts_stand_in_order_each_in_one_stretch(plan):
    part_of = {
        row: part
        for part in range(plan.num_parts)
        for row in plan.rows_of((part,)).tolist()
    }
    for first in range(0, plan.batch_size, plan.micro_rows):
        found = [part_of[row] for row in range(first, first + plan.micro_rows)]

        assert found == sorted(found)
        assert {found.count(part) for part in range(plan.num_parts)} == {plan.stripe}


@given(plan=plans())
def test_the_parts_of_all_data_ranks_laid_end_to_end_are_all_parts(plan):
    held = [plan.parts_of(rank) for rank in range(plan.num_data_ranks)]

    assert [part for parts in held for part in parts] == list(range(plan.num_parts))


@given(plan=plans())
def test_the_rows_of_a_data_ranks_parts_are_its_slice(plan):
    for rank in range(plan.num_data_ranks):
        rows = plan.rows_of(plan.parts_of(rank)).tolist()

        assert (
            rows
            == slice_rows(
                plan.batch_size, plan.num_data_ranks, rank, plan.micro_rows
            ).tolist()
        )


@given(plan=plans(), data=st.data())
def test_a_field_split_over_fewer_data_ranks_is_cut_at_parts_too(plan, data):
    fewer = data.draw(
        st.sampled_from(
            [d for d in range(1, plan.num_parts + 1) if plan.num_parts % d == 0]
        )
    )
    rank = data.draw(st.integers(0, fewer - 1))

    rows = plan.rows_of(plan.parts_of(rank, fewer)).tolist()
    assert rows == slice_rows(plan.batch_size, fewer, rank, plan.micro_rows).tolist()


@given(plan=plans(), data=st.data())
def test_rows_of_some_parts_are_theirs_and_ascend(plan, data):
    some = tuple(sorted(data.draw(st.sets(st.integers(0, plan.num_parts - 1)))))
    rows = plan.rows_of(some).tolist()

    assert rows == sorted(
        row for part in some for row in plan.rows_of((part,)).tolist()
    )


@given(first=st.integers(0, 50), held=st.integers(1, 20), workers=st.integers(0, 30))
def test_every_part_is_dealt_to_one_worker_as_evenly_as_can_be(first, held, workers):
    parts = tuple(range(first, first + held))
    chunks = chunks_of(parts, workers)

    assert sorted(part for chunk in chunks for part in chunk) == list(parts)
    assert all(list(chunk) == sorted(chunk) for chunk in chunks)
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert min(map(len, chunks)) >= 1
    assert len(chunks) == sorted((1, workers, held))[1]
    for part in parts:  # DESIGN: inside a data rank, worker (p mod P/D) mod W
        assert [part in chunk for chunk in chunks].index(True) == (part - first) % len(
            chunks
        )


# How many parts


@given(rows=st.integers(1, 3000), shards=st.one_of(st.none(), st.integers(1, 5000)))
@example(rows=64, shards=None)
@example(rows=128, shards=64)
@example(rows=61, shards=60)  # a prime that is out of reach
@example(rows=49, shards=7)  # a square
def test_the_chosen_parts_are_the_most_that_divide_within_the_limits(rows, shards):
    chosen, most = (
        choose_num_parts(rows, shards),
        min(rows, MAX_PARTS, rows if shards is None else shards),
    )

    assert rows % chosen == 0
    assert chosen <= most
    assert all(rows % more for more in range(chosen + 1, most + 1))


# Steps


def counted(lengths, size, tail):
    """Steps until nothing is served any more, one at a time."""
    left, steps = list(lengths), 0
    while True:
        if all(n <= 0 for n in left) or (
            tail == "drop" and any(n < size for n in left)
        ):
            return steps
        if tail == "error" and any(n < size for n in left):
            return None
        left = [n - size for n in left]
        steps += 1


@settings(max_examples=trials(100))
@given(tail=st.sampled_from(STREAM_TAILS), data=st.data())
def test_steps_are_what_a_plain_count_says(tail, data):
    plan = data.draw(plans(tail=tail))
    low = 1 if tail == "repeat" else 0
    some = st.one_of(
        st.lists(
            st.integers(low, 30), min_size=plan.num_parts, max_size=plan.num_parts
        ),
        st.integers(low, 30).map(lambda n: [n] * plan.num_parts),
        st.integers(low, 6).map(lambda n: [n * plan.samples_per_part] * plan.num_parts),
    )
    lengths = data.draw(some)
    expected = counted(lengths, plan.samples_per_part, tail)

    if expected is None:
        with pytest.raises(
            ArgumentError,
            match=re.escape(f"tail='error': the stream's {plan.num_parts} parts have "),
        ):
            plan.num_steps(lengths)
    else:
        assert plan.num_steps(lengths) == expected


@given(
    tail=st.sampled_from(STREAM_TAILS),
    steps=st.integers(1, 1000),
    lengths=st.lists(st.integers(1, 9), min_size=4),
)
def test_asked_for_so_many_batches_there_are_so_many(tail, steps, lengths):
    plan = PartsPlan(
        batch_size=8, num_parts=4, num_data_ranks=2, tail=tail, num_batches=steps
    )

    assert plan.num_steps(lengths) == steps
    assert plan.repeats


@pytest.mark.parametrize("options", [{"tail": "repeat"}, {"num_batches": 3}])
@pytest.mark.parametrize("lengths", [[0, 5], [5, 0], [0, 0]])
def test_an_empty_part_that_is_to_be_repeated_is_refused_with_its_number(
    options, lengths
):
    plan = PartsPlan(batch_size=4, num_parts=2, num_data_ranks=1, **options)

    with pytest.raises(
        ArgumentError, match=rf"part {lengths.index(0)} of 2 .*in_parts\(\)"
    ):
        plan.num_steps(lengths)


def test_unequal_ends_are_refused_with_the_lengths_and_what_works():
    plan = PartsPlan(batch_size=4, num_parts=2, num_data_ranks=1, tail="error")

    with pytest.raises(
        ArgumentError,
        match=r"have 4, 6 samples.*\(2 of each part\).*'pad', 'drop' or 'repeat'",
    ):
        plan.num_steps([4, 6])
    assert plan.num_steps([6, 6]) == 3


# What is refused


@pytest.mark.parametrize(
    "name", ["batch_size", "num_parts", "num_data_ranks", "accumulation", "num_batches"]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_a_count_that_is_none_is_refused_by_name(name, value):
    options = {
        "batch_size": 4,
        "num_parts": 2,
        "num_data_ranks": 1,
        "accumulation": 1,
        name: value,
    }

    with pytest.raises(
        ArgumentError, match=re.escape(f"{name} must be an int >= 1, got {value!r}")
    ):
        PartsPlan(**options)
    with pytest.raises(ArgumentError, match="any must be an int"):
        check_count("any", value)


def test_another_tail_is_refused_with_those_there_are():
    with pytest.raises(
        ArgumentError,
        match="tail must be one of 'pad', 'drop', 'repeat', 'error' .*got 'fill'",
    ):
        PartsPlan(batch_size=4, num_parts=2, num_data_ranks=1, tail="fill")


def refusal(**options):
    with pytest.raises(ArgumentError) as caught:
        PartsPlan(**options)
    return caught.value


def advised(error):
    """The numbers of the last sentence but the dots, and without the sizes of micro-batches."""
    return [
        int(number)
        for number in re.findall(
            r"\d+", str(error).rsplit(":", 1)[1].partition(", micro")[0]
        )
    ]


@given(
    rows=st.integers(1, 60), parts=st.integers(1, 60), accumulation=st.integers(1, 3)
)
def test_parts_that_do_not_divide_are_named_with_some_that_do(
    rows, parts, accumulation
):
    options = {
        "batch_size": rows * accumulation,
        "num_data_ranks": 1,
        "accumulation": accumulation,
    }
    if rows % parts == 0:
        assert PartsPlan(num_parts=parts, **options).num_parts == parts
        return
    error = refusal(num_parts=parts, **options)

    assert isinstance(error, ArgumentError)
    assert f"in_parts({parts}): the number of parts must divide the {rows} rows" in str(
        error
    )
    assert advised(error)
    for number in advised(error):
        PartsPlan(num_parts=number, **options)


@given(
    rows=st.integers(1, 60),
    parts=st.integers(1, 60),
    ranks=st.integers(1, 12),
    accumulation=st.integers(1, 3),
)
@example(rows=6, parts=3, ranks=2, accumulation=1)  # another number of parts works
@example(rows=6, parts=3, ranks=4, accumulation=2)  # only another batch works
def test_data_ranks_that_do_not_divide_the_parts_are_told_what_works(
    rows, parts, ranks, accumulation
):
    options = {"num_data_ranks": ranks, "accumulation": accumulation}
    if rows % parts or parts % ranks == 0:
        return
    error = refusal(batch_size=rows * accumulation, num_parts=parts, **options)

    assert f"{ranks} data ranks" in str(error)
    assert advised(error)
    if isinstance(error, BatchSizeError):
        assert f"a global batch of {rows * accumulation} cannot be split evenly" in str(
            error
        )
        for size in advised(error):
            PartsPlan(batch_size=size, num_parts=ranks, **options)
    else:
        assert f"in_parts({parts}):" in str(error)
        for number in advised(error):
            PartsPlan(batch_size=rows * accumulation, num_parts=number, **options)


@pytest.mark.parametrize(("rows", "parts", "ranks"), [(8, 3, 4), (6, 5, 4)])
def test_parts_that_do_not_divide_are_advised_only_with_what_the_data_ranks_allow(
    rows, parts, ranks
):
    error = refusal(batch_size=rows, num_parts=parts, num_data_ranks=ranks)

    for number in advised(error):
        size, found = (number, ranks) if "batch_size" in str(error) else (rows, number)
        PartsPlan(batch_size=size, num_parts=found, num_data_ranks=ranks)


@pytest.mark.parametrize(("size", "accumulation"), [(7, 2), (1, 2)])
def test_a_batch_that_does_not_divide_into_micro_batches_is_refused_as_that(
    size, accumulation
):
    error = refusal(
        batch_size=size, num_parts=1, num_data_ranks=1, accumulation=accumulation
    )

    assert f"{size}" in str(error)
    assert re.search("micro-batches|accumulation", str(error))
    assert "in_parts(1): the number of parts must divide" not in str(error)
