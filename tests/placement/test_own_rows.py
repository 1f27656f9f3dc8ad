"""Fields whose rows are not the samples, such as image patches and pairs of answers."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.testing.simulated import on_each_rank, simulated_rank

ONE, TWO = (
    dist.ProcessMesh([0], dim_names=["dp"]),
    dist.ProcessMesh([0, 1], dim_names=["dp"]),
)
REPLICAS = dist.ProcessMesh([0, 1], dim_names=["mp"])
DENSE = [[], [0], []]


class Pictures(paddle.io.Dataset):
    """Sample i has i % 3 + 1 patches."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, np.full((index % 3 + 1, 5), index, "float32")


def patches(samples):
    """[ids, patches of all samples one after the other, how many each has], as Qwen2-VL's."""
    ids, pixels = zip(*samples, strict=True)
    arrays = (
        np.array(ids),
        np.concatenate(pixels),
        np.array([[len(p), 1] for p in pixels]),
    )
    return [paddle.to_tensor(array) for array in arrays]


def pairs(samples):
    """A row for every two samples."""
    ids = np.array([index for index, _ in samples])
    return [
        paddle.to_tensor(ids),
        paddle.to_tensor(ids.reshape(-1, 2)),
        paddle.to_tensor(ids),
    ]


def sharded(collate, mesh=TWO, workers=0, size=4, shard_dims="dp", **options):
    given = paddle.io.DataLoader(
        Pictures(), batch_size=size, collate_fn=collate, num_workers=workers
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims=shard_dims, **options
    )


def local(leaf):
    return (leaf._local_value() if leaf.is_dist() else leaf).numpy().tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mesh", [ONE, TWO])
def test_dense_field_is_what_was_made_of_the_ranks_own_samples(mesh, workers):
    def run():
        return [
            [local(leaf) for leaf in batch] + [batch[1].is_dist()]
            for batch in sharded(patches, mesh, workers, dense_tensor_idx=DENSE)
        ]

    width, data = 4 // mesh.size, Pictures()
    for rank, steps in on_each_rank(range(mesh.size), run).items():
        for step, found in enumerate(steps):
            first = 4 * step + width * rank
            own = [data[index] for index in range(first, first + width)]
            assert found == [
                *(leaf.numpy().tolist() for leaf in patches(own)),
                False,
            ]


def test_own_rows_of_one_data_rank_are_taken_as_they_are():
    batch = next(iter(sharded(patches, ONE)))

    assert batch[1].is_dist()
    assert list(batch[1].shape) == [1 + 2 + 3 + 1, 5]
    assert list(
        next(iter(sharded(patches, REPLICAS, shard_dims=None)))[1].shape
    ) == [
        7,
        5,
    ]


def test_over_several_data_ranks_it_has_to_be_said():
    with (
        simulated_rank(1),
        pytest.raises(
            BatchStructureError, match=r"'as read'.* dense_tensor_idx"
        ) as raised,
    ):
        next(iter(sharded(pairs)))
    assert "field [1] has shape [1, 2] for 2 samples" in str(raised.value)

    def run():
        batches = sharded(pairs, placements={1: "as read"})
        return [
            [local(batch[1]), list(batch[1].shape), str(batch[1].placements)]
            for batch in batches
        ]

    got = on_each_rank(range(2), run)
    assert got[0] == [
        [[[0, 1]], [2, 2], "[Shard(dim=0)]"],
        [[[4, 5]], [2, 2], "[Shard(dim=0)]"],
    ]
    assert got[1] == [
        [[[2, 3]], [2, 2], "[Shard(dim=0)]"],
        [[[6, 7]], [2, 2], "[Shard(dim=0)]"],
    ]


def test_data_that_is_split_already_is_taken_as_it_is():
    def run(own):
        sampler = own or paddle.io.DistributedBatchSampler(
            Pictures(), 2, num_replicas=2, rank=dist.get_rank()
        )
        given = paddle.io.DataLoader(
            Pictures(), batch_sampler=sampler, collate_fn=pairs
        )
        loader = paddle_shard.shard_dataloader(
            given, TWO, shard_dims="dp", is_dataset_splitted=True
        )
        return [[local(batch[1]), list(batch[1].shape)] for batch in loader]

    for own in (None, paddle.io.BatchSampler(Pictures(), batch_size=2)):
        got = on_each_rank(range(2), lambda own=own: run(own))
        assert all(shape == [2, 2] for rank in got for _, shape in got[rank])
        assert got[0][0][0] in ([[0, 2]], [[0, 1]])


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"dense_tensor_idx": [[], [0]]}, {"placements": {1: "as read"}}]
)
def test_own_rows_of_a_stream_are_made_of_a_whole_batch(workers, options):
    # of the first two samples two patches each: half of them as many as there are samples
    def collate(
        samples,
    ):
        patches = [
            index for index in samples for _ in range(2 * (index % 4 < 2))
        ]
        return [
            paddle.to_tensor(np.array(samples)),
            paddle.to_tensor(np.array(patches).reshape(-1, 1)),
        ]

    stream = paddle_shard.Stream.of(range(8))
    given = paddle.io.DataLoader(
        stream, batch_size=4, collate_fn=collate, num_workers=workers
    )
    batches = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", **options
    )

    assert [[local(leaf) for leaf in batch] for batch in batches] == [
        [[0, 1, 2, 3], [[0], [0], [1], [1]]],
        [[4, 5, 6, 7], [[4], [4], [5], [5]]],
    ]


