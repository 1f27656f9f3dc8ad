import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import ArgumentError, ArgumentTypeError, DataReadError, MissingDependencyError, SplitError
from paddle_shard.sources.grain import grain_dataset, grain_loader
from paddle_shard.testing.simulated import on_each_rank
from tests.extras import needs
from tests.sources.laws import check_laws

grain = needs("grain")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_laws_hold(workers):
    check_laws("grain", None, workers)


def rows(loader, limit=None):
    found = []
    for batch in loader:
        leaf = batch[0] if isinstance(batch, list) else batch
        found.append(leaf._local_value().numpy().tolist())
        if len(found) == limit:
            break
    return found


def read(dataset, ids=(0,), **options):
    given = paddle.io.DataLoader(dataset, batch_size=8)
    mesh = dist.ProcessMesh(list(ids), dim_names=["dp"])
    return paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", **options)


def test_it_has_a_length_and_ends_there():
    dataset = grain_dataset(grain.MapDataset.range(10)[2:8].map(lambda x: x * x))

    assert (len(dataset), list(dataset)) == (6, [4, 9, 16, 25, 36, 49])
    assert list(grain_dataset(grain.MapDataset.range(4)[::-1])) == [3, 2, 1, 0], "the other way round is not cut"
    assert dataset[np.int64(1)] == 9
    for index in (6, -1):
        with pytest.raises(IndexError, match=f"{index} is not in range"):
            dataset[index]


def test_grains_own_order_is_kept_where_the_loader_does_not_shuffle():
    shuffled = grain.MapDataset.range(21).seed(5).shuffle()  # 21: no power of two, nor one above it

    once, thrice = (rows(read(grain_dataset(d), tail="drop")) for d in (shuffled, shuffled.repeat(3)))

    assert once == [[shuffled[i] for i in range(first, first + 8)] for first in (0, 8)]
    assert thrice == [[shuffled[i] for i in range(first, first + 8)] for first in range(0, 56, 8)]


def test_grains_random_map_is_the_same_on_every_rank():
    dataset = grain.MapDataset.range(16).seed(5).random_map(lambda x, rng: x + rng.random())
    halves = on_each_rank(range(2), lambda: rows(read(grain_dataset(dataset), range(2))))

    joined = [one + two for one, two in zip(*halves.values(), strict=True)]
    np.testing.assert_array_equal(joined, [[dataset[i] for i in range(8)], [dataset[i] for i in range(8, 16)]])


def test_an_element_that_is_filtered_out_is_an_error_and_a_stream_the_way_out():
    dataset = grain_dataset(grain.MapDataset.range(40).filter(lambda x: x % 3 != 1))

    with pytest.raises(DataReadError, match="element 1 of the MapDataset is None, .* Filter a stream instead"):
        rows(read(dataset))
    map_dataset = dataset._dataset
    stream = Stream.of(range(40)).sharding_filter().map(map_dataset.__getitem__).filter(lambda x: x is not None)
    loader = read(stream)
    batches = iter(loader)
    found = []
    for batch in batches:
        found += batch._local_value().numpy()[batches.valid._local_value().numpy()].tolist()
    assert sorted(found) == [x for x in range(40) if x % 3 != 1]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: grain.MapDataset.range(8)[1::2].map(str), SplitError, r"step 2 \(SliceMapDataset\[1:8:2\]\)"),
        (lambda: grain.MapDataset.range(8).repeat(), ArgumentError, "repeated without an end"),
        (lambda: grain.MapDataset.range(8).to_iter_dataset(), ArgumentTypeError, "grain_loader"),
        (lambda: [1, 2], ArgumentTypeError, "got list"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        grain_dataset(make())


def build(share):
    mine = grain.MapDataset.range(48).seed(share.seed + share.epoch).shuffle()[share.shard :: share.num_shards]
    return mine.to_iter_dataset().batch(4)


def test_an_iter_dataset_is_read_by_each_data_rank_and_goes_on_by_its_own_state():
    def loader():
        mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
        return paddle_shard.shard_dataloader(grain_loader(build), mesh, shard_dims="dp")

    straight = on_each_rank(range(2), lambda: (lambda one: [rows(one), rows(one)])(loader()))
    for epoch in range(2):
        delivered = [i for rank in range(2) for batch in straight[rank][epoch] for i in batch]
        assert sorted(delivered) == list(range(48))
    assert straight[0][0] != straight[0][1]

    def resumed():
        first = loader()
        begun = rows(first, 2)
        second = loader()
        second.load_state_dict(first.state_dict())
        return begun + rows(second)

    assert on_each_rank(range(2), resumed) == {rank: straight[rank][0] for rank in range(2)}


def test_a_build_that_does_not_cut_is_refused():
    def loader():
        mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
        uncut = grain_loader(lambda share: grain.MapDataset.range(48).to_iter_dataset().batch(4))
        return rows(paddle_shard.shard_dataloader(uncut, mesh, shard_dims="dp"))

    with pytest.raises((SplitError, DataReadError), match="neither share.shard nor share.num_shards"):
        on_each_rank(range(2), loader)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "grain", None)

    with pytest.raises(MissingDependencyError, match=r"paddle_shard\[grain\]"):
        grain_dataset(None)
