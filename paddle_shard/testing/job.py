"""Real processes for tests: run a script on several ranks of this host, under a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

_REPORT_DIR = "PADDLE_SHARD_REPORT_DIR"
"""Environment variable: the folder of the ranks' reports."""
_DUMP_AT = "PADDLE_SHARD_DUMP_AT"
"""Environment variable: seconds since the epoch, when a rank that still runs writes its stacks."""
_AFTER_A_FAILURE = 2.0
"""Seconds in which the other ranks may end by themselves when one has failed."""
_LAUNCHER_SETS = ("PADDLE_", "POD_", "TRAINER_", "MASTER_", "FLAGS_selected_")
"""Prefixes of the variables of a launcher: this process may be a rank of another job."""
_LOG_TAIL = 6000
_POLL = 0.01
_KILL_SECONDS = 10.0
"""Seconds in which a process that was killed must be gone: one that waits for a disk ends late."""
_PR_SET_PDEATHSIG = 1


class RanksFailed(AssertionError):
    """A rank failed, hung or left no report; the message holds every rank's log."""


class Processes:
    """The processes of a job: fresh interpreters, and all that these start.

    They are found by the job's directory, which all of them inherit in their environment: also one that a rank has left
    behind in a session of its own, when its rank has died.
    """

    def __init__(self, directory: Path) -> None:
        self._mark = f"{_REPORT_DIR}={directory}".encode()

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> Any:
        """Start a process in this one's folder, and return an object with its `pid` and `poll`, as a `Popen`.

        Args:
            command: A Python file and its arguments.
            variables: All of its environment.
            log: File of its standard output and error.
        """
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-u", *command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for this process, which ends that one
                start_new_session=True,
                # before the script can run: this process may be killed at once
                preexec_fn=_end_with_the_parent,
            )

    def alive(self) -> set[int]:
        """Return the processes that were started, or that those have started, and that run."""
        pids = set()
        for process in Path("/proc").glob("[0-9]*"):
            # ended meanwhile, or another user's
            with contextlib.suppress(OSError):
                if self._mark in (process / "environ").read_bytes().split(
                    b"\0"
                ):
                    pids.add(int(process.name))
        return pids


class Job:
    """Ranks that `start_ranks` has started; the others continue when one ends."""

    def __init__(
        self, name: str, directory: Path, processes: Processes
    ) -> None:
        self._name = name
        self._directory = directory
        self._processes = processes
        self._ranks: list[Any] = []

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], log: str
    ) -> None:
        """Start the next rank; see `Processes.start`."""
        self._ranks.append(
            self._processes.start(command, variables, self._directory / log)
        )

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self._ranks]

    def exit_codes(self) -> dict[int, int]:
        """Return {rank: exit code} of the ranks that have ended; -n for signal n."""
        codes = {
            rank: process.poll() for rank, process in enumerate(self._ranks)
        }
        return {rank: code for rank, code in codes.items() if code is not None}

    def wait(self, ranks: Iterable[int], seconds: float) -> dict[int, int]:
        """Wait until these ranks have ended, or the time is over; return `exit_codes`."""
        wanted = set(ranks)
        _poll(lambda: wanted <= self.exit_codes().keys(), seconds)
        return self.exit_codes()

    def reports(self, ranks: Iterable[int], seconds: float) -> list[Any]:
        """Return the reports of these ranks, when they have ended.

        Raises:
            RanksFailed: One has ended with an error, has not ended in time, or has not reported.
        """
        wanted = set(ranks)

        def failed() -> bool:
            codes = self.exit_codes()
            return any(codes.get(rank) for rank in wanted)

        _poll(lambda: failed() or wanted <= self.exit_codes().keys(), seconds)
        if failed():  # the others may be its victims, and their logs say more
            self.wait(wanted, _AFTER_A_FAILURE)
        running = sorted(wanted - self.exit_codes().keys())
        silent = self.silent(sorted(wanted))
        if failed() or running or silent:
            codes = {
                rank: code for rank, code in self.exit_codes().items() if code
            }
            raise RanksFailed(
                f"{self._name}: exit codes {codes}; still running: ranks {running} (deadline {seconds:g} s); no report "
                f"from ranks {silent}, by paddle_shard.testing.report()\n{self.logs()}"
            )
        paths = [_report_path(self._directory, rank) for rank in sorted(wanted)]
        return [json.loads(path.read_text()) for path in paths]

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ranks have not reported."""
        return [
            rank
            for rank in ranks
            if not _report_path(self._directory, rank).exists()
        ]

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank that has not ended."""
        if rank not in self.exit_codes():
            os.kill(self.pids[rank], number)

    def kill(self) -> None:
        """Kill the ranks, and all that they have started."""

        def all_killed() -> bool:
            pids = self._processes.alive()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        _poll(all_killed, _KILL_SECONDS)
        # One that is ending has lost its environment, by which it is found, before its exit code is there.
        self.wait(range(len(self._ranks)), _KILL_SECONDS)

    def logs(self) -> str:
        """Return the end of every rank's log."""
        parts = []
        for path in sorted(self._directory.glob("*log*")):
            text = path.read_text(errors="replace")
            cut = "" if len(text) <= _LOG_TAIL else "[...]"
            parts.append(f"--- {path.name} ---\n{cut}{text[-_LOG_TAIL:]}")
        return "\n".join(parts)


