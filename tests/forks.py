"""From which process are ranks forked, so that Paddle is imported once for many jobs?

A rank is ready in milliseconds instead of seconds of CPU. It differs from a process that the launcher has started in
two ways only: what is read when Paddle is imported (`FLAGS_*`, `OMP_NUM_THREADS`, the hash seed) is the same for all,
and at its end Paddle's kernels are not freed one by one.

The process that forks has imported Paddle and this library, and has started nothing of `paddle.distributed`. It is
asked in lines of JSON over its standard input, and answers over its standard output.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tokenize
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paddle_shard.testing.job import Processes, arm_stack_dump

_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
_READ_AT_IMPORT = ("FLAGS_", "OMP_", "PYTHONHASHSEED")
_CONNECT_SECONDS = 60.0


class Fork:
    """A process that was forked."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid

    def poll(self) -> int | None:
        """Its exit code, -n for signal n; None while it runs."""
        return self._forks.ended().get(self.pid)


class Forks(Processes):
    """A process that starts others; all that they start are its descendants, and end with it. One job at a time."""

    def __init__(self) -> None:
        """Start the process."""
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            # Ctrl-C is for this process, which ends that one
            start_new_session=True,
        )
        self._ended: dict[int, int] = {}

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> Fork:
        """Start a process in this one's folder. A Python file is run as `__main__` in a fork.

        Raises:
            ValueError: A variable was given that is read when Paddle is imported, which the process does not do.
        """
        changed = sorted(
            name
            for name, value in variables.items()
            if value != self._environment.get(name)
        )
        if at_import := [
            name for name in changed if name.startswith(_READ_AT_IMPORT)
        ]:
            raise ValueError(
                f"env: {at_import} is read when Paddle is imported, before ranks are forked."
            )
        pid = self._ask(
            "start", list(command), dict(variables), str(log), os.getcwd()
        )
        # of one that had the same number before: the system begins again at 32768
        self._ended.pop(
            pid,
            None,
        )
        return Fork(self, pid)

    def preload(self, *modules: str) -> None:
        """Import modules before more ranks are forked, which then need not do it each for itself."""
        self._ask("import", *modules)

    def ended(self) -> Mapping[int, int]:
        """Return the exit code of each process that was started and has ended; -n for signal n."""
        self._ended.update(
            {int(pid): code for pid, code in self._ask("ended").items()}
        )
        return self._ended

    def alive(self) -> set[int]:
        """Return the processes that were started, or that those have started, and that run."""
        return set(_descendants(self._process.pid))

    def close(self) -> None:
        """Kill all, and end the process."""
        with suppress(OSError):
            self._process.communicate(timeout=_KILL_SECONDS)
        self._process.kill()
        self._process.wait()

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the process that forks ranks has ended with {self._process.wait()}; see its output"
            )
        return json.loads(answer)


@functools.cache
def forks_of_process(process: int) -> Forks:
    """Return the one `Forks` of a process (`os.getpid()`), which ends with it."""
    found = Forks()
    atexit.register(found.close)
    return found


def _descendants(pid: int) -> list[int]:
    """Return the processes below one that run, parents first; with their parents dead they are the nearest reaper's."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):  # ended meanwhile
            state, parent = (
                Path("/proc", str(int(entry)), "stat")
                .read_text()
                .rpartition(")")[2]
                .split()[:2]
            )
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def serve() -> None:
    """Be the process that forks: do what standard input asks for, to its end; a forked child becomes its script."""
    # not tests: it has a `multiprocess`
    sys.path[0] = str(Path(__file__).parents[1])
    _import_what_ranks_use()
    # A rank's workers, when it has died, are this process's children, and so are found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    # the children's collections pass over what is here now, so that they do not copy its memory
    gc.freeze()
    for line in sys.stdin:
        kind, *request = json.loads(line)
        answer: Any = None
        if kind == "start":
            answer = os.fork()
            if answer == 0:
                return _become(*request)
        elif kind == "import":
            for name in request:
                with suppress(ImportError):
                    importlib.import_module(name)
            gc.freeze()
        elif kind == "ended":
            answer = {}
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    answer[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        print(json.dumps(answer), flush=True)
    return _kill_all()


def _import_what_ranks_use() -> None:
    """Do once what each rank would do: import Paddle, this library, and what both import when they are first used."""
    for name in ("paddle_shard.loader.api", "numpy.ma", "encodings.idna"):
        importlib.import_module(name)
    # compiles its patterns
    list(tokenize.generate_tokens(io.StringIO().readline))
    importlib.import_module("numpy").random.seed()
    core = importlib.import_module("paddle.base.core")
    # A forked process that ends would copy the memory of all kernels to free them.
    atexit.unregister(getattr(core, "clear_kernel_factory", None))


def _kill_all() -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:  # a launcher first, so that it restarts nothing
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _become(
    command: list[str], variables: Mapping[str, str], log: str, folder: str
) -> None:
    """Run a command in this forked process; a script as its `__main__`."""
    import numpy as np
    import paddle

    os.setsid()
    for path, flags, numbers in (
        (os.devnull, os.O_RDONLY, (0,)),
        (log, os.O_WRONLY | os.O_CREAT, (1, 2)),
    ):
        opened = os.open(path, flags, 0o644)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    os.chdir(folder)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(variables)
    more = [
        path
        for path in variables.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in known
    ]
    sys.path[:1] = [str(Path(command[0]).resolve().parent), *more]
    sys.argv = command
    # Seed the generators from the system, as those of fresh processes; Python does it with its own after a fork.
    np.random.seed()
    paddle.seed(int.from_bytes(os.urandom(4), "little"))
    _connect_late(variables)
    arm_stack_dump()
    script = types.ModuleType("__main__")
    script.__file__ = command[0]
    sys.modules["__main__"] = script
    exec(
        compile(Path(command[0]).read_bytes(), command[0], "exec"),
        script.__dict__,
    )
    _end()


def _end() -> None:
    """End a rank whose script has come to its end: all that is done at exit, without freeing each object.

    That would write to each page that is shared with the process that has forked it: ten times what the rest costs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _connect_late(variables: Mapping[str, str]) -> None:
    """Connect to Paddle's store when it listens: who comes too early sleeps for 3 s (Paddle 3.3)."""
    from paddle.framework import core

    if variables["PADDLE_TRAINER_ID"] == "0":
        return
    host, _, port = variables["PADDLE_MASTER"].rpartition(":")
    original = core.create_or_get_global_tcp_store

    def create_or_get_global_tcp_store(*args: Any) -> Any:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.01)
        core.create_or_get_global_tcp_store = original
        return original(*args)

    core.create_or_get_global_tcp_store = create_or_get_global_tcp_store


if __name__ == "__main__":
    serve()
