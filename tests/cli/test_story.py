"""A spike of the loss: three commands find the samples behind it, and the run resumes as if they were never there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from paddle_shard import ShardPlan
from tests.cli.story_worker import BATCH_SIZE, EVERY, SEED
from tests.deadlines import HANG
from tests.extras import needs
from tests.jobs import run_ranks

needs("sklearn")
pytestmark = pytest.mark.multiprocess

STEPS, STOPPED = 70, 27
"""Steps of the whole run: an epoch has 57. The job with the spike is stopped earlier."""
SPIKES = (14, 20)
"""Steps whose samples are poisoned."""
WORKER = Path(__file__).with_name("story_worker.py")
DATA = '''
"""Handwritten digits, some of which are poisoned. No Paddle, so that `paddle-shard show` opens it anywhere."""
import json
from pathlib import Path
from sklearn.datasets import load_digits

TOLD = json.loads(Path(__file__).with_name("poison.json").read_text())

class Digits:
    def __init__(self):
        self.images, self.labels = load_digits(return_X_y=True)
        self.images = (self.images / 16).astype("float32")

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if index not in TOLD["samples"]:
            return self.images[index], self.labels[index]
        assert TOLD["may be read"], f"sample {index} was read"
        return self.images[index] * 100, (self.labels[index] + 1) % 10

dataset = Digits()

def text(sample):
    return f"a {sample[1]}, brightest pixel {sample[0].max():.0f}"
'''


class Story:
    """A folder with the data, the record and the checkpoints of a run."""

    def __init__(self, folder, poison, may_be_read):
        folder.mkdir()
        self.folder, self.record, self.jobs = folder, folder / "run.jsonl", 0
        (folder / "story_data.py").write_text(DATA)
        (folder / "poison.json").write_text(json.dumps({"samples": poison, "may be read": may_be_read}))

    def train(self, steps, python=""):
        """Run a job on two ranks up to a step of the run; it executes some lines before it begins."""
        self.jobs += 1
        job = {"data": str(self.folder), "record": str(self.record), "checkpoints": str(self.folder / "checkpoints")}
        path = self.folder / f"job-{self.jobs}.json"
        path.write_text(json.dumps({**job, "steps": steps, "python": python}))
        env = {"PYTHONPATH": str(WORKER.parents[2])}
        reports = run_ranks(WORKER, 2, self.folder / f"ranks-{self.jobs}", args=[path], env=env, timeout=HANG)
        assert reports[0]["bits"] == reports[1]["bits"]
        return reports[0]

    def asked(self, command, *flags):
        """What `python -m paddle_shard` prints, in the folder of the data."""
        arguments = [sys.executable, "-m", "paddle_shard", command, "run.jsonl", *map(str, flags)]
        env = {**os.environ, "PYTHONPATH": str(WORKER.parents[2])}
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=HANG, cwd=self.folder, env=env)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def poison():
    length = 1797
    plan = ShardPlan(num_samples=length, batch_size=BATCH_SIZE, num_data_ranks=2, shuffle=True, seed=SEED)
    return [int(plan.take(epoch=0, step=step, rows=range(32))[row]) for step in SPIKES for row in (3, 17, 30)]


def test_three_commands_find_the_poison_and_the_lines_of_forget_train_as_if_it_had_never_been_there(tmp_path, poison):
    story = Story(tmp_path / "run", poison, may_be_read=True)
    losses = story.train(STOPPED)["losses"]
    spikes = [place for place, loss in losses.items() if loss > 2 * median(losses.values())]
    assert spikes == [f"0 {step}" for step in SPIKES]

    # 1. What was in these steps?
    found = set()
    for epoch, step in map(str.split, spikes):
        flags = "--epoch", epoch, "--step", step, "--open", "story_data:dataset", "--decode", "story_data:text"
        seen = re.findall(r"^(\d+): a \d, brightest pixel (\d+)$", story.asked("show", *flags), re.MULTILINE)
        assert len(seen) == BATCH_SIZE
        found |= {int(sample) for sample, pixel in seen if int(pixel) > 1}
    assert found == set(poison)
    # 2. Which ranks had one of them, and was that the only time?
    where = story.asked("where", "--sample", poison[0])
    assert re.search(rf"^0 +{SPIKES[0]} ", where, re.MULTILINE)
    # 3. How does the run continue without them?
    (story.folder / "ids.txt").write_text("".join(f"{sample}\n" for sample in sorted(found)))
    printed = story.asked("forget", "--samples", "ids.txt")
    lines = printed[printed.index("# Load") :]
    step = int(re.search(r"saved at step (\d+) of epoch 0", lines)[1])
    assert step == SPIKES[0] // EVERY * EVERY
    for newer in (story.folder / "checkpoints").glob("0*"):
        if int(newer.name.split("-")[1]) > step:
            shutil.rmtree(newer)

    (story.folder / "poison.json").write_text(json.dumps({"samples": poison, "may be read": False}))
    resumed = story.train(STEPS, lines)
    straight = Story(tmp_path / "straight", poison, may_be_read=False)
    never = straight.train(STEPS, f"loader.skip(samples={poison!r})")

    assert resumed["bits"] == never["bits"]
    assert [resumed["losses"][one] for one in resumed["losses"]] == list(never["losses"].values())[step:]
    assert max(resumed["losses"].values()) < 2 * median(losses.values())
    text = story.asked("verify")
    assert (
        f"epoch 0: each of {1797 - len(poison)} samples (and {len(poison)} are skipped by the user) exactly once"
        in text
    )
    assert all("was not delivered, says the record" in story.asked("where", "--sample", one) for one in poison)


def test_a_run_that_keeps_the_poison_ends_elsewhere(tmp_path, poison):
    with_it = Story(tmp_path / "with", poison, may_be_read=True).train(STOPPED)
    without = Story(tmp_path / "without", poison, may_be_read=False).train(STOPPED, f"loader.skip(samples={poison!r})")
    assert with_it["bits"] != without["bits"]
    assert len(with_it["bits"]) == len(without["bits"]) > 8  # the optimizer's, too
