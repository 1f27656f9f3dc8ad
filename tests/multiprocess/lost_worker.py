"""Ranks of which one is killed in a loop over a loader: `lost map|stream WORKERS LOOP VICTIM`; or before the first:
`early kill|end|refuse certificate|loop VICTIM`; or `stopped VICTIM`; or `unmet`; or `spawn`.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.errors import BatchSizeError, PaddleShardError, PeerLostError
from paddle_shard.testing import report

STEPS, KILLED_AT = 20, 5


class Numbers(paddle.io.IterableDataset):
    def __iter__(self):
        return (np.array(number) for number in range(8 * STEPS))


class NumbersAt(paddle.io.Dataset):
    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, index):
        return np.array(index)


def loader(kind, workers, *, timeout=1800.0, batch_size=8, **options):
    dataset = NumbersAt() if kind == "map" else Numbers()
    mesh = dist.ProcessMesh(
        list(range(dist.get_world_size())), dim_names=["dp"]
    )
    dataloader = paddle.io.DataLoader(
        dataset, batch_size=batch_size, num_workers=workers, **options
    )
    return paddle_shard.shard_dataloader(
        dataloader, mesh, shard_dims="dp", timeout=timeout
    )


def lost(kind, workers, loop, victim):
    """Report [loops that ended, whom it has lost, seconds after the kill]."""
    dist.init_parallel_env()
    mine, killed = (
        dist.get_rank() == int(victim),
        Path(os.environ["PADDLE_SHARD_REPORT_DIR"], "killed"),
    )
    batches = loader(kind, int(workers))
    done = 0
    try:
        for number in (1, 2):
            for step, _ in enumerate(batches):
                if mine and number == int(loop) and step == KILLED_AT:
                    killed.write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)
            done += 1
    except PeerLostError as error:
        report(
            [done, list(error.ranks), time.time() - float(killed.read_text())]
        )


def early(how, call, victim):
    """Report [whom a rank has lost in its first call, seconds], where another has ended since it made its loader."""
    dist.init_parallel_env()
    folder = Path(os.environ["PADDLE_SHARD_REPORT_DIR"])
    if dist.get_rank() == int(victim) and how == "refuse":
        with contextlib.suppress(PaddleShardError):
            loader("map", 0, batch_size=9)
    else:
        batches = loader("map", 0)
    (folder / f"made-{dist.get_rank()}").touch()
    while len(list(folder.glob("made-*"))) < dist.get_world_size():
        time.sleep(0.01)
    if dist.get_rank() == int(victim):
        time.sleep(0.5)  # the others wait by then
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)  # Paddle's own groups would wait for the others
    began = time.monotonic()
    try:
        batches.certificate() if call == "certificate" else next(iter(batches))
    except PeerLostError as error:
        report([list(error.ranks), time.monotonic() - began])
    except (
        BatchSizeError
        # the rank whose loader was refused has said why, before it has ended
    ) as error:
        report(
            [
                [int(victim)]
                if f"global rank {victim}: its shard_dataloader() failed"
                in str(error)
                else str(error),
                time.monotonic() - began,
            ]
        )
    os._exit(0)


def stopped(victim):
    """Report [whom a rank has waited for in vain, seconds], where one is stopped and all exchange what they know."""
    dist.init_parallel_env()
    list(loader("map", 0, timeout=40.0))
    batches = loader("map", 0, timeout=6.0)
    dist.barrier()
    if dist.get_rank() == int(victim):
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2.0)  # the others have begun an exchange in the background
    began = time.monotonic()
    try:
        batches.certificate()
    except PeerLostError as error:
        report([list(error.ranks), time.monotonic() - began])
    # Who has named it stays until the others have, whose time is over a little later: else they would name this rank.
    others, folder = (
        {*range(dist.get_world_size())} - {int(victim)},
        Path(os.environ["PADDLE_SHARD_REPORT_DIR"]),
    )
    while time.monotonic() < began + 30 and not all(
        (folder / f"rank-{rank}.json").exists() for rank in others
    ):
        time.sleep(0.05)
    os._exit(0)


def unmet():
    """The last rank ends while it looks for the others, which make no loader yet."""
    dist.init_parallel_env()
    if dist.get_rank():
        loader("map", 0)
        time.sleep(1.0)
        report("ended")
    else:
        time.sleep(3.0)  # it has Paddle's store
        report("ended")


def spawned():
    dist.init_parallel_env()
    # Here each worker is a new process that imports all again, too: one, for both epochs.
    batches = loader("stream", 1, persistent_workers=True)
    report(
        [
            [batch._local_value().numpy().tolist() for batch in batches]
            for _ in range(2)
        ]
    )
    dist.barrier()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        dist.spawn(spawned, nprocs=2, backend="gloo")
    else:
        {"lost": lost, "early": early, "stopped": stopped, "unmet": unmet}[
            sys.argv[1]
        ](*sys.argv[2:])
