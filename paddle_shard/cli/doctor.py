"""`paddle-shard doctor`: has this machine what loaders need?"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from paddle_shard.cli.answer import Answer, Command, Hazard, with_hazards
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
    found: dict[str, str] = {
        "paddle_shard": VERSION,
        "python": platform.python_version(),
        "numpy": _installed("numpy"),
        "paddle": _installed("paddlepaddle-gpu", "paddlepaddle"),
        "system": f"{platform.system()} {platform.release()}",
        "cores": str(os.cpu_count()),
    }
    hazards: list[Hazard] = []
    if found["paddle"] == "not installed":
        hazards.append(
            ("Paddle is not installed: loaders need it", "pip install 'paddle_shard[cpu]', or paddlepaddle-gpu 3.x")
        )
    elif found["paddle"].split()[1].startswith("2."):
        hazards.append((f"{found['paddle']} has no auto-parallel loader", "Install 3.0 or later"))
    if sys.platform != "linux":
        hazards.append((f"loaders need Linux, this is {found['system']}", "Use a Linux container (on Windows: WSL 2)"))
    with ignoring(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        found["open files"] = f"at most {files}"
        if 0 <= files < _FILES:
            hazards.append(
                (f"a process may open {files} files", f"ulimit -n {_FILES}: workers, ranks and files need them")
            )
    with ignoring(OSError):
        shared = os.statvfs("/dev/shm")
        free, size = (blocks * shared.f_frsize >> 20 for blocks in (shared.f_bavail, shared.f_blocks))
        found["/dev/shm"] = f"{free} of {size} MB free"
        if free < _SHARED_MB:
            what = f"/dev/shm has {free} MB free, through which workers hand over batches"
            hazards.append((what, "docker run --shm-size=8g; of Kubernetes, an emptyDir with medium: Memory"))
    with ignoring(OSError), open("/proc/meminfo") as memory:
        sizes = dict(line.split(":", 1) for line in memory)
        found["memory"] = f"{int(sizes['MemAvailable'].split()[0]) >> 10} MB available"
    if "PADDLE_TRAINER_ID" in os.environ:
        ranks = os.environ.get("PADDLE_TRAINERS_NUM", "?")
        found["launcher"] = f"rank {os.environ['PADDLE_TRAINER_ID']} of {ranks}"
    rows = [{"what": name, "here": value} for name, value in found.items()]
    return with_hazards({"machine": found}, [rows], hazards)


COMMANDS = {
    "doctor": Command(does="Has this machine what loaders need?", example="--json", arguments=[], answer=_doctor)
}
"""The command, by name."""
