import paddle.distributed as dist
import pytest

from paddle_shard.errors import ArgumentError
from paddle_shard.testing import on_each_rank


def test_simulated_ranks_are_refused_in_a_real_job(
    monkeypatch,
):
    assert on_each_rank(range(2), lambda: dist.get_rank()) == {0: 0, 1: 1}
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)

    with pytest.raises(
        ArgumentError, match=r"a job of 2 ranks.*simulated in a single process"
    ):
        on_each_rank(range(2), lambda: dist.get_rank())
