"""A rank on none of the meshes gets metadata, and reads nothing if the batches are described."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.testing.simulated import on_each_rank

EXAMPLE = {"x": np.zeros((1, 3, 4), "float32"), "name": ["a name"], "y": np.zeros(1, "int64")}
MIDDLE = 4
"""A rank of neither mesh."""


class Samples(paddle.io.Dataset):
    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.reads += 1
        return {"x": np.full((3, 4), index, "float32"), "name": f"s{index}", "y": index}


def meshes():
    return [dist.ProcessMesh([0, 1], dim_names=["dp"]), dist.ProcessMesh([2, 3], dim_names=["dp"])]


def sharded(data, *, workers=0, **options):
    first, last = meshes()
    given = paddle.io.DataLoader(data, batch_size=4, num_workers=workers)
    options = {"tail": "drop", **options}
    return paddle_shard.shard_dataloader(given, [first, first, last], ["x", "name", "y"], shard_dims="dp", **options)


def seen(loader):
    """For each step: the metadata of its tensors, and what `valid` is like."""
    batches, found = iter(loader), []
    for batch in batches:
        tensors = [batch["x"], batch["y"], batches.valid]
        found.append([(t.shape, str(t.dtype), str(t.placements), t.process_mesh.process_ids) for t in tensors])
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["drop", "fill"])
def test_it_makes_the_same_steps_and_sees_the_same_shapes_without_a_read(workers, tail):
    data = Samples()
    described = on_each_rank(range(5), lambda: seen(sharded(data, workers=workers, describe=EXAMPLE, tail=tail)))
    plain = on_each_rank(range(5), lambda: seen(sharded(Samples(), tail=tail)))

    assert described == plain
    assert len(described[MIDDLE]) == (5 if tail == "drop" else 6)
    assert described[MIDDLE] == described[0]

    def alone():
        data.reads = 0
        loader = sharded(data, describe=EXAMPLE, tail=tail)
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert len(seen(loader)) == len(loader)
        return data.reads

    assert on_each_rank([MIDDLE], alone) == {MIDDLE: 0}


def test_of_a_stream_it_reads_no_part():
    read = []

    def sample(index):
        read.append(index)
        return {"x": np.full((3, 4), index, "float32"), "name": "n", "y": index}

    def steps(**options):
        read.clear()
        found = seen(sharded(Stream.of(range(40)).sharding_filter().map(sample), num_batches=7, tail=None, **options))
        return found, len(read)

    described, none = on_each_rank([MIDDLE], lambda: steps(describe=EXAMPLE))[MIDDLE]
    plain, some = on_each_rank([MIDDLE], steps)[MIDDLE]
    assert described == plain
    assert len(described) == 7
    assert (none, some > 0) == (0, True)


def test_resuming_counts_the_same_steps():
    def rest():
        loader = sharded(Samples(), describe=EXAMPLE)
        batches = iter(loader)
        next(batches), next(batches)
        again = sharded(Samples(), describe=EXAMPLE)
        again.load_state_dict(loader.state_dict())
        return len(seen(again))

    assert on_each_rank([0, MIDDLE], rest) == {0: 3, MIDDLE: 3}


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"x": np.zeros((2, 3, 4), "float32"), "y": np.zeros(2, "int32")}, "but this batch has float32[3, 4], int64[]"),
        ({"x": np.zeros((2, 3, 5), "float32"), "y": np.zeros(2, "int64")}, "rows of float32[3, 5], int64[]"),
        ({"x": np.zeros((2, 3, 4), "float32")}, "rows of float32[3, 4], but"),
    ],
)
def test_a_rank_that_reads_refuses_batches_that_are_not_as_described(example, says):
    with pytest.raises(BatchStructureError) as refused:
        on_each_rank([0], lambda: seen(sharded(Samples(), describe=example)))
    assert says in str(refused.value)
    assert "step 0" in str(refused.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"describe": {"x": np.zeros((2, 3)), "y": np.zeros(1)}}, "as many rows"),
        ({"describe": {"x": np.zeros((0, 3))}}, "at least one"),
        ({"describe": "a batch"}, "arrays or tensors"),
        ({"describe": EXAMPLE, "pad_to": "longest", "pad_values": {"x": 0}}, "pad_to= is given"),
    ],
)
def test_a_description_that_is_of_no_use_is_refused(how, says):
    with pytest.raises(ArgumentError, match=says):
        on_each_rank([0], lambda: sharded(Samples(), **how))


def test_a_stream_whose_end_is_not_known_cannot_be_described_to_a_rank_on_no_mesh():
    stream = Stream.of(iter([{"x": np.zeros((3, 4), "float32"), "name": "n", "y": 0}] * 8))
    with pytest.raises(ArgumentError, match="Give num_batches="):
        on_each_rank([MIDDLE], lambda: sharded(stream, describe=EXAMPLE))
