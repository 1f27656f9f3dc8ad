"""dp x mp on four ranks, of which some read other data than their replicas: what `verify=` says on each rank."""

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing import report

RANK = dist.get_rank()


class Samples(paddle.io.Dataset):
    """Fields "image" and "label"; `wrong` are the samples of which this rank has another image."""

    def __init__(self, wrong=(), noise=None):
        self.wrong, self.noise = wrong, noise

    def __len__(self):
        return 32

    def __getitem__(self, index):
        image = np.full(3, index + 0.5 * (index in self.wrong), "float32")
        return {
            "image": image + (self.noise.random() if self.noise else 0),
            "label": index,
        }


def sharded(
    data, *, workers=0, size=8, replicas=True, collate_fn=None, **options
):
    ids = [[0, 1], [2, 3]] if replicas else [[0], [1], [2], [3]]
    mesh = dist.ProcessMesh(ids, dim_names=["dp", "mp"])
    given = paddle.io.DataLoader(
        data, batch_size=size, num_workers=workers, collate_fn=collate_fn
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", **options
    )


def steps_of(loader):
    """The number of steps, and the error, if there is one."""
    steps = 0
    try:
        for _ in loader:
            steps += 1
    except PaddleShardError as error:
        return [steps, f"{type(error).__name__}: {error}"]
    return [steps, ""]


def numbers(wrong):
    return (
        Stream.of(lambda: iter(range(32)))
        .sharding_filter()
        .map(lambda i: np.array(i + 100 * (i in wrong)))
    )


def whole(wrong):
    return [np.full((4, 2), i + 100 * (i in wrong)) for i in range(6)]


class Seeded(Samples):
    """Draws from generators that are seeded for each sample."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "noise": np.random.rand()}


class Items(paddle.io.Dataset):
    """Whole batches."""

    def __init__(self, wrong):
        self.wrong = wrong

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {
            "image": np.arange(8) + index + 100 * (self.wrong and index == 1)
        }


class Named(paddle.io.BatchSampler):
    """The user's own order, of names."""

    def __init__(self):
        self.batch_size = 8

    def __iter__(self):
        yield from (
            [f"sample {4 * batch + row}" for row in range(8)]
            for batch in range(3)
        )

    def __len__(self):
        return 3


class ByName(paddle.io.Dataset):
    def __init__(self, suffix=""):
        self.suffix = suffix

    def __getitem__(self, name):
        return {"text": name + self.suffix, "length": np.array(len(name))}

    def __len__(self):
        return 32


def by_name(suffix):
    mesh = dist.ProcessMesh([[0], [1], [2], [3]], dim_names=["dp", "mp"])
    given = paddle.io.DataLoader(ByName(suffix), batch_sampler=Named())
    return paddle_shard.shard_dataloader(given, mesh, shard_dims="dp")


class Mixed(paddle.io.Dataset):
    """Texts, Python's numbers, objects, arrays of objects, and a field that one rank may have besides."""

    def __init__(self, change=None):
        self.change = change

    def __len__(self):
        return 32

    def __getitem__(self, index):
        other = self.change if index == 5 else None
        objects = np.array([index, "b" if other == "objects" else "a"], object)
        found = {
            "text": f"{index}{'!' if other == 'text' else ''}",
            "number": 2 * index + (other == "number"),
            "pair": (f"{index}", index + 0.5 * (other == "pair")),
            "objects": objects,
            "image": np.full(3, index),
        }
        if self.change == "more":
            found["more"] = np.zeros(1)
        return (
            dict(reversed(found.items())) if self.change == "order" else found
        )


def mixed(change, **options):
    return sharded(Mixed(change), collate_fn=collate_mixed, **options)


def collate_mixed(samples):
    found = {name: [sample[name] for sample in samples] for name in samples[0]}
    for name in {"image", "number", "more"} & set(found):
        found[name] = np.stack(found[name])
    found["objects"] = np.stack(found["objects"])
    return {**found, "name": "a batch"}


