"""Train a small GPT whose sequences are split over processes, and show that it is exactly one process's training.

    python -m paddle.distributed.launch --nproc_per_node 4 demos/context_parallel.py            # dp=2 x sep=2 x mp=1
    python -m paddle.distributed.launch --nproc_per_node 4 demos/context_parallel.py --mesh 1 2 2

The model reads the bytes of Python's standard library: each module is a document, and documents are packed into rows
(`Packed`), which shifts labels and counts positions before rows are split. Each row is split over `sep`: each process
holds two chunks, one from either end (`Balanced`). `token_index` is the place of each token in its row; masks and
`in_order_of_rows` need it. Attention keeps to the document; each process has the queries of its own tokens, and gathers
the keys and values. It ends with an error if
  - the loss of a step differs by more than 1e-5 from that of one process on the unsplit rows;
  - the losses of tokens, put back in the order of the rows, are not those of one process;
  - the processes of a row do not hold as many tokens.
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

import paddle_shard

LENGTH, BATCH_SIZE, STEPS, SEED, PARITY = 128, 8, 8, 7, 1e-5
HIDDEN, HEADS, LAYERS = 32, 4, 2
FIELDS = ("input_ids", "labels", "position_ids", "segment_ids", "token_index")


def documents():
    """Each of 60 modules of the standard library, up to 400 bytes of it."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return [
        np.frombuffer(module.read_bytes()[:400], "uint8").astype("int64")
        for module in modules[:60]
    ]


def collate(rows):
    """Stack packed rows, and number the tokens of each."""
    batch = {
        name: np.stack([row[name] for row in rows]) for name in FIELDS[:-1]
    }
    return {**batch, "token_index": np.tile(np.arange(LENGTH), (len(rows), 1))}


def gathered_over_sep(tensor):
    """Return a distributed tensor whose sequences are not split."""
    mesh = tensor.process_mesh
    placements = list(tensor.placements)
    placements[mesh.dim_names.index("sep")] = dist.Replicate()
    return dist.reshard(tensor, mesh, placements)


def in_order_of_rows(outputs, token_index):
    """Return outputs of tokens, [rows, length], in the order of the rows: an array of this process's rows."""
    with paddle.no_grad():
        values, index = (
            gathered_over_sep(tensor)._local_value().numpy()
            for tensor in (outputs, token_index)
        )
    return np.take_along_axis(values, np.argsort(index, axis=1), axis=1)


