"""What the demos of this folder share: digits read by another library, trained on two data ranks."""

import json
import time

import numpy as np
import paddle
import paddle.distributed as dist
from sklearn.datasets import load_digits

import paddle_shard

BATCH_SIZE, STOP = 64, 9
MESH = dist.ProcessMesh([0, 1], dim_names=["dp"])


def digits():
    """float32[1797, 64] in [0, 1], and int64[1797]."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels.astype("int64")


def written_once(write):
    """Let rank 0 write the files that both ranks read, and return where they are."""
    where = [None]
    if dist.get_rank() == 0:
        where = [write()]
    dist.broadcast_object_list(where, src=0)
    return where[0]


def own_ids(batches, ids):
    """The samples of this rank's rows of a batch, without padding."""
    valid = batches.valid._local_value().numpy()
    return ids._local_value().numpy().reshape(-1)[valid].tolist()


def train(name, make_source):
    """Train for two epochs; go on from the middle of the first with another loader; check what was read.

    `make_source()` returns the ExternalLoader; its batches are (images, labels, ids).
    """

    def make_loader():
        return paddle_shard.shard_dataloader(
            make_source(), MESH, shard_dims="dp", seed=1
        )

    began = time.perf_counter()
    paddle.seed(0)
    model = paddle.nn.Linear(64, 10)
    dist.shard_layer(model, MESH, lambda name, layer, mesh: None)
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    loader, losses, epochs, state = make_loader(), [], [[], []], ""
    for epoch in range(2):
        batches = iter(loader)
        for images, labels, ids in batches:
            outputs = model(paddle.reshape(images, [images.shape[0], 64]))
            each = paddle.nn.functional.cross_entropy(
                outputs, paddle.reshape(labels, [-1]), reduction="none"
            )
            valid = batches.valid.astype("float32")
            loss = (each.reshape([-1]) * valid).sum() / valid.sum()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
            epochs[epoch].append(own_ids(batches, ids))
            if epoch == 0 and len(losses) == STOP:
                state = json.dumps(loader.state_dict())
    resumed = make_loader()
    resumed.load_state_dict(json.loads(state))
    batches = iter(resumed)
    again = [own_ids(batches, ids) for _, _, ids in batches]
    everything = []
    dist.all_gather_object(everything, epochs[0])
    read = sorted(i for steps in everything for ids in steps for i in ids)
    assert read == list(range(1797)), "each image once in an epoch"
    assert len({len(steps) for steps in everything}) == 1, "equal steps"
    assert again == epochs[0][STOP:], "resumed = straight"
    assert epochs[0] != epochs[1], "another order in the next epoch"
    assert np.mean(losses[-5:]) < losses[0] / 2, "it learns"
    if dist.get_rank() == 0:
        seconds = time.perf_counter() - began
        print(
            f"{name}: {len(read)} images, each once, in {len(epochs[0])} equal steps of 2 data ranks",
            flush=True,
        )
        print(
            f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in 2 epochs, {seconds:.1f} s"
        )
        print(
            f"{name}: stopped behind step {STOP}, gone on with the same images by a state of {len(state)} bytes"
        )
    dist.barrier()
