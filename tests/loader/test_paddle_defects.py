"""One test for each thing that Paddle's own `shard_dataloader` gets wrong, observed on 3.3.1."""

import collections
import re

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler

import paddle_shard
from paddle_shard.errors import (
    ArgumentError,
    AxisError,
    BatchSizeError,
    BatchStructureError,
    SplitError,
)
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.helpers import indices_of
from tests.jobs import run_script


class Ids(Dataset):
    """Sample i is i."""

    def __init__(self, length=8):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.array(index)


class Make(Dataset):
    """Sample i is what a function makes of i."""

    def __init__(self, function, length=8):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


def mesh(array, *names):
    return dist.ProcessMesh(array, dim_names=list(names))


DP2 = mesh([0, 1], "dp")


def local(leaf):
    return leaf._local_value().numpy().tolist()


def placements(leaf):
    """As text: on Paddle 3.0 the objects die with their tensor."""
    return [str(placement) for placement in leaf.placements]


def epochs(make_loader, ranks=(0, 1), num_epochs=1):
    """{rank: [ids of each step]} of one or more epochs of bare-tensor batches."""

    def run():
        loader = make_loader()
        return [local(batch) for _ in range(num_epochs) for batch in loader]

    return on_each_rank(ranks, run)


def sharded(
    dataset=None,
    meshes=DP2,
    batch_size=4,
    shard_dims="dp",
    *,
    loader=None,
    **options,
):
    names = (
        "shuffle",
        "drop_last",
        "collate_fn",
        "num_workers",
        "batch_sampler",
    )
    given = {name: options.pop(name) for name in names if name in options}
    if loader is None:
        size = {} if "batch_sampler" in given else {"batch_size": batch_size}
        loader = DataLoader(
            Ids() if dataset is None else dataset, **size, **given
        )
    return paddle_shard.shard_dataloader(
        loader, meshes, shard_dims=shard_dims, **options
    )


# The mesh


@pytest.mark.processes
def test_import_and_patch_leave_paddles_meshes_as_they_are(tmp_path):
    # The process that runs it has imported this library before, and has made no mesh.
    script = """
import paddle, paddle.distributed as dist
import paddle_shard.loader.api
for name in ("ProcessMesh.get_rank_by_dim_and_process_id", "shard_dataloader"):
    found = dist
    for part in name.split("."):
        found = getattr(found, part)
    assert found.__module__.startswith("paddle."), name
paddle_shard.patch_paddle()
first = dist.ProcessMesh([[0]], ['dp', 'mp'])
paddle_shard.shard_dataloader(paddle.io.DataLoader([[0]], batch_size=1), first, shard_dims='dp')
meshes = first, dist.ProcessMesh([0, 1])
assert [one.unique_id for one in meshes] == [1, 2], 'Paddle counts meshes, and seeds by the number of each'
"""
    (tmp_path / "script.py").write_text(script)
    code, output, _ = run_script(tmp_path / "script.py", tmp_path / "run")
    assert code == 0, output


def test_newest_numpy_does_not_stop_it():
    assert epochs(sharded)[1] == [[2, 3], [6, 7]]
    four = mesh([[0, 1], [2, 3]], "dp", "mp")
    assert [
        four.get_rank_by_dim_and_process_id("mp", rank) for rank in range(5)
    ] == [
        0,
        1,
        0,
        1,
        -1,
    ]
    assert four.get_rank_by_dim_and_process_id(0, 3) == 1


def test_shard_0_goes_on_the_named_axis_not_on_axis_0():
    four = mesh([[0, 1], [2, 3]], "mp", "dp")

    def run():
        batch = next(iter(sharded(meshes=four)))
        return local(batch), placements(batch)

    got = on_each_rank(range(4), run)

    assert [got[rank][0] for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [0, 1],
        [2, 3],
    ]
    assert got[0][1] == ["Replicate()", "Shard(dim=0)"]