def unreadable(change):
    class Some(Mixed):
        def __getitem__(self, index):
            if index == 4:
                raise ValueError("damaged")
            return super().__getitem__(index)

    return sharded(Some(change), collate_fn=collate_mixed, on_error="skip")


def one_line(**options):
    """All four ranks hold the same rows, and were each given a part of their own."""
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["mp"])
    given = paddle.io.DataLoader(
        paddle.io.Subset(Samples(), range(RANK, 32, 4)), batch_size=4
    )
    return paddle_shard.shard_dataloader(given, mesh, **options)


def own_part(**options):
    return sharded(
        paddle.io.Subset(Samples(), range(RANK, 32, 4)),
        replicas=False,
        **options,
    )


def outcomes():
    other = RANK == 3
    # of the batch at step 1; rank 3 holds its second half
    mine = (9, 13) if other else ()
    third = (21, 22) if other else ()
    first = (4, 6) if other else ()
    made = {
        "same": lambda: sharded(Samples()),
        "same, workers, each step": lambda: sharded(
            Samples(), workers=2, verify=1
        ),
        "first": lambda: sharded(Samples(first)),
        "first, workers": lambda: sharded(Samples(first), workers=2),
        "later": lambda: sharded(Samples(third)),
        "later, every second": lambda: sharded(Samples(third), verify=2),
        "later, every step": lambda: sharded(Samples(mine + third), verify=1),
        "never": lambda: sharded(Samples(first), verify=None),
        "noise": lambda: sharded(Samples(noise=np.random.default_rng(RANK))),
        "stream": lambda: sharded(
            numbers(range(32) if other else ()), verify=1
        ),
        "stream, same": lambda: sharded(numbers(()), verify=1),
        "whole": lambda: paddle_shard.shard_dataloader(
            whole((0,) if other else ()),
            dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"]),
            shard_dims="dp",
        ),
        "mixture": lambda: sharded(
            paddle_shard.Mixture(
                {"web": Samples(range(32) if other else ()), "code": Samples()},
                {"web": 1, "code": 1},
            )
        ),
        "own part": own_part,
        **{
            f"own part, {replicas}": lambda replicas=replicas: one_line(
                replicas=replicas
            )
            for replicas in ("leader",)
        },
        "own noise, padded": lambda: sharded(
            Samples(noise=np.random.default_rng(RANK)),
            replicas=False,
            pad_to={"image": ("longest", 0)},
        ),
        "own part, workers": lambda: own_part(workers=2),
        "own part, not compared": lambda: own_part(verify=None),
        "own part, split": lambda: own_part(size=2, is_dataset_splitted=True),
        "other version": lambda: sharded(
            Samples(range(32) if other else ()), replicas=False
        ),
        "seeded": lambda: sharded(Seeded(), replicas=False),
        "seeded, workers": lambda: sharded(Seeded(), workers=2, replicas=False),
        "own noise": lambda: sharded(
            Samples(noise=np.random.default_rng(RANK)), replicas=False
        ),
        "names": lambda: by_name(""),
        "other text": lambda: by_name("!" if other else ""),
        **{
            f"mixed, {change}": lambda change=change: mixed(
                change if other else None
            )
            for change in (
                "nothing",
                "text",
                "number",
                "pair",
                "objects",
                "more",
                "order",
            )
        },
        "damaged, nothing": lambda: unreadable(None),
        "damaged, text": lambda: unreadable("text" if other else None),
        "items": lambda: paddle_shard.shard_dataloader(
            paddle.io.DataLoader(Items(other), batch_size=None),
            dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"]),
            shard_dims="dp",
            verify=1,
        ),
        "other option": lambda: sharded(
            Samples(), verify=None if other else "first"
        ),
    }
    return {name: steps_of(make()) for name, make in made.items()}


if __name__ == "__main__":
    dist.init_parallel_env()
    report(outcomes())
    dist.barrier()
