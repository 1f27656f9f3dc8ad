import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paddle_shard
from paddle_shard.errors import ArgumentError, ArgumentTypeError, DataReadError
from paddle_shard.testing.simulated import on_each_rank

MESH = dist.ProcessMesh([0, 1], dim_names=["dp"])
TABLE = np.arange(60, dtype="float32").reshape(20, 3)


class Chunked:
    """Indexed as an HDF5 data set is: by slices, and by ascending rows without repeats only."""

    chunks = (4, 3)

    def __len__(self):
        return len(TABLE)

    def __getitem__(self, rows):
        if not isinstance(rows, int | slice):
            assert list(rows) == sorted(set(rows))
        return TABLE[rows]


def kinds(folder):
    mapped = np.memmap(
        folder / "table", dtype="float32", mode="w+", shape=TABLE.shape
    )
    mapped[:] = TABLE
    return {
        "numpy": TABLE,
        "memmap": mapped,
        "list": list(TABLE),
        "chunked": Chunked(),
    }


@pytest.mark.parametrize("kind", ["numpy", "memmap", "list", "chunked"])
def test_rows_are_those_of_numpy_for_every_kind_of_array(kind, tmp_path):
    dataset = paddle_shard.ArrayDataset(kinds(tmp_path)[kind])

    @given(st.lists(st.integers(0, 19), min_size=1, max_size=9))
    def check(rows):
        np.testing.assert_array_equal(dataset.__getitems__(rows), TABLE[rows])

    check()
    np.testing.assert_array_equal(dataset.__getitems__([5, 6, 7]), TABLE[5:8])
    np.testing.assert_array_equal(dataset[4], TABLE[4])


class Samples(paddle.io.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return TABLE[index], index


def batches(dataset, workers, collate_fn=None, shuffle=True):
    loader = paddle.io.DataLoader(
        dataset,
        batch_size=6,
        shuffle=shuffle,
        num_workers=workers,
        collate_fn=collate_fn,
    )

    def as_rank():
        sharded = paddle_shard.shard_dataloader(loader, MESH, shard_dims="dp")
        return [
            [leaf._local_value().numpy().tolist() for leaf in batch]
            for batch in sharded
        ]

    return on_each_rank([0, 1], as_rank)


@pytest.mark.parametrize("workers", [0, 2])
def test_batched_reads_deliver_what_samples_one_by_one_do(workers):
    together = paddle_shard.ArrayDataset(TABLE, np.arange(20))

    assert batches(together, workers) == batches(Samples(), 0)
    doubled = batches(
        together,
        workers,
        collate_fn=lambda rows: [2 * np.stack([row[0] for row in rows])],
    )
    assert (
        doubled[0][0][0]
        == (np.array(batches(Samples(), 0)[0][0][0]) * 2).tolist()
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_list_from_getitems_is_samples_as_in_torch(workers):
    class Torch(Samples):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    assert batches(Torch(), workers) == batches(Samples(), 0)


def test_list_of_another_length_is_an_error_that_says_so():
    class Short(Samples):
        def __getitems__(self, indices):
            return [self[index] for index in indices][1:]

    with pytest.raises(DataReadError, match="returned 2 samples for 3 indices"):
        batches(Short(), 0)


def test_random_numbers_of_a_batched_read_repeat():
    class Noisy(Samples):
        def __getitems__(self, indices):
            return np.random.rand(len(indices)), np.array(indices)

    assert batches(Noisy(), 0) == batches(Noisy(), 2)


def test_block_size_is_that_of_the_chunks():
    assert paddle_shard.ArrayDataset(Chunked()).block_size == 4
    assert paddle_shard.ArrayDataset(TABLE, block_size=5).block_size == 5
    assert not hasattr(paddle_shard.ArrayDataset(TABLE), "block_size")


def test_array_dataset_refuses_what_has_no_rows():
    with pytest.raises(ArgumentError, match="at least one"):
        paddle_shard.ArrayDataset()
    with pytest.raises(
        ArgumentError, match="as many rows each, got {0: 20, 1: 3}"
    ):
        paddle_shard.ArrayDataset(TABLE, [1, 2, 3])
    with pytest.raises(ArgumentTypeError, match="must have a length"):
        paddle_shard.ArrayDataset(iter([1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_array_dataset_is_not_changed_by_writing_to_a_batch(workers):
    class Views:
        def __init__(self):
            self.rows = TABLE.copy()

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, rows):
            return self.rows[rows]

    views = Views()
    loader = paddle.io.DataLoader(
        paddle_shard.ArrayDataset(views), batch_size=4, num_workers=workers
    )
    for batch in paddle_shard.shard_dataloader(
        loader, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp"
    ):
        batch._local_value().fill_(-1.0)

    np.testing.assert_array_equal(views.rows, TABLE)
