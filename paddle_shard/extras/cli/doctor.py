"""`paddle-shard doctor`: check that a machine has what loaders need, and under the launcher, that all ranks answer."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from paddle_shard.errors import PeerLostError
from paddle_shard.extras.cli.answer import Answer, argument, command
from paddle_shard.version import VERSION

_FILES = 4096
_SHARED_MB = 256


class Hazard(NamedTuple):
    """A problem of a machine, or of the group of ranks."""

    what: str
    fix: str


@command(
    argument(
        "--timeout",
        "under the launcher: seconds to wait for a rank",
        type=int,
        default=60,
    )
)
def doctor(options: argparse.Namespace) -> Answer:
    """Check what loaders need of this machine; under paddle.distributed.launch, also that all ranks answer.

    example: paddle-shard doctor --json
    """
    paddle = _installed("paddlepaddle-gpu", "paddlepaddle")
    machine = {
        "paddle_shard": VERSION,
        "paddle": paddle,
        "numpy": _installed("numpy"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    hazards = []
    if paddle == "not installed":
        hazards.append(
            Hazard(
                "Paddle is not installed: loaders need it",
                "pip install 'paddle_shard[cpu]'",
            )
        )
    if sys.platform == "linux":
        hazards += _check_limits(machine)
    else:
        fix = "Use a Linux container (on Windows: WSL 2)"
        hazards.append(
            Hazard(f"loaders need Linux, this is {machine['system']}", fix)
        )
    group: dict[str, str] = {}
    size = int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)
    if size > 1 and paddle != "not installed":
        hazards += _check_group(size, options.timeout, group)
    table = [
        {"what": name, "value": value}
        for name, value in {**machine, **group}.items()
    ]
    lines = [f"HAZARD: {what}. {fix}." for what, fix in hazards]
    return Answer(
        values={
            "machine": machine,
            "group": group,
            "hazards": [hazard._asdict() for hazard in hazards],
        },
        text=[table, *(lines or ["no hazard was found"])],
        failed=bool(hazards),
    )


def _check_limits(machine: dict[str, str]) -> Iterator[Hazard]:
    """Yield the limits of a Linux machine that are too low; `machine` gets their values."""
    import resource

    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    machine["open files"] = f"at most {open_files}"
    if 0 <= open_files < _FILES:
        yield Hazard(
            f"a process may open {open_files} files", f"ulimit -n {_FILES}"
        )
    shared = os.statvfs("/dev/shm")
    free_mb = shared.f_bavail * shared.f_frsize >> 20
    machine["/dev/shm"] = f"{free_mb} MB free"
    if free_mb < _SHARED_MB:
        yield Hazard(
            f"/dev/shm, by which workers hand over batches, has {free_mb} MB",
            "docker run --shm-size=8g",
        )


def _installed(*names: str) -> str:
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "not installed"


def _check_group(
    size: int, timeout: int, group: dict[str, str]
) -> Iterator[Hazard]:
    """Yield the hazard of a rank that does not answer; `group` gets the hosts of the ranks."""
    from paddle_shard.ranks.agreeing import gather_payloads

    try:
        hosts = gather_payloads(
            tuple(range(size)), socket.gethostname(), timeout, "doctor"
        )
    except PeerLostError as lost:
        fix = "Look for the reason in their logs: each runs paddle-shard doctor, and can reach rank 0"
        yield Hazard(str(lost).rstrip("."), fix)
        return
    names = list(dict.fromkeys(hosts))
    group["ranks"] = f"{size} on {len(names)} hosts: {', '.join(names)}"
