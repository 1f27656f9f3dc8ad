"""From which process are ranks forked, so that Paddle is imported once for many jobs?

A rank is ready in milliseconds instead of seconds of CPU. It differs from a process that the launcher has started in
one way only: what is read when Paddle is imported (`FLAGS_*`, `OMP_NUM_THREADS`, the hash seed) is the same for all.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_KILL_SECONDS = 10.0


class Forks:
    """A process that forks ranks; all that they start are its descendants, and end with it."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the process.

        Args:
            variables: Its environment; None: this process's.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "paddle_shard.testing.fork_server"],
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
        return set(descendants(self._process.pid))

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


def descendants(pid: int) -> list[int]:
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
