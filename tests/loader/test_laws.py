"""The six laws, for every rank of random meshes; the ranks are simulated in this process."""

import itertools
import math

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import paddle_shard
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation
from paddle_shard.plan.tails import INDEX_TAILS, find_tail
from paddle_shard.testing.simulated import on_each_rank
from tests.orders_and_tails import BLOCKS, OF_ANY_MESH
from tests.strategies import layouts_with_data_axes
from tests.trials import trials


class Rows(paddle.io.Dataset):
    """Sample i is (a row made of i, random numbers, i), i counted from `first`."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        number = self.first + range(self.length)[index]
        return np.full(3, number, "float32"), np.random.rand(2), number


def process_mesh(layout):
    return dist.ProcessMesh(
        np.array(layout.process_ids).reshape(layout.shape),
        dim_names=list(layout.axes),
    )


def one_pass(loader):
    """What this rank gets in an epoch: [(local rows of each field, their global shapes, valid)]."""
    batches, out = iter(loader), []
    for batch in batches:
        local = [leaf._local_value().numpy() for leaf in batch]
        out.append(
            (
                local,
                [leaf.shape for leaf in batch],
                batches.valid._local_value().numpy(),
            )
        )
    return out


def mixture(length):
    """Three sources with other samples; the smallest is drawn several times."""
    sources = {"web": Rows(50), "code": Rows(7, 100), "chat": Rows(2, 200)}
    return paddle_shard.Mixture(
        sources, {"web": 5, "code": 3, "chat": 1}, num_samples=length
    )


def make(
    length,
    batch_size,
    mesh,
    axes,
    *,
    workers=0,
    accumulation=1,
    data=Rows,
    **options,
):
    if isinstance(options.get("shuffle"), bool):
        options["shuffle"], in_loader = None, options["shuffle"]
    else:
        in_loader = False
    dataset = data(length)
    sampler = paddle.io.BatchSampler(
        dataset, batch_size=batch_size, shuffle=in_loader
    )
    sampler._acc_steps = accumulation
    loader = paddle.io.DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers
    )
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims=axes, **options
    )


def data_coordinates(layout, axes):
    """{global rank: data coordinate}, by numpy's own idea of where a number stands in an array."""
    mesh = np.array(layout.process_ids).reshape(layout.shape)
    indices = sorted(layout.axes.index(axis) for axis in axes)
    return {
        rank: tuple(np.argwhere(mesh == rank)[0][indices])
        for rank in layout.process_ids
    }


def check_laws(
    layout, axes, length, multiple, tail, accumulation, workers=0, **options
):
    coordinates = data_coordinates(layout, axes)
    num_data_ranks = len(set(coordinates.values()))
    batch_size = num_data_ranks * multiple
    mesh, step_size = process_mesh(layout), batch_size * accumulation
    if find_tail(tail).drops and length < step_size:
        length += step_size
    if tail == "error":
        length = math.ceil(length / step_size) * step_size

    def as_rank():
        loader = make(
            length,
            batch_size,
            mesh,
            axes,
            tail=tail,
            workers=workers,
            accumulation=accumulation,
            **options,
        )
        batches = one_pass(loader)
        assert len(loader) == len(batches)
        return batches

    per_rank = on_each_rank(layout.process_ids, as_rank)
    # One process reads the same batches whole; only where micro-batches are a part of the order does it make them.
    micro = accumulation if options.get("shuffle") in (BLOCKS, "blocks") else 1
    one = dist.ProcessMesh([0], dim_names=["dp"])
    alone = on_each_rank(
        [0],
        lambda: one_pass(
            make(
                length,
                step_size // micro,
                one,
                "dp",
                tail="pad",
                accumulation=micro,
                **options,
            )
        ),
    )[0]

    steps = {len(batches) for batches in per_rank.values()}
    assert len(steps) == 1, "equal steps"
    (num_steps,) = steps
    delivered = []
    for step in range(num_steps):
        slices = {}
        for rank, batches in per_rank.items():
            local, shapes, valid = batches[step]
            found = slices.setdefault(coordinates[rank], (local, valid))
            for mine, theirs in zip(
                [*local, valid], [*found[0], found[1]], strict=True
            ):
                np.testing.assert_array_equal(
                    mine, theirs, err_msg="replicas agree"
                )
            rows = len(local[0]) * num_data_ranks
            assert [shape[0] for shape in shapes] == [rows] * 3, "global shape"
        ordered = [slices[coordinate] for coordinate in sorted(slices)]
        valid = in_row_order([valid for _, valid in ordered], accumulation)
        for field in range(3):
            rows = in_row_order(
                [local[field] for local, _ in ordered], accumulation
            )
            fields, _, real = alone[step]
            np.testing.assert_array_equal(
                rows[valid], fields[field][real], err_msg="global equivalence"
            )
        delivered.extend(
            in_row_order([local[2] for local, _ in ordered], accumulation)[
                valid
            ].tolist()
        )
        padding = int((~valid).sum())
        if tail == "pad":
            assert padding < num_data_ranks * accumulation
        elif tail == "fill":
            assert len(valid) == step_size
        assert padding == 0 or (find_tail(tail).pads and step == num_steps - 1)
        assert len(valid) % (num_data_ranks * accumulation) == 0
    dropped = length - len(delivered)
    assert dropped in (
        (0, length % step_size) if find_tail(tail).drops else (0,)
    ), "exact coverage"
    assert dropped == length % step_size or tail != "drop"
    if options.get("data") is mixture:
        assert (
            delivered
            == drawn_by_hand(options.get("shuffle"), options.get("seed", 0))[
                : len(delivered)
            ]
        )
    else:
        assert len(set(delivered)) == len(delivered)


