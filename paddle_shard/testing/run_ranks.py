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

import numpy as np

_RUN_ID = "PADDLE_SHARD_RUN_ID"
_REPORT_DIR = "PADDLE_SHARD_REPORT_DIR"
_DUMP_AFTER = "PADDLE_SHARD_DUMP_AFTER"
_LAUNCHER_SETS = ("PADDLE_", "POD_", "TRAINER_", "FLAGS_selected_")
_LOG_TAIL = 6000


class RanksFailed(AssertionError):
    """A rank failed, hung or left no report; the message holds every rank's log."""


def run_ranks(
    script: str | Path,
    num_ranks: int,
    directory: str | Path,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> list[Any]:
    """Run `script` on `num_ranks` processes under `paddle.distributed.launch` and return their reports.

    Every process that the run started, DataLoader workers included, is gone when this returns or raises.

    Args:
        script: A Python file; each rank runs it and calls `report` once.
        num_ranks: Number of processes, at least 1.
        directory: An empty directory for the reports and one log a rank (pytest's `tmp_path`).
        args: Command-line arguments of the script.
        env: Environment variables on top of this process's; `PADDLE_*` of this process are not passed on.
        timeout: Deadline in seconds for the whole run.

    Returns:
        What each rank gave to `report`, in rank order, after a round trip through JSON.

    Raises:
        RanksFailed: A rank ended with an error, left no report, or was not done at the deadline.
    """
    directory = Path(directory)
    logs, reports = directory / "log", directory / "report"
    reports.mkdir(parents=True)
    run_id = uuid.uuid4().hex
    command = [
        *(sys.executable, "-u", "-m", "paddle.distributed.launch"),
        *("--nproc_per_node", str(num_ranks), "--log_dir", str(logs)),
        *(str(script), *args),
    ]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_SETS)}
    variables |= {
        _RUN_ID: run_id,
        _REPORT_DIR: str(reports),
        _DUMP_AFTER: str(max(timeout - 3.0, timeout * 0.8)),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    with open(directory / "launcher.log", "w") as output:
        launcher = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code: int | None = launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            alive = sorted(rank for rank in _kill(run_id, launcher) if rank is not None)
    results = [reports / f"rank-{rank}.json" for rank in range(num_ranks)]
    silent = [rank for rank, path in enumerate(results) if not path.exists()]
    if code == 0 and not silent:
        return [json.loads(path.read_text()) for path in results]
    if code is None:
        reason = f"the deadline of {timeout:g} s passed; still running: ranks {alive}; no report from: {silent}"
    elif code:
        reason = f"the launcher exited with {code}; no report from ranks {silent}"
    else:
        reason = f"no report from ranks {silent}: the script must call paddle_shard.testing.report()"
    raise RanksFailed(f"{Path(script).name} on {num_ranks} ranks: {reason}\n{_all_logs(directory)}")


def report(value: Any) -> None:
    """Hand a rank's result to the `run_ranks` that started it.

    Args:
        value: Anything that JSON can hold; numpy arrays and scalars become lists and numbers.
    """
    path = Path(os.environ[_REPORT_DIR], f"rank-{os.environ.get('PADDLE_TRAINER_ID', '0')}.json")
    path.with_suffix(".part").write_text(json.dumps(value, default=_plain))
    path.with_suffix(".part").rename(path)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"report() takes what JSON can hold, got {type(value).__name__}: {value!r}")


def _processes(run_id: str) -> Iterator[tuple[int, int | None]]:
    """Yield (pid, global rank) of every live process of a run; the launcher's rank is None."""
    token = f"{_RUN_ID}={run_id}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
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


def _all_logs(directory: Path) -> str:
    paths = [*sorted((directory / "log").glob("workerlog.*")), directory / "launcher.log"]
    parts = []
    for path in paths:
        text = path.read_text(errors="replace")
        cut = "" if len(text) <= _LOG_TAIL else "[...]"
        parts.append(f"--- {path.name} ---\n{cut}{text[-_LOG_TAIL:]}")
    return "\n".join(parts)


def _arm_stack_dump() -> None:
    """In a rank: write all threads' stacks to the log shortly before the deadline."""
    if _DUMP_AFTER in os.environ and "PADDLE_TRAINER_ID" in os.environ:
        import faulthandler

        faulthandler.dump_traceback_later(float(os.environ[_DUMP_AFTER]))


_arm_stack_dump()
