"""Does the GPT demo, run as a user runs it on dp=2 x mp=2, show what it claims?"""

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.jobs import launch_ranks

pytestmark = pytest.mark.multiprocess

DEMO = Path(__file__).parents[2] / "demos" / "gpt.py"
# What a count from outside needs goes into the report that run_ranks waits for.
RANK = """
import runpy
import sys

import paddle

from paddle_shard.testing import report

demo = runpy.run_path(sys.argv[1], run_name="__main__")
held_out = demo["read_text"]()[-demo["HELD_OUT_BYTES"] :]
model, _ = demo["new_model"]()
batch = demo["tensors"](demo["Windows"](held_out)[:1])
losses = model(**batch)
batch["input_ids"][0, 40] += 1
moved = (model(**batch) != losses).numpy()[0].nonzero()[0]
report(
    {"held_out": held_out, "context": demo["CONTEXT"], "batch_size": demo["BATCH_SIZE"], "first_moved": moved.min()}
)
"""
NUMBER = r"(\d[\d.e+-]*)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return rank 0's report and every rank's log."""
    directory = tmp_path_factory.mktemp("gpt")
    rank = directory / "rank.py"
    rank.write_text(RANK)
    # Under the launcher, as its reader runs it.
    reports = launch_ranks(
        rank, 4, directory / "run", args=[str(DEMO)], timeout=400
    )
    return reports[0], [
        (directory / "run" / f"workerlog.{k}").read_text() for k in range(4)
    ]


def test_losses_are_one_process_s(run):
    _, logs = run

    found = re.search(
        rf"losses of (\d+) steps differ from one process's by at most {NUMBER},\s+the held-out loss by {NUMBER}\n",
        logs[0],
    )

    assert "dp=2 x mp=2, 4 processes" in logs[0]
    assert int(found[1]) >= 10
    assert float(found[2]) <= 1e-5
    assert float(found[3]) <= 1e-5


def test_held_out_loss_is_exact_and_below_the_byte_entropy(run):
    report, logs = run
    length = len(report["held_out"])
    counts = Counter(report["held_out"]).values()

    found = re.search(
        rf"held-out loss: {NUMBER} nats a byte, of (\d+) windows; byte entropy: {NUMBER}\n",
        logs[0],
    )

    assert int(found[2]) == (length - 1) // report["context"]
    assert int(found[2]) % report["batch_size"], (
        "the last batch is full: nothing shows that padding is left out"
    )
    assert float(found[3]) == pytest.approx(
        math.log(length) - sum(c * math.log(c) for c in counts) / length,
        abs=1e-5,
    )
    assert float(found[1]) < float(found[3])


def test_loss_falls(run):
    _, logs = run

    line = logs[0].split("loss at steps:\n")[1].splitlines()[0]
    losses = [float(loss) for loss in re.findall(r"\d+: (\S+)", line)]

    assert losses[0] > math.log(256) - 0.5  # knows nothing yet
    assert losses[-1] < losses[0] / 2


def test_gpt_is_causal(run):
    """Or else a low loss would show nothing: byte 40 was changed."""
    report, _ = run

    assert report["first_moved"] == 40


def test_gpt_shows_progress_on_rank_0_only(run):
    _, logs = run

    assert ["training:" in log for log in logs] == [True, False, False, False]
    assert ["held-out loss" in log for log in logs] == [
        True,
        False,
        False,
        False,
    ]