@pytest.mark.parametrize(
    ("size", "nearest"), [(5, "4 or 6"), (1, "2"), (3, "2 or 4")]
)
def test_batch_size_that_does_not_divide_is_refused_with_numbers(size, nearest):
    text = f"global batch of {size} cannot be split evenly over 2 data ranks. Nearest sizes that can: {nearest}."
    with pytest.raises(BatchSizeError, match=re.escape(text)):
        sharded(batch_size=size)


def test_misspelt_axis_is_named_with_the_nearest():
    with pytest.raises(AxisError, match=r"no axis 'DP'; its axes are \['dp'\]"):
        sharded(shard_dims="DP")


# Samplers


@pytest.mark.parametrize(
    ("make_sampler", "workers"),
    [
        (lambda: paddle.io.WeightedRandomSampler([0.1] * 4 + [0.9] * 4, 8), 2),
        (lambda: paddle.io.SubsetRandomSampler([1, 3, 5, 7]), 0),
        (
            lambda: paddle.io.RandomSampler(
                Ids(), replacement=True, num_samples=12
            ),
            0,
        ),
        (lambda: [7, 5, 3, 1], 2),
    ],
    ids=["weighted", "subset", "replacement", "list"],
)
def test_users_sampler_is_kept_and_shared_by_all_ranks(make_sampler, workers):
    def joined():
        per_rank = epochs(
            lambda: sharded(
                batch_sampler=BatchSampler(
                    sampler=make_sampler(), batch_size=4
                ),
                num_workers=workers,
            )
        )
        return [a + b for a, b in zip(per_rank[0], per_rank[1], strict=True)]

    # ranks draw from their own generators; the order must not depend on them
    np.random.seed(1)
    first = joined()
    np.random.seed(2)

    assert joined() == first
    drawn = {i for batch in first for i in batch}
    sampler = make_sampler()
    if isinstance(sampler, list):
        assert first == [[7, 5, 3, 1]]
    elif isinstance(sampler, paddle.io.SubsetRandomSampler):
        assert drawn == {1, 3, 5, 7}
    else:
        assert sum(map(len, first)) == sampler.num_samples


class Reversed(BatchSampler):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch[::-1]


class Duck:
    batches = ([5, 1], [2, 6, 0, 4], [3, 7])

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def test_batch_sampler_subclass_is_kept():
    got = epochs(lambda: sharded(batch_sampler=Reversed(Ids(), batch_size=4)))

    assert (got[0], got[1]) == ([[3, 2], [7, 6]], [[1, 0], [5, 4]])


def test_duck_typed_batch_sampler_may_change_its_sizes():
    got = epochs(lambda: sharded(batch_sampler=Duck()))

    assert (got[0], got[1]) == ([[5], [2, 6], [3]], [[1], [0, 4], [7]])


def test_batch_of_a_size_that_does_not_divide_raises_at_its_step():
    class Odd(Duck):
        batches = ([0, 1], [2, 3, 4], [5, 6])

    loader = sharded(batch_sampler=Odd())
    batches = iter(loader)
    assert local(next(batches)) == [0]
    with pytest.raises(
        BatchSizeError, match="batch of 3 .* step 1 of the batch_sampler Odd"
    ):
        next(batches)


# Steps and iterators


def test_drop_last_repeats_nothing_and_drops_only_the_tail():
    got = epochs(lambda: sharded(Ids(7), drop_last=True))

    assert (got[0], got[1]) == ([[0, 1]], [[2, 3]])


def test_zip_of_a_loader_with_itself_is_two_passes():
    loader = sharded(shuffle=True)

    pairs = [(local(a), local(b)) for a, b in zip(loader, loader)]  # noqa: B905

    assert len(pairs) == 2
    assert all(a == b for a, b in pairs)


def test_peek_inside_the_loop_does_not_restart_it():
    loader, seen = sharded(), []
    for batch in loader:
        next(iter(loader))
        next(loader())
        seen.append(local(batch))

    assert seen == [[0, 1], [4, 5]]