def test_own_rows_that_would_be_cut_are_refused():
    for options in (
        {"dense_tensor_idx": DENSE},
        {"placements": {1: "as read"}},
    ):
        loader = None
        with (
            simulated_rank(0),
            pytest.raises(BatchStructureError, match="a mesh of its own"),
        ):
            loader = sharded(
                patches,
                [TWO, TWO, TWO],
                shard_dims=["dp", "dp", None],
                **options,
            )
            next(iter(loader))
        del loader


def test_word_that_says_nothing_is_refused():
    with pytest.raises(
        ArgumentError,
        match="placements must map a field's key .* or to 'as read' or 'row index'",
    ):
        sharded(pairs, placements={1: "as it is"})


class Scenes(paddle.io.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"id": index, "camera": np.full((4, 4), index, "float32")}


@pytest.mark.parametrize("kind", [list, tuple])
def test_dicts_of_each_sample_stay_local_or_are_refused(kind):
    """As Paddle3D's `img_metas`, with 2 samples a rank."""
    size = 4

    def collate(samples):
        return {
            "id": np.array([one["id"] for one in samples]),
            "metas": kind(samples),
        }

    def loader(mesh, **options):
        given = paddle.io.DataLoader(
            Scenes(), batch_size=size, collate_fn=collate
        )
        return paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", **options
        )

    (batch, *_) = loader(ONE)
    assert [one["id"] for one in batch["metas"]] == list(range(size))
    with simulated_rank(1, 2):
        batch = next(
            iter(loader(TWO, dense_tensor_idx=[[], list(range(size // 2))]))
        )
        assert [one["camera"].numpy()[0, 0] for one in batch["metas"]] == list(
            range(size // 2, size)
        )
        with pytest.raises(BatchStructureError, match=r"\['metas'\]"):
            next(iter(loader(TWO)))


class Holes(paddle.io.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return None if index % 5 == 2 else np.array(index)


def without_none(samples):
    return {"id": np.stack([one for one in samples if one is not None])}


def test_collate_fn_that_leaves_samples_out_is_refused():
    given = paddle.io.DataLoader(Holes(), batch_size=6, collate_fn=without_none)
    with simulated_rank(0, 2), pytest.raises(BatchStructureError) as raised:
        list(paddle_shard.shard_dataloader(given, TWO, shard_dims="dp"))
    assert "raise in __getitem__ and pass on_error='skip'" in str(raised.value)


@pytest.mark.parametrize(
    "fields", [tuple, list, lambda two: dict(zip("ab", two, strict=True))]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_valid_covers_a_whole_batch_that_is_not_split(fields, ranks):
    """Items that are global batches of several fields, with shard_dims left at None."""
    items = [
        fields([np.arange(4), np.arange(4.0)]),
        fields([np.arange(4), np.arange(4.0)]),
    ]

    def run():
        loader = paddle_shard.shard_dataloader(
            items, REPLICAS if ranks == 2 else ONE
        )
        batches = iter(loader)
        found = [batches.valid._local_value().numpy().tolist() for _ in batches]
        return found, loader.stats.total.samples

    assert on_each_rank(range(ranks), run) == dict.fromkeys(
        range(ranks), ([[True] * 4] * 2, 8)
    )


@pytest.mark.parametrize(
    "item", [3, "text", (1, 2.0), {"id": 1}, {"texts": ["a", "b"]}]
)
@pytest.mark.parametrize("as_loader", [False, True])
def test_whole_batches_without_rows_are_refused(item, as_loader):
    """As if samples were batches: a stream or a list that no DataLoader makes batches of."""
    given = (
        paddle.io.DataLoader([item] * 4, batch_size=None)
        if as_loader
        else [item] * 4
    )
    with simulated_rank(1, 2):
        with pytest.raises(
            BatchStructureError,
            match=r"each of 2 data ranks would get all of it. .* let a DataLoader",
        ):
            next(
                iter(paddle_shard.shard_dataloader(given, TWO, shard_dims="dp"))
            )
        assert len(list(paddle_shard.shard_dataloader(given, REPLICAS))) == 4, (
            "replicas are to have all of it"
        )


@pytest.mark.parametrize(
    ("batch", "dense"),
    [((np.arange(4), np.arange(4.0)), [[0], [0]]), (np.arange(4), [[0]])],
)
def test_whole_batches_of_local_fields_give_each_rank_its_rows(batch, dense):
    def run():
        (found,) = paddle_shard.shard_dataloader(
            [batch], TWO, shard_dims="dp", dense_tensor_idx=dense
        )
        return [
            local(leaf)
            for leaf in (found if isinstance(found, list | tuple) else [found])
        ]

    for rank, leaves in on_each_rank(range(2), run).items():
        assert leaves == [[2 * rank, 2 * rank + 1]] * len(dense)
