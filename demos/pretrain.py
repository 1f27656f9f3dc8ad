"""Pretrain a small language model on a mixture of packed texts, kill it, and resume it on fewer processes.

    python demos/pretrain.py                     # kills it at a random step
    python demos/pretrain.py --kill-at 30        # at step 30

Three sources that every machine has: Python's standard library ("code"), what the installed packages say of themselves
("packages"), and this project's own pages ("english"). Their bytes are the tokens. The texts of each source are packed
into rows of 256 tokens, the sources are mixed by weight, and the weights change in the middle of the run. The first run
has 4 CPU processes (dp=2 x mp=2) and gets SIGKILL. The second one resumes from its last checkpoint with 2 processes
(dp=1 x mp=2) and 2 workers each. A straight run is one process without a mesh. It ends with an error
  - if the loss of a step, whichever run made it, differs by more than 1e-5 from that of the straight run;
  - if a source is ever further from its share than 1 - 1/(2n-2) rows for each stretch of weights;
  - if a row of a source is read again before each of them was read once, so that a token is missed or repeated;
  - if an epoch is not certified as "each of ... draws of the mixture exactly once".
"""

import argparse
import json
import os
import random
import signal
import sys
import sysconfig
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from resume import Run, parse_mesh, whole, write

import paddle_shard
from paddle_shard import Mixture, Packed

LENGTH, BATCH_SIZE, SEED, TOKENS = 256, 8, 7, 257  # a byte, and 0 for padding
EPOCHS, ROWS, SAVE_EVERY, PARITY = 2, 128, 6, 1e-5
WEIGHTS = [
    (0, {"code": 0.5, "packages": 0.3, "english": 0.2}),
    (150, {"code": 0.2, "packages": 0.2, "english": 0.6}),
]
NAMES = list(WEIGHTS[0][1])


# The data


def texts(paths, most):
    """The first 1,500 bytes of some files, each a document; a byte b is the token b + 1."""
    contents = (path.read_bytes()[:1500] for path in sorted(paths)[:most])
    return [
        np.frombuffer(content, "uint8").astype("int64") + 1
        for content in contents
        if content
    ]


def mixture():
    library, project = (
        Path(sysconfig.get_path("stdlib")),
        Path(__file__).parents[1],
    )
    files = {
        "code": (library.glob("[a-z]*.py"), 60),
        "packages": (
            Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA"),
            40,
        ),
        "english": (
            [
                *project.glob("*.md"),
                *project.glob("docs/*.md"),
                *project.glob("*/README.md"),
            ],
            16,
        ),
    }
    packed = {
        name: Packed(texts(*found), LENGTH, labels="labels", max_pieces=LENGTH)
        for name, found in files.items()
    }
    return Mixture(packed, WEIGHTS, num_samples=ROWS)


# The model


class Model(paddle.nn.Layer):
    """One layer of attention that keeps to the document, and an MLP."""

    def __init__(self, width=32, hidden=64):
        super().__init__()
        self.tokens = paddle.nn.Embedding(TOKENS, width)
        self.positions = paddle.nn.Embedding(LENGTH, width)
        self.query, self.key, self.value = (
            paddle.nn.Linear(width, width) for _ in range(3)
        )
        self.inner, self.outer = (
            paddle.nn.Linear(width, hidden),
            paddle.nn.Linear(hidden, width),
        )
        self.head = paddle.nn.Linear(width, TOKENS)

    def forward(self, tokens, positions, segments, causal):
        x = self.tokens(tokens) + self.positions(positions)
        scores = (
            paddle.matmul(self.query(x), self.key(x), transpose_y=True)
            / x.shape[-1] ** 0.5
        )
        # 1 between two documents
        apart = (segments.unsqueeze(2) - segments.unsqueeze(1)).abs().clip(0, 1)
        x = x + paddle.matmul(
            F.softmax(scores - 1e9 * (apart + causal).clip(0, 1)), self.value(x)
        )
        return self.head(x + self.outer(F.relu(self.inner(x))))


def split_weights(name, layer, mesh):
    """Split the hidden units of the MLP over mp; replicate the rest."""
    dims = {"inner": {"weight": 1, "bias": 0}, "outer": {"weight": 0}}.get(
        name, {}
    )
    for kind, dim in dims.items():
        placements = [
            dist.Shard(dim) if axis == "mp" else dist.Replicate()
            for axis in mesh.dim_names
        ]
        setattr(
            layer,
            kind,
            dist.shard_tensor(getattr(layer, kind), mesh, placements),
        )


