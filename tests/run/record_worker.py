"""One job of a run with a record: does what it is told, and writes down each id that it is given, at once."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import paddle.distributed as dist
from paddle.io import BatchSampler, DataLoader

import paddle_shard
from paddle_shard import Mixture, Stream
from paddle_shard.testing import report
from tests.helpers import Made

SOURCES = {"web": 40, "code": 11, "chat": 3}


def data_of(kind, broken):
    if kind == "mixture":
        sources = {
            name: Made(lambda i, at=at: np.array([1000 * at + i]), length)
            for at, (name, length) in enumerate(SOURCES.items())
        }
        weights = [
            (0, {"web": 5, "code": 3, "chat": 1}),
            (32, {"web": 1, "code": 0, "chat": 1}),
        ]
        return Mixture(sources, weights, num_samples=96)
    if kind == "stream":
        return (
            Stream.of(lambda: (np.array([i]) for i in range(64)))
            .sharding_filter()
            .in_parts(4)
        )

    def row(i):
        if i in broken:
            raise ValueError("damaged")
        return np.array([i])

    return Made(row, int(kind))


def loader_of(job, mesh):
    data, options = (
        data_of(job["data"], job.get("broken", ())),
        dict(job.get("options", {})),
    )
    if "balance" in options:
        options["balance"] = np.arange(len(data)) % 7
    if job["data"] == "stream":
        given = DataLoader(data, batch_size=job["batch_size"])
    elif job.get("own_sampler"):
        sampler = BatchSampler(
            sampler=list(range(len(data)))[::-1], batch_size=job["batch_size"]
        )
        given = DataLoader(data, batch_sampler=sampler)
    else:
        sampler = BatchSampler(data, batch_size=job["batch_size"], shuffle=True)
        sampler._acc_steps = job.get("accumulation", 1)
        given = DataLoader(data, batch_sampler=sampler)
    return paddle_shard.shard_dataloader(
        given,
        mesh,
        shard_dims=job["dims"],
        seed=5,
        record=job["record"],
        **options,
    )


def main(path):
    job = json.loads(Path(path).read_text())
    rank = dist.get_rank()
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    mesh = dist.ProcessMesh(job["mesh"], dim_names=job["names"])
    loader, folder = loader_of(job, mesh), Path(path).parent
    with open(f"{path}.rank-{rank}.jsonl", "w", buffering=1) as log:
        do(job, loader, folder, log)
    report(
        {
            "exact": None
            if job["data"] == "stream"
            else bool(loader.certificate().exact)
        }
    )
    if dist.get_world_size() > 1:
        dist.barrier()


def do(job, loader, folder, log):
    batches = None
    for action, given in job["does"]:
        if action == "take":
            batches = iter(loader) if batches is None else batches
            for _ in range(given):
                try:
                    batch = next(batches)
                except StopIteration:
                    batches = None
                    break
                ids, valid = (
                    one._local_value().numpy().reshape(-1).tolist()
                    for one in (batch, batches.valid)
                )
                print(
                    json.dumps([batches.epoch, batches.step - 1, ids, valid]),
                    file=log,
                )
        elif action == "leave":
            batches = None
        elif action == "save":
            if job.get("certificates"):
                loader.certificate()
            state = loader.state_dict()
            if dist.get_rank() == 0:
                Path(folder, given).write_text(json.dumps(state))
        elif action == "load":
            batches = None
            loader.load_state_dict(json.loads(Path(folder, given).read_text()))
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "python":
            exec(
                given,
                {
                    "loader": loader,
                    "state": json.loads(Path(folder, "state").read_text()),
                },
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