def test_peek_consumes_no_epoch():
    loader = sharded(Ids(64), shuffle=True)
    first = local(next(iter(loader)))

    assert local(next(iter(loader))) == first
    assert loader.epoch == 0


def test_order_follows_the_seed_and_the_epoch():
    def first(**options):
        return local(
            next(
                iter(
                    sharded(Ids(1000), batch_size=100, shuffle=True, **options)
                )
            )
        )

    assert first(seed=0) == first(seed=0) != first(seed=1)
    loader = sharded(Ids(1000), batch_size=100, shuffle=True)
    orders = []
    for epoch in (0, 5, 0):
        loader.set_epoch(epoch)
        orders.append([local(batch) for batch in loader])
    assert orders[0] == orders[2] != orders[1]
    assert loader.dataset.length == 1000


# Replicas


@pytest.mark.parametrize("workers", [0, 2])
def test_replicas_get_the_same_bytes_from_a_random_getitem(workers):
    def noise(_):
        return np.random.rand(3)

    def run():
        return [
            local(b)
            for b in sharded(
                Make(noise),
                mesh([[0, 1], [2, 3]], "dp", "mp"),
                num_workers=workers,
            )
        ]

    got = on_each_rank(range(4), run)

    assert got[0] == got[1] != got[2] == got[3]


def test_shuffled_loader_without_data_axes_is_alike_on_ranks():
    got = epochs(lambda: sharded(Ids(64), shuffle=True, shard_dims=None))

    assert got[0] == got[1]
    assert sorted(i for batch in got[0] for i in batch) == list(range(64))


def test_world_sized_distributed_batch_sampler_is_refused():
    four = mesh([[0, 1], [2, 3]], "dp", "mp")
    with simulated_rank(1, 4):
        sampler = DistributedBatchSampler(Ids(), 2)
        sampler.nranks, sampler.local_rank = 4, 1
        text = r"part local_rank=1 of nranks=4, but .* global rank 1 data rank 0 of 2\. Use num_replicas=2"
        with pytest.raises(SplitError, match=text):
            sharded(meshes=four, batch_sampler=sampler)


def test_distributed_batch_sampler_of_another_rank_is_refused():
    with simulated_rank(1, 2):
        sampler = DistributedBatchSampler(Ids(), 2, num_replicas=2, rank=0)
        with pytest.raises(
            SplitError,
            match="reads part local_rank=0 of nranks=2, but shard_dims gives global rank 1 data rank 1",
        ):
            sharded(batch_sampler=sampler)


# Data sets


def test_batch_size_none_serves_items_as_global_batches():
    items = [np.arange(4) + 10 * i for i in range(3)]
    got = epochs(lambda: sharded(Make(lambda i: items[i], 3), batch_size=None))

    assert got[0] == [[0, 1], [10, 11], [20, 21]]
    assert got[1] == [[2, 3], [12, 13], [22, 23]]


def test_item_batch_that_does_not_divide_raises_at_its_step():
    batches = iter(
        sharded(Make(lambda i: np.arange(4 - i), 2), batch_size=None)
    )
    next(batches)

    with pytest.raises(
        BatchStructureError, match="epoch 0, step 1: .* global batch of 3 rows"
    ):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_dataset_is_split_by_rows(workers):
    class Squares(paddle.io.IterableDataset):
        def __iter__(self):
            return iter([i * i for i in range(8)])

    def as_rank():
        return [
            batch._local_value().numpy().tolist()
            for batch in sharded(Squares(), num_workers=workers)
        ]

    slices = on_each_rank([0, 1], as_rank)

    assert slices == {0: [[0, 1], [16, 25]], 1: [[4, 9], [36, 49]]}


# Batches


