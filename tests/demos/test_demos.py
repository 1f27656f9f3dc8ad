"""Each demo runs as its reader would run it, and says what it shows. Two run at a time: much of each is waiting.

`digits.py` is run by `make demo`, and checks itself.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]
DEADLINE = 400
"""Seconds that only a hang takes."""


def run_demo(name, processes, directory, *arguments):
    """The terminal's text; `launch/local.py` ends every process by itself when it is terminated."""
    directory.mkdir()
    command = [
        sys.executable,
        str(ROOT / "launch/local.py"),
        "--processes",
        str(processes),
    ]
    process = subprocess.Popen(
        [
            *command,
            "--log-dir",
            str(directory),
            str(ROOT / "demos" / name),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()
        text, _ = process.communicate(timeout=30)
        pytest.fail(f"{name} had not ended after {DEADLINE} s:\n{text}")
    assert process.returncode == 0, text
    return text


def shows(name, *processes, arguments=(), needs=None):
    """What a test needs: `demo` is the text of this run."""
    marks = (
        []
        if needs is None or find_spec(needs)
        else [pytest.mark.skip(reason=f"{needs} is not installed")]
    )
    runs = [
        pytest.param(
            (name, number, arguments), id=f"{name}-{number}", marks=marks
        )
        for number in processes
    ]
    return pytest.mark.parametrize("demo", runs, indirect=True)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The runs of the tests that were chosen, begun in their order: test -> future text."""
    chosen = [
        item
        for item in request.session.items
        if item.path == request.path and not item.get_closest_marker("skip")
    ]
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for number, item in enumerate(chosen):
            name, processes, arguments = item.callspec.params["demo"]
            directory = tmp_path_factory.getbasetemp() / f"demo-{number}"
            found[item.nodeid] = pool.submit(
                run_demo, name, processes, directory, *arguments
            )
        yield found
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def demo(request, runs):
    text = runs[request.node.nodeid].result()
    print(text)  # which `make demos` shows
    return text


@shows("two_meshes.py", 8)
def test_two_meshes_trains_as_one_process(demo):
    losses = re.search(r"losses on two meshes: (.+)", demo)[1].split()
    assert [float(loss) for loss in losses] == pytest.approx(
        [231.17969, 394.97314, 388.04575, 358.34125], rel=1e-5
    )


@shows("dict_inputs.py", 8)
def test_dict_inputs_checks_every_rank(demo):
    assert demo.count("2 steps, all as expected") == 3


@shows("csv_stream.py", 2)
def test_csv_demo_delivers_every_row_once_an_epoch(demo):
    assert (
        demo.count(
            "10 epochs of 64 steps, 2 ranks x 4 workers: each of 1024 rows exactly once"
        )
        == 2
    )


@shows("webdataset_digits.py", 2, needs="webdataset")
def test_webdataset_demo_trains_from_disk_and_over_http(demo):
    assert (
        "10 tars of 37 to 253 samples, 2 processes x 2 workers: 8 epochs of 45 steps"
        in demo
    )
    assert "over HTTP the same losses" in demo


@shows("jpeg.py", 2)
def test_jpegs_are_decoded_by_what_is_installed(demo):
    assert ": 64 of 64 images as they were written" in demo


@shows("equal_steps.py", 2, 4, arguments=["--show-splits", "--show-open"])
def test_equal_steps_whatever_the_shards(demo):
    # 7 files by turns into 4 parts: 36, 8, 20 and 7 samples, of which a step takes 2 each.
    assert (
        "tail='pad': 18 steps on every rank, 71 samples: 0 left out, 0 read again"
        in demo
    )
    assert (
        "tail='drop': 3 steps on every rank, 24 samples: 47 left out, 0 read again"
        in demo
    )
    assert (
        "tail='repeat': 18 steps on every rank, 144 samples: 0 left out" in demo
    )
    assert "tail='error': UnequalEndsError on every rank, after 3 steps" in demo


@shows("sources/parquet.py", 2, needs="pyarrow")
def test_parquet_delivers_each_row_once(demo):
    assert (
        "32 steps of 16 rows from 3 files, 2 ranks x 2 workers: each of 511 rows exactly once"
        in demo
    )


@shows("sources/huggingface.py", 2, needs="datasets")
def test_huggingface_delivers_each_sample_once(demo):
    assert "exactly once" in demo


@shows("sources/grain_data.py", 2, needs="grain")
def test_grain_delivers_each_sample_once(demo):
    assert "exactly once" in demo


@shows("sources/s3.py", 2, needs="moto")
def test_s3_delivers_each_sample_once(demo):
    assert "exactly once" in demo


@shows("context_parallel.py", 4)
def test_sequences_that_are_split_train_as_one_process_does(demo):
    assert "dp=2 x sep=2 x mp=1" in demo
    parity = float(
        re.search(r"differ from one process's by at most ([\d.e+-]+)", demo)[1]
    )
    assert parity <= 1e-5


@shows("context_parallel.py", 4, arguments=("--mesh", "1", "2", "2"))
def test_sequence_demo_trains_as_one_process_does(demo):
    assert "dp=1 x sep=2 x mp=2" in demo
    assert (
        float(re.search(r"in the order of the rows, by ([\d.e+-]+)", demo)[1])
        <= 1e-4
    )