class Block(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (
            paddle.nn.LayerNorm(HIDDEN),
            paddle.nn.LayerNorm(HIDDEN),
        )
        self.query, self.key, self.value, self.out = (
            paddle.nn.Linear(HIDDEN, HIDDEN) for _ in range(4)
        )
        self.fc1, self.fc2 = (
            paddle.nn.Linear(HIDDEN, 4 * HIDDEN),
            paddle.nn.Linear(4 * HIDDEN, HIDDEN),
        )

    def forward(self, x, mask, gathered):
        x = x + self.attention(self.norm1(x), mask, gathered)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def attention(self, x, mask, gathered):
        def heads(y):
            return y.reshape(
                [y.shape[0], y.shape[1], HEADS, HIDDEN // HEADS]
            ).transpose([0, 2, 1, 3])

        query, key, value = (
            heads(self.query(x)),
            heads(gathered(self.key(x))),
            heads(gathered(self.value(x))),
        )
        scores = (
            paddle.matmul(query, key, transpose_y=True)
            * (HIDDEN // HEADS) ** -0.5
        )
        weights = F.softmax(scores + mask.unsqueeze(1))
        mixed = paddle.matmul(weights, value).transpose([0, 2, 1, 3])
        return self.out(mixed.reshape([x.shape[0], x.shape[1], HIDDEN]))


class GPT(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.token, self.position = (
            paddle.nn.Embedding(256, HIDDEN),
            paddle.nn.Embedding(LENGTH, HIDDEN),
        )
        self.blocks = paddle.nn.LayerList([Block() for _ in range(LAYERS)])
        self.norm, self.head = (
            paddle.nn.LayerNorm(HIDDEN),
            paddle.nn.Linear(HIDDEN, 256),
        )

    def forward(self, batch, gathered=lambda tensor: tensor):
        """Return the loss of each token, [rows, length]; 0 where there is no label."""
        segments, index = batch["segment_ids"], batch["token_index"]
        same = segments.unsqueeze(2) == gathered(segments).unsqueeze(1)
        seen = index.unsqueeze(2) >= gathered(index).unsqueeze(1)
        mask = (1 - paddle.logical_and(same, seen).astype("float32")) * -1e9
        x = self.token(batch["input_ids"]) + self.position(
            batch["position_ids"]
        )
        for block in self.blocks:
            x = block(x, mask, gathered)
        return F.cross_entropy(
            self.head(self.norm(x)),
            batch["labels"],
            reduction="none",
            ignore_index=-100,
        )


def new_model(mesh=None):
    """The same weights every time; over a mesh if there is one: heads and hidden units are split over mp."""
    split = {"query": 1, "key": 1, "value": 1, "fc1": 1, "out": 0, "fc2": 0}

    def place(name, layer, mesh):
        for kind, parameter in list(
            layer.named_parameters(include_sublayers=False)
        ):
            dim = split.get(name.split(".")[-1])
            splits = dim is not None and (kind == "weight" or dim == 1)
            mp = (
                dist.Shard(dim if kind == "weight" else 0)
                if splits
                else dist.Replicate()
            )
            setattr(
                layer,
                kind,
                dist.shard_tensor(
                    parameter, mesh, [dist.Replicate(), dist.Replicate(), mp]
                ),
            )

    paddle.seed(SEED)
    model = GPT()
    if mesh is not None:
        dist.shard_layer(model, mesh, place)
    return model, paddle.optimizer.AdamW(
        learning_rate=3e-3, parameters=model.parameters()
    )


def step(model, optimizer, batch, gathered=lambda tensor: tensor):
    """Train on a batch; return the mean loss of its tokens that have a label, and the loss of each token."""
    losses = model(batch, gathered)
    loss = losses.sum() / (batch["labels"] != -100).astype("float32").sum()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return loss, losses


def train(loader, mesh):
    """Return the loss of each step, and the losses of its tokens in the order of the rows, of this rank's rows."""
    model, optimizer = new_model(mesh)
    optimizer, found = dist.shard_optimizer(optimizer), []
    for number, batch in zip(range(STEPS), loader, strict=False):
        loss, losses = step(model, optimizer, batch, gathered_over_sep)
        found.append(
            (
                float(dist.reshard(loss, mesh, [dist.Replicate()] * 3)),
                in_order_of_rows(losses, batch["token_index"]),
            )
        )
        if number == 0:
            assert batch["input_ids"]._local_shape[1] * mesh.shape[1] == LENGTH
    return found


def train_one_process(rows):
    """Plain Paddle, no mesh, no loader: the first global batches by their indices, unsplit."""
    plan = paddle_shard.ShardPlan(
        num_samples=len(rows),
        batch_size=BATCH_SIZE,
        num_data_ranks=1,
        shuffle=True,
        seed=SEED,
    )
    (model, optimizer), found = new_model(), []
    for number in range(STEPS):
        batch = collate(
            [
                rows[row]
                for row in plan.indices(epoch=0, step=number, data_rank=0)
            ]
        )
        loss, losses = step(
            model,
            optimizer,
            {name: paddle.to_tensor(batch[name]) for name in FIELDS},
        )
        found.append((float(loss), losses.numpy()))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--mesh",
        type=int,
        nargs=3,
        metavar=("DP", "SEP", "MP"),
        default=[2, 2, 1],
    )
    shape = parser.parse_args().mesh
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(
        np.arange(np.prod(shape)).reshape(shape), dim_names=["dp", "sep", "mp"]
    )
    rows = paddle_shard.Packed(documents(), LENGTH, labels="labels")
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(
            rows,
            batch_size=BATCH_SIZE,
            shuffle=True,
            drop_last=True,
            collate_fn=collate,
        ),
        mesh,
        shard_dims="dp",
        input_keys=FIELDS,
        placements={
            name: {"dp": 0, "sep": paddle_shard.Balanced(dim=1)}
            for name in FIELDS
        },
        seed=SEED,
        # on each host, one of the ranks that differ in sep or mp reads for them all
        replicas="leader",
    )
    found, alone = train(loader, mesh), train_one_process(rows)
    own = slice(
        *(
            BATCH_SIZE
            // shape[0]
            * (dist.get_rank() // (shape[1] * shape[2]) + end)
            for end in (0, 1)
        )
    )
    difference = max(
        abs(mine[0] - theirs[0])
        for mine, theirs in zip(found, alone, strict=True)
    )
    of_tokens = max(
        np.abs(mine[1] - theirs[1][own]).max()
        for mine, theirs in zip(found, alone, strict=True)
    )
    if dist.get_rank() == 0:
        print(f"dp={shape[0]} x sep={shape[1]} x mp={shape[2]}, {rows}")
        print("loss: " + "  ".join(f"{loss:.5f}" for loss, _ in found))
        print(
            f"parity: the losses of {STEPS} steps differ from one process's by at most {difference:.1e},"
        )
        print(
            f"  those of tokens, in the order of the rows, by {of_tokens:.1e}"
        )
    assert difference <= PARITY, (
        f"losses differ from one process's by {difference:.1e}"
    )
    assert of_tokens <= 10 * PARITY, (
        f"losses of tokens differ from one process's by {of_tokens:.1e}"
    )
    assert found[-1][0] < found[0][0], "nothing was learnt"
    dist.barrier()  # rank 0 hosts the others' rendezvous


if __name__ == "__main__":
    main()
