"""A tiny random model, trained by a package's auto-parallel trainer that nobody edits: `trainer_worker.py RUNS`.

Runs, a list in JSON. Of each: the package's `name`, the folder `out`, and `static`, `accumulation`, `rows`,
`max_steps`, `resume`; `data`: "stream", or "ragged" for rows of several lengths; `consumed`: for the package's own
sampler without a `TrainerCallback`, the samples behind which it begins.
Each rank reports for each run [rows of its slice, loss] of each micro-step.
"""

import functools
import json
import os
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report

sys.path.insert(0, str(Path(__file__).parents[2] / "demos"))
from cpu_static import cpu_static

VOCABULARY, LENGTH, BATCH = 128, 6, 8
"""Rows are of so many tokens; the global micro-batch has so many rows."""


class Rows(paddle.io.Dataset):
    """Random tokens, of which the first is the row's number."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draw = np.random.RandomState(1000 + index)
        tokens, labels = draw.randint(0, VOCABULARY, (2, LENGTH))
        tokens[0] = index
        return {
            "input_ids": tokens.astype("int64"),
            "labels": labels.astype("int64"),
        }


class Ragged(Rows):
    """Rows of one to six tokens."""

    def __getitem__(self, index):
        return {
            key: value[: 1 + index % LENGTH]
            for key, value in super().__getitem__(index).items()
        }


class Stream(paddle.io.IterableDataset):
    """The rows, without an index."""

    def __init__(self, length):
        self.rows = Rows(length)

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


DATA = {"rows": Rows, "ragged": Ragged, "stream": Stream}


def padded(samples):
    """A batch as long as the longest of its rows."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    found = {}
    for key, fill in (("input_ids", 0), ("labels", -100)):
        rows = [
            np.pad(s[key], (0, longest - len(s[key])), constant_values=fill)
            for s in samples
        ]
        found[key] = paddle.to_tensor(np.stack(rows))
    return found


class Config:
    """What PaddleFormers asks of a model's configuration."""

    def save_pretrained(self, *args, **options):
        pass

    def to_dict(self):
        return {}


