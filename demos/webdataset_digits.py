"""Train on WebDataset tars of unequal size: from disk, then the same run over HTTP.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/webdataset_digits.py

Rank 0 writes scikit-learn's digits as ten tars of 37 to 253 samples and counts them with the command
`paddle-shard index`, so that they are cut into equal parts in mid-file. Two processes with two workers each
train from them. It asserts that every epoch delivers each image exactly once, that both ranks make the
same steps, that the test accuracy is above 93 %, and that the losses over HTTP are those from disk.
"""

import functools
import http.server
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import webdataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import paddle_shard
from paddle_shard import Stream

SIZES = (37, 61, 85, 109, 133, 157, 181, 205, 216, 253)
EPOCHS, BATCH_SIZE, WORKERS, SEED = 8, 32, 2, 11


def digits():
    images, labels = load_digits(return_X_y=True)
    return train_test_split(
        images.astype("float32") / 16,
        labels.astype("int64"),
        test_size=0.2,
        random_state=SEED,
    )


def write_tars(folder, images, labels):
    """Ten tars, and the index of how many samples each holds."""
    assert sum(SIZES) == len(labels)
    samples = iter(enumerate(zip(images, labels, strict=True)))
    for number, size in enumerate(SIZES):
        with webdataset.TarWriter(
            str(folder / f"digits-{number:02}.tar")
        ) as tar:
            for key, (image, label) in (next(samples) for _ in range(size)):
                tar.write(
                    {"__key__": f"{key:05}", "npy": image, "cls": int(label)}
                )
    command = [
        sys.executable,
        "-m",
        "paddle_shard",
        "index",
        str(folder / "digits-{00..09}.tar"),
    ]
    subprocess.run([*command, "-o", str(folder / "index.json")], check=True)


def sample(decoded):
    return (
        decoded["npy"],
        np.array(decoded["cls"], "int64"),
        np.array(int(decoded["__key__"]), "int64"),
    )


def make_loader(where, mesh):
    tars = Stream.webdataset(
        where + "/digits-{00..09}.tar", index=where + "/index.json"
    )
    stream = tars.shuffle(200).decode().map(sample)
    loader = paddle.io.DataLoader(
        stream, batch_size=BATCH_SIZE, num_workers=WORKERS
    )
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims="dp", seed=SEED
    )


def train(loader, mesh):
    """Losses, the keys that each epoch delivered, and the model."""
    paddle.seed(SEED)
    model = paddle.nn.Sequential(
        paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
    )
    dist.shard_layer(model, mesh, lambda name, layer, mesh: None)
    optimizer = dist.shard_optimizer(
        paddle.optimizer.AdamW(5e-3, parameters=model.parameters())
    )
    losses, epochs = [], []
    for _ in range(EPOCHS):
        batches, keys = iter(loader), []
        for images, labels, key in batches:
            each = paddle.nn.functional.cross_entropy(
                model(images), labels, reduction="none"
            ).squeeze(-1)
            # the parts differ by one sample at most
            real = batches.valid.astype("float32")
            loss = (each * real).sum() / real.sum()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(
                dist.reshard(loss, mesh, [dist.Replicate()])
                ._local_value()
                .item()
            )
            keys += paddle_shard.gather_valid(key, batches.valid).tolist()
        epochs.append(keys)
    return losses, epochs, model


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def serve(folder):
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main():
    dist.init_parallel_env()
    rank, mesh = (
        dist.get_rank(),
        dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"]),
    )
    images, test_images, labels, test_labels = digits()
    shared = [tempfile.mkdtemp() if rank == 0 else None, None]
    if rank == 0:
        write_tars(Path(shared[0]), images, labels)
        server = serve(shared[0])
        shared[1] = f"http://127.0.0.1:{server.server_port}"
    dist.broadcast_object_list(shared, src=0)
    folder, url = shared

    losses, epochs, model = train(make_loader(folder, mesh), mesh)
    for keys in epochs:
        assert sorted(keys) == list(range(len(labels))), (
            "each image exactly once"
        )
    assert len({str(keys) for keys in epochs}) == EPOCHS, (
        "each epoch has an order of its own"
    )
    over_http, _, _ = train(make_loader(url, mesh), mesh)
    assert over_http == losses, "the same run over HTTP"

    found = model(
        dist.shard_tensor(
            paddle.to_tensor(test_images), mesh, [dist.Replicate()]
        )
    )
    accuracy = float(
        (found._local_value().numpy().argmax(1) == test_labels).mean()
    )
    assert accuracy > 0.93, accuracy
    if rank == 0:
        print(
            f"{len(SIZES)} tars of {min(SIZES)} to {max(SIZES)} samples, {dist.get_world_size()} processes x {WORKERS} "
            f"workers: {EPOCHS} epochs of {len(losses) // EPOCHS} steps, each of {len(labels)} images exactly once"
        )
        print(
            f"loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.2%}; over HTTP the same losses"
        )
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
        os.rmdir(folder)
    dist.barrier()


if __name__ == "__main__":
    main()