def test_input_keys_choose_fields_and_name_those_left_out(caplog):
    both = Make(
        lambda i: {"x": np.array(i), "label": np.array(-i), "id": np.array(i)}
    )

    assert list(next(iter(sharded(both)))) == ["x", "label", "id"]
    for _ in range(2):
        assert list(next(iter(sharded(both, input_keys=["label", "x"])))) == [
            "label",
            "x",
        ]

    assert list(
        next(iter(sharded(both, [DP2, DP2], input_keys=["x", "label"])))
    ) == [
        "x",
        "label",
    ]
    said = [
        text
        for record in caplog.records
        if "left out" in (text := record.getMessage())
    ]
    assert said == [
        "input_keys=['label', 'x']: the keys ['id'] of the batch are left out.",
        "input_keys=['x', 'label']: the keys ['id'] of the batch are left out.",
    ]
    with pytest.raises(
        BatchStructureError,
        match="the batch has the 3 fields .* but meshes has 2 entries",
    ):
        next(iter(sharded(both, [DP2, DP2])))


def test_tensors_in_nested_dicts_are_distributed():
    nested = Make(
        lambda i: {"a": {"b": {"c": np.array(i)}}, "label": np.array(i)}
    )

    leaf = next(iter(sharded(nested)))["a"]["b"]["c"]

    assert leaf.is_dist()
    assert leaf.shape == [4]
    assert local(leaf) == [0, 1]


def test_leaves_that_are_no_tensors_pass_through():
    def collate(samples):
        return [
            np.array(samples),
            True,
            "text",
            None,
            {"n": "2"},
            ["one", "two"],
        ]

    batch = next(iter(sharded(collate_fn=collate)))

    assert local(batch[0]) == [0, 1]
    assert batch[1:] == [True, "text", None, {"n": "2"}, ["one", "two"]]


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize("workers", [0, 2])
def test_structure_of_the_source_is_kept(workers):
    def sample(i):
        return collections.OrderedDict(
            p=Point(np.array(i), [np.array(i), "s"]), t=(np.array(i),)
        )

    batch = next(iter(sharded(Make(sample), num_workers=workers)))

    assert type(batch) is dict, "as paddle.io.DataLoader has it"
    assert type(batch["p"]) is Point
    assert type(batch["p"].y) is list
    assert local(batch["p"].x) == [0, 1]
    assert batch["p"].y[1] == ["s", "s"]
    assert type(batch["t"]) is list, "as paddle.io.DataLoader has it"


def test_0d_field_is_an_error_not_a_crash():
    def collate(samples):
        return [np.array(samples), np.array(1.0)]

    with pytest.raises(
        BatchStructureError,
        match=r"epoch 0, step 0: field \[1\] has shape \[\] for 2 samples",
    ):
        next(iter(sharded(collate_fn=collate)))
    batch = next(
        iter(
            sharded(
                meshes=[DP2, DP2], shard_dims=["dp", None], collate_fn=collate
            )
        )
    )
    assert batch[1].shape == []


def test_collate_that_pads_to_a_fixed_length_is_taken():
    def pad(samples):
        return np.array([np.pad(s, (0, 8 - len(s))) for s in samples])

    assert next(
        iter(sharded(Make(lambda i: np.ones(i + 1)), collate_fn=pad))
    ).shape == [4, 8]


# Fields and meshes


@pytest.mark.parametrize(
    ("dims", "shared"), [(["dp", None], 1), ([None, "dp"], 0)]
)
def test_field_without_data_axes_is_the_whole_batch_on_all_ranks(dims, shared):
    pairs = Make(lambda i: (np.array(i), np.array(10 * i)))

    def run():
        batch = next(iter(sharded(pairs, [DP2, DP2], shard_dims=dims)))
        return (
            [local(leaf) for leaf in batch],
            [leaf.shape for leaf in batch],
            [placements(leaf) for leaf in batch],
        )

    got = on_each_rank(range(2), run)
    whole = [[0, 1, 2, 3], [0, 10, 20, 30]]

    for rank in range(2):
        leaves, shapes, placed = got[rank]
        assert shapes == [[4], [4]]
        assert leaves[shared] == whole[shared]
        assert leaves[1 - shared] == whole[1 - shared][2 * rank : 2 * rank + 2]
        assert placed[shared] == ["Replicate()"]
        assert placed[1 - shared] == ["Shard(dim=0)"]


