"""How do I run a training script on N processes of this host?

On the CPU, over gloo, or on GPUs, one process each:

    python launch/local.py --processes 2 train.py [script arguments]
    python launch/local.py --gpus 0,1 train.py [script arguments]

The ranks run under `python -m paddle.distributed.launch`. Global rank 0's output is copied to the terminal as
it comes; every rank's own is in `--log-dir` as `workerlog.<rank>`, and what the launcher says is in
`launcher.log`. When a rank fails, the end of every log is shown and the first rank to fail is named. The exit
code is that rank's, 130 after Ctrl-C, 2 for wrong arguments, and 0 only if every rank ended well. No process
of the run is alive when this one ends. Needs Linux, the standard library, and Paddle for the script.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0
TAIL_LINES = 40

_RUN_ID = "LAUNCH_LOCAL_RUN_ID"

# Each rank runs in this shell, which leaves its exit code in the log directory. The launcher looks once a
# second, names the lowest rank of those that failed, often a victim of the first, and exits with the code of
# the lowest, be it the SIGTERM that it sent itself. The traps make the shell outlive the script.
_RANK = """
trap : HUP INT TERM
"$@"
code=$?
echo $code > "$PADDLE_LOG_DIR/exit.$PADDLE_TRAINER_ID"
exit $code
"""

# What the launcher takes from the environment in place of its arguments: left over from another job (a
# PaddleJob's pod, a rank that starts a run of its own), these would change this run without a word.
_LAUNCHER_READS = re.compile(
    "POD_IP|POD_NAME|DISTRIBUTED_TRAINER_ENDPOINTS|FLAGS_selected_.*|PADDLE_("
    "AUTO_CLUSTER|AUTO_PARALLEL_CONFIG|BACKUP_ENV_PATH|CURRENT_ENDPOINT|DEVICES|ELASTIC_.*|GLOBAL_.*"
    "|GLOO_PORT|IPS|JOB_ID|LAUNCH_WITH_ARGS|LOCAL_.*|LOG_DIR|LOG_LEVEL|LOG_OVERWRITE|MASTER|MAX_RESTART"
    "|NNODES|NPROC_PER_NODE|RANK|RANK_IN_NODE|RUN_MODE|SERVERS_ENDPOINTS|SERVER_NUM|SORT_IP|START_PORT"
    "|TRAINERS.*|TRAINER_.*|WITH_GLOO)"
)
_OLD_LOGS = (
    "workerlog.*",
    "exit.*",
    "envlog.*",
    "backup_env.*.json",
    "default.*.log",
)


def main() -> int:
    """Run the script that the command line names and return the exit code of the run."""
    options = parse_arguments()
    environment = {
        k: v for k, v in os.environ.items() if not _LAUNCHER_READS.fullmatch(k)
    }
    command = [
        sys.executable,
        "-u",
        "-m",
        "paddle.distributed.launch",
        "--log_dir",
        str(options.log_dir),
    ]
    if options.gpus is None:
        num_ranks = options.processes
        command += ["--nproc_per_node", str(num_ranks)]
        # No device has this name, so CUDA shows none and the launcher takes gloo. An empty value, or one from
        # the user's shell, makes it look for GPUs, even where Paddle is the CPU build.
        environment["CUDA_VISIBLE_DEVICES"] = "all"
        cores = len(os.sched_getaffinity(0))
        environment.setdefault(
            "OMP_NUM_THREADS", str(max(1, cores // num_ranks))
        )
    else:
        num_ranks = len(options.gpus)
        command += ["--devices", ",".join(options.gpus)]
    python = [sys.executable, "-u"] if options.script.endswith(".py") else []
    command += [
        "/bin/sh",
        "-c",
        _RANK,
        "rank",
        *python,
        options.script,
        *options.arguments,
    ]
    with open(options.log_dir / "launcher.log", "ab") as launcher_log:
        if not _lock(launcher_log):
            say(
                f"--log-dir {options.log_dir} belongs to a run that is alive: wait, or pass another --log-dir"
            )
            return 2
        launcher_log.truncate(0)
        for path in (
            path
            for pattern in _OLD_LOGS
            for path in options.log_dir.glob(pattern)
        ):
            path.unlink()
        try:
            return run(
                command, environment, num_ranks, options.log_dir, launcher_log
            )
        except BrokenPipeError:
            # as in `local.py ... | head`; the run has been killed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE


def parse_arguments() -> argparse.Namespace:
    """Parse and check the command line; `gpus` comes back as a list of labels, `log_dir` as a directory."""
    parser = argparse.ArgumentParser(
        prog="local.py",
        usage="local.py (--processes N | --gpus LIST) [--log-dir DIR] script [script arguments]",
        description="Run a training script on N processes of this host, under paddle.distributed.launch.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="N processes on the CPU, over gloo",
    )
    parser.add_argument(
        "--gpus", metavar="LIST", help="one process per GPU: 0,1 or all"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=Path("log"),
        metavar="DIR",
        help="default: %(default)s",
    )
    parser.add_argument("script", help="a .py file or an executable")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="passed on to the script"
    )
    options = parser.parse_args()
    if (options.processes is None) == (options.gpus is None):
        given = "neither" if options.gpus is None else "both"
        parser.error(
            f"pass --processes N (CPU) or --gpus LIST, exactly one of them; got {given}"
        )
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if not os.path.isfile(options.script):
        parser.error(
            f"script {options.script!r} is not a file, seen from {os.getcwd()}"
        )
    if not options.script.endswith(".py") and not os.access(
        options.script, os.X_OK
    ):
        parser.error(
            f"script {options.script!r} must end in .py or be executable (chmod +x)"
        )
    if options.gpus is not None:
        try:
            options.gpus = choose_gpus(options.gpus, visible_gpus())
        except ValueError as error:
            parser.error(str(error))
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(
            f"--log-dir {options.log_dir} cannot be made: {error.strerror}; pass another"
        )
    return options


def choose_gpus(wanted: str, visible: list[str]) -> list[str]:
    """Return the labels that `--gpus` names.

    Args:
        wanted: "all", or labels joined by commas: indices, or members of `CUDA_VISIBLE_DEVICES` if set.
        visible: Labels of the GPUs that Paddle sees.

    Raises:
        ValueError: If none is visible, or one is not visible or named twice.
    """
    if not visible:
        raise ValueError(
            f"--gpus {wanted}: this Paddle sees no GPU; use --processes N to run on the CPU"
        )
    labels = (
        visible
        if wanted == "all"
        else [label.strip() for label in wanted.split(",")]
    )
    if missing := [label for label in labels if label not in visible]:
        raise ValueError(
            f"--gpus {wanted}: {missing} not among the visible GPUs, {visible}"
        )
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"--gpus {wanted}: a GPU is named twice, and each runs one process"
        )
    return labels


def visible_gpus() -> list[str]:
    """Return the launcher's labels of the GPUs that Paddle sees, asked in a process of its own."""
    code = "import paddle; print('count', paddle.device.cuda.device_count())"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    count = re.search(r"^count (\d+)$", answer.stdout, re.MULTILINE)
    if count is None:
        raise ValueError(
            f"--gpus: Paddle cannot be asked for the GPUs that it sees:\n{answer.stderr}"
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    labels = (
        [str(index) for index in range(int(count[1]))]
        if listed == "all"
        else listed.split(",")
    )
    return labels[: int(count[1])]


def run(
    command: list[str],
    environment: dict[str, str],
    num_ranks: int,
    log_dir: Path,
    launcher_log: BinaryIO,
) -> int:
    """Start the launcher, follow global rank 0, see the run to its end, and return its exit code."""
    run_id = uuid.uuid4().hex
    follower = Follower(log_dir / "workerlog.0")
    received = _collect_signals()
    # A session of its own: Ctrl-C in the terminal reaches this process only, which passes it on once.
    launcher = subprocess.Popen(
        command,
        env={**environment, _RUN_ID: run_id},
        stdin=subprocess.DEVNULL,
        stdout=launcher_log,
        stderr=launcher_log,
        start_new_session=True,
    )
    give_up = None
    try:
        while launcher.poll() is None:
            follower.copy()
            if received and give_up is None:
                give_up = time.monotonic() + GRACE_SECONDS
                say(
                    f"{signal.Signals(received[0]).name}: stopping; once more kills"
                )
                # To the ranks, as in a terminal without a launcher: this one would turn it into SIGTERM.
                ranks = [pid for pid in _pids_of(run_id) if pid != launcher.pid]
                _send(received[0], ranks or [launcher.pid])
            if len(received) > 1 or (
                give_up is not None and time.monotonic() > give_up
            ):
                break
            time.sleep(POLL_SECONDS)
    finally:
        kill_run(run_id, launcher)
    follower.copy()
    if received:
        say(f"stopped by {signal.Signals(received[0]).name}; logs in {log_dir}")
        return 128 + received[0]
    return (
        0
        if launcher.returncode == 0
        else explain_failure(launcher.returncode, num_ranks, log_dir)
    )


class Follower:
    """Copies what is new in a growing file to standard output, byte for byte."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0

    def copy(self) -> None:
        """Copy what was written since the last call; a file that is not there yet is an empty one."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            while chunk := file.read(1 << 16):
                sys.stdout.buffer.write(chunk)
                self._offset += len(chunk)
        sys.stdout.flush()


def explain_failure(launcher_code: int, num_ranks: int, log_dir: Path) -> int:
    """Show the end of every log, name the rank that failed first, and return the exit code to leave with."""
    ends = [(path.stat().st_mtime_ns, path) for path in log_dir.glob("exit.*")]
    codes = {
        int(path.suffix[1:]): int(path.read_text()) for _, path in sorted(ends)
    }
    first = next((rank for rank, code in codes.items() if code != 0), None)
    logs = [
        log_dir / f"workerlog.{rank}"
        for rank in range(num_ranks)
        if rank != first
    ]
    # The cause comes last, nearest to the prompt.
    logs.append(
        log_dir / ("launcher.log" if first is None else f"workerlog.{first}")
    )
    for path in (path for path in logs if path.exists()):
        lines = path.read_text(errors="replace").splitlines()
        cut = (
            f", the last {TAIL_LINES} of {len(lines)} lines"
            if len(lines) > TAIL_LINES
            else ""
        )
        print(
            f"--- {path}{cut} ---",
            *lines[-TAIL_LINES:],
            sep="\n",
            file=sys.stderr,
        )
    if first is None:
        say(
            f"the launcher ended with {how(launcher_code)}, no rank did; logs in {log_dir}"
        )
        return launcher_code if launcher_code > 0 else 128 - launcher_code
    say(
        f"rank {first} of {num_ranks} failed first, with {how(codes[first])}; logs in {log_dir}"
    )
    return codes[first]


def how(code: int) -> str:
    """Return an exit code in words; 128 + n, or -n, is signal n."""
    number = code - 128 if code > 128 else -code
    name = (
        signal.Signals(number).name if number in set(signal.Signals) else None
    )
    return f"exit code {code}" if name is None else f"exit code {code} ({name})"


def kill_run(run_id: str, launcher: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a run, the launcher first so that it starts nothing more."""
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := _pids_of(run_id)) and time.monotonic() < deadline:
        _send(signal.SIGKILL, left)
        time.sleep(POLL_SECONDS)
    if left:
        say(f"these processes of the run do not die: {left}")


def say(text: str) -> None:
    """Print a line of our own to standard error, apart from what the ranks print."""
    print(f"local.py: {text}", file=sys.stderr, flush=True)


def _collect_signals() -> list[int]:
    """Return a list to which every signal that asks this process to stop will be appended."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # under nohup, SIGHUP stays ignored
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: received.append(number))
    return received


def _pids_of(run_id: str) -> list[int]:
    """Return every live process of a run, DataLoader workers included: all inherit its id."""
    token = f"{_RUN_ID}={run_id}".encode()
    found = []
    for name in os.listdir("/proc"):
        # One may end meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            if name.isdigit() and token in Path(
                "/proc", name, "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _lock(file: BinaryIO) -> bool:
    """Take the lock that a run holds on its log directory, unless another run has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
