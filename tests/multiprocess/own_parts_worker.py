"""Data that differ by rank, or that a sampler draws in part: what each of two ranks says."""

import gzip
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.testing import report

dist.init_parallel_env()
RANK, FOLDER = dist.get_rank(), Path(sys.argv[1])
mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])


def gz(first, folder):
    folder.mkdir(exist_ok=True)
    for number in range(8):
        text = "".join(f"{first + 10 * number + i}\n" for i in range(10))
        # As they are: files of one size whose contents differ.
        (folder / f"{number}.txt.gz").write_bytes(
            gzip.compress(text.encode(), 0, mtime=0)
        )
    return Stream.lines(
        [str(folder / f"{number}.txt.gz") for number in range(8)]
    ).map(int)


def hugging_face(cut):
    import datasets

    whole = datasets.Dataset.from_dict(
        {"id": list(range(44))}
    ).to_iterable_dataset(num_shards=4)
    return Stream.huggingface(cut(whole)).map(lambda sample: sample["id"])


def generated(shards):
    import datasets

    def numbers(shards):
        for shard in shards:
            number = int(shard.rpartition("/")[2].partition(".")[0])
            yield from ({"id": 11 * number + i} for i in range(11))

    return datasets.IterableDataset.from_generator(
        numbers, gen_kwargs={"shards": shards}
    )


def iterable(cut):
    """Data with an index, which is cut before it is made iterable."""
    import datasets

    return Stream.huggingface(
        cut(
            datasets.Dataset.from_dict({"id": list(range(44))})
        ).to_iterable_dataset(2)
    ).map(id_of)


def id_of(sample):
    return sample["id"]


def names(folder=""):
    return [f"/data{folder}/{number}.txt" for number in range(4)]


def mixed(cut):
    return Stream.mixture(
        {"own": Stream.of(cut(list(range(40)))), "all": Stream.of(range(40))},
        {"own": 1, "all": 1},
    )


def splits_itself(by_rank, noise=0.0, header=False):
    """A stream that splits itself among the workers; and also among the ranks, as is usual with torch."""

    def own_rows():
        if header:
            yield -1.0
        info = paddle.io.get_worker_info()
        first, step = info.id, info.num_workers
        if by_rank:
            first, step = RANK * step + first, 2 * step
        yield from (
            row + noise * np.random.rand() for row in range(first, 44, step)
        )

    return Stream.of(own_rows, splits_itself=True)


def unseeded(shuffles):
    """A stream that splits itself, draws without a seed, and has parts of different lengths."""

    def own_rows():
        info, rng = paddle.io.get_worker_info(), np.random.default_rng()
        rows = np.arange(info.id, 36 if info.id else 44, info.num_workers)
        return (
            row + 0.5 * rng.random()
            for row in (rng.permutation(rows) if shuffles else rows)
        )

    return Stream.of(own_rows, splits_itself=True)


def resumed(stream):
    """What is said of a run that is stopped after two steps and goes on."""
    try:
        loaders = [
            paddle_shard.shard_dataloader(
                paddle.io.DataLoader(stream.in_parts(2), batch_size=8),
                mesh,
                shard_dims="dp",
                timeout=60,
            )
            for _ in range(2)
        ]
        batches = iter(loaders[0])
        next(batches), next(batches)
        state = loaders[0].state_dict()
        batches.close()
        loaders[1].load_state_dict(state)
        return f"{2 + sum(1 for _ in loaders[1])} steps"
    except paddle_shard.errors.PaddleShardError as error:
        return f"{type(error).__name__}: {error}"


class OfRank0(paddle.io.BatchSampler):
    def __init__(self):
        self.batch_size = 8

    def __iter__(self):
        return iter([list(range(first, first + 8)) for first in (0, 8, 16)])

    def __len__(self):
        return 3


def said(given):
    try:
        loader = paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", tail=None, timeout=60
        )
        steps = sum(1 for _ in loader)
        return f"{steps} steps. " + (
            str(loader.certificate()) if isinstance(given.dataset, list) else ""
        )
    except paddle_shard.errors.PaddleShardError as error:
        return f"{type(error).__name__}: {error}"


cases = {
    "gz, the same": lambda: gz(1000, FOLDER / str(RANK)),
    "taken and skipped": lambda: hugging_face(
        lambda whole: whole.skip(22) if RANK else whole.take(22)
    ),
    "cut alike": lambda: hugging_face(
        lambda whole: whole.map(dict).shard(2, 0)
    ),
    "names": lambda: Stream.huggingface(generated(names()[RANK::2])).map(id_of),
    "names in other folders": lambda: Stream.huggingface(
        generated(names(RANK))
    ).map(id_of),
    "with an index, alike": lambda: iterable(lambda data: data.shuffle(seed=0)),
    "a list in a mixture": lambda: mixed(lambda data: data[RANK::2]),
    "a list in a mixture, alike": lambda: mixed(lambda data: data[::2]),
    "splits itself": lambda: splits_itself(by_rank=False),
    "splits itself and draws": lambda: splits_itself(by_rank=False, noise=0.5),
    "taken alike": lambda: hugging_face(lambda whole: whole.take(22)),
}
found = {}
for name, made in cases.items():
    try:
        found[name] = said(
            paddle.io.DataLoader(made().in_parts(2), batch_size=8)
        )
    except ImportError:
        found[name] = None
found["unseeded, resumed"] = resumed(unseeded(shuffles=False))
found["shuffled without a seed, resumed"] = resumed(unseeded(shuffles=True))
found["sampler"] = said(
    paddle.io.DataLoader(list(range(50)), batch_sampler=OfRank0())
)
found["26 and 25"] = said(
    paddle.io.DataLoader(list(range(26 - RANK)), batch_size=8)
)
report(found)
