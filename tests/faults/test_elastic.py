"""An elastic job of two nodes, one of which is struck at a random step: each sample is trained once all the same."""

import pytest

from tests.demos.test_elastic import run_elastic
from tests.launch.conftest import commands, two_hosts  # noqa: F401  (fixtures)
from tests.launch.elastic_hosts import ElasticHosts, elastic_demo

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.leaves,
    pytest.mark.only_in_rounds,
]


def test_elastic_node_killed_stopped_or_frozen_costs_no_sample(rng, tmp_path):
    text = run_elastic(
        rng.choice(elastic_demo().FAULTS), rng.randrange(10**6), tmp_path
    )

    assert "epoch 1: each sample exactly once" in text


def test_elastic_host_cut_off_past_its_lease_loses_no_sample(
    commands,  # noqa: F811
    two_hosts,  # noqa: F811
    rng,
    tmp_path,
):
    job = ElasticHosts(commands, two_hosts, tmp_path)
    moment = rng.randint(8, job.demo.STEPS // 4)
    job.wait_until(lambda: job.steps() >= moment)

    job.set_cable("down")
    job.wait_until(lambda: job.steps(ranks=1) > moment)
    job.set_cable("up")

    job.wait_until(job.has_ended)
    job.check_that_each_sample_was_trained_once()
