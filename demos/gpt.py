"""Train a small GPT with data and tensor parallelism, and show that it is exactly one process's training.

    python -m paddle.distributed.launch --nproc_per_node 4 demos/gpt.py    # CPU
    python -m paddle.distributed.launch --gpus 0,1,2,3 demos/gpt.py        # GPUs, unchanged

The model reads bytes: 300 KB of the source of Python's standard library, of which the last 20 KB are held out. Pairs
of processes share the weights (mp=2) and the pairs share each batch (dp), so any even number of processes works whose
half divides the batch. It ends with an error
  - if the loss of one of the first 20 steps differs by more than 1e-5 from that of one process on the same batches;
  - if the held-out loss differs as much from that of one process with the trained weights;
  - if the held-out loss is not below the entropy of the held-out bytes, the best that counting bytes can do.
GPUs that multiply in TF32 need NVIDIA_TF32_OVERRIDE=0 to come that close.
"""

import sysconfig
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from tqdm import tqdm

# the one import that changes: paddle_shard.shard_dataloader for dist.shard_dataloader
import paddle_shard

TEXT_BYTES, HELD_OUT_BYTES = 300_000, 20_000
CONTEXT, BATCH_SIZE, SEED = 64, 32, 7
HIDDEN, HEADS, LAYERS = 64, 4, 2
PARITY_STEPS, PARITY = 20, 1e-5

REPLICATED = [dist.Replicate(), dist.Replicate()]
# on the axes (dp, mp): heads and hidden units are split over mp; what is not named is replicated
PLACEMENTS = {
    "qkv.weight": [dist.Replicate(), dist.Shard(1)],
    "qkv.bias": [dist.Replicate(), dist.Shard(0)],
    "out.weight": [dist.Replicate(), dist.Shard(0)],
    "fc1.weight": [dist.Replicate(), dist.Shard(1)],
    "fc1.bias": [dist.Replicate(), dist.Shard(0)],
    "fc2.weight": [dist.Replicate(), dist.Shard(0)],
}


def read_text():
    """The standard library's modules from abc.py on, in the order of their names, as bytes."""
    modules = Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")
    text = b"".join(module.read_bytes() for module in sorted(modules))
    return np.frombuffer(text, "uint8", count=TEXT_BYTES)


def entropy(text):
    """Nats per byte of the best model that knows how often each byte occurs, and nothing else."""
    shares = np.unique(text, return_counts=True)[1] / len(text)
    return -float((shares * np.log(shares)).sum())


class Windows(paddle.io.Dataset):
    """Windows of the text, end to end; the labels are the inputs, one byte later."""

    def __init__(self, text):
        self.windows = np.lib.stride_tricks.sliding_window_view(
            text.astype("int64"), CONTEXT + 1
        )[::CONTEXT]

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return {
            "input_ids": self.windows[index, ..., :-1],
            "labels": self.windows[index, ..., 1:],
        }


