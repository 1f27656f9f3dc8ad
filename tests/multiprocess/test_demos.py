"""Each demo runs as its reader would run it, and says what it shows. Two run at a time: much of each is waiting."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]


def run_demo(name, processes, directory, **env):
    """The terminal's text; `launch/local.py` ends every process by itself when it is terminated."""
    directory.mkdir()
    command = [sys.executable, str(ROOT / "launch/local.py"), "--processes", str(processes)]
    process = subprocess.Popen(
        [*command, "--log-dir", str(directory), str(ROOT / "demos" / name)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.terminate()
        text, _ = process.communicate(timeout=30)
        pytest.fail(f"{name} had not ended after 150 s:\n{text}")
    assert process.returncode == 0, text
    return text


def shows(name, processes, **env):
    """What a test needs: `demo` is the text of this run, and the directory of its logs."""
    return pytest.mark.parametrize("demo", [(name, processes, env)], ids=[f"{name}-{processes}"], indirect=True)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The runs of the tests that were chosen, begun in their order: test -> (future text, directory)."""
    chosen = [item for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for number, item in enumerate(chosen):
            name, processes, env = item.callspec.params["demo"]
            directory = tmp_path_factory.getbasetemp() / f"demo-{number}"
            found[item.nodeid] = pool.submit(run_demo, name, processes, directory, **env), directory
        yield found
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def demo(request, runs):
    future, directory = runs[request.node.nodeid]
    return future.result(), directory


def check_digits(text, logs, mode):
    assert f"{mode}, 2 processes, the loss of each step:" in text
    assert len(re.findall(r"\b\d\.\d{4}\b", text.split("loss of each step:")[1].split("test accuracy")[0])) == 528
    assert float(re.search(r"test accuracy: ([\d.]+)% of 360 images", text)[1]) >= 95
    parity = re.search(r"the losses of 528 steps differ from one process's by at most (\S+)", text)
    assert float(parity[1]) <= 1e-5
    assert f"{mode}: 100%" in text, "the progress bar is on rank 0 .."
    assert f"{mode}: 100%" not in (logs / "workerlog.1").read_text(), ".. only"


@shows("digits.py", 2, RUN_STATIC="0")
def test_digits_trains_to_95_percent_exactly_as_one_process(demo):
    check_digits(*demo, "dynamic")


@shows("digits.py", 2, RUN_STATIC="1")
def test_digits_trains_to_95_percent_exactly_as_one_process_by_a_static_program(demo):
    check_digits(*demo, "static")


@shows("two_meshes.py", 8)
def test_two_meshes_trains_as_one_process(demo):
    text, _ = demo

    losses = re.search(r"losses on two meshes: (.+)", text)[1].split()
    assert [float(loss) for loss in losses] == pytest.approx([231.17969, 394.97314, 388.04575, 358.34125], rel=1e-5)


@shows("dict_inputs.py", 8)
def test_dict_inputs_checks_every_rank(demo):
    text, _ = demo

    assert text.count("2 steps, all as expected") == 3


@shows("csv_stream.py", 2)
def test_csv_stream_delivers_every_row_once_in_each_of_ten_epochs(demo):
    text, _ = demo

    assert text.count("10 epochs of 64 steps, 2 ranks x 4 workers: each of 1024 rows exactly once") == 2


@shows("webdataset_digits.py", 2)
def test_webdataset_digits_trains_from_tars_on_disk_and_over_http(demo):
    text, _ = demo

    assert "10 tars of 37 to 253 samples, 2 processes x 2 workers: 8 epochs of 45 steps" in text
    assert "over HTTP the same losses" in text


@pytest.mark.parametrize("demo", [("equal_steps.py", n, {}) for n in (2, 4)], ids=["2", "4"], indirect=True)
def test_equal_steps_whatever_the_shards(demo):
    text, _ = demo

    # 7 files by turns into 4 parts: 36, 8, 20 and 7 samples, of which a step takes 2 each.
    assert "tail='pad': 18 steps on every rank, 71 samples: 0 left out, 0 read again" in text
    assert "tail='drop': 3 steps on every rank, 24 samples: 47 left out, 0 read again" in text
    assert "tail='repeat': 18 steps on every rank, 144 samples: 0 left out" in text
    assert "tail='error': UnequalEndsError on every rank, after 3 steps" in text
