"""Every source through `shard_dataloader`, and what must hold of it, on simulated ranks or on real ones."""

import io
import itertools
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.testing.simulated import on_each_rank
from tests.deadlines import HANG

BATCH = 8
LENGTHS = [14, 3, 9, 1, 6, 8, 2, 10]
"""Of the pieces that a data set is made of, where it is made of pieces."""
TOTAL = sum(LENGTHS)


def pieces():
    """The ids of each piece."""
    ends = np.cumsum([0, *LENGTHS]).tolist()
    return [
        list(range(start, stop)) for start, stop in itertools.pairwise(ends)
    ]


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


def text_bytes(ids):
    return "\n".join(map(str, ids)).encode()


def csv_bytes(ids):
    return "".join(
        f"{line}\r\n"
        for line in ("id,text", *(f'{i},"text, {i}"' for i in ids))
    ).encode()


def jsonl_bytes(ids):
    return "\n\n".join(
        json.dumps({"id": i, "text": f"ü {i}"}) for i in ids
    ).encode()


@dataclass(frozen=True)
class FileKind:
    """A kind of files, and a stream of their samples."""

    ending: str
    """Of the files' names."""
    content: Callable[[Sequence[int]], bytes]
    """Makes the content of a file with the samples of some ids, in their order."""
    stream: Callable[[Sequence[str]], Stream]
    """Opens files, given by their paths."""
    id_of: Callable[[Any], int]
    """Returns a sample's id."""
    needs: str = "os"
    """A module that it needs."""


def of_tar(sample):
    return int(sample["txt"])


def of_row(row):
    return int(row["id"])


FILE_KINDS = {
    "lines": FileKind(
        "txt", text_bytes, lambda paths: Stream.lines(paths, counts=False), int
    ),
    "counted lines": FileKind("txt", text_bytes, Stream.lines, int),
    "csv": FileKind(
        "csv", csv_bytes, lambda paths: Stream.csv(paths, counts=False), of_row
    ),
    "counted csv": FileKind("csv", csv_bytes, Stream.csv, of_row),
    "jsonl": FileKind(
        "jsonl",
        jsonl_bytes,
        lambda paths: Stream.jsonl(paths, counts=False),
        of_row,
    ),
    "counted jsonl": FileKind("jsonl", jsonl_bytes, Stream.jsonl, of_row),
    "webdataset": FileKind(
        "tar",
        tar_bytes,
        lambda urls: Stream.webdataset(urls, index=False),
        of_tar,
        "webdataset",
    ),
    "counted webdataset": FileKind(
        "tar", tar_bytes, Stream.webdataset, of_tar, "webdataset"
    ),
    "parquet": FileKind(
        "parquet",
        parquet_bytes,
        lambda p: Stream.parquet(p, columns=["id"]),
        of_row,
        "pyarrow",
    ),
}
"""Every source of files. A new one joins all laws by a line here: parts, skipping, moved copies, meshes and resumes."""
FILE_KINDS = {
    name: kind for name, kind in FILE_KINDS.items() if find_spec(kind.needs)
}


def files():
    """Name -> content of files of each kind, each kind with all ids."""
    kinds = {kind.ending: kind for kind in FILE_KINDS.values()}
    return {
        f"{number}.{kind.ending}": kind.content(ids)
        for number, ids in enumerate(pieces())
        for kind in kinds.values()
    }


def names(folder, ending):
    return [f"{folder}/{number}.{ending}" for number in range(len(LENGTHS))]


def _of_shards(ids_of_shards):
    for ids in ids_of_shards:
        yield from ({"id": i} for i in ids)


def _huggingface():
    import datasets

    return datasets.IterableDataset.from_generator(
        _of_shards, gen_kwargs={"ids_of_shards": pieces()}
    )


def _huggingface_shuffled():
    import datasets

    found = datasets.Dataset.from_dict(
        {"id": list(range(TOTAL))}
    ).to_iterable_dataset(num_shards=8)
    return found.shuffle(seed=4, buffer_size=5)


def noisy(id_of, sample):
    """Two fields: the id, and a random number."""
    return id_of(sample), np.random.rand()


