"""The order of every kind of loader is a promise: runs are resumed, and papers repeated, by later versions."""

import json
from pathlib import Path

import pytest

from paddle_shard.testing.simulated import on_each_rank
from tests.golden.cases import (
    CASES,
    EPOCHS,
    SAVED_AFTER,
    delivered,
    large,
    loader_of,
)

HERE = Path(__file__).parent
ORDERS = json.loads((HERE / "orders.json").read_text())
STATES = {
    path.stem.partition("-")[2]: json.loads(path.read_text())
    for path in sorted(HERE.glob("states-*.json"))
}


@pytest.mark.parametrize("name", CASES)
def test_golden_orders_are_unchanged(name, tmp_path):
    for rank, loader in on_each_rank(
        [0, 1], lambda: loader_of(name, tmp_path)
    ).items():
        for epoch in range(EPOCHS):
            found = on_each_rank(
                [rank], lambda loader=loader: delivered(iter(loader))
            )[rank]
            assert found == ORDERS[f"{name}, epoch {epoch}"][rank]


@pytest.mark.parametrize("version", STATES)
@pytest.mark.parametrize("name", CASES)
def test_golden_states_resume_with_the_next_sample(name, version, tmp_path):
    def rest():
        loader = loader_of(name, tmp_path)
        # the files are written again
        loader.load_state_dict(STATES[version][name], override=["data"])
        return delivered(iter(loader))

    for rank, found in on_each_rank([0, 1], rest).items():
        assert found == ORDERS[f"{name}, epoch 0"][rank][SAVED_AFTER:]


def test_order_of_a_billion_samples_is_what_it_always_was():
    for name, found in large().items():
        assert found == ORDERS[name]


def test_golden_cases_are_all_there():
    assert {
        f"{name}, epoch {epoch}" for name in CASES for epoch in range(EPOCHS)
    } | set(large()) == set(ORDERS)
    assert all(set(cases) <= set(CASES) for cases in STATES.values())
