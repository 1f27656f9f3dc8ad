"""Documents of a part become rows, a window at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_shard import Stream
from paddle_shard.errors import ArgumentError
from tests.trials import trials


def documents(lengths):
    return [
        100 * number + np.arange(1, length + 1)
        for number, length in enumerate(lengths)
    ]


@settings(max_examples=trials(100))
@given(
    lengths=st.lists(st.integers(0, 25), max_size=30),
    length=st.integers(1, 10),
    window=st.integers(1, 8),
    long=st.sampled_from(["split", "drop"]),
)
def test_pack_puts_every_token_in_one_row_of_its_window(
    lengths, length, window, long
):
    rows = list(
        Stream.of(documents(lengths)).pack(
            length, window=window, long=long, labels="labels"
        )
    )
    kept = [n if n <= length or long == "split" else 0 for n in lengths]
    found = []
    for row in rows:
        real = row["segment_ids"] > 0
        found.append(row["input_ids"][real].tolist())
        assert row["input_ids"].shape == (length,)
        assert row["cu_seqlens"].shape == (length + 2,)
        for token, label in zip(
            found[-1], row["labels"][real].tolist(), strict=True
        ):
            number, place = divmod(token, 100)
            assert label == (token + 1 if place < lengths[number] else -100)

    assert sorted(t for row in found for t in row) == [
        100 * d + t for d, n in enumerate(kept) for t in range(1, n + 1)
    ]
    windows = [{token // 100 // window for token in row} for row in found]
    assert all(len(numbers) == 1 for numbers in windows)
    assert [min(numbers) for numbers in windows] == sorted(
        min(numbers) for numbers in windows
    )


def test_shuffle_before_it_loses_no_token():
    stream = (
        Stream.of(documents([3, 9, 4, 4, 7, 1, 2, 8] * 6))
        .shuffle(6)
        .pack(8, window=7)
    )
    straight = [row["input_ids"].tolist() for row in stream]

    assert sum(token > 0 for row in straight for token in row) == 38 * 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 0}, "length must be an int >= 1"),
        ({"window": 0}, r"window must be an int in \[1, 65536\], got 0"),
        (
            {"window": 65537},
            r"window must be an int in \[1, 65536\], got 65537",
        ),
        ({"long": "cut"}, "long must be .split. or .drop."),
        ({"labels": "input_ids"}, "must differ from each other"),
    ],
)
def test_bad_arguments_are_named_at_once(options, says):
    with pytest.raises(ArgumentError, match=says):
        Stream.of([[1]]).pack(**{"length": 4, **options}).batch(1).__iter__()
