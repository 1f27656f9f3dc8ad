from pathlib import Path

import paddle
import pytest
import torch

import paddle_shard
from paddle_shard.testing import run_ranks
from tests.adapters.claims import check

WORKER = Path(__file__).parent / "torchdata_worker.py"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_torchdata_keeps_every_claim(num_ranks, tmp_path):
    reports = run_ranks(WORKER, num_ranks, tmp_path, timeout=300)

    check(reports, "plain", range(23), shuffled=False)
    check(reports, "shuffled", range(23), shuffled=True)
    check(reports, "workers", range(23), shuffled=True)
    check(reports, "nodes", range(23), shuffled=True)
    for report in reports:
        refused = report["refused"]
        assert (
            "neither share.shard nor share.num_shards"
            in refused["share not read"]
        )
        assert (
            "num_replicas=4, but this process is data rank"
            in refused["world's ranks"]
        )
        assert (
            "the MultiNodeWeightedSampler has rank=0 and world_size=1"
            in refused["fallback"]
        )
        assert "got list" in refused["not a loader"]
        assert (
            "cannot be split evenly over 2 data ranks" in refused["batch size"]
        )
        assert refused["sampler"].startswith(
            "ArgumentError: stateful_dataloader: sampler"
        )
        assert "dataset must have a length and an index" in refused["iterable"]


class Noisy(torch.utils.data.IterableDataset):
    """Splits itself among the workers as torch's own guide does it, and draws."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return (
            row + 0.5 * torch.rand(()).item()
            for row in range(info.id, 103, info.num_workers)
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_iterable_that_splits_itself_is_read_once(workers):
    mesh = paddle.distributed.ProcessMesh([0], dim_names=["dp"])
    given = paddle.io.DataLoader(
        paddle_shard.Stream.of(Noisy(), splits_itself=True),
        batch_size=16,
        num_workers=workers,
    )
    batches = iter(paddle_shard.shard_dataloader(given, mesh, shard_dims="dp"))
    rows = [
        int(row)
        for batch in batches
        for row in paddle_shard.gather_valid(batch, batches.valid).numpy()
    ]

    assert sorted(rows) == list(range(103))
    assert torch.utils.data.get_worker_info() is None


def test_torchs_samplers_draw_by_the_seed_and_are_resumed():
    data = list(range(48))
    mesh = paddle.distributed.ProcessMesh([0], dim_names=["dp"])

    def made():
        sampler = paddle.io.BatchSampler(
            sampler=torch.utils.data.RandomSampler(data), batch_size=8
        )
        given = paddle.io.DataLoader(data, batch_sampler=sampler)
        return paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", seed=5
        )

    straight = [batch.numpy().tolist() for batch in made()]
    loader = made()
    batches = iter(loader)
    begun = [next(batches).numpy().tolist() for _ in range(2)]
    other = made()
    other.load_state_dict(loader.state_dict())

    assert begun + [batch.numpy().tolist() for batch in other] == straight
    assert sorted(row for batch in straight for row in batch) == data
