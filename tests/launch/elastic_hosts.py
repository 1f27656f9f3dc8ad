"""`demos/elastic.py` on two hosts, which are network namespaces; etcd runs on the first."""

import collections
import importlib.util
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import HANG

ROOT = Path(__file__).parents[2]


def elastic_demo():
    path = ROOT / "demos" / "elastic.py"
    spec = importlib.util.spec_from_file_location("elastic_demo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def from_manifest():
    """Return the command and the variables of a pod's container."""
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(
        (ROOT / "launch" / "kubernetes-elastic.yaml").read_text()
    )
    (container,) = job["spec"]["worker"]["template"]["spec"]["containers"]
    return container["command"], {
        one["name"]: one["value"] for one in container["env"]
    }


def of_operator(host, number):
    """Return what paddle-operator adds for an elastic job: controllers/paddlejob_helper.go, constructPod."""
    return {
        "POD_IP": host.ip,
        "PADDLE_TRAINER_ID": str(number),
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINING_ROLE": "TRAINER",
        "PADDLE_ELASTIC_SERVER": ":",
        "PADDLE_ELASTIC_JOB_ID": "paddle-system-paddle-shard-7",
        "PADDLE_ELASTIC_NP": "2",
        "PADDLE_ELASTIC_TIMEOUT": "60",
        # Left over from another job; the launcher would take them.
        "PADDLE_JOB_ID": f"other-{number}",
        "PADDLE_MAX_RESTART": "0",
    }


class ElasticHosts:
    """The job. Its hosts see each other only by their cable, and each is told nothing but where etcd is."""

    def __init__(self, commands, hosts, directory):
        if not hosts[0].enter:
            pytest.skip("network namespaces are not permitted here")
        if not (shutil.which("etcd") or shutil.which("apt-get")):
            pytest.skip(
                "there is no etcd, and no way to fetch Debian's package"
            )
        self.demo = elastic_demo()
        try:
            command = [
                self.demo.etcd_binary(),
                "--data-dir",
                directory / "etcd",
            ]
        except SystemExit as error:
            pytest.skip(str(error))
        self.folder, self.diary, self._commands, self._hosts = (
            directory / "saved",
            directory / "diary",
            commands,
            hosts,
        )
        self.diary.mkdir()
        here, peer = (f"http://{hosts[0].ip}:{port}" for port in (2379, 2380))
        command += [
            "--listen-client-urls",
            here,
            "--advertise-client-urls",
            here,
            "--listen-peer-urls",
            peer,
        ]
        command += [
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
        ]
        self._etcd = commands.start("etcd", [*hosts[0].enter, *command])
        command, given = from_manifest()
        given |= {
            "ETCD": f"{hosts[0].ip}:2379",
            "NNODES": "1:2",
            "NPROC": "1",
            "TIMEOUT": "10",
        }
        given |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        command = [
            ROOT / command[0],
            self.demo.__file__,
            "--as-rank",
            self.folder,
            self.diary,
        ]
        self.nodes = [
            commands.start(
                f"host-{number}",
                [*host.enter, *command],
                **{
                    **given,
                    **of_operator(host, number),
                    "LOG_DIR": str(directory / f"logs-{number}"),
                },
            )
            for number, host in enumerate(hosts)
        ]

    def set_cable(self, state):
        """Cut the cable ("down"), or mend it ("up")."""
        command = [*self._hosts[1].enter, "ip", "link", "set", "eth0", state]
        subprocess.run(command, check=True, capture_output=True, timeout=10)

    def steps(self, ranks=None):
        return self.demo.Job.steps(self, ranks)

    def worlds(self):
        return self.demo.Job.worlds(self)

    def wait_until(self, reached):
        self._commands.until(reached, 2 * HANG)

    def has_ended(self):
        return all(node.poll() is not None for node in self.nodes)

    def check_that_each_sample_was_trained_once(self):
        self._etcd.send_signal(signal.SIGTERM)
        self._commands.wait()
        assert [node.returncode for node in self.nodes] == [0, 0]
        newest = max(
            path.parent for path in self.folder.glob("*/manifest.json")
        )
        found, _ = self.demo.audit(self.diary, str(newest))
        for epoch in range(self.demo.EPOCHS):
            assert collections.Counter(found[epoch]) == dict.fromkeys(
                range(self.demo.SAMPLES), 1
            )
