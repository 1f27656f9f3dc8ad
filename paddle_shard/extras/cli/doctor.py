"""`paddle-shard doctor`: has this machine what loaders need, and under the launcher: do its ranks fit together?"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from paddle_shard.checks import check_count
from paddle_shard.errors import PeerLostError, described
from paddle_shard.extras.cli.answer import Answer, command, with_hazards
from paddle_shard.extras.cli.hazards import Hazard
from paddle_shard.extras.cli.plan import MESH, with_data_axes
from paddle_shard.version import VERSION

_FILES = 4096
_SHARED_MB = 256
# Agreements that are timed.
_STEPS = 200
# In a process of its own: it may hang or crash, and is ended then.
_ALL_REDUCE = """
import paddle, paddle.distributed as dist
dist.init_parallel_env()
ones = paddle.ones([4])
dist.all_reduce(ones)
assert ones.tolist() == [dist.get_world_size()] * 4, f"the sum of ones over all ranks is {ones.tolist()}"
dist.barrier()
print("works by", dist.get_backend())
"""


def _installed(*names: str) -> str:
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "not installed"


@command(
    *MESH,
    ("--timeout", {"type": int, "default": 60, "help": "under the launcher: seconds for which a rank is waited for"}),
)
def doctor(options: argparse.Namespace) -> Answer:
    """Has this machine what loaders need? Under paddle.distributed.launch, also: do its ranks fit together?

    example: paddle-shard doctor --json
    """
    paddle, numpy, system = _installed("paddlepaddle-gpu", "paddlepaddle"), _installed("numpy"), platform.platform()
    found = {"paddle_shard": VERSION, "paddle": paddle, "numpy": numpy, "python": platform.python_version()}
    found |= {"system": system, "cores": str(os.cpu_count())}
    files, free = _FILES, _SHARED_MB
    with contextlib.suppress(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        found["open files"] = f"at most {files}"
    with contextlib.suppress(OSError):
        shared = os.statvfs("/dev/shm")
        free, size = (blocks * shared.f_frsize >> 20 for blocks in (shared.f_bavail, shared.f_blocks))
        found["/dev/shm"] = f"{free} of {size} MB free"
    with contextlib.suppress(OSError), open("/proc/meminfo") as memory:
        found["memory"] = next(line.split(":")[1].strip() for line in memory if line.startswith("MemAvailable"))
    checks = [
        (paddle == "not installed", "Paddle is not installed: loaders need it", "pip install 'paddle_shard[cpu]'"),
        (" 2." in paddle, f"{paddle} has no auto-parallel loader", "Install 3.0 or later"),
        (sys.platform != "linux", f"loaders need Linux, this is {system}", "Use a Linux container (on Windows: WSL 2)"),
        (0 <= files < _FILES, f"a process may open {files} files", f"ulimit -n {_FILES}"),
        (free < _SHARED_MB, f"/dev/shm, by which workers hand over batches, has {free} MB", "docker run --shm-size=8g"),
    ]
    hazards, group = [(what, remedy) for bad, what, remedy in checks if bad], dict[str, str]()
    check_count("--timeout", options.timeout)
    if (size := int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)) > 1 and paddle != "not installed":
        versions = {name: found[name] for name in ("paddle_shard", "paddle", "numpy", "python")}
        more, group = _group(size, options, versions)
        hazards += more
    shown = [{"what": name, "here": one} for name, one in {**found, **group}.items()]
    return with_hazards({"machine": found, "group": group}, [shown], hazards)


# A live group


def _group(size: int, options: argparse.Namespace, versions: Mapping[str, str]) -> tuple[list[Hazard], dict[str, str]]:
    """Return what is wrong with the ranks that the launcher has started, and what they have told."""
    from paddle_shard.ranks.agreeing import gather_of, open_agreement
    from paddle_shard.ranks.verdict import Terms

    ranks, found, hazards, timeout = tuple(range(size)), dict[str, str](), list[Hazard](), float(options.timeout)
    if options.data_axes is not None:
        with_data_axes(options.mesh, options.data_axes)  # refuses axes that a mesh does not have
    meshes = [f"{mesh.shape} of axes {mesh.axes} with ranks {mesh.process_ids}" for mesh in options.mesh]
    mine = {**versions, "host": socket.gethostname(), "--mesh": "; ".join(meshes), "--data-axes": options.data_axes}
    try:
        said = [json.loads(one) for one in gather_of(ranks, json.dumps(mine), timeout, "doctor")]
        hosts = dict.fromkeys(one.pop("host") for one in said)
        found["ranks"] = f"{size} on {len(hosts)} hosts: {', '.join(hosts)}"
        remedy = "All ranks need the same: install one version, and give all of them the same meshes"
        for what, first in said[0].items():
            for rank in [rank for rank, one in enumerate(said) if one[what] != first][:1]:
                hazards.append((f"{what} differs: {first} on rank 0, {said[rank][what]} on rank {rank}", remedy))
        times, agreement = list[float](), open_agreement(ranks, Terms(name="doctor", timeout=timeout))
        for step in range(_STEPS):
            begun = time.perf_counter()
            agreement.announce()
            agreement.deliver(step)
            times.append(time.perf_counter() - begun)
        agreement.close()
        found["an agreement"] = f"{1e6 * statistics.median(times):.0f} us, the median of {_STEPS}"
        works = gather_of(ranks, _collective(timeout), 2 * timeout, "doctor, after the collectives")
    except PeerLostError as lost:
        who = f"ranks {list(lost.ranks)} do" if lost.ranks else "a rank does"
        what = f"{who} not answer within {timeout:g} s" if lost.timeout else str(lost).rstrip(".")
        return [(what, "Look for the reason in their logs: each runs paddle-shard doctor, and can reach rank 0")], found
    found["an all-reduce"] = works[0]
    failed = [(rank, one) for rank, one in enumerate(works) if not one.startswith("works")]
    remedy = "Check the network, drivers and GLOO_SOCKET_IFNAME"
    hazards += [(f"collectives fail on rank {rank}: {one}", remedy) for rank, one in failed]
    if missing := sorted({rank for mesh in options.mesh for rank in mesh.process_ids} - {*ranks}):
        hazards.append((f"--mesh has the ranks {missing}, and the job has {size}", "Start more ranks, or correct it"))
    return hazards, found


def _collective(timeout: float) -> str:
    """Return how an all-reduce of all ranks went, in their own group."""
    try:
        done = subprocess.run([sys.executable, "-c", _ALL_REDUCE], capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not in {timeout:g} s" if isinstance(error, subprocess.TimeoutExpired) else described(error)
    said = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
    return said[-1] if said else f"exit code {done.returncode}"
