"""Loaders of many kinds: run by real ranks in `loader_worker.py`, and by simulated ones beside them."""

import hashlib

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard

MESHES = {
    2: [([0, 1], ["dp"]), ([[1, 0]], ["mp", "dp"])],
    4: [
        ([[0, 1], [2, 3]], ["dp", "mp"]),
        ([[0, 1], [2, 3]], ["mp", "dp"]),
        ([[3, 0], [2, 1]], ["dp", "mp"]),
        ([2, 0], ["dp"]),  # ranks 1 and 3 are on no mesh
    ],
    8: [
        ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["pp", "dp", "mp"]),
        ([[[[7, 1], [2, 3]], [[4, 5], [6, 0]]]], ["pp", "mp", "dp", "sep"]),
    ],
}


class Mixed(paddle.io.Dataset):
    """Dicts of an index, random numbers, text and a list."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return {
            "id": index,
            "noise": np.random.rand(3),
            "name": f"s{index}",
            "pair": [np.arange(index, index + 2)],
        }


def dataloader(workers, shuffle):
    """Its workers persist, so that two epochs start them once."""
    return paddle.io.DataLoader(
        Mixed(),
        batch_size=8,
        num_workers=workers,
        shuffle=shuffle,
        persistent_workers=workers > 0,
    )


def cases(num_ranks):
    """{name: a function that makes a loader, with `workers` of its own or without any}: half of them on each mesh."""
    made = {}
    for number, (ids, names) in enumerate(MESHES[num_ranks]):
        of_mesh = {}
        for workers, shuffle, tail in (
            (0, False, "pad"),
            (2, True, "fill"),
            (0, True, "drop"),
        ):

            def make(
                ids=ids,
                names=names,
                workers=workers,
                shuffle=shuffle,
                tail=tail,
            ):
                given = dataloader(workers, shuffle)
                mesh = dist.ProcessMesh(ids, dim_names=names)
                replicas = "leader" if shuffle else "each"
                return paddle_shard.shard_dataloader(
                    given,
                    mesh,
                    shard_dims="dp",
                    tail=tail,
                    seed=3,
                    replicas=replicas,
                )

            of_mesh[
                f"{names} {ids} workers={workers} shuffle={shuffle} {tail}"
            ] = make

        def ramped(ids=ids, names=names, workers=0):
            given = dataloader(workers, False)
            mesh = dist.ProcessMesh(ids, dim_names=names)
            sizes = [(0, 4), (10, 8), (30, 4)]
            return paddle_shard.shard_dataloader(
                given,
                mesh,
                shard_dims="dp",
                batch_size=sizes,
                replicas="leader",
            )

        of_mesh[f"{names} {ids} batch sizes"] = ramped

        def dealt(ids=ids, names=names, workers=2):
            given = dataloader(workers, True)
            mesh = dist.ProcessMesh(ids, dim_names=names)
            costs = {"balance": lambda ids: ids**2}
            return paddle_shard.shard_dataloader(
                given, mesh, shard_dims="dp", replicas="leader", **costs
            )

        of_mesh[f"{names} {ids} balance"] = dealt

        def without(ids=ids, names=names, workers=2):
            given = dataloader(workers, True)
            mesh = dist.ProcessMesh(ids, dim_names=names)
            options = {
                "balance": lambda ids: ids**2,
                "skip_steps": [(1, 2), (5, 8)],
                "replicas": "leader",
            }
            return paddle_shard.shard_dataloader(
                given, mesh, shard_dims="dp", **options
            )

        of_mesh[f"{names} {ids} skip"] = without
        made |= list(of_mesh.items())[number % 2 :: 2]
    return made


def summary(loader):
    """[ids, names, a digest of the bytes, the global shape, valid] of each step of two epochs."""
    steps = []
    for _ in range(2):
        batches = iter(loader)
        for batch in batches:
            leaves = [
                batch["id"],
                batch["noise"],
                batch["pair"][0],
                batches.valid,
            ]
            shapes = [list(leaf.shape) for leaf in leaves]
            if (
                dist.get_rank()
                not in loader._setup.row_layout.layout.process_ids
            ):
                steps.append([shapes])
                continue
            local = [leaf._local_value().numpy() for leaf in leaves]
            digest = hashlib.sha1(
                b"".join(array.tobytes() for array in local)
            ).hexdigest()
            steps.append([shapes, local[0].tolist(), batch["name"], digest])
    return steps
