"""How is each loader of the comparison made?

All read the same data set in random order, with the same global batch. Paddle's own loader gets this library's order,
as lists that are made before; the others cannot be given one and shuffle with their own. What they yield: this library
and `dist.shard_dataloader` distributed tensors, the others local ones of a rank's rows, Grain numpy arrays. With no
loader at all a batch is gathered and made a tensor, its indices at hand: the limit of what can be had on one thread.
"""

import numpy as np
from common import package_version

OURS, BATCHED = "paddle_shard, per sample", "paddle_shard, batched"
PADDLE, SHARDED = "paddle.io.DataLoader", "dist.shard_dataloader"
TORCH, GRAIN = "torch DataLoader", "grain DataLoader"
BARE = "no loader: __getitems__ and to_tensor"
READ_AHEAD = 32
"""Steps beyond those that are measured, so that a loader reads ahead to the last."""
PEERS = (OURS, BATCHED, PADDLE, BARE, SHARDED, TORCH, GRAIN)


def why_not(peer, workers=0):
    """Why a peer is left out, or None."""
    if peer == BARE and workers:
        return "has no workers"
    package = {TORCH: "torch", GRAIN: "grain"}.get(peer)
    if package is not None and package_version(package) is None:
        return "skipped: not installed"
    if peer == SHARDED and tuple(map(int, np.__version__.split(".")[:2])) >= (
        2,
        4,
    ):
        return f"skipped: fails on numpy {np.__version__}, works below 2.4"
    return None


def sharded(dataset, work_batch_size, workers, mesh, **options):
    """This library's loader."""
    import paddle

    import paddle_shard

    given = paddle.io.DataLoader(
        dataset, batch_size=work_batch_size, shuffle=True, num_workers=workers
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", **options
    )


def batch_sampler(plan, rank, steps):
    """A batch sampler for Paddle's loader, with a rank's part of the first batches of a plan."""
    import paddle

    batches = [
        plan.indices(epoch=0, step=step, data_rank=rank).tolist()
        for step in range(steps)
    ]

    class Given(paddle.io.BatchSampler):
        def __init__(self):
            self.batch_size, self.drop_last = len(batches[0]), True

        def __iter__(self):
            return iter(batches)

        def __len__(self):
            return steps

    return Given()


def open_pass(peer, work, rows, workers, mesh, rank, num_ranks):
    """Start an epoch; returns an iterator over its batches."""
    import paddle
    import paddle.distributed as dist

    import paddle_shard

    if peer == OURS:
        return iter(sharded(rows, work.batch_size, workers, mesh))
    if peer == BATCHED:
        return iter(
            sharded(
                paddle_shard.ArrayDataset(rows.rows),
                work.batch_size,
                workers,
                mesh,
            )
        )
    if peer in (PADDLE, BARE):
        plan = sharded(rows, work.batch_size, 0, mesh).plan
        given = batch_sampler(
            plan,
            rank,
            min(work.passed + work.steps + READ_AHEAD, plan.num_steps),
        )
        if peer == BARE:
            place, dataset = (
                paddle.CPUPlace(),
                paddle_shard.ArrayDataset(rows.rows),
            )
            return (
                paddle.to_tensor(dataset.__getitems__(indices), place=place)
                for indices in given
            )
        return iter(
            paddle.io.DataLoader(rows, batch_sampler=given, num_workers=workers)
        )
    if peer == SHARDED:
        given = paddle.io.DataLoader(
            rows, batch_size=work.batch_size, shuffle=True, num_workers=workers
        )
        return iter(dist.shard_dataloader(given, mesh, shard_dims="dp"))
    local = work.batch_size // num_ranks
    if peer == TORCH:
        from torch.utils.data import DataLoader, DistributedSampler

        order = DistributedSampler(rows, num_ranks, rank, shuffle=True)
        return iter(
            DataLoader(
                rows, batch_size=local, sampler=order, num_workers=workers
            )
        )
    import grain.python as grain

    shard = grain.ShardOptions(rank, num_ranks, drop_remainder=True)
    order = grain.IndexSampler(
        len(rows), shard_options=shard, shuffle=True, num_epochs=1, seed=0
    )
    batch = grain.Batch(local, drop_remainder=True)
    # Without reading threads, which make it ten times slower on rows that are in memory.
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(
        grain.DataLoader(
            data_source=rows,
            sampler=order,
            operations=[batch],
            worker_count=workers,
            read_options=read,
        )
    )


def end_pass(iterator):
    """End the workers of a pass; those of Paddle's loaders and their threads would stay until the process ends."""
    inner = getattr(iterator, "iter", iterator)  # of `dist.shard_dataloader`
    getattr(inner, "close", getattr(inner, "_try_shutdown_all", lambda: None))()


def first_numbers(batch):
    """The first number of each of a rank's rows, whatever the loader yields."""
    local = batch
    while isinstance(local, list | tuple):
        local = local[0]
    if hasattr(local, "is_dist") and local.is_dist():
        local = local._local_value()
    return np.asarray(
        local.numpy() if hasattr(local, "numpy") else local
    ).reshape(len(local), -1)[:, 0]
