"""Train on two nodes, kill one at a random step, let it come back, and show that nothing shows.

    python demos/elastic.py                              # kills everything of one node, which comes back
    python demos/elastic.py --fault rank --seed 3        # kills one rank; the node starts it again
    python demos/elastic.py --fault launcher | sigterm | freeze | hang

It starts an etcd server and two nodes on this machine, each by launch/elastic.sh with one rank. The ranks train with
`paddle_shard.Checkpoints`, and each of them writes the ids of the samples that it trains on to a file of its own, as
it sees them in its rows: no plan and no state of a loader is asked. In the end the driver puts together, from what was
loaded and saved when, which of these steps are in the history of the last checkpoint. What was trained and lost with a
kill does not count. It ends with an error unless the steps that count have each sample exactly once, in each epoch.

It needs `paddle_shard[elastic]` and Debian's etcd-server: an `etcd` on the PATH, or it fetches the package without
installing it (`apt-get download`).
"""

import argparse
import collections
import contextlib
import glob
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
EPOCHS, SAMPLES, BATCH_SIZE, SAVE_EVERY = 2, 480, 6, 7
STEPS = EPOCHS * SAMPLES // BATCH_SIZE
DEADLINE = 300
"""Seconds, of the whole run."""
FAULTS = ("node", "rank", "launcher", "sigterm", "freeze", "hang")


# A rank


def train(folder, diary):
    import paddle
    import paddle.distributed as dist
    import paddle.nn.functional as F

    import paddle_shard

    class Numbers(paddle.io.Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            return np.array([index], "int64"), np.array(
                [index / SAMPLES, 1], "float32"
            )

    # with one rank there is no group, and none is needed
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(
            Numbers(), batch_size=BATCH_SIZE, shuffle=True, num_workers=1
        ),
        mesh,
        shard_dims="dp",
    )
    paddle.seed(0)
    model = paddle.nn.Linear(2, 1)
    dist.shard_layer(model, mesh)
    optimizer = dist.shard_optimizer(
        paddle.optimizer.AdamW(parameters=model.parameters())
    )
    what = {"model": model, "optimizer": optimizer, "data": loader}
    checkpoints = paddle_shard.Checkpoints(folder)

    def write(**told):
        file.write(json.dumps(told) + "\n")
        file.flush()

    with open(Path(diary) / f"{time.time():.3f}-{os.getpid()}", "a") as file:
        write(
            loaded=checkpoints.newest(),
            pid=os.getpid(),
            ranks=dist.get_world_size(),
        )
        step = checkpoints.load(**what) or 0
        while loader.epoch < EPOCHS and step < STEPS:
            epoch, batches = loader.epoch, iter(loader)
            for ids, rows in batches:
                loss = F.mse_loss(model(rows), rows[:, :1])
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                step += 1
                real = batches.valid._local_value().numpy()
                write(
                    step=step,
                    epoch=epoch,
                    ids=ids._local_value().numpy()[real, 0].tolist(),
                )
                time.sleep(0.05)
                if loader.stop_requested:  # on all ranks at the same step
                    write(saved=checkpoints.save(step, **what), asked=True)
                    # not 0: the run is not at its end
                    sys.exit(128 + signal.SIGTERM)
                if step % SAVE_EVERY == 0 or step == STEPS:
                    write(saved=checkpoints.save(step, **what))
    if dist.is_initialized():
        dist.barrier()


# What the ranks have written