def new_model(mesh=None, saved=None):
    paddle.seed(SEED)
    model = Model()
    if saved is not None:
        model.set_state_dict(saved["model"])
    if mesh is not None:
        dist.shard_layer(model, mesh, split_weights)
    optimizer = paddle.optimizer.AdamW(
        learning_rate=3e-3, parameters=model.parameters()
    )
    if saved is not None:
        optimizer.set_state_dict(saved["optimizer"])
    return model, optimizer if mesh is None else dist.shard_optimizer(optimizer)


def train_step(model, optimizer, batch, causal):
    """Return the loss: the mean over all tokens that have a next one."""
    logits = model(
        batch["input_ids"],
        batch["position_ids"],
        batch["segment_ids"].astype("float32"),
        causal,
    )
    losses = F.cross_entropy(
        logits, batch["labels"], reduction="none", ignore_index=-100
    ).squeeze(-1)
    loss = losses.sum() / (batch["labels"] >= 0).astype("float32").sum()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return loss


def causal_mask():
    return paddle.to_tensor(np.triu(np.ones([LENGTH, LENGTH], "float32"), 1))


def keys(rows):
    """What rows are known by: a checksum of their tokens."""
    return [zlib.crc32(row.tobytes()) for row in rows]


# A rank of a run


def train(checkpoint, record, axes, workers):
    """Train from the checkpoint, if there is one, to the end; write each step's loss, counts and rows to the record."""
    (Path(record).parent / f"pid.{os.environ['PADDLE_TRAINER_ID']}").write_text(
        str(os.getpid())
    )
    dist.init_parallel_env()
    axes = parse_mesh(axes)
    mesh = dist.ProcessMesh(
        np.arange(dist.get_world_size()).reshape(list(axes.values())),
        dim_names=list(axes),
    )
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(
            mixture(),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=int(workers),
        ),
        meshes=mesh,
        shard_dims="dp",
        seed=SEED,
    )
    saved = paddle.load(checkpoint) if os.path.exists(checkpoint) else None
    model, optimizer = new_model(mesh, saved)
    if saved is not None:
        loader.load_state_dict(saved["data"])
    step = 0 if saved is None else saved["step"]
    everywhere = [dist.Replicate()] * mesh.ndim
    causal = dist.shard_tensor(causal_mask(), mesh, everywhere)
    with open(record, "a") as lines:
        while loader.epoch < EPOCHS:
            for batch in loader:
                loss = float(
                    dist.reshard(
                        train_step(model, optimizer, batch, causal),
                        mesh,
                        everywhere,
                    )
                )
                drawn = [source.drawn for source in loader.sources().values()]
                rows = keys(dist.unshard_dtensor(batch["input_ids"]).numpy())
                write(lines, f"step {step} {loss!r}")
                write(lines, f"drawn {json.dumps([step, drawn, rows])}")
                step += 1
                if step % SAVE_EVERY == 0:
                    save(checkpoint, model, optimizer, loader, step)
            certificate = loader.certificate()
            assert certificate.exact, certificate
            write(lines, f"certificate {certificate}")
    dist.barrier()


def save(checkpoint, model, optimizer, loader, step):
    # so that state_dict() holds what all ranks have delivered
    loader.certificate()
    saved = {
        "step": step,
        "data": loader.state_dict(),
        "model": whole(model.state_dict()),
        "optimizer": whole(optimizer.state_dict()),
    }
    if dist.get_rank() == 0:
        paddle.save(saved, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)


# What it is compared with


def train_straight():
    """One process, no mesh: the mixture by hand. Returns the loss and the rows' keys of each step."""
    data, (model, optimizer), causal = mixture(), new_model(), causal_mask()
    losses, rows = [], []
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True),
        dist.ProcessMesh([0], dim_names=["dp"]),
        shard_dims="dp",
        seed=SEED,
    )
    for _ in range(EPOCHS):
        for batch in loader:
            local = {
                name: field._local_value() for name, field in batch.items()
            }
            losses.append(float(train_step(model, optimizer, local, causal)))
            rows.append(keys(local["input_ids"].numpy()))
    return losses, rows


