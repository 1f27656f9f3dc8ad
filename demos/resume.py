"""Kill a training run, go on with it on other processes, and show that nothing shows.

    python demos/resume.py                                         # kills it at a random step
    python demos/resume.py --kill-at 30                            # at step 30
    python demos/resume.py --meshes dp=2,mp=2 mp=2,dp=1            # on the meshes of your choice

It starts two runs through launch/local.py. The first trains on scikit-learn's digits with 4 CPU processes (dp=4, no
DataLoader workers), saves a checkpoint every few steps, and gets SIGKILL: all its processes, at no step in particular.
The second goes on from the last checkpoint with 2 processes on a mesh with its axes in another order (mp=1 x dp=2) and
2 workers each, to the end. A straight run is one process of plain Paddle, which knows neither mesh nor loader, on the
same global batches. It ends with an error
  - if the loss of a step, whichever of the runs made it, differs by more than 1e-5 from that of the straight run; the
    steps between the last checkpoint and the kill are made twice, and both times are compared;
  - if the certificate of an epoch is not "each of 1437 samples exactly once", on every rank, and of the epoch that was
    interrupted above all.
Nothing is dropped: a last batch of 29 is padded to 32 rows for 4 data ranks and to 30 for 2, and the loss is the mean
of the real rows, those that `.valid` marks.
"""

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import paddle_shard

LAUNCH = Path(__file__).parents[1] / "launch" / "local.py"
EPOCHS, BATCH_SIZE, SEED = 3, 32, 7
# 7: no checkpoint falls on the end of an epoch, so that each has one to complete
SAVE_EVERY, PARITY = (
    7,
    1e-5,
)
DEADLINE = 120  # seconds, of a run


class Digits(paddle.io.Dataset):
    def __init__(self):
        images, labels = load_digits(return_X_y=True)
        images, _, self.labels, _ = train_test_split(
            images, labels, test_size=0.2, random_state=0
        )
        self.images = (images / 16).astype("float32")

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
        return self.output(F.relu(self.hidden(images)))


