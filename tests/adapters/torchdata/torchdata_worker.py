"""Real ranks that read torchdata's loaders."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "demos/adapters"))
from observe import loader_of, main, observe, refusal, steps_of
from torchdata_recipe import stateful_dataloader, torchdata_loader

LENGTH = 23


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, i):
        flags = np.array([i % 2, 1], bool)
        return np.full(3, i / 7, "float32"), flags, torch.rand(2), np.int64(i)


def as_arrays(samples):
    return [
        np.stack([np.asarray(sample[field]) for sample in samples])
        for field in range(2)
    ]


def unequal(share, split=True):
    """Nodes: data rank 0 reads 5 samples, the other 18."""
    order = torch.randperm(
        LENGTH,
        generator=torch.Generator().manual_seed(share.seed * 100 + share.epoch),
    ).tolist()
    mine = order[:5] if share.shard == 0 else order[5:]
    assert share.num_shards == 2 or not split
    samples = nodes.Mapper(nodes.SamplerWrapper(mine), Still().__getitem__)
    root = nodes.Mapper(nodes.Batcher(samples, 4, drop_last=False), as_arrays)
    return nodes.Loader(nodes.Prefetcher(root, prefetch_factor=2))


def distributed(share, **ranks):
    assert share.shard in range(share.num_shards)
    sampler = DistributedSampler(Samples(), **ranks)
    return StatefulDataLoader(Samples(), batch_size=3, sampler=sampler)


def weighted(share, **ranks):
    assert share.shard in range(share.num_shards)
    sources = {name: nodes.IterableWrapper(range(9)) for name in "ab"}
    return nodes.Batcher(
        nodes.MultiNodeWeightedSampler(sources, {"a": 1.0, "b": 1.0}, **ranks),
        3,
    )


def first_step(build):
    return refusal(lambda: steps_of(loader_of(torchdata_loader(build)), 1))


def observed():
    dataset = Samples()
    found = {
        "plain": observe(lambda: stateful_dataloader(dataset, batch_size=6)),
        "shuffled": observe(
            lambda: stateful_dataloader(dataset, batch_size=6, shuffle=True)
        ),
        "nodes": observe(lambda: torchdata_loader(unequal)),
    }
    workers = partial(
        stateful_dataloader, Still(), batch_size=6, shuffle=True, num_workers=2
    )
    found["workers"] = observe(workers)
    found["refused"] = {
        "share not read": first_step(
            lambda share: nodes.Batcher(nodes.IterableWrapper(range(9)), 3)
        ),
        "world's ranks": first_step(
            partial(distributed, num_replicas=4, rank=0)
        ),
        "fallback": first_step(weighted),
        "not a loader": first_step(
            lambda share: [share.shard, share.num_shards]
        ),
        "batch size": refusal(
            lambda: steps_of(
                loader_of(stateful_dataloader(dataset, batch_size=5)), 1
            )
        ),
        "sampler": refusal(
            lambda: stateful_dataloader(dataset, batch_size=6, sampler=[1])
        ),
        "iterable": refusal(
            lambda: stateful_dataloader(iter([1]), batch_size=6)
        ),
    }
    return found


class Still(Samples):
    """Without torch's random numbers, which its workers do not take up again."""

    def __getitem__(self, i):
        return np.full(3, i / 7, "float32"), np.int64(i)


if __name__ == "__main__":
    main(observed)
