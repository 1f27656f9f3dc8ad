import runpy
import signal
import sys
from pathlib import Path

import pytest

from tests.deadlines import HANG

LOCAL = Path(__file__).parents[2] / "launch/local.py"
RANK = "import os, pathlib, subprocess, sys, time\nrank = int(os.environ['PADDLE_TRAINER_ID'])\n"

# The tests on GPU labels need none of it.
multiprocess = pytest.mark.multiprocess


def script(directory: Path, body: str) -> Path:
    path = directory / "script.py"
    path.write_text(RANK + body)
    return path


@multiprocess
def test_local_run_shows_rank_0_live_and_has_its_own_logs(commands, tmp_path):
    """Its logs are its own, and its arguments and variables: not those of a run at once, nor of an earlier one."""
    body = """
told = sys.argv[1:], os.environ['PADDLE_TRAINERS_NUM'], os.environ['OMP_NUM_THREADS']
print('early', rank, *told)
while not pathlib.Path('go').exists(): time.sleep(0.05)
print('late', rank, end='')
"""
    path = script(tmp_path, body)
    (tmp_path / "out").mkdir()
    for name in ("workerlog.0", "workerlog.7", "exit.7", "notes.txt"):
        (tmp_path / "out" / name).write_text("old\n")
    left_over = {
        "PADDLE_NNODES": "2",
        "PADDLE_MASTER": "192.0.2.1:1",
        "PADDLE_TRAINER_ID": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "3",
    }
    arguments = ["--processes", "7", "a b", "--", "$x"]
    command = [
        sys.executable,
        LOCAL,
        "--processes",
        "2",
        "--log-dir",
        "out",
        path,
    ]

    commands.start("first", [*command, *arguments], **left_over)
    early = f"early 0 {arguments} 2 3\n"
    commands.until(lambda: commands.out("first") == early)
    second = commands.start("second", command)
    assert second.wait(HANG) == 2
    assert "--log-dir out belongs to a run that is alive" in commands.err(
        "second"
    )
    (tmp_path / "go").touch()

    assert commands.wait()["first"] == 0
    assert commands.out("first") == f"{early}late 0"
    assert commands.err("first") == ""
    logs = tmp_path / "out"
    assert (logs / "workerlog.0").read_text() == commands.out("first")
    assert (
        logs / "workerlog.1"
    ).read_text() == f"early 1 {arguments} 2 3\nlate 1"
    assert "LAUNCH INFO" in (logs / "launcher.log").read_text()
    assert not (logs / "workerlog.7").exists()
    assert (logs / "notes.txt").read_text() == "old\n"


@multiprocess
@pytest.mark.parametrize(
    "rank_0",
    [
        pytest.param(
            "time.sleep(60)",
            id="the other is stopped by the launcher",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "while not pathlib.Path('failed').exists(): time.sleep(0.01)\ntime.sleep(0.1)\nsys.exit(4)",
            id="the other fails of it",  # and is lower: the launcher names it
        ),
    ],
)
def test_local_run_names_the_first_rank_to_fail(commands, tmp_path, rank_0):
    path = script(
        tmp_path,
        "print('hello from', rank)\n"
        "if rank == 1:\n"
        "    print('boom')\n"
        "    pathlib.Path('failed').touch()\n"
        "    sys.exit(3)\n" + rank_0,
    )

    commands.start("run", [sys.executable, LOCAL, "--processes", "2", path])

    assert commands.wait() == {"run": 3}
    shown = commands.err("run")
    for text in ("hello from 0", "hello from 1", "boom"):
        assert text in shown
    assert (
        shown.splitlines()[-1]
        == "local.py: rank 1 of 2 failed first, with exit code 3; logs in log"
    )
    assert commands.alive() == []


@multiprocess
def test_local_run_passes_ctrl_c_to_ranks_and_leaves_no_process(
    commands, tmp_path
):
    path = script(
        tmp_path,
        # Not in the group, nor in the session of its rank.
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('ready', flush=True)\n"
        "try: time.sleep(600)\n"
        "except KeyboardInterrupt: print('saved', rank)",
    )

    run = commands.start(
        "run", [sys.executable, LOCAL, "--processes", "2", path]
    )
    logs = [tmp_path / "log/workerlog.0", tmp_path / "log/workerlog.1"]
    commands.until(
        lambda: all(log.exists() and "ready" in log.read_text() for log in logs)
    )
    # local.py, the launcher, 2 ranks, 2 detached
    assert len(commands.alive()) >= 6
    run.send_signal(signal.SIGINT)

    assert commands.wait() == {"run": 130}
    assert commands.alive() == []
    assert commands.out("run") == "ready\nsaved 0\n"
    assert "saved 1" in logs[1].read_text()


@multiprocess
def test_local_run_kills_at_the_second_ctrl_c(commands, tmp_path):
    path = script(
        tmp_path,
        "import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(600)",
    )

    run = commands.start(
        "run", [sys.executable, LOCAL, "--processes", "1", path]
    )
    commands.until(lambda: "deaf" in commands.out("run"))
    run.send_signal(signal.SIGINT)
    commands.until(lambda: "once more kills" in commands.err("run"))
    assert run.poll() is None
    run.send_signal(signal.SIGINT)

    assert commands.wait() == {"run": 130}
    assert commands.alive() == []


@multiprocess
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--processes", "0", "script.py"],
            "--processes must be at least 1, got 0",
        ),
        (
            ["--processes", "two", "script.py"],
            "--processes: invalid int value: 'two'",
        ),
        (
            ["--processes", "2", "missing.py"],
            "script 'missing.py' is not a file",
        ),
        (["--processes", "2", "run.out"], "must end in .py or be executable"),
        (
            ["--processes", "2", "--log-dir", "script.py", "script.py"],
            "--log-dir script.py cannot be made",
        ),
        (["--processes", "2"], "required: script"),
        (["script.py"], "exactly one of them; got neither"),
        (
            ["--processes", "2", "--gpus", "0", "script.py"],
            "exactly one of them; got both",
        ),
        pytest.param(
            ["--gpus", "0,99", "script.py"],
            # no host has a hundred: none is seen, or not this one
            "--gpus 0,99: ",
            marks=pytest.mark.long,  # imports Paddle to look for GPUs
        ),
    ],
)
def test_local_rejects_wrong_arguments(commands, tmp_path, arguments, message):
    script(tmp_path, "raise SystemExit('ran')")

    commands.start("run", [sys.executable, LOCAL, *arguments])

    assert commands.wait() == {"run": 2}
    assert message in commands.err("run")
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("wanted", "visible", "chosen"),
    [
        ("all", ["0", "1"], ["0", "1"]),
        # in the order given: local rank 0 has GPU 1
        ("1, 0", ["0", "1"], ["1", "0"]),
        ("5", ["4", "5"], ["5"]),  # as CUDA_VISIBLE_DEVICES=4,5 calls it
    ],
)
def test_choose_gpus_by_label(wanted, visible, chosen):
    assert runpy.run_path(str(LOCAL))["choose_gpus"](wanted, visible) == chosen


@pytest.mark.parametrize(
    ("wanted", "visible", "message"),
    [
        ("all", [], "sees no GPU; use --processes"),
        ("0,2", ["0", "1"], r"\['2'\] not among the visible GPUs"),
        ("", ["0"], r"\[''\] not among"),
        ("0,0", ["0", "1"], "named twice"),
    ],
)
def test_choose_gpus_rejects_gpus_that_are_not_there(wanted, visible, message):
    with pytest.raises(ValueError, match=message):
        runpy.run_path(str(LOCAL))["choose_gpus"](wanted, visible)
