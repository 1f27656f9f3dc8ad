"""How do I run a script on N real processes in a test, without a hang: how are they started, watched and ended?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.testing.forks import Forks, forks_of_process

REPORT_DIR = "PADDLE_SHARD_REPORT_DIR"
"""Environment variable: where a rank's `report` goes."""
_DUMP_AT = "PADDLE_SHARD_DUMP_AT"
"""The same: seconds since the epoch, when a rank that still runs writes its stacks."""
_RUN_ID = "PADDLE_SHARD_RUN_ID"
_AFTER_A_FAILURE = 2.0
"""Seconds in which the other ranks may end by themselves when one has failed."""
_LAUNCHER_SETS = ("PADDLE_", "POD_", "TRAINER_", "MASTER_", "FLAGS_selected_")
_READ_AT_IMPORT = ("FLAGS_", "OMP_", "PYTHONHASHSEED")
_LOG_TAIL = 6000
_POLL = 0.01


class RanksFailed(AssertionError):
    """A rank failed, hung or left no report; the message holds every rank's log."""


class Job:
    """Ranks that `start_ranks` has started; the others continue when one ends."""

    def __init__(self, forks: Forks, pids: Sequence[int], directory: Path) -> None:
        self._forks, self.pids, self._directory = forks, tuple(pids), directory

    def exit_codes(self) -> dict[int, int]:
        """Return {rank: exit code} of the ranks that have ended; -n for signal n."""
        ended = self._forks.ended()
        return {rank: ended[pid] for rank, pid in enumerate(self.pids) if pid in ended}

    def wait(self, ranks: Iterable[int], seconds: float) -> dict[int, int]:
        """Wait until these ranks have ended, or the time is over; return `exit_codes`."""
        wanted, deadline = set(ranks), time.monotonic() + seconds
        while not wanted <= set(codes := self.exit_codes()) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return codes

    def reports(self, ranks: Iterable[int], seconds: float) -> list[Any]:
        """Return what these ranks have reported, when they have ended.

        Raises:
            RanksFailed: One has not ended in time, or has not reported.
        """
        wanted = list(ranks)
        running = sorted(set(wanted) - set(self.wait(wanted, seconds)))
        paths = [report_path(self._directory, rank) for rank in wanted]
        if running or not all(path.exists() for path in paths):
            silent = [rank for rank, path in zip(wanted, paths, strict=True) if not path.exists()]
            what = f"ranks {running} had not ended after {seconds:g} s; " if running else ""
            raise RanksFailed(f"{what}no report from ranks {silent}\n{self.logs()}")
        return [json.loads(path.read_text()) for path in paths]

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank that has not ended."""
        if rank not in self.exit_codes():
            os.kill(self.pids[rank], number)

    def left(self, seconds: float = 10.0) -> set[int]:
        """Return which processes that the ranks have started run after them, when they have had time to end."""
        deadline = time.monotonic() + seconds
        while (found := self._forks.alive() - set(self.pids)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return found

    def logs(self) -> str:
        """Return the end of every rank's log."""
        return all_logs(self._directory)


