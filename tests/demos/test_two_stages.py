"""Do two stages train as one process does, and are meshes and activations that do not fit refused?"""

import sys
from pathlib import Path

import pytest

from paddle_shard.errors import ArgumentError

sys.path.insert(0, str(Path(__file__).parents[2] / "demos"))
from two_stages import Stages

WORKER = Path(__file__).with_name("two_stages_worker.py")
LAYOUTS = {8: ["docstring", "partial gradient"], 4: ["data parallel"]}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("docstring", 8), ("partial gradient", 8), ("data parallel", 4)],
)
def test_losses_are_those_of_one_process(name, num_ranks, run_case):
    reports = run_case(WORKER, num_ranks, name, LAYOUTS[num_ranks])

    assert sum(report["stage"] for report in reports) == num_ranks // 2
    for report in reports:
        expected = report["whole"] if report["stage"] == 1 else []
        assert report["losses"] == pytest.approx(expected, rel=1e-6)
        assert report["whole"] == pytest.approx(
            [231.17969, 394.97314, 388.04575, 358.34125], rel=1e-6
        )


def mesh(ids):
    import paddle.distributed as dist

    return dist.ProcessMesh(ids, dim_names=["x", "y"])


@pytest.fixture
def as_rank(monkeypatch):
    def set_rank(rank, num_ranks):
        import paddle.distributed as dist

        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: num_ranks)

    return set_rank


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ([[0, 1]], [[2], [3]], r"shapes \[1, 2\] and \[2, 1\]"),
        ([[0, 1]], [[1, 2]], r"ranks \[0, 1, 1, 2\]"),  # one rank twice
        # two ranks on none
        ([[0]], [[1]], r"each of the job's 4 must be on one"),
    ],
)
def test_meshes_whose_ranks_cannot_be_paired_are_refused(
    first, second, text, as_rank
):
    as_rank(0, 4)
    with pytest.raises(ArgumentError, match=text):
        Stages(mesh(first), mesh(second))


@pytest.mark.parametrize(
    ("rank", "index", "peer"), [(5, 0, 2), (0, 0, 3), (4, 1, 1), (2, 1, 5)]
)
def test_ranks_are_paired_by_position(rank, index, peer, as_rank):
    as_rank(rank, 6)

    stages = Stages(mesh([[5, 0, 1]]), mesh([[2, 3, 4]]))

    assert (stages.index, stages.peer) == (index, peer)


def test_call_of_the_other_stage_is_refused(as_rank):
    as_rank(1, 2)
    stages = Stages(mesh([[0]]), mesh([[1]]))

    with pytest.raises(
        ArgumentError,
        match="send_forward is for stage 0; this rank is on stage 1",
    ):
        stages.send_forward(None)


@pytest.mark.parametrize(
    ("ids", "rows", "partial", "text"),
    [
        ([[0, 1]], 2, True, "reshard the partial ones first"),
        ([[0, 1]], 3, False, "does not split evenly"),
        ([[0, 2]], 2, False, "this stage on"),
    ],
)
def test_activation_that_would_arrive_as_another_is_refused(
    ids, rows, partial, text, as_rank
):
    import paddle
    from paddle.distributed import Partial, Shard

    # what `send_forward` reads of a distributed tensor, which would need other processes
    class Activation:
        process_mesh, shape, ndim, dtype = (
            mesh(ids),
            [4, rows],
            2,
            paddle.float32,
        )
        placements = [Shard(0), Partial() if partial else Shard(1)]

    as_rank(0, 4)
    stages = Stages(mesh([[0, 1]]), mesh([[2, 3]]))
    with pytest.raises(ArgumentError, match=text):
        stages.send_forward(Activation())
