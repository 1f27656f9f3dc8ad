"""Batches that are dicts, with a list of inputs, over one mesh or two.

    python -m paddle.distributed.launch --nproc_per_node 8 demos/dict_inputs.py
    python -m paddle.distributed.launch --gpus 0,1,2,3,4,5,6,7 demos/dict_inputs.py

Each batch is `{"inputs": [a, b], "label": l}`. `input_keys` says which key each entry of `meshes` is for; an
entry that is a list gives each input its own mesh. Every rank checks what it got.
"""

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard

MESH0 = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
MESH1 = dist.ProcessMesh([[4, 5], [6, 7]], dim_names=["dp", "mp"])
BATCH_SIZE = 4


class Pairs(paddle.io.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        a, b = (
            np.full([3], index, "float32"),
            np.full([2, 2], -index, "float32"),
        )
        return {"inputs": [a, b], "label": np.array(index)}


def check(batch, step, meshes):
    """Compare this rank's part of a batch with the samples that belong there."""
    samples = [
        Pairs()[i] for i in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
    ]
    fields = [
        (batch["inputs"][0], np.stack([s["inputs"][0] for s in samples])),
        (batch["inputs"][1], np.stack([s["inputs"][1] for s in samples])),
        (batch["label"], np.stack([s["label"] for s in samples])),
    ]
    mine = []
    for (leaf, whole), mesh in zip(fields, meshes, strict=True):
        assert leaf.process_mesh == mesh, (leaf.process_mesh, mesh)
        assert leaf.shape == list(whole.shape), (leaf.shape, whole.shape)
        assert leaf.placements == [dist.Shard(0), dist.Replicate()], (
            leaf.placements
        )
        if dist.get_rank() in mesh.process_ids:
            data_rank = int(
                np.argwhere(np.array(mesh.mesh) == dist.get_rank())[0][0]
            )
            np.testing.assert_array_equal(
                leaf._local_value().numpy(), np.split(whole, 2)[data_rank]
            )
            mine.append(leaf)
    return mine


def main():
    dist.init_parallel_env()
    assert dist.get_world_size() == 8, (
        f"this demo takes 8 processes, got {dist.get_world_size()}"
    )
    ways = {
        "both inputs on mesh 0, the label on mesh 1": (
            [MESH0, MESH1],
            [MESH0, MESH0, MESH1],
        ),
        "a mesh for each input": (
            [[MESH0, MESH1], MESH1],
            [MESH0, MESH1, MESH1],
        ),
        "the same, twice mesh 0": (
            [[MESH0, MESH0], MESH1],
            [MESH0, MESH0, MESH1],
        ),
    }
    for name, (meshes, expected) in ways.items():
        loader = paddle_shard.shard_dataloader(
            paddle.io.DataLoader(Pairs(), batch_size=BATCH_SIZE),
            meshes=meshes,
            input_keys=["inputs", "label"],
            shard_dims="dp",
        )
        counts = [
            len(check(batch, step, expected))
            for step, batch in enumerate(loader)
        ]
        assert len(counts) == len(loader) == 2
        if dist.get_rank() in (0, 4):
            print(
                f"rank {dist.get_rank()}, {name}: holds {counts[0]} of 3 fields, 2 steps, all as expected"
            )
    dist.barrier()


if __name__ == "__main__":
    main()
