"""Read Hugging Face `datasets`, streamed and with an index, by 2 workers in each process.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/sources/huggingface.py

Needs `pip install 'paddle_shard[huggingface]'`; nothing is downloaded. Every rank asserts that each sample is delivered
exactly once an epoch by either, that the two epochs differ, and that a stream that its user has split by node already
is refused.
"""

import itertools

import datasets
import numpy as np
import paddle
import paddle.distributed as dist
from datasets.distributed import split_dataset_by_node

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import SplitError

BATCH_SIZE, WORKERS, SAMPLES = 16, 2, 500


def make(data, mesh, shuffle=None):
    loader = paddle.io.DataLoader(
        data, batch_size=BATCH_SIZE, num_workers=WORKERS
    )
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims="dp", shuffle=shuffle, seed=5
    )


def ids_of(loader):
    """The ids that all ranks together get in an epoch."""
    batches = iter(loader)
    found = [
        paddle_shard.gather_valid(batch["id"], batches.valid).tolist()
        for batch in batches
    ]
    return list(itertools.chain(*found))


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    indexed = datasets.Dataset.from_dict(
        {"id": list(range(SAMPLES))}
    ).with_format("numpy")
    # As load_dataset(..., streaming=True) gives it. Its own shuffle needs a seed: the same on every rank.
    streamed = indexed.to_iterable_dataset(num_shards=10).shuffle(
        seed=1, buffer_size=50
    )
    streamed = streamed.map(
        lambda sample: {"id": sample["id"], "square": sample["id"] ** 2}
    )
    loaders = {
        "streamed": make(Stream.huggingface(streamed), mesh),
        "indexed": make(indexed, mesh, shuffle=True),
    }
    for name, loader in loaders.items():
        epochs = [ids_of(loader) for _ in range(2)]
        for ids in epochs:
            assert sorted(ids) == list(range(SAMPLES)), (
                "each sample exactly once"
            )
        assert epochs[0] != epochs[1], "each epoch has an order of its own"
        if dist.get_rank() == 0:
            print(
                f"{name}: {dist.get_world_size()} ranks x {WORKERS} workers: each of {SAMPLES} samples exactly once; "
                f"epochs begin {[ids[:4] for ids in epochs]}"
            )
    try:
        Stream.huggingface(
            split_dataset_by_node(
                streamed, dist.get_rank(), dist.get_world_size()
            )
        )
    except SplitError as error:
        refused = str(error)
    assert "split_dataset_by_node" in refused
    dist.barrier()


if __name__ == "__main__":
    main()
