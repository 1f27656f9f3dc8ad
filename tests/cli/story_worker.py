"""A rank of a training on digits with a record and checkpoints, on data that a person can look at: `story_data.py`."""

import hashlib
import json
import sys
from pathlib import Path

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

import paddle_shard
from paddle_shard.testing import report

BATCH_SIZE, SEED, EVERY = 32, 7, 6
"""EVERY: steps from one checkpoint to the next."""


class Model(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.hidden, self.output = paddle.nn.Linear(64, 64), paddle.nn.Linear(64, 10)

    def forward(self, images):
        return self.output(F.relu(self.hidden(images)))


def main(path):
    job = json.loads(Path(path).read_text())
    dist.init_parallel_env()
    sys.path.insert(0, job["data"])
    from story_data import dataset

    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    paddle.seed(SEED)
    model = Model()
    dist.shard_layer(model, mesh, lambda name, layer, mesh: None)  # replicated
    optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(learning_rate=5e-3, parameters=model.parameters()))
    given = paddle.io.DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    loader = paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", seed=SEED, record=job["record"])
    checkpoints, state = paddle_shard.Checkpoints(job["checkpoints"], keep=100), {}
    step = checkpoints.load(model=model, optimizer=optimizer, data=state) or 0
    exec(job["python"], {"loader": loader, "state": state})  # what `paddle-shard forget` has printed
    losses = {}
    while step < job["steps"]:
        batches = iter(loader)
        for images, labels in batches:
            real = batches.valid.astype("float32")
            each = F.cross_entropy(model(images), labels, reduction="none").squeeze(-1)
            loss = (each * real).sum() / real.sum()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses[f"{batches.epoch} {batches.step - 1}"] = float(dist.reshard(loss, mesh, [dist.Replicate()]))
            step += 1
            if step % EVERY == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, data=loader)
            if step == job["steps"]:
                break
    values = [*model.state_dict().items(), *optimizer.state_dict().items()]
    tensors = {name: value for name, value in values if isinstance(value, paddle.Tensor)}
    bits = {name: hashlib.sha256(value._local_value().numpy().tobytes()).hexdigest() for name, value in tensors.items()}
    report({"losses": losses, "bits": list(bits.values()), "exact": bool(loader.certificate().exact)})
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
