"""Data of other libraries through `shard_dataloader`, and what must hold of it, on simulated ranks or on real ones."""

import io
import itertools
import json
import tarfile
from importlib.util import find_spec

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.testing.simulated import on_each_rank

BATCH = 8
LENGTHS = [14, 3, 9, 1, 6, 8, 2, 10]
"""Of the pieces that a data set is made of, where it is made of pieces."""
TOTAL = sum(LENGTHS)


def pieces():
    """The ids of each piece."""
    ends = np.cumsum([0, *LENGTHS]).tolist()
    return [list(range(start, stop)) for start, stop in itertools.pairwise(ends)]


def noisy(sample):
    """Two fields: the id, and a random number."""
    return int(sample["id"]), np.random.rand()


def noisy_line(line):
    return noisy({"id": line})


def noisy_tar(sample):
    return noisy({"id": sample["txt"]})


def parquet_bytes(ids, row_group_size=5):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"id": ids, "unused": [f"text {i}" for i in ids]})
    pq.write_table(table, buffer := io.BytesIO(), row_group_size=row_group_size)
    return buffer.getvalue()


def tar_bytes(ids):
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w") as tar:
        for i in ids:
            member = tarfile.TarInfo(f"{i:04}.txt")
            member.size = len(content := str(i).encode())
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def files():
    """Name -> content of files of several kinds, each kind with all ids."""
    found = {}
    for number, ids in enumerate(pieces()):
        if find_spec("pyarrow"):
            found[f"{number}.parquet"] = parquet_bytes(ids)
        found[f"{number}.tar"] = tar_bytes(ids)
        found[f"{number}.txt"] = "\n".join(map(str, ids)).encode()
    return found


def names(folder, ending):
    return [f"{folder}/{number}.{ending}" for number in range(len(LENGTHS))]


def _of_shards(ids_of_shards):
    for ids in ids_of_shards:
        yield from ({"id": i} for i in ids)


def _huggingface():
    import datasets

    return datasets.IterableDataset.from_generator(_of_shards, gen_kwargs={"ids_of_shards": pieces()})


def _huggingface_shuffled():
    import datasets

    found = datasets.Dataset.from_dict({"id": list(range(TOTAL))}).to_iterable_dataset(num_shards=8)
    return found.shuffle(seed=4, buffer_size=5)


class Indexed(paddle.io.Dataset):
    """A map-style data set whose samples become two fields."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return noisy(self.dataset[index])


def _huggingface_indexed():
    import datasets

    return Indexed(datasets.Dataset.from_dict({"id": list(range(TOTAL))}).with_format("numpy"))


def _grain():
    import grain

    from paddle_shard.sources.grain import grain_dataset

    return Indexed(grain_dataset(grain.MapDataset.range(TOTAL).map(lambda i: {"id": i})))


SOURCES = {
    "parquet": lambda folder: Stream.parquet(names(folder, "parquet"), columns=["id"]).shuffle(4).map(noisy),
    "lines": lambda folder: Stream.lines(names(folder, "txt"), counts=False).map(noisy_line),
    "webdataset": lambda folder: Stream.webdataset(names(folder, "tar"), index=False).map(noisy_tar),
    "huggingface": lambda folder: Stream.huggingface(_huggingface()).shuffle(4).map(noisy),
    "huggingface shuffled": lambda folder: Stream.huggingface(_huggingface_shuffled()).map(noisy),
    "huggingface indexed": lambda folder: _huggingface_indexed(),
    "grain": lambda folder: _grain(),
}
"""Name -> what a DataLoader is given, for a folder (or the URL of one) with `files()`."""
NEEDS = {"parquet": "pyarrow", "webdataset": "webdataset", "grain": "grain"}
INSTALLED = [name for name in SOURCES if find_spec(NEEDS.get(name, "datasets" if "hugging" in name else "os"))]
"""Those whose library is installed; each needs an extra."""


def make(source, folder, workers, ids=(0,), axes=("dp",), seed=3):
    """A loader over a source, on a mesh."""
    data = SOURCES[source](folder)
    loader = paddle.io.DataLoader(data, batch_size=BATCH, num_workers=workers)
    shuffle = None if isinstance(data, Stream) else True
    mesh = dist.ProcessMesh(list(ids), dim_names=list(axes))
    # Of files that are not counted, which are compared with those of a server, that tells no size.
    num_parts = 8 if source in ("lines", "webdataset") else None
    return paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp", shuffle=shuffle, seed=seed, num_parts=num_parts)


def steps_of(loader, limit=None, *, collective=False):
    """[[[id, noise] of each real row] of each step] of this rank, in one pass or its first steps."""
    batches, found = iter(loader), []
    for batch in batches:
        ids, noise, valid = (leaf._local_value().numpy().tolist() for leaf in (*batch, batches.valid))
        found.append([[i, n] for i, n, v in zip(ids, noise, valid, strict=True) if v])
        if collective and dist.get_world_size() > 1:
            steps = paddle.to_tensor([len(found)])
            dist.all_reduce(steps)
            assert steps.item() == len(found) * dist.get_world_size()
        if len(found) == limit:
            break
    return found


def resumed(step, other_workers, source, folder, workers, *mesh):
    """The steps of a pass that is stopped at a step, and gone on with by other workers."""
    first = make(source, folder, workers, *mesh)
    begun = steps_of(first, step)
    state = json.loads(json.dumps(first.state_dict()))
    second = make(source, folder, other_workers, *mesh)
    second.load_state_dict(state)
    return begun + steps_of(second)


def joined(per_rank):
    """The steps of several data ranks as those of one; a rank that ended sooner has no rows there."""
    return [list(itertools.chain(*step)) for step in itertools.zip_longest(*per_rank, fillvalue=[])]


def ids_of(steps):
    return [i for step in steps for i, _ in step]


def check_laws(source, folder, workers, stops=(1, 3, 5), oracle=None):
    """On two simulated data ranks, compared with one that has no workers and reads `oracle`: by default the folder."""
    loader = make(source, folder if oracle is None else oracle, 0)
    alone = [steps_of(loader) for _ in range(2)]
    assert [sorted(ids_of(epoch)) for epoch in alone] == [list(range(TOTAL))] * 2, "each sample exactly once"
    assert ids_of(alone[0]) != ids_of(alone[1]), "two epochs differ"

    def two_epochs():
        loader = make(source, folder, workers, range(2))
        return [steps_of(loader), steps_of(loader)]

    of_ranks = on_each_rank(range(2), two_epochs)
    for epoch in range(2):
        assert joined([of_ranks[rank][epoch] for rank in range(2)]) == alone[epoch], "the batches of one process"
    for step in stops:
        of_ranks = on_each_rank(range(2), lambda step=step: resumed(step, 2 - workers, source, folder, workers, [0, 1]))
        assert joined(of_ranks.values()) == alone[0], "resumed equals straight"