def test_pipeline_stages_see_the_same_global_shape():
    first, last = mesh([0, 1, 2, 3], "dp"), mesh([[4, 5], [6, 7]], "dp", "mp")
    pairs = Make(lambda i: (np.array(i), np.array(i)), 16)

    def run():
        batch = next(iter(sharded(pairs, [first, last], 8)))
        rank = dist.get_rank()
        return [leaf.shape for leaf in batch], local(
            batch[0 if rank < 4 else 1]
        ) if rank < 8 else None

    # rank 8 is on neither mesh, as a middle stage is
    got = on_each_rank(range(9), run)

    assert all(got[rank][0] == [[8], [8]] for rank in range(9))
    assert [got[rank][1] for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert [got[rank][1] for rank in range(4, 8)] == [[0, 1, 2, 3]] * 2 + [
        [4, 5, 6, 7]
    ] * 2


# The user's objects


@pytest.mark.parametrize("workers", [0, 2])
def test_users_loader_is_never_changed(workers):
    given = DataLoader(Ids(), batch_size=4, num_workers=workers)
    before = (
        dict(vars(given)),
        dict(vars(given.batch_sampler)),
        dict(vars(given.dataset)),
    )

    for _ in sharded(loader=given):
        pass

    assert (
        vars(given),
        vars(given.batch_sampler),
        vars(given.dataset),
    ) == before
    assert [batch.numpy().tolist() for batch in given] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_to_static_does_not_move_the_order():
    pairs = Make(lambda i: (np.array(i), np.array(i)), 64)
    loader = sharded(pairs, shuffle=True)
    loader.set_epoch(3)
    expected = [local(x) for x, _ in loader]
    loader.set_epoch(3)

    paddle.distributed.auto_parallel.static.engine.Engine._prepare_data_spec_from_dataloader(
        FakeEngine(), loader
    )

    assert loader.epoch == 3
    assert [local(x) for x, _ in loader] == expected


class FakeEngine:
    def _validate_spec(self, specs):
        assert all(list(spec.shape) == [4] for spec in specs)
        return specs


# What Paddle's loader does that must be kept


def test_batch_cut_by_accumulation_holds_whole_micro_batches():
    def make():
        sampler = BatchSampler(Ids(16), batch_size=4)
        sampler._acc_steps = 2
        return sharded(batch_sampler=sampler, dataset=Ids(16))

    got = epochs(make)

    assert (got[0], got[1]) == (
        [[0, 1, 4, 5], [8, 9, 12, 13]],
        [[2, 3, 6, 7], [10, 11, 14, 15]],
    )


def test_auto_dp_mode_is_not_split_twice(monkeypatch):
    utils = pytest.importorskip(
        "paddle.distributed.auto_parallel.auto_dp_utils"
    )
    monkeypatch.setattr(utils, "_enable_auto_dp_mode", True)

    def run():
        loader = sharded()
        return [(local(batch), placements(batch)) for batch in loader]

    got = on_each_rank(range(2), run)

    assert [ids for ids, _ in got[0]] == [[0, 1], [4, 5]]
    assert [ids for ids, _ in got[1]] == [[2, 3], [6, 7]]
    assert got[0][0][1] == ["Replicate()"]


def test_integer_axes_unnamed_meshes_and_a_repeated_mesh():
    unnamed = dist.ProcessMesh([[0, 1], [2, 3]])
    pairs = Make(lambda i: (np.array(i), np.array(i)))

    def run():
        return [
            local(leaf)
            for leaf in next(
                iter(sharded(pairs, [unnamed, unnamed], shard_dims=1))
            )
        ]

    got = on_each_rank(range(4), run)

    assert [got[rank][0] for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [0, 1],
        [2, 3],
    ]


def test_several_axes_act_as_one():
    four = mesh([[0, 1], [2, 3]], "dp", "sharding")
    for dims in (("dp", "sharding"), ["sharding", "dp"], [["dp", "sharding"]]):
        got = on_each_rank(
            range(4),
            lambda dims=dims: local(
                next(iter(sharded(meshes=four, shard_dims=dims)))
            ),
        )
        assert [got[rank] for rank in range(4)] == [[0], [1], [2], [3]]


def test_input_keys_may_be_assigned_by_trainers():
    both = Make(lambda i: {"label": np.array(-i), "x": np.array(i)})
    with simulated_rank(1, 2):
        loader = sharded(both, [DP2, DP2])
        loader._input_keys = ["x", "label"]
        called = loader()

        for _ in range(2):  # called once, enumerated every epoch
            assert [list(batch) for _, batch in enumerate(called)] == [
                ["x", "label"]
            ] * 2

        sampler = loader._dataloader.batch_sampler
        assert isinstance(sampler, DistributedBatchSampler)
        assert (sampler.batch_size, sampler.nranks, sampler.local_rank) == (
            2,
            2,
            1,
        )
        assert indices_of(loader) == [[2, 3], [6, 7]]
        sampler.set_epoch(5)
        assert (loader.epoch, sampler.epoch, len(sampler)) == (5, 5, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_trainers_name_the_first_and_the_last_stage(nested):
    m0, m1 = mesh([0, 1], "dp"), mesh([2, 3], "dp")
    make = (
        (lambda i: ((np.array(i), np.array(i)), np.array(i)))
        if nested
        else (lambda i: (np.array(i),) * 2)
    )

    def run():
        return next(
            iter(sharded(Make(make), [[m0, m1], m1] if nested else [m0, m1]))
        )

    got = on_each_rank(range(4), run)

    x = got[3][0][1] if nested else got[3][1]
    assert x.process_mesh == m1
    with simulated_rank(3):
        assert local(x) == [2, 3]
    assert got[3][1].process_mesh == m1
    assert (got[0][0][0] if nested else got[0][0]).process_mesh == m0


def test_dense_tensor_idx_keeps_a_local_slice():
    pairs = Make(lambda i: ([np.array(i), np.array(i)], np.array(i)))
    with simulated_rank(1, 2):
        batch = next(iter(sharded(pairs, dense_tensor_idx=[[1], []])))

    assert batch[0][0].is_dist()
    assert not batch[0][1].is_dist()
    assert batch[0][1].numpy().tolist() == [2, 3]


def test_dense_tensor_idx_keeps_a_batch_that_is_one_tensor_local():
    with simulated_rank(1, 2):
        batch = next(iter(sharded(Make(np.array), dense_tensor_idx=[[0]])))

    assert not batch.is_dist()
    assert batch.numpy().tolist() == [2, 3]


def test_loader_that_is_sharded_already_is_refused():
    with pytest.raises(SplitError, match="sharded already"):
        sharded(loader=sharded())


def test_arguments_that_cannot_be_read():
    with pytest.raises(ArgumentError, match="meshes must hold at least one"):
        sharded(meshes=[])
    with pytest.raises(
        ArgumentError, match="an empty data set cannot be sharded"
    ):
        sharded(
            loader=DataLoader(
                Ids(1), batch_sampler=BatchSampler(Ids(0), batch_size=2)
            )
        )
    with pytest.raises(
        ArgumentError, match="is_dataset_splitted=True needs shard_dims"
    ):
        sharded(shard_dims=None, is_dataset_splitted=True)
    with pytest.raises(
        TypeError, match=r"must be a paddle\.io\.DataLoader, .* got ndarray"
    ):
        sharded(loader=np.arange(4))
    with pytest.raises(
        ArgumentError, match="shard_dims: the mesh has no axis None"
    ):
        sharded(shard_dims=["dp", None])
    with pytest.raises(
        BatchStructureError, match="input_keys: 'y' is not in the batch"
    ):
        next(
            iter(sharded(Make(lambda i: {"x": np.array(i)}), input_keys=["y"]))
        )
