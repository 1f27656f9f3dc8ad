"""Two hosts are two network namespaces joined by a cable or, where these are not permitted, one loopback."""

import json
import re
import runpy
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.multiprocess

LAUNCH = Path(__file__).parents[2] / "launch"
WORKER = Path(__file__).with_name("linear_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start_by_hosts_sh(commands, hosts, reports, ranks):
    master = f"{hosts[0].ip}:{free_port()}"
    for rank, host in enumerate(hosts):
        commands.start(
            f"host-{rank}",
            [*host.enter, LAUNCH / "hosts.sh", WORKER, reports],
            PYTHON=sys.executable,
            MASTER=master,
            NNODES="2",
            RANK=str(rank),
            NPROC=str(ranks),
            # Left over from another job; the launcher would take them.
            PADDLE_NNODES="1",
            PADDLE_JOB_ID=f"other-{rank}",
            PADDLE_TRAINER_ENDPOINTS="192.0.2.1:1",
        )


def start_as_paddle_operator_does(commands, hosts, reports, ranks):
    if not hosts[0].enter:
        pytest.skip(
            "pods have addresses of their own, and network namespaces are not permitted here"
        )
    text = (LAUNCH / "kubernetes.yaml").read_text()
    arguments = json.loads(
        re.search(r"^ +args: (\[.*\])$", text, re.MULTILINE)[1]
    )
    assert arguments[-1] == "demos/digits.py"
    assert arguments[arguments.index("--nproc_per_node") + 1] == str(ranks)
    assert arguments[-3:-1] == ["--log_dir", "/logs"]
    for rank, host in enumerate(hosts):
        logs = ["--log_dir", f"log/host-{rank}"]
        commands.start(
            f"host-{rank}",
            [
                *host.enter,
                sys.executable,
                *arguments[:-3],
                *logs,
                WORKER,
                reports,
            ],
            # From the manifest,
            GLOO_SOCKET_IFNAME=re.search(
                r"GLOO_SOCKET_IFNAME\n +value: (\w+)", text
            )[1],
            # and from the operator: controllers/paddlejob_helper.go, constructPod and constructConfigMap.
            POD_IP=host.ip,
            PADDLE_TRAINER_ID=str(rank),
            TRAINING_ROLE="TRAINER",
            PADDLE_TRAINING_ROLE="TRAINER",
            PADDLE_TRAINER_ENDPOINTS=",".join(
                f"{host.ip}:36000" for host in hosts
            ),
            PADDLE_TRAINERS=",".join(host.ip for host in hosts),
            PADDLE_TRAINERS_NUM="2",
            PADDLE_PORT="36000",
            TRAINER_PORTS_NUM="20",
        )


def one_process(num_ranks):
    """The same training by hand: [step, rank] -> the loss of the rank's rows."""
    worker = runpy.run_path(str(WORKER))
    weight, bias, losses = np.zeros((worker["FEATURES"], 1)), 0.0, []
    for features, labels in zip(*worker["fixed_data"](), strict=True):
        error = features @ weight + bias - labels
        losses.append((error**2).reshape(num_ranks, -1).mean(axis=1))
        weight -= worker["LEARNING_RATE"] * 2 * features.T @ error / len(error)
        bias -= worker["LEARNING_RATE"] * 2 * error.mean()
    return np.array(losses)


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        # test_slurm.py looks at what hosts.sh starts on each of two hosts.
        pytest.param(start_by_hosts_sh, 1, marks=pytest.mark.long),
        pytest.param(start_by_hosts_sh, 2, marks=pytest.mark.long),
        pytest.param(start_as_paddle_operator_does, 2, marks=pytest.mark.long),
    ],
)
def test_two_hosts_train_as_one_process_would(
    commands, tmp_path, two_hosts, start, ranks
):
    start(commands, two_hosts, tmp_path, ranks)

    assert commands.wait() == {"host-0": 0, "host-1": 0}
    reports = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for rank in range(2 * ranks)
    ]
    assert [report["ip"] for report in reports] == [
        two_hosts[rank // ranks].ip for rank in range(2 * ranks)
    ]
    np.testing.assert_allclose(
        [report["losses"] for report in reports],
        one_process(2 * ranks).T,
        rtol=1e-5,
    )
    for rank in range(2 * ranks):
        assert (
            f"rank {rank} lost"
            in (
                tmp_path / f"log/host-{rank // ranks}/workerlog.{rank % ranks}"
            ).read_text()
        )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MASTER": ""}, "MASTER is not set"),
        ({"MASTER": "192.0.2.1"}, "MASTER must be ip:port, got '192.0.2.1'"),
        # the others' localhost is theirs
        (
            {"MASTER": "localhost:6170"},
            "'localhost' means 127.0.0.1 on this host",
        ),
        ({"NNODES": "0"}, "NNODES must be at least 1"),
        ({"RANK": "2"}, "RANK must be 0 .. 1, got '2'"),
        ({"RANK": "-1"}, "RANK must be 0 .. 1, got '-1'"),
        ({"NPROC": ""}, "NPROC (CPU) or GPUS, one of them"),
        ({"GPUS": "all"}, "NPROC (CPU) or GPUS, one of them"),
        ({"NPROC": "0"}, "NPROC must be at least 1"),
        ({"IFNAME": "nic9"}, "IFNAME=nic9 is no interface with an address"),
        ({"HOST_IP": "192.0.2.77"}, "no interface has HOST_IP=192.0.2.77"),
    ],
)
def test_hosts_sh_names_what_is_wrong(commands, variables, message):
    given = {
        "MASTER": "127.0.0.1:6170",
        "NNODES": "2",
        "RANK": "0",
        "NPROC": "2",
        "PYTHON": sys.executable,
    }

    commands.start(
        "run", [LAUNCH / "hosts.sh", WORKER], **{**given, **variables}
    )

    assert commands.wait() == {"run": 2}
    assert message in commands.err("run")
