"""PaddleFormers 1.2.0's own Trainer in its default (fleet) mode on CPU ranks: `fleet_worker.py CASES`.

Cases, a list in JSON. Of each: the folder `out`; `patch`: False for plain Paddle, or the options of `patch_paddle`;
`callback`: True for a `TrainerCallback`; `rows`, `batch` (of a data rank), `epochs`, `accumulation`, `workers`,
`shuffle`, `seed`, `data` ("map", "stream"), `mp`, `distributed`, `bad` (a row that cannot be read), `save_steps`,
`resume`, `die_at` (a micro-batch), `dropout`, `label_pad` (the collate function names its ignored label), `evaluate`
(rows of the data to evaluate; nothing is trained). Each rank reports for each case {"steps": rows of each micro-batch,
"losses", "global_step", "metrics", "evaluated": rows that `compute_metrics` got, "error"}.
"""

import json
import os
import signal
import sys
import traceback

import numpy as np
import paddle
import paddle.distributed.fleet.meta_parallel.tensor_parallel as tensor_parallel

import paddle_shard
from paddle_shard.testing import report

VOCABULARY, LENGTH = 128, 6


def on_cpu():
    """Replace what Paddle and the package take a GPU for; none of it has to do with data."""
    paddle.set_device("cpu")
    paddle.Tensor.cuda = lambda self, *args, **options: self
    paddle.device.synchronize = lambda *args, **options: None
    # It sends the batch of the first rank to the others of a model-parallel group.
    tensor_parallel.broadcast_input_data = lambda hcg, *inputs, **options: (
        inputs,
        options,
    )


class Rows(paddle.io.Dataset):
    """Random tokens and labels; the first token is the row's number."""

    def __init__(self, length, bad=None):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"row {index} cannot be read")
        tokens, labels = np.random.RandomState(1000 + index).randint(
            0, VOCABULARY, (2, LENGTH)
        )
        tokens[0] = labels[0] = index
        return {
            "input_ids": tokens.astype("int64"),
            "labels": labels.astype("int64"),
        }


class Stream(paddle.io.IterableDataset):
    """The rows, without an index."""

    def __init__(self, length, bad=None):
        self.rows = Rows(length, bad)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


DATA = {"map": Rows, "stream": Stream}


class Collate:
    """Stacks rows; like the package's own, it may name the label that the loss ignores."""

    def __init__(self, label_pad):
        if label_pad is not None:
            self.label_pad_token_id = label_pad

    def __call__(self, samples):
        return {key: np.stack([s[key] for s in samples]) for key in samples[0]}


class Config(dict):
    """What the package asks of a model's configuration."""

    tensor_model_parallel_size = 1

    def save_pretrained(self, *args, **options):
        pass

    def to_dict(self):
        return {}


class Tiny(paddle.nn.Layer):
    def __init__(self, dropout):
        super().__init__()
        self.config, self.dropout = Config(), dropout
        self.embedding = paddle.nn.Embedding(VOCABULARY, 16)
        self.out = paddle.nn.Linear(16, VOCABULARY)

    def can_generate(self):
        return False

    def get_hardware_flops(self, *args, **options):
        return None

    def forward(self, input_ids, labels=None):
        hidden = self.embedding(input_ids)
        if self.dropout:
            hidden = paddle.nn.functional.dropout(
                hidden, self.dropout, training=self.training
            )
        logits = self.out(hidden)
        labels = labels.reshape([-1])
        losses = paddle.nn.functional.cross_entropy(
            logits.reshape([-1, VOCABULARY]), labels, reduction="none"
        )
        # As the package's own criterion: a mean over the labels that count.
        counted = (labels != -100).astype("float32")
        return (losses.reshape([-1]) * counted).sum() / counted.sum(), logits


def arguments_of(case):
    from paddleformers.trainer import TrainingArguments

    options = {"sharding": ""}
    if case.get("mp", 1) > 1:
        options["tensor_model_parallel_size"] = case["mp"]
    batch = case.get("batch", 2)
    return TrainingArguments(
        output_dir=case["out"],
        device="cpu",
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=case.get("accumulation", 1),
        num_train_epochs=case.get("epochs", 2),
        max_steps=case.get("max_steps", -1),
        dataloader_num_workers=case.get("workers", 0),
        dataloader_shuffle=case.get("shuffle", False),
        dataloader_drop_last=case.get("drop_last", False),
        distributed_dataloader=case.get("distributed", False),
        logging_steps=1,
        save_steps=case.get("save_steps", 10**9),
        save_strategy="steps" if "save_steps" in case else "no",
        disable_tqdm=True,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        seed=case.get("seed", 42),
        amp_master_grad=False,
        convert_from_hf=False,
        save_to_hf=False,
        **options,
    )


def run(case, found):
    from paddleformers.trainer import Trainer

    class Watched(Trainer):
        def training_step(self, model, inputs, *args, **options):
            found["steps"].append(inputs["input_ids"].numpy()[:, 0].tolist())
            loss = super().training_step(model, inputs, *args, **options)
            found["losses"].append(float(loss))
            if case.get("die_at") == len(found["steps"]):
                os.kill(os.getpid(), signal.SIGKILL)
            return loss

    def compute(predictions):
        found["evaluated"] = np.asarray(predictions.label_ids)[:, 0].tolist()
        return {}

    arguments = arguments_of(case)
    paddle.seed(11)
    data = DATA[case.get("data", "map")]
    is_read = arguments.should_load_dataset
    trainer = Watched(
        model=Tiny(case.get("dropout", 0.0)),
        args=arguments,
        train_dataset=data(case["rows"], case.get("bad")) if is_read else None,
        eval_dataset=data(case["rows"]) if is_read else None,
        data_collator=Collate(case.get("label_pad")),
        compute_metrics=compute,
    )
    if case.get("evaluate"):
        found["metrics"] = trainer.evaluate()
    else:
        trainer.train(resume_from_checkpoint=case.get("resume"))
    found["global_step"] = trainer.state.global_step


def main(cases):
    import paddleformers.trainer.trainer  # noqa: F401, before it is patched

    on_cpu()
    results = []
    for case in cases:
        found = {"steps": [], "losses": []}
        results.append(found)
        with paddle.utils.unique_name.guard():
            patch = None
            if case.get("patch", {}) is not False:
                position = False
                if case.get("callback"):
                    position = paddle_shard.TrainerCallback(case.get("resume"))
                patch = paddle_shard.patch_paddle(
                    callback=position, **case.get("patch", {})
                )
            try:
                run(case, found)
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            if patch is not None:
                patch.undo()
    report(results)
    if any("error" in found for found in results):
        os._exit(0)  # Paddle's groups would wait for ranks that have failed


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
