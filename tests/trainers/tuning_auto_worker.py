"""SFT by PaddleFormers 0.4.1's own SFTAutoTrainer, data set and collate functions: `tuning_auto_worker.py OPTIONS`.

Options and reports are those of tuning_worker.py. A case may also be `static`, or `ragged`: padded to the longest row
of the batch; `shuffle` is an option of the patch. Map data is tokenized before; the stream is what the package makes.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from demos.cpu_static import cpu_static
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing import report
from tests.trainers.trainer_worker import (
    Config,
    arguments_of,
    imported,
    on_all_ranks,
    on_cpu,
)
from tests.trainers.tuning_worker import (
    BATCH,
    LENGTH,
    ROWS,
    WORDS,
    Loss,
    items_of,
    row_losses,
    tokenizer,
)

PADDING = {"input_ids": 0, "labels": -100, "attention_mask": 0}


class Toy(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.words = paddle.nn.Embedding(len(WORDS), 16)
        self.out = paddle.nn.Linear(16, len(WORDS))

    def can_generate(self):
        return False

    def get_hardware_flops(self, *args, **options):
        return None

    def forward(
        self,
        input_ids,
        attention_mask=None,
        loss_mask=None,
        attn_mask_startend_row_indices=None,
    ):
        real = attention_mask if loss_mask is None else loss_mask
        return self.out(
            self.words(input_ids) * (0.5 + real.astype("float32")).unsqueeze(-1)
        )


def dataset(case, folder):
    from paddleformers.datasets import MapDataset
    from paddleformers.datasets.finetuning import create_dataset

    if case["dataset"] == "iterator":
        packing = case.get("packing")
        return create_dataset(
            task_group=str(folder / "sft-0.4.1.jsonl"),
            task_group_prob="1.0",
            sub_dataset_type="erniekit",
            tokenizer=tokenizer(),
            max_seq_len=2 * LENGTH,
            num_samples_each_epoch=ROWS,
            random_seed=42,
            # the trainer takes a batch before, and would shuffle what is read
            random_shuffle=False,
            greedy_intokens=packing == "greedy",
            packing=packing is not None,
            mix_strategy="concat",
            encode_one_turn=True,
            use_template=True,
            is_pretraining=False,
        )
    made, words = [], tokenizer()
    for line in (folder / "sft.jsonl").read_text().splitlines():
        ((asked, said),) = words.encode_chat_inputs(json.loads(line))
        made.append(
            {"input_ids": asked + said, "labels": [-100] * len(asked) + said}
        )
    return MapDataset(made)


def collate_of(case):
    from paddleformers.data import DataCollatorForSeq2Seq
    from paddleformers.datasets.finetuning import collate_fn

    if case["dataset"] == "iterator":
        model = SimpleNamespace(
            use_attn_mask_startend_row_indices=True,
            use_global_causal_attn=False,
            stage="SFT",
        )
        common = {
            "tokenizer": tokenizer(),
            "training_args": SimpleNamespace(num_nextn_predict_layers=0),
        }
        return partial(
            collate_fn, model_args=model, max_seq_len=2 * LENGTH, **common
        )
    lengths = (
        {}
        if case.get("ragged")
        else {
            "max_length": LENGTH,
            "max_label_length": LENGTH,
            "padding": "max_length",
        }
    )
    return DataCollatorForSeq2Seq(
        tokenizer=tokenizer(), return_tensors="np", **lengths
    )


def toy(reference=None):
    paddle.seed(11)
    return Toy()


def loss_of(case, layer):
    return lambda batch: Loss()(
        layer(**{name: batch[name] for name in batch if name != "labels"}),
        batch["labels"],
    )


def trained(case, out, folder, reports):
    position = paddle_shard.TrainerCallback(case.get("resume"))
    found, patch = [], {"shuffle": case.get("shuffle")}
    if case.get("ragged"):
        patch["pad_to"] = {
            name: ("longest", fill) for name, fill in PADDING.items()
        }
    with (
        paddle_shard.patch_paddle(callback=False, **patch)
        if not case.get("plain")
        else open(os.devnull)
    ):
        from paddleformers.trainer import trainer_utils
        from paddleformers.trainer.auto_training_args import (
            AutoTrainingArguments,
        )
        from paddleformers.trl import SFTConfig
        from paddleformers.trl.sft_auto_trainer import SFTAutoTrainer

        # the trainer itself gives each rank its rows
        if case["dataset"] == "iterator":
            trainer_utils.IterableDatasetShard.is_dataset_splitted = True

        @dataclass
        class Arguments(AutoTrainingArguments, SFTConfig):
            pass

        class Watched(SFTAutoTrainer):
            def training_step(self, model, inputs, *args, **others):
                if len(found) == case.get("die_at"):
                    os.kill(os.getpid(), signal.SIGKILL)
                items = items_of(inputs)
                loss = super().training_step(model, inputs, *args, **others)
                local = (
                    loss._local_value()
                    if isinstance(loss, paddle.Tensor) and loss.is_dist()
                    else loss
                )
                found.append([items, float(local)])
                return loss

        arguments = Arguments(
            **arguments_of(out, BATCH, case),
            to_static=case.get("static", False),
            max_steps=case.get("steps", -1),
            max_seq_len=LENGTH,
        )
        layer = toy()
        mesh = on_all_ranks(layer)
        trainer = Watched(
            model=layer,
            criterion=Loss(),
            args=arguments,
            train_dataset=dataset(case, folder),
            data_collator=collate_of(case),
            tokenizer=tokenizer(),
            callbacks=[] if case.get("plain") else [position],
        )
        if case.get("static"):
            cpu_static()
        trainer.train(resume_from_checkpoint=case.get("resume"))
        if case.get("evaluate"):
            reports["rows"] = row_losses(
                layer, dataset(case, folder), collate_of(case), mesh
            )
    return found


def pairs_of(row, packing):
    """A sample as `preprocess_preference_data` makes it, with one pair, or two in every other sample."""
    draw, made = np.random.RandomState(row), {}
    for _ in range(1 + bool(packing and row % 2)):
        said = draw.randint(1, 100, 6).tolist()
        at = len(made.get("input_ids", []))
        one = {
            "input_ids": said,
            "position_ids": [*range(4), 2, 3],
            "response_indexs": [[at + 1, at + 3, at + 5, 1]],
        }
        one |= {
            "response_0_labels": [0, *said[2:4], 0, 0, 0],
            "response_1_labels": [0, 0, 0, 0, *said[:2]],
        }
        one["attn_mask_startend_row_indices"] = [at + 6] * 6
        made = {name: made.get(name, []) + field for name, field in one.items()}
    return made


def pairs(case):
    """What the loader makes of the batches of the collate function that goes with `DPOAutoTrainer`; or its error."""
    from paddleformers.datasets import MapDataset
    from paddleformers.trl import preference_collate_fn_auto_parallel

    world = int(os.environ["PADDLE_TRAINERS_NUM"])
    data = MapDataset([pairs_of(row, case.get("packing")) for row in range(12)])
    collate = partial(preference_collate_fn_auto_parallel, max_seq_len=16)
    said = (
        {"placements": {"input_ids": "as read", "labels": "as read"}}
        if case.get("as read")
        else {}
    )
    with (
        paddle_shard.patch_paddle(**said)
        if not case.get("plain")
        else open(os.devnull)
    ):
        given = paddle.io.DataLoader(data, batch_size=BATCH, collate_fn=collate)
        mesh = dist.ProcessMesh(list(range(world)), dim_names=["dp"])
        loader = dist.shard_dataloader(
            given, mesh, input_keys=["input_ids", "labels"], shard_dims="dp"
        )
        try:
            batches = [
                [*batch["input_ids"], *batch["labels"]] for batch in loader()
            ]
        except PaddleShardError as error:
            return str(error)
    return [
        [[leaf.shape, leaf._local_value().numpy().tolist()] for leaf in batch]
        for batch in batches
    ]


def main(options):
    on_cpu()
    imported("paddleformers_auto")
    out, reports = Path(options["out"]), {}
    for name, case in options["cases"].items():
        # a checkpoint holds the names of parameters
        with paddle.utils.unique_name.guard():
            pair = case["task"] == "pairs"
            reports[name] = (
                pairs(case)
                if pair
                else trained(case, out / name, Path(options["rows"]), reports)
            )
    report(reports)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
