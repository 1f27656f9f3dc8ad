"""SFT and DPO by PaddleFormers 1.2.0's own trainers, data sets and collate functions: `tuning_worker.py OPTIONS`.

Options, in JSON: the folders `out` and `rows`, and `cases`, {name: case}. A case: `task` ("sft", "dpo"), `dataset`
("map", "iterator"), `packing` (None, "base", "greedy", "bins"), `reference` (DPO has a reference model), `workers`,
`shuffle` (an option of the patch), `plain` (Paddle's own loader), `steps`, `save_steps`, `resume`, `die_at`,
`evaluate`. Each rank reports for each case [items of its slice, loss] of each step; an item is the numbers of the rows
that are packed in it.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import paddle

import paddle_shard
from paddle_shard.testing import report
from tests.trainers import fleet_worker
from tests.trainers.trainer_worker import (
    OF_1_2_0,
    arguments_of,
    imported,
    on_all_ranks,
    on_cpu,
)

ROWS, BATCH, LENGTH = 36, 6, 24
"""Rows of the data set, items of a global batch, tokens of an item."""
WORDS = [
    "<pad>",
    "<eos>",
    "<unk>",
    "<|begin_of_sentence|>",
    *(f"row{i}" for i in range(ROWS)),
]
WORDS += [f"w{i}" for i in range(40)]
FIRST = WORDS.index("row0")


def tokenizer():
    """A word is a token, and the first word of a row is its number."""
    from paddleformers.transformers.tokenizer_utils import warp_tokenizer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = warp_tokenizer(PreTrainedTokenizerFast)(
        tokenizer_object=words, **special
    )
    made.chat_template = (
        "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    )
    return made


def write_rows(folder):
    """Write the file of each task; rows differ in length."""
    folder.mkdir(parents=True, exist_ok=True)

    def said(row, times, count):
        return " ".join(f"w{(row * times + k) % 40}" for k in range(count))

    lines = {"sft": [], "dpo": [], "sft-0.4.1": []}
    for row in range(ROWS):
        asked = {
            "role": "user",
            "content": f"row{row} {said(row, 1, row % 4 + 1)}",
        }
        good, bad = (
            {"role": "assistant", "content": said(row, by, row % by + 1)}
            for by in (5, 3)
        )
        lines["sft"].append({"messages": [asked, good]})
        lines["dpo"].append(
            {
                "messages": [asked],
                "chosen_response": [good],
                "rejected_response": [bad],
            }
        )
        lines["sft-0.4.1"].append(
            {
                "src": f"row{row} {said(row, 1, row % 4 + 5)}",
                "tgt": said(row, 5, row % 5 + 5),
            }
        )
    for task, of_task in lines.items():
        (folder / f"{task}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in of_task)
        )


def dataset(case, folder):
    from paddleformers.datasets.loader import create_dataset

    packing = case.get("packing")
    return create_dataset(
        task_group=str(folder / f"{case['task']}.jsonl"),
        task_group_prob="1.0",
        sub_dataset_type="messages",
        tokenizer=tokenizer(),
        stage=case["task"].upper(),
        dataset_type=case["dataset"],
        max_seq_len=LENGTH,
        mix_strategy="concat",
        random_seed=42,
        random_shuffle=True,
        num_samples_each_epoch=ROWS,
        packing=packing is not None,
        greedy_intokens=packing == "greedy",
        binpacking=packing == "bins",
        packing_interval=8,
        use_template=True,
        use_filtered_label_loss=False,
    )


def collate_of(case):
    from paddleformers.datasets.collate import collate_fn, dpo_collate_fn

    arguments = SimpleNamespace(
        num_nextn_predict_layers=0,
        context_parallel_size=1,
        sequence_parallel=False,
        fp8=None,
    )
    common = {
        "tokenizer": tokenizer(),
        "training_args": arguments,
        "padding_free": False,
    }
    common["max_seq_len"] = LENGTH if case.get("packing") else None
    if case["task"] == "dpo":
        return partial(dpo_collate_fn, use_filtered_label_loss=False, **common)
    model = SimpleNamespace(
        use_attn_mask_startend_row_indices=True, use_global_causal_attn=False
    )
    return partial(collate_fn, model_args=model, **common)


class Config(dict):
    """What PaddleFormers asks of a model's configuration."""

    tensor_model_parallel_size = 1
    tensor_parallel_output = False

    def __init__(self, reference=False):
        from paddleformers.cli.train.dpo.dpo_argument import DPOConfig

        super().__init__(
            dpo_config=DPOConfig(
                reference_free=not reference, sft_loss_ratio=0.5
            )
        )
        self.dpo_config = self["dpo_config"]

    def save_pretrained(self, *args, **options):
        pass

    def to_dict(self):
        return {}


class Toy(paddle.nn.Layer):
    """Takes all that the collate functions make, so that the loss tells if a field belongs to other rows."""

    def __init__(self, reference):
        super().__init__()
        self.config = Config(reference)
        self.words, self.places = (
            paddle.nn.Embedding(len(WORDS), 16),
            paddle.nn.Embedding(2 * LENGTH, 16),
        )
        self.out = paddle.nn.Linear(16, len(WORDS))

    def get_hardware_flops(self, *args, **options):
        return None

    def can_generate(self):
        return False

    def forward(
        self,
        input_ids,
        position_ids,
        attn_mask_startend_row_indices,
        labels=None,
    ):
        ends = attn_mask_startend_row_indices[:, 0, :, 0]
        return self.out(
            self.words(input_ids)
            + self.places(position_ids)
            + 0.1 * self.places(ends)
        )