def split_weights(name, layer, mesh):
    """Split the hidden units over mp, if the mesh has that axis; replicate the rest."""
    dims = {"hidden": {"weight": 1, "bias": 0}, "output": {"weight": 0}}.get(
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
    """The same weights every time, or those of a checkpoint; over a mesh if there is one."""
    paddle.seed(SEED)
    model = Classifier()
    if saved is not None:
        model.set_state_dict(saved["model"])
    if mesh is not None:
        dist.shard_layer(model, mesh, split_weights)
    optimizer = paddle.optimizer.AdamW(
        learning_rate=3e-3, parameters=model.parameters()
    )
    if saved is not None:
        # Before the first step: the optimizer makes its moments then, whole, and only then splits them as the weights.
        optimizer.set_state_dict(saved["optimizer"])
    return model, optimizer if mesh is None else dist.shard_optimizer(optimizer)


def train_step(model, optimizer, images, labels, real):
    """Return the loss: the mean over the real rows, whatever the padding."""
    losses = F.cross_entropy(model(images), labels, reduction="none")
    loss = (losses * real).sum() / real.sum()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return loss


# A rank of a run


def train(checkpoint, record, axes, workers):
    """Train from the checkpoint, if there is one, to the end; write every step's loss to the record."""
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
            Digits(),
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
    with open(record, "a") as lines:
        while loader.epoch < EPOCHS:
            batches = iter(loader)
            for images, labels in batches:
                loss = train_step(
                    model,
                    optimizer,
                    images,
                    labels,
                    batches.valid.astype("float32"),
                )
                write(
                    lines,
                    f"step {step} {float(dist.reshard(loss, mesh, [dist.Replicate()] * mesh.ndim))!r}",
                )
                step += 1
                if step % SAVE_EVERY == 0:
                    save(checkpoint, model, optimizer, loader, step)
            certificate = loader.certificate()  # of the epoch that is complete
            assert certificate.exact, certificate
            write(lines, f"certificate {certificate}")
    dist.barrier()  # rank 0 hosts the others' rendezvous


def write(lines, text):
    if dist.get_rank() == 0:
        lines.write(text + "\n")
        lines.flush()


def save(checkpoint, model, optimizer, loader, step):
    """Every rank takes part; rank 0 writes, and replaces the old checkpoint at once: a kill leaves one of the two."""
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


def whole(tensors):
    """The tensors with their parts put together, bound to no mesh."""
    return {
        name: dist.unshard_dtensor(tensor).numpy()
        for name, tensor in tensors.items()
    }


# What the ranks' runs are compared with


def train_straight():
    """Plain Paddle, one process, no loader: the global batches by their indices. Returns each step's loss."""
    data, (model, optimizer), losses = Digits(), new_model(), []
    plan = paddle_shard.ShardPlan(
        num_samples=len(data),
        batch_size=BATCH_SIZE,
        num_data_ranks=1,
        shuffle=True,
        seed=SEED,
    )
    for epoch in range(EPOCHS):
        for step in range(plan.num_steps):
            images, labels = map(
                paddle.to_tensor,
                data[plan.indices(epoch=epoch, step=step, data_rank=0)],
            )
            losses.append(
                float(
                    train_step(
                        model,
                        optimizer,
                        images,
                        labels,
                        paddle.ones([len(labels)]),
                    )
                )
            )
    return losses, plan.num_steps


# The driver


def parse_mesh(text):
    """'dp=2,mp=2' -> {'dp': 2, 'mp': 2}"""
    return {
        axis: int(size)
        for axis, size in (item.split("=") for item in text.split(","))
    }


class Run:
    """A training run on this host, through launch/local.py; what is left of it is ended on leaving `with`."""

    def __init__(self, directory, checkpoint, axes, workers, script=__file__):
        self.directory, self.record = directory, directory / "record"
        self.processes = math.prod(parse_mesh(axes).values())
        directory.mkdir()
        self.record.touch()
        command = [
            LAUNCH,
            "--processes",
            self.processes,
            "--log-dir",
            directory / "log",
            script,
        ]
        command += ["--as-rank", checkpoint, self.record, axes, workers]
        with open(directory / "output", "wb") as output:
            self.launch = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=output,
                stderr=output,
            )
        self.give_up = time.monotonic() + DEADLINE

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.launch.poll() is None:
            # it ends every process of the run, workers too
            self.launch.terminate()
            self.launch.wait()

    def poll(self, wait):
        """Wait a little; return the exit code once the run has ended."""
        if time.monotonic() > self.give_up:
            raise SystemExit(
                f"the run had not ended after {DEADLINE} s:\n{self.output()}"
            )
        time.sleep(wait)
        return self.launch.poll()

    def output(self):
        return (self.directory / "output").read_text(errors="replace")

    def losses(self):
        """(step, loss) of every step so far, in the order in which they were made."""
        return [
            (int(step), float(loss))
            for step, loss in map(str.split, self.recorded("step "))
        ]

    def recorded(self, kind):
        lines = self.record.read_text().split("\n")[:-1]  # whole ones
        return [
            line.removeprefix(kind) for line in lines if line.startswith(kind)
        ]

    def kill_at(self, step):
        """SIGKILL for every rank, as soon as so many steps have been made; return how many had been by then."""
        while len(self.losses()) < step:
            if self.poll(0.002) is not None:
                raise SystemExit(
                    f"the run ended before step {step}:\n{self.output()}"
                )
        pids = [int(path.read_text()) for path in self.directory.glob("pid.*")]
        assert len(pids) == self.processes, (
            f"{len(pids)} ranks of {self.processes} told their ids"
        )
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # the launcher notices that its ranks are gone
        while self.poll(0.05) is None:
            pass
        assert self.launch.returncode != 0, (
            f"the run ended well, though it was killed:\n{self.output()}"
        )
        return len(self.losses())

    def finish(self):
        while self.poll(0.05) is None:
            pass
        if self.launch.returncode:
            raise SystemExit(f"the run failed:\n{self.output()}")