def read_diaries(diary):
    """What each process of a rank has written, in the order of their starts."""
    for path in sorted(
        Path(diary).iterdir(), key=lambda path: float(path.name.split("-")[0])
    ):
        # whole lines
        yield [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def step_of(checkpoint):
    return int(Path(checkpoint).name.rpartition("step")[2])


def audit(diary, newest):
    """Return the ids in the history of a checkpoint, by epoch, and how many trained samples are not in it."""
    runs = [entries for entries in read_diaries(diary) if entries]
    generation = lambda path: Path(path).name.split("-")[0]  # noqa: E731
    by_generation = collections.defaultdict(list)
    for entries in runs:
        saved = {
            generation(entry["saved"]) for entry in entries if "saved" in entry
        }
        assert len(saved) <= 1, (
            f"a process has saved as several generations: {saved}"
        )
        for name in saved:
            by_generation[name].append(entries)
    found, counted, checkpoint = collections.defaultdict(list), 0, newest
    # from the last checkpoint back to the beginning
    while checkpoint is not None:
        until, processes = (
            step_of(checkpoint),
            by_generation[generation(checkpoint)],
        )
        # A rank that was killed may have trained and not noted its save: its generation is that of who loaded alike.
        origins = {entries[0]["loaded"] for entries in processes}
        assert len(origins) == 1, (
            f"the ranks of {checkpoint} have loaded {origins}"
        )
        [checkpoint] = origins
        first = 0 if checkpoint is None else step_of(checkpoint)
        for entries in processes:
            for entry in entries:
                if first < entry.get("step", 0) <= until:
                    found[entry["epoch"]] += entry["ids"]
                    counted += len(entry["ids"])
    trained = sum(
        len(entry.get("ids", ())) for entries in runs for entry in entries
    )
    return found, trained - counted


# The driver


def etcd_binary():
    """An etcd, from the PATH or from Debian's package, which is unpacked into build/."""
    unpacked = ROOT / "build" / "etcd" / "usr" / "bin" / "etcd"
    found = shutil.which("etcd") or (
        str(unpacked) if unpacked.exists() else None
    )
    if found is None:
        folder = ROOT / "build" / "etcd"
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(
            OSError, subprocess.CalledProcessError, IndexError
        ):
            quiet = {
                "cwd": folder,
                "check": True,
                "stdout": subprocess.DEVNULL,
                "stderr": subprocess.DEVNULL,
            }
            subprocess.run(["apt-get", "download", "etcd-server"], **quiet)
            subprocess.run(
                ["dpkg-deb", "-x", glob.glob(str(folder / "*.deb"))[0], "."],
                **quiet,
            )
            found = str(unpacked)
    if found is None:
        raise SystemExit(
            "no etcd: apt-get install etcd-server (Debian, Ubuntu), or put etcd's release on the PATH"
        )
    return found


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Job:
    """An etcd and two nodes; all that is left of them is killed on leaving `with`."""

    def __init__(self, directory):
        self.directory, self.folder, self.diary = (
            directory,
            directory / "checkpoints",
            directory / "diary",
        )
        self.diary.mkdir()
        self.port, self.nodes, self.give_up = (
            free_port(),
            {},
            time.monotonic() + DEADLINE,
        )
        here, peer = (
            f"http://127.0.0.1:{port}" for port in (self.port, free_port())
        )
        command = [
            etcd_binary(),
            "--data-dir",
            directory / "etcd",
            "--log-level",
            "error",
            "--unsafe-no-fsync",
        ]
        command += [
            "--listen-client-urls",
            here,
            "--advertise-client-urls",
            here,
            "--listen-peer-urls",
            peer,
        ]
        command += [
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
        ]
        command = [
            one
            for one in command
            if one != "--unsafe-no-fsync" or "3.4" not in version_of(command[0])
        ]
        with open(directory / "etcd.log", "wb") as log:
            self.etcd = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in list(self.nodes):
            self.kill_node(number)
        self.etcd.kill()
        self.etcd.wait()

    def start_node(self, number):
        variables = {
            **os.environ,
            "ETCD": f"127.0.0.1:{self.port}",
            "JOB": "demo",
            "NNODES": "1:2",
            "NPROC": "1",
        }
        variables |= {
            "HOST_IP": "127.0.0.1",
            "IFNAME": "lo",
            "LOG_DIR": str(self.directory / f"node-{number}"),
        }
        variables |= {
            "PYTHON": sys.executable,
            "DEMO_ELASTIC_NODE": self.mark(number),
            "TIMEOUT": "10",
        }
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [
            ROOT / "launch" / "elastic.sh",
            __file__,
            "--as-rank",
            self.folder,
            self.diary,
        ]
        with open(self.directory / f"node-{number}.log", "ab") as log:
            self.nodes[number] = subprocess.Popen(
                list(map(str, command)),
                env=variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def mark(self, number):
        return f"{self.directory}-{number}"

    def processes(self, number):
        """(process, command) of all that runs for a node."""
        found = []
        for path in glob.glob("/proc/[0-9]*"):
            # it has ended, or is another user's
            with contextlib.suppress(OSError):
                if f"DEMO_ELASTIC_NODE={self.mark(number)}".encode() in Path(
                    path, "environ"
                ).read_bytes().split(b"\0"):
                    found.append(
                        (
                            int(path.split("/")[2]),
                            Path(path, "cmdline")
                            .read_bytes()
                            .decode()
                            .split("\0"),
                        )
                    )
        return found

    def send(self, number, signalled, chosen=lambda command: True):
        for pid, command in self.processes(number):
            if chosen(command):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signalled)

    def kill_node(self, number):
        while self.processes(number):
            self.send(number, signal.SIGKILL)
            time.sleep(0.05)
        self.nodes.pop(number).wait()

    def ranks(self, number):
        return [
            pid for pid, command in self.processes(number) if is_rank(command)
        ]

    def wait_until(self, what, reached):
        while not reached():
            if time.monotonic() > self.give_up:
                raise SystemExit(
                    f"not reached within {DEADLINE} s: {what}\n{self.logs()}"
                )
            time.sleep(0.1)

    def logs(self):
        files = [
            *self.directory.glob("*.log"),
            *self.directory.glob("node-*/workerlog.*"),
        ]
        return "\n".join(
            f"--- {path}\n{path.read_text(errors='replace')[-3000:]}"
            for path in files
        )

    def steps(self, ranks=None):
        """The newest step of a process that was started among so many ranks; 0 if there is none."""
        steps = [
            entries[-1].get("step", 0)
            or max(entry.get("step", 0) for entry in entries)
            for entries in read_diaries(self.diary)
            if entries and ranks in (None, entries[0]["ranks"])
        ]
        return max(steps, default=0)

    def worlds(self):
        """How many ranks each start of the job had; the processes of one have loaded the same."""
        starts = [
            entries[0]["ranks"]
            for entries in read_diaries(self.diary)
            if entries
        ]
        worlds = []
        while starts:
            worlds.append(starts[0])
            starts = starts[starts[0] :]
        return worlds


def version_of(binary):
    return subprocess.run(
        [str(binary), "--version"], capture_output=True, text=True, check=True
    ).stdout.split("\n")[0]


def is_rank(command):
    return (
        "--as-rank" in command
        and "paddle.distributed.launch" not in command
        and "-c" not in command[:3]
    )


def is_launcher(command):
    return "paddle.distributed.launch" in command and "-c" not in command[:3]


def strike(job, fault, node):
    """Do something to a node, and what it takes for it to come back."""
    if fault == "node":
        job.kill_node(node)
        alone = job.steps(ranks=1)
        job.wait_until(
            "the other node trains alone",
            lambda: job.steps(ranks=1) > alone or job.steps() >= STEPS,
        )
        job.start_node(node)
    elif fault == "rank":
        job.send(node, signal.SIGKILL, is_rank)
    elif fault == "launcher":
        job.send(node, signal.SIGKILL, is_launcher)
    elif fault == "sigterm":
        job.send(node, signal.SIGTERM, is_rank)
    else:
        # all of the node, as a host that sleeps; or what elastic.sh has started, which goes on to watch it
        pids = [
            pid
            for pid, command in job.processes(node)
            if fault == "freeze" or "-c" not in command[:3]
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(16)  # past the lease, and past the other's wait for it
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def drive(fault, rng, directory):
    began = time.monotonic()
    with Job(directory) as job:
        for node in (0, 1):
            job.start_node(node)
        moment, node = rng.randint(SAVE_EVERY + 1, STEPS // 3), rng.randrange(2)
        job.wait_until(f"step {moment}", lambda: job.steps() >= moment)
        print(
            f"two nodes train; at step {job.steps()}, {time.monotonic() - began:.0f} s: {fault} of node {node}",
            flush=True,
        )
        strike(job, fault, node)
        job.wait_until(
            "the end of both nodes",
            lambda: all(one.poll() is not None for one in job.nodes.values()),
        )
        codes = {number: one.returncode for number, one in job.nodes.items()}
        if any(codes.values()):
            raise SystemExit(f"the nodes ended with {codes}\n{job.logs()}")
        worlds = job.worlds()
        newest = max(
            path.parent.name for path in job.folder.glob("*/manifest.json")
        )
        found, lost = audit(job.diary, str(job.folder / newest))
    print(
        f"the job was started {len(worlds)} times, and ended after {time.monotonic() - began:.0f} s at {newest}"
    )
    print(f"samples trained on in steps that were lost, and made again: {lost}")
    for epoch in range(EPOCHS):
        counts = collections.Counter(found[epoch])
        missed = [sample for sample in range(SAMPLES) if sample not in counts]
        again = [sample for sample, count in counts.items() if count > 1]
        assert not missed + again, (
            f"epoch {epoch}: {len(missed)} samples missed, {len(again)} more than once"
        )
        print(
            f"epoch {epoch}: each sample exactly once, by what the ranks wrote of their own rows ({SAMPLES} samples)"
        )


def main():
    parser = argparse.ArgumentParser(
        description="Train on two nodes of which one is struck and comes back."
    )
    parser.add_argument(
        "--fault", choices=FAULTS, default="node", help="default: %(default)s"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="of the moment and the node; default: a random one",
    )
    # how the nodes start a rank
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        train(*options.as_rank)
        return
    # leaves every `with`
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"--fault {options.fault} --seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        drive(options.fault, random.Random(seed), Path(directory))


if __name__ == "__main__":
    main()