class Loss(paddle.nn.Layer):
    def forward(self, logits, labels):
        each = paddle.nn.functional.cross_entropy(
            logits, labels.unsqueeze(-1), reduction="none", ignore_index=-100
        )
        real = (labels != -100).astype("float32")
        return (each.squeeze(-1) * real).sum() / real.sum()


def toy(reference=False):
    paddle.seed(11)
    return Toy(reference)


def loss_of(case, layer):
    """The loss of a batch by the package's own criterion for DPO, on one process."""
    if case["task"] == "sft":
        return lambda batch: Loss()(
            layer(**{name: batch[name] for name in batch if name != "labels"}),
            batch["labels"],
        )
    from paddleformers.nn.criterion import CriterionLayer

    criterion, before = CriterionLayer(layer.config), toy(True)

    def of(batch):
        response = [batch.pop("response_labels"), batch.pop("response_indexs")]
        with paddle.no_grad():
            known = (
                criterion(before(**batch), (*response, None, None))
                if case.get("reference")
                else [paddle.zeros([1])] * 2
            )
        return criterion(layer(**batch), (*response, *known))[-1]

    return of


def items_of(inputs):
    """[rows of each item] of this rank's slice."""
    tokens = inputs["input_ids"]
    tokens = tokens._local_value() if tokens.is_dist() else tokens
    return [
        [int(t) - FIRST for t in line if FIRST <= t < FIRST + ROWS]
        for line in tokens.numpy()
    ]


def row_losses(layer, data, collate, mesh):
    """What each row loses, by the loop of docs/evaluation.md; a row is left out, so that there is padding."""
    given = paddle.io.DataLoader(
        paddle.io.Subset(data, range(ROWS - 1)),
        batch_size=BATCH,
        collate_fn=collate,
    )
    batches, found = (
        iter(paddle_shard.shard_dataloader(given, mesh, shard_dims="dp")),
        [],
    )
    for batch in batches:
        labels = batch.pop("labels")
        with paddle.no_grad():
            each = paddle.nn.functional.cross_entropy(
                layer(**batch), labels.unsqueeze(-1), reduction="none"
            )
        real = (labels != -100).astype("float32")
        of_rows = (each.squeeze(-1) * real).sum(-1) / real.sum(-1)
        found += paddle_shard.gather_valid(of_rows, batches.valid).tolist()
    return found


def trained(case, out, folder, reports):
    position = paddle_shard.TrainerCallback(case.get("resume"))
    found = []
    patch = {"shuffle": True} if case.get("shuffle") else {}
    with (
        paddle_shard.patch_paddle(callback=position, **patch)
        if not case.get("plain")
        else open(os.devnull)
    ):
        from paddleformers.cli.train.dpo.dpo_argument import (
            DPOTrainingArguments,
        )
        from paddleformers.cli.train.dpo.dpo_trainer import DPOTrainer
        from paddleformers.cli.train.sft.sft_config import SFTConfig
        from paddleformers.cli.train.sft.sft_trainer import SFTTrainer

        dpo = case["task"] == "dpo"

        class Watched(DPOTrainer if dpo else SFTTrainer):
            def training_step(self, model, inputs, *args, **others):
                if len(found) == case.get("die_at"):
                    os.kill(os.getpid(), signal.SIGKILL)
                items = items_of(inputs)
                loss = super().training_step(model, inputs, *args, **others)
                found.append(
                    [
                        items,
                        float(loss._local_value() if loss.is_dist() else loss),
                    ]
                )
                return loss

        arguments = (DPOTrainingArguments if dpo else SFTConfig)(
            **arguments_of(out, BATCH, case),
            **OF_1_2_0,
            max_steps=case.get("steps", -1),
            dataloader_num_workers=case.get("workers", 0),
            unified_checkpoint=False,
            **({} if dpo else {"max_seq_len": LENGTH}),
        )
        layer = toy(case.get("reference"))
        mesh = None if case.get("fleet") else on_all_ranks(layer)
        made = {
            "model": layer,
            "args": arguments,
            "train_dataset": dataset(case, folder),
            "data_collator": collate_of(case),
        }
        made["tokenizer"] = tokenizer()
        made |= (
            {"dpo_config": layer.config.dpo_config}
            if dpo
            else {"criterion": Loss()}
        )
        if case.get("reference"):
            made["ref_model"] = toy(True)
        Watched(**made).train(resume_from_checkpoint=case.get("resume"))
        if case.get("evaluate"):
            reports["rows"] = row_losses(
                layer, dataset(case, folder), collate_of(case), mesh
            )
    return found


def main(options):
    on_cpu()
    fleet_worker.on_cpu()
    imported("paddleformers")
    out, reports = Path(options["out"]), {}
    for name, case in options["cases"].items():
        # a checkpoint holds the names of parameters
        with paddle.utils.unique_name.guard():
            reports[name] = trained(
                case, out / name, Path(options["rows"]), reports
            )
    report(reports)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