def drive(meshes, kill_at, directory):
    straight, epoch_steps = train_straight()
    # There must be a checkpoint to go on from, and some of the run left to kill.
    latest = (EPOCHS - 1) * epoch_steps
    kill_at = (
        random.randint(SAVE_EVERY + 1, latest) if kill_at is None else kill_at
    )
    if not SAVE_EVERY < kill_at <= latest:
        raise SystemExit(
            f"--kill-at must be from {SAVE_EVERY + 1} to {latest}, got {kill_at}"
        )
    print(
        f"straight run: 1 process, {len(straight)} steps in {EPOCHS} epochs",
        flush=True,
    )

    checkpoint = str(directory / "checkpoint.pd")
    with Run(directory / "killed", checkpoint, meshes[0], workers=0) as killed:
        stopped_at = killed.kill_at(kill_at)
    resumed_at = paddle.load(checkpoint)["step"]
    print(
        f"killed run:   {killed.processes} processes ({meshes[0]}), 0 workers each; SIGKILL after {stopped_at} steps"
    )
    print(
        f"  (as chosen by --kill-at {kill_at}); its last checkpoint is from step {resumed_at}",
        flush=True,
    )
    with Run(
        directory / "resumed", checkpoint, meshes[1], workers=2
    ) as resumed:
        resumed.finish()
    print(
        f"resumed run:  {resumed.processes} processes ({meshes[1]}), 2 workers each; steps {resumed_at} to the end"
    )

    losses, again = dict(killed.losses()), dict(resumed.losses())
    assert list(losses) == list(range(stopped_at)), (
        f"the killed run made the steps {list(losses)}"
    )
    assert list(again) == list(range(resumed_at, len(straight))), (
        f"the resumed run made the steps {list(again)}"
    )
    difference = max(
        abs(loss - straight[step])
        for run in (losses, again)
        for step, loss in run.items()
    )
    print("losses:    straight    killed   resumed")
    for step in sorted(
        {
            0,
            resumed_at - 1,
            resumed_at,
            stopped_at - 1,
            stopped_at,
            len(straight) - 1,
        }
    ):
        cells = [
            f"{run[step]:10.6f}" if step in run else " " * 9 + "-"
            for run in (losses, again)
        ]
        print(f"  step {step:3}{straight[step]:10.6f}{''.join(cells)}")
    print(
        f"parity: the losses of all {len(straight)} steps, {stopped_at - resumed_at} of them made by both runs,"
    )
    print(f"  differ from the straight run's by at most {difference:.1e}")
    assert difference <= PARITY, (
        f"losses differ from the straight run's by {difference:.1e}"
    )

    certificates = {
        text.split(":")[0]: text
        for run in (killed, resumed)
        for text in run.recorded("certificate ")
    }
    stopped_epoch, its_steps = divmod(resumed_at, epoch_steps)
    for epoch, text in sorted(certificates.items()):
        by = f" ({its_steps} steps by the killed run, {epoch_steps - its_steps} by the resumed run)"
        print(
            f"certificate of {text}"
            + (by if epoch == f"epoch {stopped_epoch}" else "")
        )
    expected = [
        f"epoch {epoch}: each of {len(Digits())} samples exactly once"
        for epoch in range(EPOCHS)
    ]
    assert sorted(certificates.values()) == expected, (
        f"the certificates are {certificates}"
    )


def main():
    parser = argparse.ArgumentParser(
        description="Kill a training run and go on with it on other processes."
    )
    parser.add_argument(
        "--kill-at", type=int, metavar="STEP", help="default: a random one"
    )
    parser.add_argument(
        "--meshes",
        nargs=2,
        default=["dp=4", "mp=1,dp=2"],
        help="default: %(default)s",
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
        drive(options.meshes, options.kill_at, Path(directory))


if __name__ == "__main__":
    main()