class Tiny(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.embedding = paddle.nn.Embedding(VOCABULARY, 16)
        self.out = paddle.nn.Linear(16, VOCABULARY)

    def can_generate(self):
        return False

    def get_hardware_flops(self, *args, **options):
        return None

    def forward(self, input_ids, labels=None):
        return self.out(self.embedding(input_ids))


class Loss(paddle.nn.Layer):
    def forward(self, logits, labels):
        return paddle.nn.functional.cross_entropy(
            logits.reshape([-1, VOCABULARY]), labels.reshape([-1])
        )


def model():
    paddle.seed(11)
    return Tiny()


def on_cpu():
    """What in Paddle and the packages takes a GPU for granted; none of it has to do with data."""
    paddle.Tensor.cuda = lambda self, *args, **options: self
    try:  # Paddle 3.3 refuses the nested dict that PaddleFormers 0.4.1 loads
        from paddle.distributed.flex_checkpoint.dcp.utils import (
            flatten_state_dict,
        )
    except ImportError:
        return
    load = dist.load_state_dict
    dist.load_state_dict = lambda state, *args, **options: load(
        flatten_state_dict(state)[0], *args, **options
    )


def whole_states(state_class):
    """Let no rank see half a `trainer_state.json`: 0.4.1 has all ranks write the same file at the same time."""
    plain = state_class.save_to_json

    def save_to_json(self, path):
        plain(self, f"{path}.{dist.get_rank()}")
        os.replace(f"{path}.{dist.get_rank()}", path)

    state_class.save_to_json = save_to_json


OF_1_2_0 = {
    "amp_master_grad": False,
    "convert_from_hf": False,
    "save_to_hf": False,
}
"""What the trainers of PaddleFormers 1.2.0 are told besides."""


def arguments_of(out, batch, options):
    """What all trainers are told."""
    return {
        "output_dir": str(out),
        "device": "cpu",
        "enable_auto_parallel": not options.get("fleet", False),
        "per_device_train_batch_size": batch
        // int(os.environ["PADDLE_TRAINERS_NUM"]),
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_steps": options.get("save_steps", 10**9),
        "save_strategy": "steps" if "save_steps" in options else "no",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "seed": 42,
        "sharding": "",
    }


def on_all_ranks(layer):
    """The mesh of the job's data ranks, on which a layer is from now on."""
    mesh, world = (
        dist.fleet.auto.get_mesh(),
        int(os.environ["PADDLE_TRAINERS_NUM"]),
    )
    if mesh is None:
        mesh = dist.ProcessMesh(
            np.arange(world).reshape(1, world, 1), dim_names=["pp", "dp", "mp"]
        )
        dist.fleet.auto.set_mesh(mesh)
    mesh = mesh.get_mesh_with_dim("pp")[0]
    dist.shard_layer(layer, mesh, lambda name, part, mesh: None)
    return mesh


@functools.cache
def imported(name):
    """(trainer, its arguments) of a package."""
    if name == "paddlenlp":
        from paddlenlp.trainer.auto_trainer import AutoTrainer
        from paddlenlp.trainer.auto_training_args import AutoTrainingArguments

        return AutoTrainer, AutoTrainingArguments
    if name == "paddleformers_auto":
        from paddleformers.trainer import TrainerState
        from paddleformers.trainer.auto_trainer import AutoTrainer
        from paddleformers.trainer.auto_training_args import (
            AutoTrainingArguments,
        )

        whole_states(TrainerState)
        return AutoTrainer, AutoTrainingArguments
    import paddleformers.trainer.trainer as trainer
    from paddleformers.trainer import Trainer, TrainingArguments

    # its fusion of tensors knows no CPU
    trainer.fully_shard = lambda model, mesh: model
    return Trainer, TrainingArguments


def rows_of(inputs):
    """The numbers of this rank's rows."""
    while not isinstance(inputs, paddle.Tensor):
        inputs = inputs["input_ids"] if isinstance(inputs, dict) else inputs[0]
    local = inputs._local_value() if inputs.is_dist() else inputs
    return local.numpy()[:, 0].tolist()


def trained(options):
    """[rows of this rank's slice, loss] of each micro-step of a run."""
    consumed = options.get("consumed")
    trainer_class, arguments_class = imported(options["name"])
    static, accumulation = (
        options.get("static", False),
        options.get("accumulation", 1),
    )
    found = []

    class Watched(trainer_class):
        def _get_train_sampler(self):
            if consumed is None:
                return super()._get_train_sampler()
            from importlib import import_module

            package = (
                "paddlenlp"
                if options["name"] == "paddlenlp"
                else "paddleformers"
            )
            sampler = import_module(
                f"{package}.utils.batch_sampler"
            ).DistributedBatchSampler
            told = {
                "num_replicas": world,
                "rank": dist.get_rank(),
                "consumed_samples": consumed,
            }
            return sampler(self.train_dataset, BATCH // world, **told)

        def training_step(self, model, inputs, *args, **others):
            rows = rows_of(inputs)
            loss = super().training_step(model, inputs, *args, **others)
            local = (
                loss._local_value()
                if isinstance(loss, paddle.Tensor) and loss.is_dist()
                else loss
            )
            found.append([rows, float(local) * (1 if static else accumulation)])
            return loss

    world = int(os.environ["PADDLE_TRAINERS_NUM"])
    arguments = arguments_class(
        **arguments_of(options["out"], BATCH, options),
        to_static=static,
        gradient_accumulation_steps=accumulation,
        max_steps=options.get("max_steps", -1),
        **(OF_1_2_0 if options["name"] == "paddleformers" else {}),
    )
    layer = model()
    on_all_ranks(layer)
    data = options.get("data", "rows")
    trainer = Watched(
        model=layer,
        criterion=Loss(),
        args=arguments,
        train_dataset=DATA[data](options["rows"]),
        **({"data_collator": padded} if data == "ragged" else {}),
    )
    if static:
        cpu_static()
    trainer.train(resume_from_checkpoint=options.get("resume"))
    return found


def main(runs):
    on_cpu()
    found = []
    for options in runs:
        position = paddle_shard.TrainerCallback(options.get("resume"))
        # A checkpoint holds the names of parameters: they begin anew with each run.
        imported(options["name"])
        patch = paddle_shard.patch_paddle(
            callback=False if "consumed" in options else position
        )
        with patch, paddle.utils.unique_name.guard():
            found.append(trained(options))
    report(found)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
