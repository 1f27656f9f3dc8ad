"""Read Grain's data sets: a MapDataset by index, by 2 workers in each process, and an IterDataset by its own state.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/sources/grain_data.py

Needs `pip install 'paddle_shard[grain]'`. Every rank asserts that each element is delivered exactly once an epoch by
either, and that a run that stops after 5 steps goes on as if it had not.
"""

import itertools

import grain
import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard

BATCH_SIZE, WORKERS, ELEMENTS = 16, 2, 320


def by_index(mesh):
    dataset = grain.MapDataset.range(ELEMENTS).map(
        lambda i: {"id": i, "square": i * i}
    )
    loader = paddle.io.DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=WORKERS
    )
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims="dp", shuffle=True, seed=5
    )


def by_its_own_iterator(mesh):
    def build(share):
        shuffled = (
            grain.MapDataset.range(ELEMENTS)
            .seed(share.seed + share.epoch)
            .shuffle()
        )
        mine = shuffled[share.shard :: share.num_shards].map(
            lambda i: {"id": i, "square": i * i}
        )
        batches = iter(
            mine.to_iter_dataset().batch(BATCH_SIZE // share.num_shards)
        )
        if share.state is not None:
            batches.set_state(share.state)
        return batches

    loader = paddle_shard.ExternalLoader(
        build,
        name="grain",
        save=lambda batches: batches.get_state(),
        repeatable=True,
    )
    return paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp", seed=5)


def ids_of(loader, steps=None):
    """The ids that all ranks together get, batch by batch."""
    batches, found = iter(loader), []
    for batch in itertools.islice(batches, steps):
        ids, squares = (
            paddle_shard.gather_valid(batch[key], batches.valid)
            for key in ("id", "square")
        )
        assert (squares == ids**2).all()
        found.append(ids.tolist())
    return found


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    for make in (by_index, by_its_own_iterator):
        loader = make(mesh)
        epochs = [ids_of(loader) for _ in range(2)]
        for epoch in epochs:
            assert sorted(itertools.chain(*epoch)) == list(range(ELEMENTS)), (
                "each element exactly once"
            )
        assert epochs[0] != epochs[1], "each epoch has an order of its own"

        stopped = make(mesh)
        begun = ids_of(stopped, 5)
        resumed = make(mesh)
        resumed.load_state_dict(stopped.state_dict())
        assert begun + ids_of(resumed) == epochs[0], "resumed equals straight"
        if dist.get_rank() == 0:
            print(
                f"{make.__name__}: {len(epochs[0])} steps on {dist.get_world_size()} ranks: each of {ELEMENTS} "
                f"elements exactly once, resumed at 5; epochs begin {[epoch[0][:4] for epoch in epochs]}"
            )
    dist.barrier()


if __name__ == "__main__":
    main()