def drawn_by_hand(shuffle, seed):
    """The samples of `mixture`: a source's next one wherever Tijdeman's sequence names it, epoch after epoch."""
    drawn, streams = [], []
    for name, length, first in (
        ("web", 50, 0),
        ("code", 7, 100),
        ("chat", 2, 200),
    ):

        def stream(name=name, length=length, first=first):
            for epoch in itertools.count():
                order = np.arange(length)
                if shuffle:
                    order = Permutation(
                        length, derive_key("source", name, seed, epoch, size=64)
                    )(order)
                yield from (first + order).tolist()

        streams.append(stream())
    for source in itertools.islice(
        itertools.cycle([0, 1, 0, 1, 0, 0, 2, 0, 1]), 1000
    ):
        drawn.append(next(streams[source]))
    return drawn


def in_row_order(slices, accumulation):
    """Undo the split: [data rank][micro-batch, rows] -> the rows of the global batch in order."""
    parts = [np.array_split(rows, accumulation) for rows in slices]
    return np.concatenate(
        [
            parts[rank][micro]
            for micro in range(accumulation)
            for rank in range(len(parts))
        ]
    )


@settings(max_examples=trials(40))
@given(
    mesh=layouts_with_data_axes(),
    length=st.integers(1, 60),
    multiple=st.integers(1, 3),
    tail=st.sampled_from(INDEX_TAILS),
    accumulation=st.integers(1, 3),
    shuffle=st.sampled_from([*OF_ANY_MESH, "blocks"]),
    seed=st.integers(0, 3),
)
def test_loader_gives_the_batches_of_one_process_on_any_mesh(
    mesh, length, multiple, tail, accumulation, shuffle, seed
):
    check_laws(
        *mesh, length, multiple, tail, accumulation, shuffle=shuffle, seed=seed
    )


