"""What each tail does with the end of an epoch."""

import pytest

from paddle_shard.errors import ArgumentError, UnequalEndsError
from paddle_shard.plan.tails import (
    INDEX_TAILS,
    STREAM_TAILS,
    TAILS,
    find_tail,
)


@pytest.mark.parametrize(
    ("tail", "rest", "rows"),
    [
        ("pad", 1, 4),
        ("pad", 4, 4),
        ("pad", 9, 12),  # up to the padding unit
        ("fill", 1, 16),
        ("fill", 16, 16),
        ("drop", 9, 0),
    ],
)
def test_tail_num_rows_of_a_short_batch(tail, rest, rows):
    assert find_tail(tail).num_rows(rest, batch_size=16, unit=4) == rows


def test_tail_fill_pads_evenly_if_batches_have_no_size():
    assert find_tail("fill").num_rows(5, batch_size=0, unit=4) == 8


@pytest.mark.parametrize(
    ("tail", "steps"), [("pad", 3), ("repeat", 3), ("drop", 1)]
)
def test_tail_num_steps_of_unequal_parts(tail, steps):
    assert find_tail(tail, stream=True).num_steps([5, 9, 7], size=4) == steps


@pytest.mark.parametrize("tail", STREAM_TAILS)
def test_end_of_stream_is_not_at_a_whole_new_batch(tail):
    assert (
        tail.end_of_stream(is_whole=True, has_new=True, is_empty=False)
        == "deliver"
    )


@pytest.mark.parametrize(
    ("tail", "is_whole", "has_new", "is_empty", "action"),
    [
        ("pad", False, True, False, "deliver"),  # some parts go on
        ("pad", False, False, True, "exhausted"),  # others may go on
        # only parts that were reopened
        ("repeat", True, False, False, "exhausted"),
        ("repeat", False, True, False, "deliver"),
        ("drop", False, True, False, "end"),
        ("drop", False, False, True, "end"),
        # all parts end with the last batch
        ("error", False, False, True, "end"),
    ],
)
def test_end_of_stream_by_tail(tail, is_whole, has_new, is_empty, action):
    tail = find_tail(tail, stream=True)

    assert action == tail.end_of_stream(
        is_whole=is_whole, has_new=has_new, is_empty=is_empty
    )


def test_end_of_stream_raises_for_a_short_batch_with_error():
    tail = find_tail("error", stream=True)

    with pytest.raises(UnequalEndsError, match="tail='error'"):
        tail.end_of_stream(is_whole=False, has_new=True, is_empty=False)


def test_find_tail_takes_its_default_from_drop_last():
    assert find_tail(None) == "pad"
    assert find_tail(None, drop_last=True) == "drop"
    assert find_tail("fill", drop_last=True) == "fill"


@pytest.mark.parametrize(
    ("tail", "stream"),
    [
        ("wrap", False),
        ("repeat", False),
        ("fill", True),
        (1, False),
        (["pad"], True),
    ],
)
def test_find_tail_names_the_tails_there_are(tail, stream):
    known = ", ".join(map(repr, STREAM_TAILS if stream else INDEX_TAILS))
    with pytest.raises(
        ArgumentError, match=f"tail must be one of {known}.*, got"
    ):
        find_tail(tail, stream=stream)


def test_tail_is_equal_to_its_name():
    assert all(
        tail == name and str(tail) == name and repr(tail) == repr(name)
        for name, tail in TAILS.items()
    )