def _poll(is_done: Callable[[], bool], seconds: float) -> None:
    """Wait until something is done, or the time is over."""
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_POLL)


@contextlib.contextmanager
def start_ranks(
    script: str | Path,
    num_ranks: int,
    directory: str | Path,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    processes: Processes | None = None,
) -> Iterator[Job]:
    """Start a script on several processes of this host, with the environment of `paddle.distributed.launch` on the CPU.

    Unlike under the launcher, the others continue when a rank ends. At the end of the `with` block every process that
    the job started, DataLoader workers included, is killed.

    Args:
        script: A Python file; each rank runs it.
        num_ranks: Number of processes, at least 1.
        directory: An empty directory for the reports and one log a rank (pytest's `tmp_path`).
        args: Command-line arguments of the script.
        env: Environment variables on top of this process's; `PADDLE_*` of this process are not passed on.
        timeout: Seconds; shortly before, a rank that still runs writes its stacks to its log.
        processes: Starts and finds them. None: each is a fresh interpreter, which takes seconds to import Paddle; a
            large suite may have an object that forks them from a process that has imported it.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    variables = job_variables(folder, env, timeout)
    name = f"{Path(script).name} on {num_ranks} ranks"
    job = Job(name, folder, processes or Processes(folder))
    command = [str(script), *map(str, args)]
    # the ranks', then the store's
    with _reserved_endpoints(num_ranks + 1) as endpoints:
        try:
            for rank in range(num_ranks):
                of_rank = variables | _rank_variables(
                    num_ranks, rank, endpoints
                )
                job.start(command, of_rank, f"workerlog.{rank}")
            yield job
        finally:
            job.kill()


def run_ranks(
    script: str | Path,
    num_ranks: int,
    directory: str | Path,
    *,
    timeout: float = 120.0,
    **options: Any,
) -> list[Any]:
    """Run `script` on `num_ranks` processes with the environment of `paddle.distributed.launch`; return their reports.

    Every process that the run started, DataLoader workers included, is gone when this returns or raises.

    Args:
        script: A Python file; each rank runs it and calls `report` once.
        num_ranks: Number of processes, at least 1.
        directory: An empty directory for the reports and one log a rank (pytest's `tmp_path`).
        timeout: Deadline in seconds for the whole run.
        options: Others of `start_ranks`.

    Returns:
        What each rank gave to `report`, in rank order, after a round trip through JSON.

    Raises:
        RanksFailed: A rank ended with an error, left no report, or was not done at the deadline.
    """
    with start_ranks(
        script, num_ranks, directory, timeout=timeout, **options
    ) as job:
        return job.reports(range(num_ranks), timeout)


def job_variables(
    directory: Path, env: Mapping[str, str] | None, timeout: float
) -> dict[str, str]:
    """Return the environment of a job's processes, without the variables of a launcher."""
    variables = dict(os.environ)
    for name in os.environ:
        if name.startswith(_LAUNCHER_SETS):
            del variables[name]
    variables[_REPORT_DIR] = str(directory)
    variables[_DUMP_AT] = str(time.time() + max(timeout - 3.0, timeout * 0.8))
    variables["OMP_NUM_THREADS"] = "1"
    return variables | dict(env or {})


@contextlib.contextmanager
def _reserved_endpoints(count: int) -> Iterator[list[str]]:
    """Reserve free ports of this host for a job, whose processes listen on them.

    A bound socket that does not listen keeps a port from all who ask for any free one, but not from those who ask for
    this one with SO_REUSEADDR, as Paddle's store does.
    """
    with contextlib.ExitStack() as opened:
        endpoints = []
        for _ in range(count):
            bound = opened.enter_context(socket.socket())
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", 0))
            endpoints.append(f"127.0.0.1:{bound.getsockname()[1]}")
        yield endpoints


def _rank_variables(
    num_ranks: int, rank: int, endpoints: Sequence[str]
) -> dict[str, str]:
    """Return the variables that `paddle.distributed.launch` sets for a rank on the CPU of one host (3.0 to 3.3).

    Args:
        num_ranks: Ranks of the job.
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
        "POD_NAME": "ranks",
    }


def report(value: Any) -> None:
    """Hand a rank's result to the `run_ranks` or `start_ranks` that started it.

    Args:
        value: Anything that JSON can hold, and what has a `tolist`: tensors, and numpy's arrays and scalars.
    """
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    path = _report_path(Path(os.environ[_REPORT_DIR]), rank)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, default=methodcaller("tolist")))
    part.rename(path)  # at once, so that no reader sees half of it


def _report_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def _end_with_the_parent() -> None:
    """In a rank: end it when the process that has started it is killed. DataLoader workers end with their rank."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def arm_stack_dump() -> None:
    """In a rank: write all threads' stacks to the log shortly before the deadline."""
    if _DUMP_AT in os.environ and "PADDLE_TRAINER_ID" in os.environ:
        faulthandler.dump_traceback_later(
            max(0.1, float(os.environ[_DUMP_AT]) - time.time())
        )


arm_stack_dump()  # its script imports this to report
