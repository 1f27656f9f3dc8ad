"""`paddleformers-cli train` of PaddleFormers 1.2.0 in its default mode, whole, with the one line of docs/trainers.md.

The `plain` tests show what the command does without the line: they fail when the package is mended.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

if os.environ["PADDLE_SHARD_TRAINER"] != "paddleformers":
    pytest.skip("of PaddleFormers 1.2.0", allow_module_level=True)

from paddle_shard.testing import RanksFailed
from tests.deadlines import HANG
from tests.jobs import launch_ranks
from tests.trainers.tuning_worker import LENGTH, WORDS, tokenizer, write_rows

# the package is imported here, too
pytestmark = pytest.mark.filterwarnings("ignore")

WORKER = Path(__file__).with_name("cli_worker.py")
ROWS, BATCH, SAVED = 35, 4, 4
"""Rows of the data, rows of a step of two ranks, and the step of the newest checkpoint when a rank is killed."""
EPOCH = 36
"""Items of an epoch: SFT fills up its last batch, and the other data sets have their last row twice."""
STAGES = {
    "dpo": {"stage": "DPO", "dataset_type": "map", "num_train_epochs": 2},
    "sft": {"stage": "SFT", "dataset_type": "map", "num_train_epochs": 2},
    "pt": {"stage": "PT", "dataset_type": "iterable", "max_steps": 18},
}
MODEL = {
    "model_type": "llama",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "architectures": ["LlamaForCausalLM"],
}
CONFIG = {
    "fine_tuning": "Full",
    "continue_training": False,
    "_attn_implementation": "eager",
    "train_dataset_type": "messages",
    "train_dataset_prob": "1.0",
    "max_seq_len": LENGTH,
    "template_backend": "jinja",
    "do_train": True,
    "device": "cpu",
    "per_device_train_batch_size": BATCH // 2,
    "eval_steps": 1000,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 1e-2,
    "sharding": "",
    "amp_master_grad": False,
    # The default, "flex_checkpoint", does not load without sharding.
    "save_checkpoint_format": "unified_checkpoint",
    "load_checkpoint_format": "unified_checkpoint",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, the tokenizer and the rows."""
    made = tmp_path_factory.mktemp("cli")
    write_rows(made)
    for task in ("sft", "dpo"):
        lines = (made / f"{task}.jsonl").read_text().splitlines(keepends=True)
        (made / f"{task}.jsonl").write_text("".join(lines[:ROWS]))
    tokenizer().save_pretrained(str(made / "model"))
    (made / "model" / "config.json").write_text(json.dumps(MODEL))
    return made


def launch(folder, out, runs, num_ranks=2):
    """{name: [rows of all ranks, mean loss] of each step} of runs in one job; `out` has a folder for each."""
    out.mkdir(parents=True, exist_ok=True)
    named = {}
    for name, run in runs.items():
        rows = str(folder / ("dpo.jsonl" if name == "dpo" else "sft.jsonl"))
        config = {
            **CONFIG,
            "model_name_or_path": str(folder / "model"),
            "train_dataset_path": rows,
            "eval_dataset_path": rows,
            "output_dir": str(out / name),
            **STAGES[name],
            **run.get("config", {}),
        }
        path = out / f"{name}.json"
        path.write_text(json.dumps(config))
        named[name] = {**run, "config": str(path)}
    for attempt in range(1, 4):
        try:
            ranks = launch_ranks(
                WORKER,
                num_ranks,
                out / "log",
                args=[json.dumps(named)],
                env={"PYTHONPATH": str(Path(__file__).parents[2])},
                timeout=3 * HANG,
            )
            break
        except RanksFailed:  # Paddle's groups do not always connect
            if any("die_at" in run for run in runs.values()) or attempt == 3:
                raise
    return {
        name: [
            [rows_of(step), np.mean([loss for _, loss in step])]
            for step in zip(*(found[name] for found in ranks), strict=True)
        ]
        for name in runs
    }


def rows_of(steps):
    return [row for rows, _ in steps for row in rows]


@pytest.fixture(scope="module")
def straight(folder):
    return launch(folder, folder / "straight", {name: {} for name in STAGES})


@pytest.fixture(scope="module")
def begun(folder, straight):
    """The folder of runs to be resumed: one got SIGKILL two steps after its newest checkpoint."""
    out = folder / "begun"
    with pytest.raises(RanksFailed):
        launch(folder, out, {"sft": {"die_at": SAVED + 1}})
    assert sorted(os.listdir(out / "sft"))[:2] == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    for name in ("dpo", "pt"):
        saved = Path(name, f"checkpoint-{SAVED}")
        shutil.copytree(folder / "straight" / saved, out / saved)
    return out


@pytest.mark.parametrize("name", STAGES)
def test_cli_reads_each_row_once_an_epoch(name, straight):
    rows = rows_of(straight[name])
    assert len(rows) == 2 * EPOCH
    for first in (0, EPOCH):
        assert set(rows[first : first + EPOCH]) == set(range(ROWS))


def test_cli_resumes_with_the_next_row_after_sigkill(
    folder, begun, straight, tmp_path
):
    out = shutil.copytree(begun, tmp_path / "out")
    rest = launch(folder, out, {name: {} for name in STAGES})
    for name, whole in straight.items():
        assert [rows for rows, _ in rest[name]] == [
            rows for rows, _ in whole[SAVED:]
        ]
        losses = [
            [loss for _, loss in steps] for steps in (rest[name], whole[SAVED:])
        ]
        assert np.allclose(*losses, atol=1e-5)


# The trainer counts epochs by its present steps, of six rows.
THREE_RANKS = {
    "config": {"max_steps": SAVED + (EPOCH - SAVED * BATCH + 5) // 6}
}


def test_cli_resumes_on_three_ranks(folder, begun, straight, tmp_path):
    out = shutil.copytree(begun, tmp_path / "out")
    rest = launch(
        folder, out, dict.fromkeys(("sft", "pt"), THREE_RANKS), num_ranks=3
    )
    for name, steps in rest.items():
        whole = straight[name]
        rows = rows_of(whole[:SAVED]) + rows_of(steps)
        assert rows[:ROWS] == rows_of(whole)[:ROWS]


def test_plain_cli_loses_and_repeats_rows(folder, tmp_path):
    run = {"patch": None, "config": {"max_steps": EPOCH // BATCH}}
    epoch = launch(folder, tmp_path, {"sft": run})["sft"]
    assert len(set(rows_of(epoch))) == ROWS - 1
    for step in (2, 6, 8):
        shutil.rmtree(tmp_path / "sft" / f"checkpoint-{step}")
    run["config"] = {"max_steps": 2 * SAVED, "per_device_train_batch_size": 1}
    rest = launch(folder, tmp_path, {"sft": run})["sft"]
    assert set(rows_of(epoch[:SAVED])) & set(rows_of(rest))