@settings(max_examples=trials(25))
@given(
    mesh=layouts_with_data_axes(),
    length=st.integers(1, 60),
    multiple=st.integers(1, 3),
    tail=st.sampled_from(INDEX_TAILS),
    accumulation=st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_loader_gives_the_batches_of_a_mixture_on_any_mesh(
    mesh, length, multiple, tail, accumulation, shuffle, seed
):
    check_laws(
        *mesh,
        length,
        multiple,
        tail,
        accumulation,
        shuffle=shuffle,
        seed=seed,
        data=mixture,
    )


@settings(max_examples=trials(6))
@given(
    mesh=layouts_with_data_axes(max_ranks=4),
    length=st.integers(1, 30),
    shuffle=st.sampled_from(OF_ANY_MESH),
)
def test_loader_with_workers_gives_the_batches_of_one_process(
    mesh, length, shuffle
):
    check_laws(*mesh, length, 2, "pad", 1, workers=2, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", OF_ANY_MESH)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 2), ("mp", "dp")), ((2, 2, 2), ("dp", "mp", "sharding"))],
)
def test_order_is_that_of_the_run_not_of_the_mesh(shape, axes, shuffle):
    mesh = dist.ProcessMesh(
        np.arange(math.prod(shape)).reshape(shape), dim_names=list(axes)
    )
    other = dist.ProcessMesh([0], dim_names=["dp"])

    def joined(mesh):
        per_rank = on_each_rank(
            mesh.process_ids,
            lambda: one_pass(make(24, 8, mesh, "dp", shuffle=shuffle)),
        )
        size = mesh.get_dim_size("dp")
        at = mesh.dim_names.index("dp")
        leaders = [
            int(np.take(mesh.mesh, r, axis=at).flat[0]) for r in range(size)
        ]
        return [
            np.concatenate(
                [per_rank[rank][step][0][2] for rank in leaders]
            ).tolist()
            for step in range(3)
        ]

    assert joined(mesh) == joined(other)


@pytest.mark.parametrize("shuffle", [True, BLOCKS])
def test_epochs_differ_in_order_and_each_repeats_its_own(shuffle):
    loader = make(
        50, 10, dist.ProcessMesh([0], dim_names=["dp"]), "dp", shuffle=shuffle
    )
    ids = [
        np.concatenate([local[2] for local, _, _ in one_pass(loader)]).tolist()
        for _ in range(3)
    ]

    loader.set_epoch(1)
    again = np.concatenate(
        [local[2] for local, _, _ in one_pass(loader)]
    ).tolist()

    assert again == ids[1]
    assert len({tuple(order) for order in ids}) == 3


def test_blocks_are_read_by_one_data_rank_but_at_borders():
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    per_rank = on_each_rank(
        range(4), lambda: one_pass(make(240, 8, mesh, "dp", shuffle=BLOCKS))
    )

    first, second = (
        {
            int(i) // BLOCKS.size
            for local, *_ in per_rank[rank]
            for i in local[2]
        }
        for rank in (0, 2)
    )
    assert len(first | second) == 80
    assert len(first & second) <= 1


def test_data_set_may_say_how_large_its_blocks_are():
    class Chunks(Rows):
        block_size = 16

    def loader(dataset, **options):
        given = paddle.io.DataLoader(dataset, batch_size=8)
        return paddle_shard.shard_dataloader(
            given, dist.ProcessMesh([0]), shard_dims=0, **options
        )

    assert loader(
        Chunks(40), shuffle="blocks"
    ).plan.ordering == paddle_shard.Blocks(size=16)
    assert loader(Chunks(40), shuffle=BLOCKS).plan.ordering == BLOCKS
    assert (
        loader(Rows(40), shuffle="blocks").plan.ordering
        == paddle_shard.Blocks()
    )
    Chunks.block_size = None
    with pytest.raises(
        ArgumentError,
        match="Blocks: size must be an int >= 1 .*block_size.*, got None",
    ):
        loader(Chunks(40), shuffle="blocks")
    with pytest.raises(
        ArgumentError, match="shuffle must be one of .*Blocks, got"
    ):
        loader(Rows(40), shuffle="block")


def test_whole_batches_of_a_data_set_may_be_shuffled_in_blocks():
    class Whole(paddle.io.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return np.full((4, 1), index)

    given = paddle.io.DataLoader(Whole(), batch_size=None)
    loader = paddle_shard.shard_dataloader(
        given, dist.ProcessMesh([0]), shard_dims=0, shuffle=BLOCKS
    )
    leaves = [
        batch if isinstance(batch, paddle.Tensor) else batch[0]
        for batch in loader
    ]
    items = [int(leaf._local_value().numpy()[0, 0]) for leaf in leaves]

    assert sorted(items) == list(range(20)) != items
    windows = [{item // 3 for item in items[at : at + 6]} for at in (0, 6)]
    assert all(len(window) <= 3 for window in windows), (
        "two blocks of 3, or of 2 at the end"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_random_samples_depend_on_seed_epoch_and_sample_alone(workers):
    mesh = dist.ProcessMesh([0], dim_names=["dp"])

    def numbers(batch_size, seed=0, epoch=0, workers=0):
        loader = make(12, batch_size, mesh, "dp", workers=workers, seed=seed)
        loader.set_epoch(epoch)
        return np.concatenate([local[1] for local, _, _ in one_pass(loader)])

    np.testing.assert_array_equal(numbers(4), numbers(3, workers=workers))
    different = [numbers(4), numbers(4, seed=1), numbers(4, epoch=1)]
    for one, two in itertools.combinations(different, 2):
        assert not np.any(one == two)
    assert len(np.unique(numbers(4))) == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_users_generators_are_not_disturbed(workers):
    import random

    np.random.seed(1)
    random.seed(2)
    paddle.seed(3)
    expected = np.random.rand(), random.random(), float(paddle.rand([1])[0])

    np.random.seed(1)
    random.seed(2)
    paddle.seed(3)
    loader = paddle.io.DataLoader(
        Rows(20),
        batch_sampler=paddle.io.BatchSampler(
            sampler=paddle.io.WeightedRandomSampler([1.0] * 20, 20),
            batch_size=5,
        ),
        num_workers=workers,
    )
    for _ in paddle_shard.shard_dataloader(
        loader, dist.ProcessMesh([0]), shard_dims=0
    ):
        pass

    assert (
        np.random.rand(),
        random.random(),
        float(paddle.rand([1])[0]),
    ) == expected


test_loader_gives_the_batches_of_one_process_on_any_mesh = example(
    mesh=(
        paddle_shard.MeshLayout(
            shape=(2, 2), axes=("mp", "dp"), process_ids=(0, 1, 2, 3)
        ),
        ("dp",),
    ),
    length=5,
    multiple=2,
    tail="pad",
    accumulation=2,
    shuffle=False,
    seed=0,
)(test_loader_gives_the_batches_of_one_process_on_any_mesh)
