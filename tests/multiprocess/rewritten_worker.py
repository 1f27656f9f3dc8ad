"""Files that are written anew between a state and its resume: what each rank says, of what another rank has read."""

import json
import sys
from pathlib import Path

import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import StateError
from paddle_shard.testing import report

dist.init_parallel_env()
RANK, FOLDER, FILES = dist.get_rank(), Path(sys.argv[1]), 8


def write(number, first, folder):
    (folder / f"{number}.txt").write_text(
        "".join(f"{first + 10 * number + i}\n" for i in range(10))
    )


def loader_of(folder, ids, names, workers, replicas, shuffle):
    paths = [str(folder / f"{number}.txt") for number in range(FILES)]
    stream = Stream.lines(paths, shuffle_shards=shuffle).map(int).in_parts(4)
    given = paddle.io.DataLoader(stream, batch_size=8, num_workers=workers)
    mesh = dist.ProcessMesh(ids, dim_names=names)
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", replicas=replicas
    )


def steps_of(loader, state, override=()):
    """The number of steps, or the error."""
    loader.load_state_dict(state, override=override)
    try:
        return sum(1 for _ in loader)
    except StateError as error:
        return str(error)


found = {}
for name, (ids, names, workers, replicas) in {
    "two data ranks": ([0, 1], ["dp"], 0, "each"),
    "with workers": ([0, 1], ["dp"], 2, "each"),
    "replicas": ([[0, 1]], ["dp", "mp"], 0, "each"),
    "a leader": ([[0, 1]], ["dp", "mp"], 0, "leader"),
}.items():
    folder = FOLDER / name
    if RANK == 0:
        folder.mkdir()
        for number in range(FILES):
            write(number, 1000, folder)
    dist.barrier()
    made = folder, ids, names, workers, replicas, False
    loader = loader_of(*made)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    states: list = []
    dist.all_gather_object(states, json.dumps(loader.state_dict()))
    batches.close()
    state = json.loads(states[0])  # also of what another rank has read
    same = steps_of(loader_of(*made), state)
    dist.barrier()
    if RANK == 0:
        write(6, 5000, folder)  # the last part reads it
    dist.barrier()
    other = steps_of(loader_of(*made), state)
    anyway = steps_of(loader_of(*made), state, ["data"])
    known = [json.loads(one)["data"] for one in states]
    found[name] = [known[0] == known[1], same, other, anyway]
report(found)
dist.barrier()
