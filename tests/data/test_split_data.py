"""A data set of which each rank has rows of its own may say so itself, where a trainer makes the loader."""

import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

from paddle_shard.errors import ArgumentError
from paddle_shard.testing import on_each_rank
from tests.helpers import DP2, Made, locals_of, sharded


def of_this_rank(says):
    data = Made(lambda index: 10 * dist.get_rank() + index, 4)
    data.is_dataset_splitted = says
    return DataLoader(data, batch_size=2)


def test_split_data_is_not_split_again():
    def run(says):
        loader = sharded(of_this_rank(says))
        return loader.is_dataset_splitted, locals_of(loader)

    assert on_each_rank(range(2), lambda: run(True)) == {
        0: (True, [[0, 1], [2, 3]]),
        1: (True, [[10, 11], [12, 13]]),
    }
    assert on_each_rank(range(2), lambda: run(False))[0] == (False, [[0], [2]])


def test_split_data_needs_an_axis():
    with pytest.raises(
        ArgumentError, match="is_dataset_splitted=True needs shard_dims"
    ):
        sharded(of_this_rank(True), DP2, None)
