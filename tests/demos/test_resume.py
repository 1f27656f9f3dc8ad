"""Does the resume demo, run as a user runs it, show what it claims, and leave nothing behind?"""

import os
import re
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

DEMO = Path(__file__).parents[2] / "demos" / "resume.py"
DEADLINE = 400
"""Seconds that only a hang takes."""
# what its processes have in their environment, however deep
MARK = "TEST_DEMO_RESUME"


def run_demo(arguments, directory, name="resume.py"):
    """Return the exit code and the text of a run, whose processes have all been ended, and those it left behind."""
    mark = uuid.uuid4().hex
    demo = subprocess.Popen(
        [sys.executable, str(DEMO.with_name(name)), *arguments],
        env={**os.environ, "TMPDIR": str(directory), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = demo.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        # the demo and launch/local.py, which ends the ranks
        os.killpg(demo.pid, signal.SIGTERM)
        text, _ = demo.communicate(timeout=30)
        pytest.fail(f"the demo had not ended after {DEADLINE} s:\n{text}")
    finally:
        left = processes_with(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    return demo.returncode, text, left


def processes_with(mark):
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (
                directory / "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found


RUNS = {
    "random": ([], "4 processes (dp=4)", "2 processes (mp=1,dp=2)"),
    # The kill falls into epoch 1, the last checkpoint into epoch 0.
    "split_weights": (
        ["--kill-at", "46", "--meshes", "dp=2,mp=2", "mp=2,dp=1"],
        "4 processes (dp=2,mp=2)",
        "2 processes (mp=2,dp=1)",
    ),
}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The runs of the tests that were chosen, at the same time: name -> (future result, directory)."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if hasattr(item, "callspec") and item.path == request.path
    ]
    with ThreadPoolExecutor(2) as pool:
        directories = {name: tmp_path_factory.mktemp(name) for name in chosen}
        yield {
            name: (pool.submit(run_demo, RUNS[name][0], where), where)
            for name, where in directories.items()
        }


@pytest.mark.parametrize("name", RUNS)
def test_run_that_is_killed_and_resumed_is_the_straight_run(name, runs):
    (future, directory), (_, killed, resumed) = runs[name], RUNS[name]
    code, text, left = future.result()

    assert code == 0, text
    stopped_at, resumed_at = map(
        int,
        re.search(
            rf"killed run: +{re.escape(killed)}, 0 workers each; SIGKILL after (\d+) steps\n.* is from step (\d+)\n",
            text,
        ).groups(),
    )
    assert f"{resumed}, 2 workers each; steps {resumed_at} to the end" in text
    assert 0 < resumed_at <= stopped_at < 135
    parity = re.search(
        r"losses of all 135 steps, (\d+) of them made by both .*\s+.* by at most (\S+)\n",
        text,
    )
    assert int(parity[1]) == stopped_at - resumed_at
    assert float(parity[2]) <= 1e-5
    certificates = re.findall(
        r"certificate of (epoch \d): each of 1437 samples exactly once(.*)\n",
        text,
    )
    epoch, steps = divmod(resumed_at, 45)
    assert [name for name, _ in certificates] == [
        "epoch 0",
        "epoch 1",
        "epoch 2",
    ]
    assert (
        certificates[epoch][1]
        == f" ({steps} steps by the killed run, {45 - steps} by the resumed run)"
    )
    assert left == [], f"processes are left: {left}"
    assert list(directory.iterdir()) == []


def test_step_that_cannot_be_killed_is_refused(tmp_path):
    code, text, _ = run_demo(["--kill-at", "91"], tmp_path)

    assert code == 1
    assert "--kill-at must be from 8 to 90, got 91" in text
