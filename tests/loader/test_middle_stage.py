"""A rank on none of the meshes gets metadata, and makes the same steps as the others."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.testing.simulated import on_each_rank

MIDDLE = 4
"""A rank of neither mesh."""


class Samples(paddle.io.Dataset):
    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.reads += 1
        return {
            "x": np.full((3, 4), index, "float32"),
            "name": f"s{index}",
            "y": index,
        }


def meshes():
    return [
        dist.ProcessMesh([0, 1], dim_names=["dp"]),
        dist.ProcessMesh([2, 3], dim_names=["dp"]),
    ]


def sharded(data, *, workers=0, **options):
    first, last = meshes()
    given = paddle.io.DataLoader(data, batch_size=4, num_workers=workers)
    options = {"tail": "drop", **options}
    return paddle_shard.shard_dataloader(
        given,
        [first, first, last],
        ["x", "name", "y"],
        shard_dims="dp",
        **options,
    )


def seen(loader):
    """For each step: the metadata of its tensors, and what `valid` is like."""
    batches, found = iter(loader), []
    for batch in batches:
        tensors = [batch["x"], batch["y"], batches.valid]
        found.append(
            [
                (
                    t.shape,
                    str(t.dtype),
                    str(t.placements),
                    t.process_mesh.process_ids,
                )
                for t in tensors
            ]
        )
    return found


@pytest.mark.parametrize(("workers", "tail"), [(0, "drop"), (2, "fill")])
def test_middle_stage_makes_the_same_steps_and_shapes(workers, tail):
    found = on_each_rank(
        range(5), lambda: seen(sharded(Samples(), workers=workers, tail=tail))
    )

    assert len(found[MIDDLE]) == (5 if tail == "drop" else 6)
    assert found[MIDDLE] == found[0]


def test_middle_stage_reads_at_most_a_row_a_step():
    def reads():
        data = Samples()
        loader = sharded(data, prefetch=0)
        return len(seen(loader)), data.reads

    [(steps, read)] = on_each_rank([MIDDLE], reads).values()
    # and two samples twice, for the identity of the data
    assert (steps, read <= steps + 4) == (
        5,
        True,
    )


def test_middle_stage_of_a_stream_makes_the_same_steps():
    def steps():
        stream = Stream.of(range(40)).sharding_filter().map(sample)
        return seen(sharded(stream, num_batches=7, tail=None))

    def sample(index):
        return {"x": np.full((3, 4), index, "float32"), "name": "n", "y": index}

    found = on_each_rank([0, MIDDLE], steps)
    assert len(found[MIDDLE]) == 7
    assert [shapes[:2] for shapes in found[MIDDLE]] == [
        shapes[:2] for shapes in found[0]
    ]


def test_resuming_counts_the_same_steps():
    def rest():
        loader = sharded(Samples())
        batches = iter(loader)
        next(batches), next(batches)
        again = sharded(Samples())
        again.load_state_dict(loader.state_dict())
        return len(seen(again))

    assert on_each_rank([0, MIDDLE], rest) == {0: 3, MIDDLE: 3}
