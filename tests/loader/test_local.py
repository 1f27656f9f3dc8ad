"""`local=True`: batches of local tensors, for models that are not distributed by placements."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.testing import on_each_rank
from tests.helpers import DP2, ONE, Made, mesh


def test_local_tensors_are_this_ranks_rows():
    data = paddle.io.DataLoader(
        Made(lambda i: (np.full(3, i), i)), batch_size=6
    )
    loader = paddle_shard.shard_dataloader(
        data, DP2, shard_dims="dp", local=True
    )

    batches = iter(loader)
    for rows, numbers in batches:
        assert not any(x.is_dist() for x in (rows, numbers, batches.valid))
        assert rows[:, 0].tolist() == numbers.tolist()
        assert len(batches.valid) == len(numbers)
    # 16 samples in batches of 6: the last one has 4, of which this rank, the first, has 2.
    assert numbers.tolist() == [12, 13]
    assert loader.certificate is not None


def test_local_valid_is_false_for_padding():
    data = paddle.io.DataLoader(Made(length=5), batch_size=4)
    loader = paddle_shard.shard_dataloader(
        data, ONE, shard_dims="dp", local=True, tail="fill"
    )

    batches = iter(loader)
    valid = [batches.valid.tolist() for _ in batches]
    assert valid == [[True] * 4, [True, False, False, False]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_local_rows_may_differ_in_length_between_ranks(num_workers):
    """What a collate function pads to the longest row of a rank need not be alike on all."""

    def padded(samples):
        longest = max(map(len, samples))
        return [np.stack([np.pad(s, (0, longest - len(s))) for s in samples])]

    data = paddle.io.DataLoader(
        Made(lambda i: np.arange(i + 1)),
        batch_size=4,
        num_workers=num_workers,
        collate_fn=padded,
    )
    loader = paddle_shard.shard_dataloader(
        data, DP2, shard_dims="dp", local=True
    )
    assert [rows.shape for (rows,) in loader] == [
        [2, i + 2] for i in (0, 4, 8, 12)
    ]


def test_local_stream_is_read_by_all_its_workers():
    stream = paddle_shard.Stream.of(range(16)).map(np.array)
    data = paddle.io.DataLoader(stream, batch_size=4, num_workers=2)
    loader = paddle_shard.shard_dataloader(
        data, mesh([0]), shard_dims="dp", local=True
    )
    assert np.concatenate([batch.numpy() for batch in loader]).tolist() == list(
        range(16)
    )


def test_local_batches_are_refused_by_to_static():
    data = paddle.io.DataLoader(
        Made(lambda i: (np.ones(3, "float32"), i)), batch_size=4
    )
    loader = paddle_shard.shard_dataloader(
        data, ONE, shard_dims="dp", local=True
    )
    layer = paddle.nn.Linear(3, 1)
    with pytest.raises(BatchStructureError, match="local=True"):
        dist.to_static(
            layer,
            loader,
            paddle.nn.MSELoss(),
            paddle.optimizer.SGD(parameters=layer.parameters()),
        )


@pytest.mark.parametrize(
    "options",
    [
        {"pad_to": {0: ("longest", 0)}},
        {"placements": {0: {"dp": 0}}},
        {"local": 1},
    ],
)
def test_local_rejects_what_is_for_distributed_tensors(options):
    data = paddle.io.DataLoader(Made(), batch_size=4)
    with pytest.raises(ArgumentError, match=next(iter(options))):
        paddle_shard.shard_dataloader(
            data, ONE, shard_dims="dp", **{"local": True, **options}
        )


def test_local_valid_is_that_of_a_field_that_is_here():
    """The last field is on other ranks."""

    def valid():
        data = paddle.io.DataLoader(
            Made(lambda i: (np.array(i), np.array(-i)), 9), batch_size=4
        )
        loader = paddle_shard.shard_dataloader(
            data,
            [mesh([0, 1]), mesh([2, 3])],
            shard_dims="dp",
            local=True,
            tail="fill",
        )
        batches = iter(loader)
        return [batches.valid.tolist() for _ in batches][-1]

    found = on_each_rank(range(4), valid)
    assert found[0] == found[2] == [True, False]
    assert found[1] == found[3] == [False, False]
