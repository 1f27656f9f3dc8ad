"""An elastic job of two nodes, one of which is struck at a random step: each sample is trained once all the same."""

import importlib.util
from pathlib import Path

import pytest

from tests.demos.test_elastic import run_elastic

pytestmark = [pytest.mark.multiprocess, pytest.mark.leaves, pytest.mark.only_in_rounds]


def faults():
    path = Path(__file__).parents[2] / "demos" / "elastic.py"
    spec = importlib.util.spec_from_file_location("elastic_demo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FAULTS


def test_a_node_whose_launcher_or_rank_is_killed_or_told_to_end_or_frozen_past_its_lease_costs_no_sample(rng, tmp_path):
    text = run_elastic(rng.choice(faults()), rng.randrange(10**6), tmp_path)

    assert "epoch 1: each sample exactly once" in text
