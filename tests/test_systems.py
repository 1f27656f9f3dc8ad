"""Other systems than Linux have the plan; a loader says what is missing there."""

import subprocess
import sys

import pytest

# What Python on Windows does not have; blocked before anything of ours is imported.
LIKE_WINDOWS = """
import os, select, signal, socket, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd", "grp", "paddle"):
            raise ImportError(f"no {name}")
sys.meta_path.insert(0, Missing())
import numpy
sys.platform = "win32"
for module, names in {
    os: "memfd_create fork register_at_fork sched_getaffinity",
    socket: "AF_UNIX SOCK_SEQPACKET MSG_CMSG_CLOEXEC SCM_RIGHTS send_fds recv_fds",
    select: "poll",
    signal: "SIGKILL SIGUSR1",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
import paddle_shard
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", LIKE_WINDOWS + code],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_plan_works_without_what_only_linux_has():
    plan = "plan = paddle_shard.ShardPlan(num_samples=10, batch_size=4, num_data_ranks=2)\n"
    done = run(
        plan + "print(plan.num_steps, paddle_shard.ArrayDataset.__name__)"
    )

    assert (done.stdout, done.stderr) == ("3 ArrayDataset\n", "")


@pytest.mark.parametrize(
    "name", ["shard_dataloader", "Stream", "BucketBatchSampler", "patch_paddle"]
)
def test_loader_says_that_it_needs_linux(name):
    done = run(f"paddle_shard.{name}")

    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: paddle_shard.{name} needs Linux, and this system is"
    )
    assert "WSL 2" in done.stderr
