"""From which process are ranks forked, so that Paddle is imported once for many jobs?

`Forks` starts this file as a program. It imports Paddle and this library, starts nothing of `paddle.distributed`, and
forks a rank for each request. A rank is ready in milliseconds instead of seconds of CPU. It differs from a process
that the launcher has started in one way only: what is read when Paddle is imported (`FLAGS_*`, `OMP_NUM_THREADS`,
the hash seed) is the same for all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
_MEET_SECONDS = 60.0


class Forks:
    """A process that forks ranks; all that they start are its descendants, and end with it."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the process.

        Args:
            variables: Its environment; None: this process's.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", __name__],
            env={"OMP_NUM_THREADS": "1", **(os.environ if variables is None else variables)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )
        self._ended: dict[int, int] = {}

    def start(self, script: Path, args: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        """Fork a process that runs a script as `__main__`, and return its id.

        Args:
            script: The file.
            args: Its command-line arguments.
            variables: All of its environment.
            log: Where its standard output and error go.
        """
        return int(self._ask(["start", [str(script), *map(str, args)], dict(variables), str(log), os.getcwd()]))

    def ended(self) -> Mapping[int, int]:
        """Return the exit code of each process that was started and has ended; -n for signal n."""
        self._ended.update({int(pid): code for pid, code in self._ask(["ended"]).items()})
        return self._ended

    def alive(self) -> set[int]:
        """Return the processes that were started, or that those have started, and that run."""
        return set(_descendants(self._process.pid))

    def kill(self) -> None:
        """Kill all of them."""
        self._ask(["kill"])

    def close(self) -> None:
        """Kill all, and end the process."""
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=_KILL_SECONDS)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks ranks has ended with {self._process.wait()}; see its output")
        return json.loads(answer)


@functools.cache
def forks_of_process(process: int) -> Forks:
    """Return the one `Forks` of a process (`os.getpid()`), which ends with it."""
    found = Forks()
    atexit.register(found.close)
    return found


def _descendants(pid: int) -> list[int]:
    """Return the processes below one that run; with their parents dead they are the nearest reaper's."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # ended meanwhile
            state, parent = Path("/proc", str(int(entry)), "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


# The process that forks


def _serve() -> list[Any] | None:
    """Do what standard input asks for; return in a forked child what it is to be, and None at the end of the input."""
    for line in sys.stdin:
        kind, *request = json.loads(line)
        answer: Any = None
        if kind == "start":
            answer = os.fork()
            if answer == 0:
                return list(request)
        elif kind == "ended":
            answer = _reaped()
        elif kind == "kill":
            _kill_all()
        print(json.dumps(answer), flush=True)
    _kill_all()
    return None


def _reaped() -> dict[int, int]:
    found = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return found


def _kill_all() -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _become(command: Sequence[str], variables: Mapping[str, str], log: str, folder: str) -> None:
    """Run a script in this forked process as its `__main__`."""
    os.setsid()
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_CREAT, (1, 2))):
        opened = os.open(path, flags, 0o644)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    more = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path and path not in known]
    sys.path[:1] = [str(Path(command[0]).resolve().parent), *more]
    sys.argv = list(command)
    _draw_apart()
    _meet_late(variables)
    from paddle_shard.testing.job import arm_stack_dump

    arm_stack_dump()
    script = types.ModuleType("__main__")
    script.__file__ = command[0]
    sys.modules["__main__"] = script
    exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), script.__dict__)


def _draw_apart() -> None:
    """Seed the generators from the system, as those of fresh processes; Python does it with its own after a fork."""
    import numpy as np
    import paddle

    np.random.seed()
    paddle.seed(int.from_bytes(os.urandom(4), "little"))


def _meet_late(variables: Mapping[str, str]) -> None:
    """Connect to Paddle's store when it listens: who comes too early sleeps for 3 s (Paddle 3.3)."""
    from paddle.framework import core

    if variables.get("PADDLE_TRAINER_ID", "0") == "0" or "PADDLE_MASTER" not in variables:
        return
    host, _, port = variables["PADDLE_MASTER"].rpartition(":")
    original: Callable[..., Any] = core.create_or_get_global_tcp_store

    def create_or_get_global_tcp_store(*args: Any) -> Any:
        deadline = time.monotonic() + _MEET_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.01)
        core.create_or_get_global_tcp_store = original
        return original(*args)

    core.create_or_get_global_tcp_store = create_or_get_global_tcp_store


if __name__ == "__main__":
    import paddle_shard.loader.api  # noqa: F401  (which imports Paddle)

    # A rank's workers, when it has died, are this process's children, and so are found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()
    asked = _serve()
    if asked is not None:
        _become(*asked)
