"""What `pad_to` may be, and what becomes of a batch in one process."""

import re

import numpy as np
import paddle
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.placement.lengths import PadTo, check_fill
from paddle_shard.testing.simulated import simulated_rank
from tests.helpers import DP2, ONE, Made

LENGTHS = [3, 1, 2, 5, 4, 4]
ROWS = Made(lambda index: np.full(LENGTHS[index], index + 1), len(LENGTHS))


def stacked(samples):
    longest = max(map(len, samples))
    return np.array(
        [
            np.pad(sample, (0, longest - len(sample)), constant_values=-7)
            for sample in samples
        ]
    )


def stacked_tensors(samples):
    return paddle.to_tensor(stacked(samples))


def sharded(mesh=ONE, dataset=None, collate_fn=stacked, **options):
    given = paddle.io.DataLoader(
        dataset or ROWS, batch_size=2, collate_fn=collate_fn
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", **options
    )


@pytest.mark.parametrize(
    ("length", "widths"),
    [
        ("longest", [3, 5, 4]),
        ([8, 4], [4, 8, 4]),
        (np.array([4, 8]), [4, 8, 4]),
        (6, [6, 6, 6]),
    ],
)
@pytest.mark.parametrize("collate_fn", [stacked, stacked_tensors])
def test_pad_to_on_one_rank_pads_to_its_own_rows(length, widths, collate_fn):
    loader = sharded(pad_to={0: (length, -7)}, collate_fn=collate_fn)
    batches = [batch._local_value().numpy() for batch in loader]

    assert [batch.shape for batch in batches] == [
        (2, width) for width in widths
    ]
    for number, row in enumerate(
        row for batch in batches for row in batch.tolist()
    ):
        own = LENGTHS[number]
        assert row[:own] == [number + 1] * own
        assert set(row[own:]) <= {-7}


@pytest.mark.parametrize("collate_fn", [stacked, stacked_tensors])
def test_first_batch_to_look_at_is_padded_too(collate_fn):
    loader = sharded(pad_to={0: ([8], -7)}, collate_fn=collate_fn)

    assert next(loader()).shape == [2, 8]
    assert [batch.shape for batch in loader] == [[2, 8]] * 3


def test_workers_of_a_stream_join_rows_of_different_lengths():
    class Given(paddle.io.IterableDataset):
        def __iter__(self):
            return (np.full(1 + n % 5, n + 1) for n in range(24))

    given = paddle.io.DataLoader(
        Stream(Given()), batch_size=4, collate_fn=stacked, num_workers=2
    )
    loader = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", pad_to={0: ("longest", -7)}
    )
    rows = [
        row for batch in loader for row in batch._local_value().numpy().tolist()
    ]
    found = sorted(
        (row[0], sum(value == row[0] for value in row)) for row in rows
    )
    assert found == [(n + 1, 1 + n % 5) for n in range(24)]
    assert {value for row in rows for value in row if value != row[0]} == {-7}


@pytest.mark.parametrize(
    "pad_to",
    [
        {0: ("most", 0)},
        {0: ([], 0)},
        {0: ([8, 0], 0)},
        {0: ([8, 1.5], 0)},
        {0: [8, 16]},
        {0: ("longest", 0, 0)},
        {0: (True, 0)},
        "longest",
        [8, 16],
        {},
        {0: "longest"},
        {0: ("longest", "0")},
        {0: ("longest", None)},
        {0: ("longest", [0])},
        {"ids": ("longest", 0), "labels": ("longest", "pad")},
    ],
)
def test_pad_to_rejects_other_values(pad_to):
    text = rf"pad_to must map .*; got {re.escape(repr(pad_to))}\."
    with pytest.raises(ArgumentError, match=text):
        sharded(pad_to=pad_to)


def test_value_for_a_field_that_is_not_there_is_refused():
    with pytest.raises(
        BatchStructureError,
        match=r"pad_to names \[1, 'x'\], but the fields .* are \[0\]",
    ):
        next(iter(sharded(pad_to={0: (8, 0), 1: (8, 0), "x": (8, 0)})))


def test_field_is_named_by_its_own_key_and_position():
    names = [*("x", "xy", 1, 11), "a'][0"]
    pads = PadTo.of(
        {name: (number + 1, 0) for number, name in enumerate(names)}
    )

    for number, name in enumerate(names):
        for path in (f"[{name!r}]", f"[{name!r}][0]", f"[{name!r}]['y']"):
            assert pads.pad_of(path).sizes == (number + 1,)
    assert pads.pad_of("['y']") is pads.pad_of("") is None


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ],
)
def test_tensors_of_any_dtype_are_evened(dtype):
    short, long = (
        paddle.ones([2, 3]).astype(dtype),
        paddle.ones([1, 5, 1])[:, :, 0].astype(dtype),
    )

    first, second = PadTo.of({"x": ("longest", 0)}).even(
        [short, long], "['x'][0]"
    )

    assert [first.shape, second.shape] == [[2, 5], [1, 5]]
    assert first.dtype == short.dtype
    assert first.astype("float32").numpy().tolist() == [[1, 1, 1, 0, 0]] * 2


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        *(("uint8", fill) for fill in (-1, 256, 0.5, float("nan"))),
        *(("int8", fill) for fill in (-129, 300, float("inf"))),
        *(("int64", fill) for fill in (2**63, 0.5, 1e30)),
        *(("bool", fill) for fill in (2, -1, 0.5)),
        *(("float16", fill) for fill in (1e6, -65520)),
        ("float32", 1e39),
    ],
)
def test_value_that_the_field_cannot_hold_is_refused(dtype, fill):
    with pytest.raises(
        BatchStructureError,
        match=f"dtype {dtype}, as field x has them, cannot hold",
    ):
        check_fill(fill, dtype, "x")


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("uint8", 255),
        ("int64", -(2**63)),
        ("int64", 3.0),
        ("bool", True),
        ("float16", -65504),
        ("float32", -np.inf),
    ],
)
def test_value_that_the_field_holds_is_taken(dtype, fill):
    check_fill(fill, dtype, "x")


def test_pad_to_refuses_a_rank_on_no_mesh(monkeypatch):
    monkeypatch.setattr("paddle_shard.loader.setup.num_ranks", lambda: 3)
    with (
        simulated_rank(2, 3),
        pytest.raises(
            ArgumentError, match="global rank 2 is on none of the meshes"
        ),
    ):
        sharded(DP2, pad_to={0: ("longest", 0)})


class OneOdd(paddle.io.IterableDataset):
    """Rows of different lengths, one of them of another structure."""

    odd = None

    def __iter__(self):
        for number in range(16):
            yield self.odd if number == 6 else np.full([1 + number % 4], number)


def at_least_1d(samples):
    if any(sample is None for sample in samples):
        raise ValueError("a sample is None")
    longest = max(sample.shape[0] for sample in samples)
    return np.stack(
        [
            np.pad(
                sample,
                [(0, longest - len(sample)), *[(0, 0)] * (sample.ndim - 1)],
            )
            for sample in samples
        ]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_pad_to_skips_a_sample_that_cannot_be_collated(workers):
    data = OneOdd()
    given = paddle.io.DataLoader(
        data, batch_size=4, collate_fn=at_least_1d, num_workers=workers
    )
    loader = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", on_error="skip", pad_to={0: ("longest", 0)}
    )
    batches, real = iter(loader), []
    for batch in batches:
        real += (
            batch._local_value()
            .numpy()[batches.valid._local_value().numpy()][:, 0]
            .tolist()
        )

    assert sorted(real) == [number for number in range(16) if number != 6]
