"""The process that forks ranks: it has imported Paddle and this library, and starts nothing of `paddle.distributed`.

`paddle_shard.testing.forks` starts it, and talks to it in lines of JSON over its standard input and output.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_shard.testing.forks import descendants
from paddle_shard.testing.job import arm_stack_dump

_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
_MEET_SECONDS = 60.0


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
            answer = {}
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    answer[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        elif kind == "kill":
            _kill_all()
        print(json.dumps(answer), flush=True)
    _kill_all()
    return None


def _kill_all() -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _become(command: Sequence[str], variables: Mapping[str, str], log: str, folder: str) -> None:
    """Run a script in this forked process as its `__main__`."""
    import numpy as np
    import paddle

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
    # Seed the generators from the system, as those of fresh processes; Python does it with its own after a fork.
    np.random.seed()
    paddle.seed(int.from_bytes(os.urandom(4), "little"))
    _meet_late(variables)
    arm_stack_dump()
    script = types.ModuleType("__main__")
    script.__file__ = command[0]
    sys.modules["__main__"] = script
    exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), script.__dict__)


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
