"""`paddle-shard doctor`: has this machine what loaders need?"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from paddle_shard.cli.answer import Answer, Command, with_hazards
from paddle_shard.plan.handlers import ignoring
from paddle_shard.version import VERSION

_FILES = 4096
_SHARED_MB = 256


def _installed(*names: str) -> str:
    for name in names:
        with ignoring(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "not installed"


def _doctor(options: argparse.Namespace) -> Answer:
    paddle, numpy, system = _installed("paddlepaddle-gpu", "paddlepaddle"), _installed("numpy"), platform.platform()
    found = {"paddle_shard": VERSION, "paddle": paddle, "numpy": numpy, "python": platform.python_version()}
    found |= {"system": system, "cores": str(os.cpu_count())}
    files, free = _FILES, _SHARED_MB
    with ignoring(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        found["open files"] = f"at most {files}"
    with ignoring(OSError):
        shared = os.statvfs("/dev/shm")
        free, size = (blocks * shared.f_frsize >> 20 for blocks in (shared.f_bavail, shared.f_blocks))
        found["/dev/shm"] = f"{free} of {size} MB free"
    with ignoring(OSError), open("/proc/meminfo") as memory:
        found["memory"] = next(line.split(":")[1].strip() for line in memory if line.startswith("MemAvailable"))
    checks = [
        (paddle == "not installed", "Paddle is not installed: loaders need it", "pip install 'paddle_shard[cpu]'"),
        (" 2." in paddle, f"{paddle} has no auto-parallel loader", "Install 3.0 or later"),
        (sys.platform != "linux", f"loaders need Linux, this is {system}", "Use a Linux container (on Windows: WSL 2)"),
        (0 <= files < _FILES, f"a process may open {files} files", f"ulimit -n {_FILES}"),
        (free < _SHARED_MB, f"/dev/shm, by which workers hand over batches, has {free} MB", "docker run --shm-size=8g"),
    ]
    hazards = [(what, remedy) for bad, what, remedy in checks if bad]
    return with_hazards({"machine": found}, [[{"what": name, "here": one} for name, one in found.items()]], hazards)


COMMANDS = {"doctor": Command("Has this machine what loaders need?", "--json", [], _doctor)}
"""The command, by name."""