class Block(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (
            paddle.nn.LayerNorm(HIDDEN),
            paddle.nn.LayerNorm(HIDDEN),
        )
        self.qkv, self.out = (
            paddle.nn.Linear(HIDDEN, 3 * HIDDEN),
            paddle.nn.Linear(HIDDEN, HIDDEN),
        )
        self.fc1, self.fc2 = (
            paddle.nn.Linear(HIDDEN, 4 * HIDDEN),
            paddle.nn.Linear(4 * HIDDEN, HIDDEN),
        )

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def attention(self, x, mask):
        rows, length, _ = x.shape
        # A head's query, key and value lie side by side, so that splitting the columns splits the heads.
        qkv = (
            self.qkv(x)
            .reshape([rows, length, HEADS, 3 * HIDDEN // HEADS])
            .transpose([0, 2, 1, 3])
        )
        # each [rows, heads, length, hidden / heads]
        query, key, value = paddle.split(qkv, 3, axis=-1)
        scores = (
            paddle.matmul(query, key, transpose_y=True)
            * (HIDDEN // HEADS) ** -0.5
            + mask
        )
        mixed = paddle.matmul(F.softmax(scores), value).transpose([0, 2, 1, 3])
        return self.out(mixed.reshape([rows, length, HIDDEN]))


class GPT(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.token, self.position = (
            paddle.nn.Embedding(256, HIDDEN),
            paddle.nn.Embedding(CONTEXT, HIDDEN),
        )
        self.blocks = paddle.nn.LayerList([Block() for _ in range(LAYERS)])
        self.norm, self.head = (
            paddle.nn.LayerNorm(HIDDEN),
            paddle.nn.Linear(HIDDEN, 256),
        )
        # no byte sees a later one
        self.mask = paddle.triu(
            paddle.full([CONTEXT, CONTEXT], -1e9), diagonal=1
        )

    def forward(self, input_ids, labels):
        """Return the loss of every byte, [rows, length]."""
        x = self.token(input_ids) + self.position.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return F.cross_entropy(
            self.head(self.norm(x)), labels, reduction="none"
        )


def split_weights(name, layer, mesh):
    for kind, parameter in list(
        layer.named_parameters(include_sublayers=False)
    ):
        placements = PLACEMENTS.get(f"{name.split('.')[-1]}.{kind}")
        if placements is not None:
            setattr(layer, kind, dist.shard_tensor(parameter, mesh, placements))


def new_model(mesh=None):
    """The same weights every time; over a mesh if there is one."""
    paddle.seed(SEED)
    model = GPT()
    if mesh is not None:
        dist.shard_layer(model, mesh, split_weights)
    return model, paddle.optimizer.AdamW(
        learning_rate=3e-3, parameters=model.parameters()
    )


def number(scalar, mesh):
    """A distributed scalar, partial sums included, as a float that is the same on every rank."""
    return float(dist.reshard(scalar, mesh, REPLICATED))


def train_step(model, optimizer, batch):
    loss = model(**batch).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return loss


def train(loader, mesh):
    model, optimizer = new_model(mesh)
    optimizer, losses = dist.shard_optimizer(optimizer), []
    with tqdm(
        loader, desc="training", disable=dist.get_rank() != 0, mininterval=1
    ) as bar:
        for batch in bar:
            losses.append(number(train_step(model, optimizer, batch), mesh))
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
    return losses, model


@paddle.no_grad()
def evaluate(model, loader, mesh):
    """Return the mean loss of the held-out windows, and how many there are."""
    total = count = 0.0
    batches = iter(loader)
    for batch in batches:
        real = batches.valid.astype("float32")  # 0 where a row is only padding
        total += number((model(**batch).mean(axis=-1) * real).sum(), mesh)
        count += number(real.sum(), mesh)
    return total / count, int(count)


def train_one_process(data):
    """Plain Paddle, no mesh, no loader: the first global batches by their indices."""
    plan = paddle_shard.ShardPlan(
        num_samples=len(data),
        batch_size=BATCH_SIZE,
        num_data_ranks=1,
        shuffle=True,
        seed=SEED,
        tail="drop",
    )
    (model, optimizer), losses = new_model(), []
    for step in range(PARITY_STEPS):
        batch = data[plan.indices(epoch=0, step=step, data_rank=0)]
        losses.append(float(train_step(model, optimizer, tensors(batch))))
    return losses


@paddle.no_grad()
def evaluate_one_process(data, trained):
    """Plain Paddle again: all windows at once, with the trained weights put together."""
    model, _ = new_model()
    model.set_state_dict(
        {
            name: dist.unshard_dtensor(weight)
            for name, weight in trained.state_dict().items()
        }
    )
    return float(model(**tensors(data[:])).mean())


def tensors(batch):
    return {key: paddle.to_tensor(value) for key, value in batch.items()}


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(
        np.arange(dist.get_world_size()).reshape(-1, 2), dim_names=["dp", "mp"]
    )
    text = read_text()
    data, held_out = (
        Windows(text[:-HELD_OUT_BYTES]),
        Windows(text[-HELD_OUT_BYTES:]),
    )

    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(
            data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
        ),
        meshes=mesh,
        shard_dims="dp",
        seed=SEED,
    )
    held_out_loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(held_out, batch_size=BATCH_SIZE),
        meshes=mesh,
        shard_dims="dp",
        tail="fill",
    )
    losses, model = train(loader, mesh)
    reached, counted = evaluate(model, held_out_loader, mesh)
    unigram = entropy(text[-HELD_OUT_BYTES:])
    difference = np.abs(
        np.array(losses[:PARITY_STEPS]) - np.array(train_one_process(data))
    ).max()
    held_out_difference = abs(reached - evaluate_one_process(held_out, model))

    if dist.get_rank() == 0:
        steps = [*range(0, len(losses), 25), len(losses) - 1]
        print(
            f"dp={mesh.shape[0]} x mp={mesh.shape[1]}, {dist.get_world_size()} processes, loss at steps:"
        )
        print("  " + "  ".join(f"{step}: {losses[step]:.5f}" for step in steps))
        print(
            f"held-out loss: {reached:.5f} nats a byte, of {counted} windows; byte entropy: {unigram:.5f}"
        )
        print(
            f"parity: the losses of {PARITY_STEPS} steps differ from one process's by at most {difference:.1e},"
        )
        print(f"  the held-out loss by {held_out_difference:.1e}")
    assert difference <= PARITY, (
        f"losses differ from one process's by {difference:.1e}"
    )
    assert held_out_difference <= PARITY, (
        f"the held-out loss differs from one process's by {held_out_difference:.1e}"
    )
    assert counted == len(held_out), (
        f"{counted} held-out windows were counted, there are {len(held_out)}"
    )
    assert reached < unigram, (
        f"held-out loss {reached:.5f} is not below the byte entropy {unigram:.5f}"
    )
    dist.barrier()  # rank 0 hosts the others' rendezvous


if __name__ == "__main__":
    main()
