"""How do I run a script on N real processes in a test, without a hang: how are they started, watched and ended?"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddle_shard.plan.handlers import ignoring
from paddle_shard.testing.forks import DUMP_AT, Forks, forks_of_process

_REPORT_DIR = "PADDLE_SHARD_REPORT_DIR"
"""Environment variable: where a rank's `report` goes."""
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
        silent = self.silent(wanted)
        if running or silent:
            what = f"ranks {running} had not ended after {seconds:g} s; " if running else ""
            raise RanksFailed(f"{what}no report from ranks {silent}\n{self.logs()}")
        return [json.loads(_report_path(self._directory, rank).read_text()) for rank in wanted]

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ranks have not reported."""
        return [rank for rank in ranks if not _report_path(self._directory, rank).exists()]

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
        parts = []
        for path in [*sorted(self._directory.glob("workerlog.*")), *self._directory.glob("launcher.log")]:
            text = path.read_text(errors="replace")
            cut = "" if len(text) <= _LOG_TAIL else "[...]"
            parts.append(f"--- {path.name} ---\n{cut}{text[-_LOG_TAIL:]}")
        return "\n".join(parts)


def start_ranks(
    script: str | Path,
    num_ranks: int,
    directory: str | Path,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> contextlib.AbstractContextManager[Job]:
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
    with contextlib.ExitStack() as stack:  # ports of this host that nobody listens at
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ranks + 1)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        endpoints = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    command, variables = [str(script), *map(str, args)], _variables(directory, env, timeout)
    ranks = {
        f"workerlog.{rank}": (command, variables | _rank_variables(num_ranks, rank, endpoints))
        for rank in range(num_ranks)
    }
    return _started(ranks, Path(directory))


@contextlib.contextmanager
def _started(commands: Mapping[str, tuple[list[str], dict[str, str]]], directory: Path) -> Iterator[Job]:
    """Start processes, name of the log -> (command, environment); kill them and theirs at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    forks = forks_of_process(os.getpid())
    try:
        yield Job(forks, [forks.start(*how, directory / log) for log, how in commands.items()], directory)
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
    started: contextlib.AbstractContextManager[Job]
    if launcher:
        command = [sys.executable, "-u", "-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks)]
        command += ["--log_dir", str(directory), str(script), *map(str, args)]
        started = _started({"launcher.log": (command, _variables(directory, env, timeout))}, Path(directory))
    else:
        started = start_ranks(script, num_ranks, directory, args=args, env=env, timeout=timeout)
    deadline, codes = time.monotonic() + timeout, dict[int, int]()
    with started as job:
        while len(found := job.exit_codes()) < len(job.pids) and time.monotonic() < deadline:
            if any(found.values()) and not any(codes.values()):  # the others may be its victims, and say more
                deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
            codes = found
            time.sleep(_POLL)
        codes = job.exit_codes()
        running = _launched_ranks() if launcher else [rank for rank in range(num_ranks) if rank not in codes]
    silent = job.silent(range(num_ranks))
    if bad := {rank: code for rank, code in codes.items() if code}:
        failure = f"the launcher exited with {bad[0]}" if launcher else f"exit codes {bad}"
        reason = f"{failure}; no report from ranks {silent}"
    elif running:
        reason = f"the deadline of {timeout:g} s passed; still running: ranks {running}; no report from: {silent}"
    elif silent:
        reason = f"no report from ranks {silent}: the script must call paddle_shard.testing.report()"
    else:
        return [json.loads(_report_path(Path(directory), rank).read_text()) for rank in range(num_ranks)]
    raise RanksFailed(f"{Path(script).name} on {num_ranks} ranks: {reason}\n{job.logs()}")


def _launched_ranks() -> list[int]:
    """Return the ranks of a launcher that still run; their environment tells which they are."""
    found = set[int]()
    for pid in forks_of_process(os.getpid()).alive():
        with ignoring(OSError):  # ended meanwhile
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(one[18:]) for one in variables if one.startswith(b"PADDLE_TRAINER_ID=")}
    return sorted(found)


def _variables(directory: str | Path, env: Mapping[str, str] | None, timeout: float) -> dict[str, str]:
    """Return the environment of a job's processes, but for what a launcher tells its ranks."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_SETS)}
    ours = {
        _REPORT_DIR: str(directory),
        DUMP_AT: str(time.time() + max(timeout - 3.0, timeout * 0.8)),
        "OMP_NUM_THREADS": "1",
    }
    return variables | ours | dict(env or {})


def _rank_variables(num_ranks: int, rank: int, endpoints: Sequence[str]) -> dict[str, str]:
    """Return what `paddle.distributed.launch` tells a rank on the CPU of one host (3.0 to 3.3).

    Args:
        num_ranks: Of the job.
        rank: The global rank.
        endpoints: One for each rank, and the store's as the last.
    """
    return {
        "PADDLE_MASTER": endpoints[num_ranks],
        "PADDLE_GLOBAL_SIZE": str(num_ranks),
        "PADDLE_LOCAL_SIZE": str(num_ranks),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_NNODES": "1",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints[:num_ranks]),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(num_ranks),
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_AUTO_CLUSTER": "0",
        "POD_NAME": "forked",
    }


def report(value: Any) -> None:
    """Hand a rank's result to the `run_ranks` or `start_ranks` that started it.

    Args:
        value: Anything that JSON can hold; numpy arrays and scalars become lists and numbers.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        raise TypeError(f"report() takes what JSON can hold, got {type(value).__name__}: {value!r}")

    path = _report_path(Path(os.environ[_REPORT_DIR]), int(os.environ.get("PADDLE_TRAINER_ID", "0")))
    path.with_suffix(".part").write_text(json.dumps(value, default=plain))
    path.with_suffix(".part").rename(path)  # in one go, so that nobody reads half of it


def _report_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"
