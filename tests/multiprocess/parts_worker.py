"""Saves tensors that are split in many ways, and loads each as it is split in each other way: usage FOLDER."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import Partial, Replicate, Shard

import paddle_shard
from paddle_shard.errors import StateError
from paddle_shard.testing import report

dist.init_parallel_env()
ME = dist.get_rank()
ALL = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
SOME = dist.ProcessMesh([3, 1], dim_names=["mp"])
# no split of the columns is even
WHOLE = np.arange(88, dtype="float32").reshape(8, 11)
WAYS = {
    "rows over mp": (ALL, [Replicate(), Shard(0)]),
    "rows over dp": (ALL, [Shard(0), Replicate()]),
    "columns over dp, rows over mp": (ALL, [Shard(1), Shard(0)]),
    "rows over both": (ALL, [Shard(0), Shard(0)]),
    "rows over some ranks": (SOME, [Shard(0)]),
    "whole on some ranks": (SOME, [Replicate()]),
}


class Tensors:
    """As a model: what it is loaded with is set in its tensors."""

    def __init__(self, ways, of=WHOLE, dtype="float32"):
        self.tensors = {}
        for name, (mesh, kinds) in ways.items():
            value = paddle.to_tensor(of.astype(dtype))
            if ME in mesh.process_ids:
                self.tensors[name] = dist.shard_tensor(value, mesh, kinds)
            else:
                value = value[
                    : len(of) // (1 if kinds[0].is_replicated() else 2)
                ]
                self.tensors[name] = dist.auto_parallel.api.dtensor_from_local(
                    value, mesh, kinds
                )

    def state_dict(self):
        return self.tensors

    def set_state_dict(self, state):
        for name, tensor in self.tensors.items():
            if ME in tensor.process_mesh.process_ids:
                tensor.set_value(state[name])

    def local(self):
        mine = {
            name: one
            for name, one in self.tensors.items()
            if ME in one.process_mesh.process_ids
        }
        return {
            name: one._local_value().numpy().tolist()
            for name, one in mine.items()
        }


saved = Tensors(WAYS)
partial = dist.auto_parallel.api.dtensor_from_local(
    paddle.to_tensor([float(ME)]), ALL, [Partial(), Partial()]
)
checkpoints = paddle_shard.Checkpoints(sys.argv[1])
checkpoints.save(1, tensors=saved, extra={"sum": partial})
found = {"wrong": []}
names = list(WAYS)
for shift in range(len(names)):
    ways = {
        name: WAYS[names[(number + shift) % len(names)]]
        for number, name in enumerate(names)
    }
    loaded, extra = Tensors(ways, np.zeros_like(WHOLE)), {}
    checkpoints.load(tensors=loaded, extra=extra)
    if loaded.local() != Tensors(ways).local():
        found["wrong"].append(shift)
found["sum"] = extra["sum"].tolist()
whole = {}
checkpoints.load(tensors=whole)
found["whole"] = [
    name for name in names if whole[name].numpy().tolist() != WHOLE.tolist()
]
found["refused"] = []
for other in (Tensors(WAYS, WHOLE[:4]), Tensors(WAYS, dtype="float64")):
    try:
        checkpoints.load(tensors=other)
    except StateError as error:
        found["refused"].append(str(error))
report(found)
dist.barrier()
