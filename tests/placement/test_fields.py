"""Fields that are replicated, nested, empty of tensors, or of several meshes."""

import numpy as np
import paddle
import pytest
from paddle.io import BatchSampler, DataLoader

import paddle_shard
from paddle_shard.errors import BatchStructureError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import DP2, ONE, Made, mesh, sharded


def test_replicated_field_of_another_mesh_has_its_global_shape():
    pairs = Made(lambda i: (np.array(i), np.array([i, i])))

    def run():
        return [
            leaf.shape
            for leaf in next(
                iter(
                    sharded(
                        DataLoader(pairs, batch_size=4), METHES, ["dp", None]
                    )
                )
            )
        ]

    METHES = [mesh([0, 1]), mesh([2, 3])]
    got = on_each_rank(range(5), run)

    assert all(shapes == [[4], [4, 2]] for shapes in got.values())


def test_valid_is_placed_as_the_last_field():
    fields = Made(lambda i: {"x": np.arange(4), "y": np.array(i)})
    four = mesh([[0, 1], [2, 3]], "dp", "sep")

    def run():
        batches = iter(
            sharded(
                DataLoader(fields, batch_size=4),
                four,
                placements={"x": {"sep": 1}},
            )
        )
        batch = next(batches)
        return batches.valid._local_value().shape, batch[
            "y"
        ]._local_value().shape

    got = on_each_rank(range(4), run)

    assert all(valid == y == [2] for valid, y in got.values())


def test_lists_with_an_item_per_row_are_cut_like_rows():
    def collate(samples):
        names = [f"s{i}" for i in samples]
        return [
            np.array(samples),
            np.array(names),
            names,
            [{"id": n} for n in names],
            [None, *names[1:]],
            np.ones(3),
        ]

    def run():
        loader = sharded(
            DataLoader(Made(int), batch_size=4, collate_fn=collate),
            [DP2] * 6,
            ["dp"] * 5 + [None],
        )
        return next(iter(loader))

    got = on_each_rank(range(2), run)[1]

    assert got[1].tolist() == got[2] == ["s2", "s3"]
    assert got[3] == [{"id": "s2"}, {"id": "s3"}]
    assert got[4] == ["s2", "s3"]


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int16", "int64", "float16", "float64", "complex64"],
)
def test_rows_that_are_scattered_are_taken_of_every_dtype(dtype):
    pairs = Made(lambda i: (np.full(2, i, dtype), np.array(i)))
    sampler = BatchSampler(pairs, batch_size=16)
    sampler._acc_steps = 2

    def run():
        loader = sharded(
            DataLoader(pairs, batch_sampler=sampler), [DP2] * 2, ["dp", None]
        )
        return [
            leaf._local_value().numpy().tolist() for leaf in next(iter(loader))
        ]

    (rows, whole), (others, _) = on_each_rank(range(2), run).values()

    # A rank has whole micro-batches.
    assert (
        rows
        == np.full([2, 16], range(16), dtype)
        .T[[*range(4), *range(8, 12)]]
        .tolist()
    )
    assert (
        others
        == np.full([2, 16], range(16), dtype)
        .T[[*range(4, 8), *range(12, 16)]]
        .tolist()
    )
    assert whole == list(range(16))


def test_view_that_the_user_keeps_stays_a_view():
    table = paddle.zeros([2, 4])
    turned = table.transpose([1, 0])
    loader = sharded(
        DataLoader(
            Made(int, length=4), batch_size=4, collate_fn=lambda samples: turned
        ),
        ONE,
    )
    first = next(iter(loader))

    table[0, 0] = 7.0

    assert turned[0, 0].item() == 7.0, (
        "Tensor.contiguous changes the tensor itself"
    )
    assert first._local_value().tolist() == [[0.0, 0.0]] * 4
    assert next(iter(loader))._local_value().tolist() == [
        [7.0, 0.0],
        *[[0.0, 0.0]] * 3,
    ]


def test_sparse_tensor_that_stays_local_is_given_as_it_is():
    def collate(samples):
        return [
            np.array(samples),
            paddle.sparse.sparse_coo_tensor(
                [[0, 1], [1, 0]], [1.0, 2.0], [2, 2]
            ),
        ]

    given = DataLoader(Made(int, length=4), batch_size=2, collate_fn=collate)
    for _, sparse in sharded(given, ONE, dense_tensor_idx=[[], [0]]):
        assert sparse.to_dense().tolist() == [[0.0, 1.0], [2.0, 0.0]]


def test_dict_cannot_have_a_list_of_meshes():
    fields = Made(lambda i: ({"a": np.array(i)}, np.array(i)))

    with pytest.raises(
        BatchStructureError,
        match="must be a list of 2 items, as its entry in meshes.* got a dict",
    ):
        next(iter(sharded(DataLoader(fields, batch_size=4), [[DP2, DP2], DP2])))


def test_item_batches_are_counted_by_a_split_field():
    item = Made(lambda i: [np.arange(3), np.arange(4)], 2)

    batch = next(
        iter(
            sharded(DataLoader(item, batch_size=None), [DP2, DP2], [None, "dp"])
        )
    )

    assert [leaf._local_value().shape for leaf in batch] == [[3], [2]]


def test_recipe_of_a_bare_tensor_is_not_that_of_a_list_of_one():
    rows = np.arange(4)
    batches = list(paddle_shard.shard_dataloader([rows, [rows], rows], ONE))

    assert [isinstance(batch, list) for batch in batches] == [
        False,
        True,
        False,
    ]
    assert batches[0]._local_value().tolist() == rows.tolist()


def test_recipe_names_a_bare_field_by_its_position():
    whole = [np.arange(3)]

    def run():
        return next(
            iter(
                paddle_shard.shard_dataloader(
                    whole, DP2, placements={0: {"dp": 1}}
                )
            )
        )

    with pytest.raises(
        BatchStructureError,
        match=r"field \[0\]: placements splits dim 1, but its shape is \[3\]",
    ):
        on_each_rank(range(2), run)
