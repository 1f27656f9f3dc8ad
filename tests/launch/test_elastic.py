"""`elastic.sh` refuses what cannot work before it starts anything; `demos/elastic.py` runs it (tests/demos)."""

import socket
import sys
from pathlib import Path

import pytest

from tests.launch.elastic_hosts import ElasticHosts
from tests.optional import needs

needs("etcd3")
pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).parents[2] / "launch" / "elastic.sh"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ETCD": ""}, "ETCD is not set"),
        ({"ETCD": "etcd://host"}, "ETCD must be ip:port, got 'etcd://host'"),
        ({"JOB": ""}, "JOB is not set"),
        (
            {"JOB": "a/b"},
            "JOB must be letters, digits, '_', '.' and '-', got 'a/b'",
        ),
        ({"JOB": "default"}, "got 'default'"),
        ({"NNODES": "2"}, "NNODES must be least:most, as 1:4, got '2'"),
        ({"NNODES": "3:2"}, "NNODES must be least:most, as 1:4, got '3:2'"),
        ({"TIMEOUT": "9"}, "TIMEOUT must be at least 10, got '9'"),
        ({"STARTS": "0"}, "STARTS must be at least 1, got '0'"),
        ({"NPROC": ""}, "NPROC (CPU) or GPUS, one of them"),
        ({"GPUS": "all"}, "NPROC (CPU) or GPUS, one of them"),
        ({}, "no etcd server answers at ETCD=127.0.0.1:"),
    ],
)
def test_elastic_sh_names_what_is_wrong(commands, variables, message):
    with socket.socket() as unused:  # bound, so that nobody else listens there
        unused.bind(("127.0.0.1", 0))
        given = {
            "ETCD": f"127.0.0.1:{unused.getsockname()[1]}",
            "JOB": "test",
            "NNODES": "1:2",
            "NPROC": "1",
        }

        commands.start(
            "run",
            [SCRIPT, __file__],
            **{**given, "PYTHON": sys.executable, **variables},
        )

        assert commands.wait() == {"run": 2}
    assert message in commands.err("run")


@pytest.mark.long
def test_elastic_hosts_meet_by_etcd_and_train_samples_once(
    commands, two_hosts, tmp_path
):
    job = ElasticHosts(commands, two_hosts, tmp_path)
    job.wait_until(job.has_ended)

    assert job.worlds()[-1] == 2
    job.check_that_each_sample_was_trained_once()