class Indexed(paddle.io.Dataset):
    """A map-style data set whose samples become two fields."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return noisy(of_row, self.dataset[index])


def _huggingface_indexed():
    import datasets

    return Indexed(
        datasets.Dataset.from_dict({"id": list(range(TOTAL))}).with_format(
            "numpy"
        )
    )


def _grain():
    import grain

    return Indexed(grain.MapDataset.range(TOTAL).map(lambda i: {"id": i}))


def _of_files(kind):
    return lambda folder: (
        kind.stream(names(folder, kind.ending))
        .shuffle(4)
        .map(partial(noisy, kind.id_of))
    )


SOURCES = {
    **{name: _of_files(kind) for name, kind in FILE_KINDS.items()},
    "huggingface": lambda folder: (
        Stream.huggingface(_huggingface())
        .shuffle(4)
        .map(partial(noisy, of_row))
    ),
    "huggingface shuffled": lambda folder: Stream.huggingface(
        _huggingface_shuffled()
    ).map(partial(noisy, of_row)),
    "huggingface indexed": lambda folder: _huggingface_indexed(),
    "grain": lambda folder: _grain(),
}
"""Name -> what a DataLoader is given, for a folder (or the URL of one) with `files()`."""
INSTALLED = [
    name
    for name in SOURCES
    if name in FILE_KINDS
    or find_spec("datasets" if "hugging" in name else name)
]
"""Those whose library is installed; each needs an extra."""

ON_RANKS = [
    name
    for name in INSTALLED
    if name not in ("csv", "jsonl", "huggingface indexed")
    and "counted" not in name
]
"""Those that real ranks try; simulated ones try all."""


def make(source, folder, workers, ids=(0,), axes=("dp",), seed=3):
    """A loader over a source, on a mesh."""
    data = SOURCES[source](folder)
    if source in ("lines", "webdataset"):
        # Of files that are not counted, which are compared with those of a server, that tells no size.
        data = data.in_parts(8)
    loader = paddle.io.DataLoader(data, batch_size=BATCH, num_workers=workers)
    shuffle = None if isinstance(data, Stream) else True
    mesh = dist.ProcessMesh(list(ids), dim_names=list(axes))
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims="dp", shuffle=shuffle, seed=seed, timeout=HANG
    )


def steps_of(loader, limit=None, *, collective=False):
    """[[[id, noise] of each real row] of each step] of this rank, in one pass or its first steps."""
    batches, found = iter(loader), []
    for batch in batches:
        ids, noise, valid = (
            leaf._local_value().numpy().tolist()
            for leaf in (*batch, batches.valid)
        )
        found.append(
            [[i, n] for i, n, v in zip(ids, noise, valid, strict=True) if v]
        )
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
    return [
        list(itertools.chain(*step))
        for step in itertools.zip_longest(*per_rank, fillvalue=[])
    ]


def ids_of(steps):
    return [i for step in steps for i, _ in step]


def check_laws(
    source, folder, workers, stops=(1, 4), oracle=None, workers_later=None
):
    """On two simulated data ranks, compared with one that has no workers and reads `oracle`: by default the folder.

    Args:
        source: Name in `SOURCES`.
        folder: Where the files are.
        workers: Of a pass up to where it is stopped, and of those that are not.
        stops: Steps at which passes are stopped.
        oracle: Folder of the same files.
        workers_later: Of a pass that goes on; by default it has workers if it had none before.
    """
    workers_later = 2 - workers if workers_later is None else workers_later
    loader = make(source, folder if oracle is None else oracle, 0)
    alone = [steps_of(loader) for _ in range(2)]
    assert [sorted(ids_of(epoch)) for epoch in alone] == [
        list(range(TOTAL))
    ] * 2, "each sample exactly once"
    assert ids_of(alone[0]) != ids_of(alone[1]), "two epochs differ"

    def two_epochs():
        loader = make(source, folder, workers, range(2))
        return [steps_of(loader), steps_of(loader)]

    of_ranks = on_each_rank(range(2), two_epochs)
    for epoch in range(2):
        assert (
            joined([of_ranks[rank][epoch] for rank in range(2)]) == alone[epoch]
        ), "the batches of one process"
    for step in stops:
        of_ranks = on_each_rank(
            range(2),
            lambda step=step: resumed(
                step, workers_later, source, folder, workers, [0, 1]
            ),
        )
        assert joined(of_ranks.values()) == alone[0], "resumed equals straight"
