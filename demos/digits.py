"""Train on real images with data parallelism, and show that it is exactly one process's training.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/digits.py                 # CPU
    RUN_STATIC=1 python -m paddle.distributed.launch --nproc_per_node 2 demos/digits.py    # dist.to_static
    python -m paddle.distributed.launch --gpus 0,1 demos/digits.py                         # GPUs, unchanged

The data are scikit-learn's 1,797 handwritten digits. Any number of processes that divides the batch works.
It ends with an error if the test accuracy is below 95 %, or if a step's loss differs from that of one process
on the same batches by more than 1e-5.
"""

import os

import numpy as np
import paddle
import paddle.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

# the one import that changes: paddle_shard.shard_dataloader for dist.shard_dataloader
import paddle_shard

RUN_STATIC = os.environ.get("RUN_STATIC", "0") == "1"
EPOCHS, BATCH_SIZE, SEED = 12, 32, 7


class Digits(paddle.io.Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Classifier(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.hidden = paddle.nn.Linear(64, 64)
        self.output = paddle.nn.Linear(64, 10)

    def forward(self, images):
        return self.output(paddle.nn.functional.relu(self.hidden(images)))


def new_model(mesh=None):
    """The same weights every time; replicated over a mesh if there is one."""
    paddle.seed(SEED)
    model = Classifier()
    if mesh is not None:
        # parameters not named are replicated
        dist.shard_layer(model, mesh, lambda name, layer, mesh: None)
    return model, paddle.optimizer.AdamW(
        learning_rate=5e-3, parameters=model.parameters()
    )


def train_dynamic(loader, mesh, bar):
    model, optimizer = new_model(mesh)
    optimizer, losses = dist.shard_optimizer(optimizer), []
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = paddle.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(dist.reshard(loss, mesh, [dist.Replicate()])))
            bar(losses[-1])
    return losses, model


def train_static(loader, mesh, bar):
    from cpu_static import cpu_static

    layer, optimizer = new_model(mesh)
    losses = []
    # lets a static program run on CPU processes; changes nothing on GPUs
    with cpu_static():
        model = dist.to_static(
            layer, loader, paddle.nn.CrossEntropyLoss(), optimizer
        )
        model.train()
        for _ in range(EPOCHS):
            for images, labels in loader:
                # this rank's mean
                loss = paddle.to_tensor(float(model(images, labels)))
                dist.all_reduce(loss)
                losses.append(float(loss) / dist.get_world_size())
                bar(losses[-1])
    # After training, a static model's weights are in its state_dict only.
    trained, _ = new_model(mesh)
    trained.set_state_dict(model.state_dict("param"))
    return losses, trained


def train_one_process(data, plan):
    """Plain Paddle, no mesh, no loader: the global batches by their indices."""
    (model, optimizer), losses = new_model(), []
    for epoch in range(EPOCHS):
        for step in range(plan.num_steps):
            of_ranks = [
                plan.indices(epoch=epoch, step=step, data_rank=data_rank)
                for data_rank in range(plan.num_data_ranks)
            ]
            indices = np.concatenate(of_ranks)
            images, labels = map(paddle.to_tensor, data[indices])
            loss = paddle.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    return losses


def accuracy(model, loader):
    right = total = 0
    batches = iter(loader)
    for images, labels in batches:
        # no padding
        hits = paddle_shard.gather_valid(
            model(images).argmax(axis=-1) == labels, batches.valid
        )
        right, total = right + int(hits.sum()), total + len(hits)
    return right / total, total


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(
        list(range(dist.get_world_size())), dim_names=["dp"]
    )
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        (images / 16).astype("float32"), labels, test_size=0.2, random_state=0
    )
    train, test = Digits(parts[0], parts[2]), Digits(parts[1], parts[3])

    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(
            train, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
        ),
        meshes=mesh,
        shard_dims="dp",
        seed=SEED,
    )
    test_loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(test, batch_size=BATCH_SIZE),
        meshes=mesh,
        shard_dims="dp",
        tail="fill",
    )
    mode = "static" if RUN_STATIC else "dynamic"
    with tqdm(
        total=EPOCHS * len(loader),
        desc=mode,
        disable=dist.get_rank() != 0,
        mininterval=1,
    ) as progress:

        def bar(loss):
            progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
            progress.update()

        losses, model = (train_static if RUN_STATIC else train_dynamic)(
            loader, mesh, bar
        )
    reached, counted = accuracy(model, test_loader)
    difference = np.abs(
        np.array(losses) - np.array(train_one_process(train, loader.plan))
    ).max()
    if dist.get_rank() == 0:
        print(
            f"{mode}, {dist.get_world_size()} processes, the loss of each step:"
        )
        for first in range(0, len(losses), 16):
            print(
                f"  {first:3d}  "
                + " ".join(f"{loss:.4f}" for loss in losses[first : first + 16])
            )
        print(f"test accuracy: {reached:.2%} of {counted} images")
        print(
            f"parity: the losses of {len(losses)} steps differ from one process's by at most {difference:.1e}"
        )
    assert reached >= 0.95, f"test accuracy {reached:.2%} is below 95 %"
    assert counted == len(test), (
        f"{counted} test images were counted, there are {len(test)}"
    )
    assert difference <= 1e-5, (
        f"losses differ from one process's by {difference:.1e}"
    )
    dist.barrier()  # rank 0 hosts the others' rendezvous


if __name__ == "__main__":
    main()