def check_shares(drawn):
    """Each source is within 1 - 1/(2n-2) of its share in each stretch of weights; over a switch, the bounds add up."""
    bound = 1 - 1 / (2 * len(NAMES) - 2)
    worst = 0.0
    for step, counts in drawn.items():
        at, share = (step + 1) * BATCH_SIZE, dict.fromkeys(NAMES, 0.0)
        ends = [*(first for first, _ in WEIGHTS[1:]), at]
        for (first, weights), end in zip(WEIGHTS, ends, strict=True):
            for name, weight in weights.items():
                share[name] += weight * max(0, min(end, at) - first)
        off = max(
            abs(count - share[name])
            for name, count in zip(NAMES, counts, strict=True)
        )
        stretches = sum(first < at for first, _ in WEIGHTS)
        assert off <= bound * stretches + 1e-9, (
            f"step {step}: {counts} are {off} off their shares {share}"
        )
        worst = max(worst, off)
    return worst


def check_rows(rows):
    """Each source's rows: none is read again before all were read."""
    read = Counter(key for batch in rows for key in batch)
    for name, packed in mixture().sources.items():
        own = [packed[row]["input_ids"] for row in range(len(packed))]
        counts = [read.pop(key) if key in read else 0 for key in keys(own)]
        assert max(counts) - min(counts) <= 1, (
            f"{name}: rows were read between {min(counts)} and {max(counts)} times"
        )
        tokens = sum(int((row > 0).sum()) for row in own)
        padding, drawn = packed.packing.padding, sum(counts)
        print(
            f"  {name:9} {len(own):3} rows of {tokens:6} tokens, {padding:.1%} padding, {drawn:3} drawn"
        )
    assert not read, f"{len(read)} rows are of no source"


def drive(kill_at, directory):
    straight, rows = train_straight()
    kill_at = (
        random.randint(SAVE_EVERY + 1, len(straight) - 4)
        if kill_at is None
        else kill_at
    )
    if not SAVE_EVERY < kill_at < len(straight):
        raise SystemExit(
            f"--kill-at must be from {SAVE_EVERY + 1} to {len(straight) - 1}, got {kill_at}"
        )
    print(
        f"straight run: 1 process, {len(straight)} steps in {EPOCHS} epochs",
        flush=True,
    )
    checkpoint = str(directory / "checkpoint.pd")
    with Run(
        directory / "killed", checkpoint, "dp=2,mp=2", 0, __file__
    ) as killed:
        stopped_at = killed.kill_at(kill_at)
    resumed_at = paddle.load(checkpoint)["step"]
    print(
        f"killed run:   4 processes (dp=2, mp=2); SIGKILL after {stopped_at} steps, as --kill-at {kill_at}",
        flush=True,
    )
    with Run(
        directory / "resumed", checkpoint, "dp=1,mp=2", 2, __file__
    ) as resumed:
        resumed.finish()
    print(
        f"resumed run:  2 processes (dp=1, mp=2), 2 workers each; steps {resumed_at} to the end"
    )

    losses, drawn, read = {}, {}, {}
    for run in (killed, resumed):
        for step, loss in run.losses():
            assert abs(loss - straight[step]) <= PARITY, (
                f"step {step}: {loss}, but {straight[step]} in the straight run"
            )
            losses[step] = loss
        for step, counts, found in map(json.loads, run.recorded("drawn ")):
            drawn[step], read[step] = counts, found
    assert list(losses) == list(range(len(straight))), (
        f"the steps {list(losses)} were made"
    )
    assert [sorted(read[step]) for step in sorted(read)] == [
        sorted(batch) for batch in rows
    ], "other rows were read"
    first, last = straight[0], straight[-1]
    print(
        f"parity: the losses of all {len(straight)} steps are the straight run's, from {first:.4f} to {last:.4f}"
    )
    off = check_shares(drawn)
    print(
        f"shares: after every step, each source is within {off:.2f} rows of its share; drawn {drawn[max(drawn)]}"
    )
    check_rows(rows)
    certificates = sorted(
        {
            text
            for run in (killed, resumed)
            for text in run.recorded("certificate ")
        }
    )
    assert certificates == [
        f"epoch {n}: each of {ROWS} draws of the mixture exactly once"
        for n in range(EPOCHS)
    ], certificates
    print(*certificates, sep="\n")


def main():
    parser = argparse.ArgumentParser(
        description="Pretrain on a mixture of packed texts, killed and resumed."
    )
    parser.add_argument(
        "--kill-at", type=int, metavar="STEP", help="default: a random one"
    )
    # how the driver starts a rank
    parser.add_argument("--as-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        train(*options.as_rank)
        return
    # leaves every `with`
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as directory:
        drive(options.kill_at, Path(directory))


if __name__ == "__main__":
    main()
