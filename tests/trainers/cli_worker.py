"""PaddleFormers 1.2.0's own command on CPU ranks, whole: `cli_worker.py RUNS`.

It is `train.py` of docs/trainers.md, with what Paddle takes a GPU for replaced, and with several runs in one process.
Runs, in JSON: {name: run}. Of each: `config`, the file that the command gets; `patch`, options of `patch_paddle`, or
None for plain Paddle; `die_at`, the micro-batch before which rank 1 gets SIGKILL. Each rank reports for each run
[rows, loss] of each micro-batch.
"""

import contextlib
import json
import os
import signal
import sys
from unittest import mock

import paddle
from paddleformers.cli import launcher
from paddleformers.nn import norm
from paddleformers.trainer import Trainer

import paddle_shard
from paddle_shard.testing import report
from tests.trainers import fleet_worker
from tests.trainers.tuning_worker import items_of


def rms_norm(x, scale, epsilon):
    return [
        x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * scale
    ]


def watched(steps, die_at):
    """`training_step` of the trainer, recorded."""
    training_step = Trainer.training_step

    def step(self, model, inputs, *args, **options):
        if die_at == len(steps) and os.environ["PADDLE_TRAINER_ID"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        rows = [row for item in items_of(inputs) for row in item]
        loss = training_step(self, model, inputs, *args, **options)
        steps.append([rows, float(loss)])
        return loss

    return step


def train(run):
    steps = []
    patch = contextlib.nullcontext()
    if run.get("patch", {}) is not None:
        patch = paddle_shard.patch_paddle(**run.get("patch", {}))
    command = [sys.argv[0], "train", run["config"]]
    step = watched(steps, run.get("die_at"))
    with (
        patch,
        mock.patch.object(sys, "argv", command),
        mock.patch.object(Trainer, "training_step", step),
        # a checkpoint holds the names of parameters
        paddle.utils.unique_name.guard(),
    ):
        launcher.launch()
    return steps


def main(runs):
    fleet_worker.on_cpu()
    norm.fused_rms_norm_ext = rms_norm
    report({name: train(run) for name, run in runs.items()})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
