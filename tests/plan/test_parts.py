"""Every row of a global batch belongs to one part, whoever holds it; a tail's steps are what a plain count says."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.core.checks import check_count
from paddle_shard.errors import ArgumentError, BatchSizeError
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.parts import (
    MAX_PARTS,
    PartsPlan,
    choose_num_parts,
    chunks_of,
)
from paddle_shard.plan.tails import STREAM_TAILS, TAILS
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
def test_parts_plan_gives_each_row_to_one_part(plan):
    rows = [plan.rows_of((part,)).tolist() for part in range(plan.num_parts)]

    assert sorted(row for part in rows for row in part) == list(
        range(plan.batch_size)
    )
    assert {len(part) for part in rows} == {plan.samples_per_part}


@given(plan=plans())
def test_parts_plan_has_parts_in_order_in_a_micro_batch(plan):
    part_of = {
        row: part
        for part in range(plan.num_parts)
        for row in plan.rows_of((part,)).tolist()
    }
    for first in range(0, plan.batch_size, plan.micro_rows):
        found = [part_of[row] for row in range(first, first + plan.micro_rows)]

        assert found == sorted(found)
        assert {found.count(part) for part in range(plan.num_parts)} == {
            plan.stripe
        }


@given(plan=plans())
def test_parts_plan_gives_each_part_to_one_data_rank(plan):
    ranks = plan.num_data_ranks
    held = [plan.parts_of(rank, ranks) for rank in range(ranks)]

    assert [part for parts in held for part in parts] == list(
        range(plan.num_parts)
    )


@given(plan=plans())
def test_parts_plan_rows_of_a_data_rank_are_its_slice(plan):
    for rank in range(plan.num_data_ranks):
        rows = plan.rows_of(plan.parts_of(rank, plan.num_data_ranks)).tolist()

        assert (
            rows
            == slice_rows(
                plan.batch_size, plan.num_data_ranks, rank, plan.micro_rows
            ).tolist()
        )


@given(plan=plans(), data=st.data())
def test_parts_plan_cuts_fewer_data_ranks_at_parts(plan, data):
    fewer = data.draw(
        st.sampled_from(
            [d for d in range(1, plan.num_parts + 1) if plan.num_parts % d == 0]
        )
    )
    rank = data.draw(st.integers(0, fewer - 1))

    rows = plan.rows_of(plan.parts_of(rank, fewer)).tolist()
    assert (
        rows
        == slice_rows(plan.batch_size, fewer, rank, plan.micro_rows).tolist()
    )


@given(plan=plans(), data=st.data())
def test_parts_plan_rows_of_some_parts_ascend(plan, data):
    some = tuple(sorted(data.draw(st.sets(st.integers(0, plan.num_parts - 1)))))
    rows = plan.rows_of(some).tolist()

    assert rows == sorted(
        row for part in some for row in plan.rows_of((part,)).tolist()
    )


@given(
    first=st.integers(0, 50),
    held=st.integers(1, 20),
    workers=st.integers(0, 30),
)
def test_chunks_of_gives_parts_evenly_to_workers(first, held, workers):
    parts = tuple(range(first, first + held))
    chunks = chunks_of(parts, workers)

    assert sorted(part for chunk in chunks for part in chunk) == list(parts)
    assert all(list(chunk) == sorted(chunk) for chunk in chunks)
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert min(map(len, chunks)) >= 1
    assert len(chunks) == sorted((1, workers, held))[1]
    for part in parts:  # DESIGN: inside a data rank, worker (p mod P/D) mod W
        assert [part in chunk for chunk in chunks].index(True) == (
            part - first
        ) % len(chunks)


# How many parts


@given(
    rows=st.integers(1, 3000), shards=st.one_of(st.none(), st.integers(1, 5000))
)
@example(rows=64, shards=None)
@example(rows=128, shards=64)
@example(rows=61, shards=60)  # a prime that is out of reach
@example(rows=49, shards=7)  # a square
def test_choose_num_parts_is_the_most_that_divide(rows, shards):
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
def test_parts_plan_num_steps_is_a_plain_count(tail, data):
    plan = data.draw(plans(tail=tail))
    low = 1 if tail == "repeat" else 0
    some = st.one_of(
        st.lists(
            st.integers(low, 30),
            min_size=plan.num_parts,
            max_size=plan.num_parts,
        ),
        st.integers(low, 30).map(lambda n: [n] * plan.num_parts),
        st.integers(low, 6).map(
            lambda n: [n * plan.samples_per_part] * plan.num_parts
        ),
    )
    lengths = data.draw(some)
    expected = counted(lengths, plan.samples_per_part, tail)

    if expected is None:
        with pytest.raises(
            ArgumentError,
            match=re.escape(
                f"tail='error': the stream's {plan.num_parts} parts have "
            ),
        ):
            plan.num_steps(lengths)
    else:
        assert plan.num_steps(lengths) == expected


@given(
    tail=st.sampled_from(STREAM_TAILS),
    steps=st.integers(1, 1000),
    lengths=st.lists(st.integers(1, 9), min_size=4),
)
def test_parts_plan_has_num_batches(tail, steps, lengths):
    plan = PartsPlan(
        batch_size=8,
        num_parts=4,
        num_data_ranks=2,
        tail=tail,
        num_batches=steps,
    )

    assert plan.num_steps(lengths) == steps
    assert plan.repeats


@pytest.mark.parametrize(
    "options", [{"tail": TAILS["repeat"]}, {"num_batches": 3}]
)
@pytest.mark.parametrize("lengths", [[0, 5], [5, 0], [0, 0]])
def test_parts_plan_names_an_empty_part_to_repeat(options, lengths):
    plan = PartsPlan(batch_size=4, num_parts=2, num_data_ranks=1, **options)

    with pytest.raises(
        ArgumentError, match=rf"part {lengths.index(0)} of 2 .*in_parts\(\)"
    ):
        plan.num_steps(lengths)


def test_parts_plan_rejects_unequal_ends_with_error():
    plan = PartsPlan(
        batch_size=4, num_parts=2, num_data_ranks=1, tail=TAILS["error"]
    )

    with pytest.raises(
        ArgumentError,
        match=r"have 4, 6 samples.*\(2 of each part\).*'pad', 'drop' or 'repeat'",
    ):
        plan.num_steps([4, 6])
    assert plan.num_steps([6, 6]) == 3


# What is refused


@pytest.mark.parametrize(
    "name",
    ["accumulation", "num_batches"],
)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_parts_plan_names_what_is_no_count(name, value):
    options = {
        "batch_size": 4,
        "num_parts": 2,
        "num_data_ranks": 1,
        "accumulation": 1,
        name: value,
    }

    with pytest.raises(
        ArgumentError,
        match=re.escape(f"{name} must be an int >= 1, got {value!r}"),
    ):
        PartsPlan(**options)
    with pytest.raises(ArgumentError, match="any must be an int"):
        check_count("any", value)


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
    rows=st.integers(1, 60),
    parts=st.integers(1, 60),
    accumulation=st.integers(1, 3),
)
def test_parts_plan_names_numbers_of_parts_that_divide(
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
    assert (
        f"in_parts({parts}): the number of parts must divide the {rows} rows"
        in str(error)
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
# another number of parts works
@example(rows=6, parts=3, ranks=2, accumulation=1)
@example(rows=6, parts=3, ranks=4, accumulation=2)  # only another batch works
def test_parts_plan_names_what_works_for_the_data_ranks(
    rows, parts, ranks, accumulation
):
    options = {"num_data_ranks": ranks, "accumulation": accumulation}
    if rows % parts or parts % ranks == 0:
        return
    error = refusal(batch_size=rows * accumulation, num_parts=parts, **options)

    assert f"{ranks} data ranks" in str(error)
    assert advised(error)
    if isinstance(error, BatchSizeError):
        assert (
            f"a global batch of {rows * accumulation} cannot be split evenly"
            in str(error)
        )
        for size in advised(error):
            PartsPlan(batch_size=size, num_parts=ranks, **options)
    else:
        assert f"in_parts({parts}):" in str(error)
        for number in advised(error):
            PartsPlan(
                batch_size=rows * accumulation, num_parts=number, **options
            )


@pytest.mark.parametrize(("rows", "parts", "ranks"), [(8, 3, 4), (6, 5, 4)])
def test_parts_plan_names_only_what_data_ranks_allow(rows, parts, ranks):
    error = refusal(batch_size=rows, num_parts=parts, num_data_ranks=ranks)

    for number in advised(error):
        size, found = (
            (number, ranks) if "batch_size" in str(error) else (rows, number)
        )
        PartsPlan(batch_size=size, num_parts=found, num_data_ranks=ranks)


@pytest.mark.parametrize(("size", "accumulation"), [(7, 2), (1, 2)])
def test_parts_plan_rejects_micro_batches_that_do_not_divide(
    size, accumulation
):
    error = refusal(
        batch_size=size,
        num_parts=1,
        num_data_ranks=1,
        accumulation=accumulation,
    )

    assert f"{size}" in str(error)
    assert re.search("micro-batches|accumulation", str(error))
    assert "in_parts(1): the number of parts must divide" not in str(error)
