"""How do I run a script on N real processes in a test, without a hang?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.testing.job import RanksFailed, all_logs, report_path, start_ranks, variables_of_job

_RUN_ID = "PADDLE_SHARD_RUN_ID"
_AFTER_A_FAILURE = 2.0
"""Seconds in which the other ranks may end by themselves when one has failed."""


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