@contextlib.contextmanager
def start_ranks(
    script: str | Path,
    num_ranks: int,
    directory: str | Path,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> Iterator[Job]:
    """Start a script on several processes of this host, as `paddle.distributed.launch` does on the CPU.

    They are forked from a process that has imported Paddle, once for all jobs, so that a job starts in a second.
    Unlike under the launcher, the others continue when a rank ends. One job at a time; at the end of the `with` block
    every process that it started, DataLoader workers included, is killed.

    Args:
        script: A Python file; each rank runs it.
        num_ranks: Number of processes, at least 1.
        directory: An empty directory for the reports and one log a rank (pytest's `tmp_path`).
        args: Command-line arguments of the script.
        env: Environment variables on top of this process's; `PADDLE_*` of this process are not passed on.
        timeout: Seconds; shortly before, a rank that still runs writes its stacks to its log.

    Raises:
        ValueError: `env` has a variable that is read when Paddle is imported, which the ranks do not do.
    """
    if at_import := [name for name in env or () if name.startswith(_READ_AT_IMPORT)]:
        raise ValueError(f"env: {at_import} is read when Paddle is imported, before ranks are forked.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    forks, ports = forks_of_process(os.getpid()), free_ports(num_ranks + 1)
    variables = variables_of_job(directory, env, timeout)
    pids = []
    try:
        for rank in range(num_ranks):
            of_rank = variables | rank_variables(num_ranks, rank, ports)
            pids.append(forks.start(Path(script), args, of_rank, directory / f"workerlog.{rank}"))
        yield Job(forks, pids, directory)
    finally:
        forks.kill()


def run_ranks(
    script: str | Path,
    num_ranks: int,
    directory: str | Path,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    launcher: bool = False,
) -> list[Any]:
    """Run `script` on `num_ranks` processes with the environment of `paddle.distributed.launch`; return their reports.

    Every process that the run started, DataLoader workers included, is gone when this returns or raises.

    Args:
        script: A Python file; each rank runs it and calls `report` once.
        num_ranks: Number of processes, at least 1.
        directory: An empty directory for the reports and one log a rank (pytest's `tmp_path`).
        args: Command-line arguments of the script.
        env: Environment variables on top of this process's; `PADDLE_*` of this process are not passed on.
        timeout: Deadline in seconds for the whole run.
        launcher: Start fresh interpreters by `python -m paddle.distributed.launch`, for tests of what happens under
            the launcher, or of what is read when Paddle is imported (`FLAGS_*`). False: fork the ranks from a process
            that has imported Paddle; see `start_ranks`. It takes a fraction of the time.

    Returns:
        What each rank gave to `report`, in rank order, after a round trip through JSON.

    Raises:
        RanksFailed: A rank ended with an error, left no report, or was not done at the deadline.
        ValueError: `env` has a variable that is read when Paddle is imported, and `launcher` is False.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    run = _launched if launcher else _forked
    failure, running = run(Path(script), num_ranks, directory, list(map(str, args)), env, timeout)
    results = [report_path(directory, rank) for rank in range(num_ranks)]
    silent = [rank for rank, path in enumerate(results) if not path.exists()]
    if not (failure or running or silent):
        return [json.loads(path.read_text()) for path in results]
    if failure:
        reason = f"{failure}; no report from ranks {silent}"
    elif running:
        reason = f"the deadline of {timeout:g} s passed; still running: ranks {running}; no report from: {silent}"
    else:
        reason = f"no report from ranks {silent}: the script must call paddle_shard.testing.report()"
    raise RanksFailed(f"{Path(script).name} on {num_ranks} ranks: {reason}\n{all_logs(directory)}")


def _forked(
    script: Path, num_ranks: int, directory: Path, args: list[str], env: Mapping[str, str] | None, timeout: float
) -> tuple[str, list[int]]:
    """Run the ranks as forks; return how they failed, and which had not ended at the deadline."""
    deadline, failed = time.monotonic() + timeout, False
    with start_ranks(script, num_ranks, directory, args=args, env=env, timeout=timeout) as job:
        while len(codes := job.exit_codes()) < num_ranks and time.monotonic() < deadline:
            if any(codes.values()) and not failed:  # the others may be its victims, and have something to say
                failed, deadline = True, min(deadline, time.monotonic() + _AFTER_A_FAILURE)
            time.sleep(0.01)
        running = [rank for rank in range(num_ranks) if rank not in codes]
    bad = {rank: code for rank, code in sorted(codes.items()) if code}
    return (f"exit codes {bad}" if bad else ""), running


def _launched(
    script: Path, num_ranks: int, directory: Path, args: list[str], env: Mapping[str, str] | None, timeout: float
) -> tuple[str, list[int]]:
    """Run the ranks under Paddle's launcher; return as `_forked` does."""
    run_id = uuid.uuid4().hex
    command = [
        *(sys.executable, "-u", "-m", "paddle.distributed.launch"),
        *("--nproc_per_node", str(num_ranks), "--log_dir", str(directory)),
        *(str(script), *args),
    ]
    variables = {**variables_of_job(directory, env, timeout), _RUN_ID: run_id}
    with open(directory / "launcher.log", "w") as output:
        launcher = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code: int | None = launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            running = sorted(rank for rank in _kill(run_id, launcher) if rank is not None)
    if code is None:
        return "", running
    return (f"the launcher exited with {code}" if code else ""), []


def _processes(run_id: str) -> Iterator[tuple[int, int | None]]:
    """Yield (pid, global rank) of every live process of a run; the launcher's rank is None."""
    token = f"{_RUN_ID}={run_id}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError as error:  # ended meanwhile, or another user's
            raise_if_a_handlers(error)
            continue
        if token in variables:
            rank = next((v[18:] for v in variables if v.startswith(b"PADDLE_TRAINER_ID=")), None)
            yield int(entry.name), None if rank is None else int(rank)


def _kill(run_id: str, launcher: subprocess.Popen[bytes]) -> set[int | None]:
    """Kill every process of a run, the launcher first so that it restarts nothing; return the ranks."""
    launcher.kill()
    launcher.wait()
    ranks: set[int | None] = set()
    deadline = time.monotonic() + 10
    while (found := list(_processes(run_id))) and time.monotonic() < deadline:
        for pid, rank in found:
            ranks.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return ranks


def variables_of_job(directory: Path, env: Mapping[str, str] | None, timeout: float) -> dict[str, str]:
    """Return the environment of a job's ranks, but for what a launcher tells them."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_SETS)}
    ours = {
        REPORT_DIR: str(directory),
        _DUMP_AT: str(time.time() + max(timeout - 3.0, timeout * 0.8)),
        "OMP_NUM_THREADS": "1",
    }
    return variables | ours | dict(env or {})


def rank_variables(num_ranks: int, rank: int, ports: Sequence[int]) -> dict[str, str]:
    """Return what `paddle.distributed.launch` tells a rank on the CPU of one host (3.0 to 3.3).

    Args:
        num_ranks: Of the job.
        rank: The global rank.
        ports: One for each rank, and the store's as the last; see `free_ports`.
    """
    endpoints = [f"127.0.0.1:{port}" for port in ports[:num_ranks]]
    return {
        "PADDLE_MASTER": f"127.0.0.1:{ports[num_ranks]}",
        "PADDLE_GLOBAL_SIZE": str(num_ranks),
        "PADDLE_LOCAL_SIZE": str(num_ranks),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_NNODES": "1",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(num_ranks),
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_AUTO_CLUSTER": "0",
        "POD_NAME": "forked",
    }


def free_ports(count: int) -> list[int]:
    """Return ports of this host that nobody listens at."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def report(value: Any) -> None:
    """Hand a rank's result to the `run_ranks` or `start_ranks` that started it.

    Args:
        value: Anything that JSON can hold; numpy arrays and scalars become lists and numbers.
    """
    path = report_path(Path(os.environ[REPORT_DIR]), int(os.environ.get("PADDLE_TRAINER_ID", "0")))
    path.with_suffix(".part").write_text(json.dumps(value, default=_plain))
    path.with_suffix(".part").rename(path)


def report_path(directory: Path, rank: int) -> Path:
    """Return where a rank's report is."""
    return directory / f"rank-{rank}.json"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"report() takes what JSON can hold, got {type(value).__name__}: {value!r}")


def all_logs(directory: Path) -> str:
    """Return the end of every log of a job."""
    parts = []
    for path in [*sorted(directory.glob("workerlog.*")), *directory.glob("launcher.log")]:
        text = path.read_text(errors="replace")
        cut = "" if len(text) <= _LOG_TAIL else "[...]"
        parts.append(f"--- {path.name} ---\n{cut}{text[-_LOG_TAIL:]}")
    return "\n".join(parts)


def arm_stack_dump() -> None:
    """In a rank: write all threads' stacks to the log shortly before the deadline."""
    if _DUMP_AT in os.environ and "PADDLE_TRAINER_ID" in os.environ:
        import faulthandler

        faulthandler.dump_traceback_later(max(0.1, float(os.environ[_DUMP_AT]) - time.time()))


arm_stack_dump()
