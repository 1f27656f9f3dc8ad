"""All ranks of a slow host, in a network namespace with a name of its own, are named as one, on all ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_hosts import LAUNCH, free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.flaky(reruns=2)]
WORKER = Path(__file__).with_name("slow_host_worker.py")


def test_a_rank_of_the_slow_host_is_named_on_all_ranks(commands, tmp_path, two_hosts):
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    if not two_hosts[0].enter or subprocess.run([*named, "x", "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("hosts have names of their own, and namespaces are not permitted here")
    common = {"PYTHON": sys.executable, "MASTER": f"{two_hosts[0].ip}:{free_port()}", "NNODES": "2", "NPROC": "2"}
    path = os.pathsep.join([str(LAUNCH.parent), os.environ.get("PYTHONPATH", "")])
    for rank, (host, name) in enumerate(zip(two_hosts, ["quick", "slow"], strict=True)):
        command = [*host.enter, *named, name, LAUNCH / "hosts.sh", WORKER, tmp_path]
        commands.start(f"host-{rank}", command, RANK=str(rank), PYTHONPATH=path, **common)

    assert commands.wait() == {"host-0": 0, "host-1": 0}
    for rank in range(4):
        said = (tmp_path / f"said-{rank}").read_text()
        assert re.search(r"Rank [23] waits \d+% of a step .* in Rows.__getitem__", said), said
