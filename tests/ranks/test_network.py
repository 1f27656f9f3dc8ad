"""Ranks of several hosts, of which the first of each host relays."""

import logging

import pytest

from paddle_shard.ranks import network
from paddle_shard.ranks.network import Route
from tests.ranks.local_network import Meeting

HOSTS = ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.2"]


@pytest.fixture
def meeting(monkeypatch, caplog):
    monkeypatch.setattr(network, "MAX_DIRECT", 2)
    with caplog.at_level(logging.CRITICAL), Meeting(range(5), hosts=HOSTS) as found:
        yield found


def test_route_connects_each_rank_to_the_hub_or_to_the_first_of_its_host(monkeypatch):
    monkeypatch.setattr(network, "MAX_DIRECT", 2)
    routes = [Route.of(range(5), rank, HOSTS)[0] for rank in range(5)]

    assert [route.up for route in routes] == [None, 0, 0, 2, 2]
    assert [route.down for route in routes] == [(1, 2), (), (3, 4), (), ()]
    assert [route.several_hosts for route in routes] == [
        True,
        False,
        False,
        False,
        False,
    ]
    monkeypatch.setattr(network, "MAX_DIRECT", 64)
    assert [Route.of(range(5), rank, HOSTS)[0].up for rank in range(5)] == [
        None,
        0,
        0,
        0,
        0,
    ]


def test_relayed_ranks_exchange_like_others(meeting):
    for _ in range(3):
        found = [meeting.start(rank) for rank in range(5)]
        meeting.join()
        assert found == [[[f"from {rank}" for rank in range(5)]]] * 5


@pytest.mark.parametrize("victim", [0, 1, 2, 4])
def test_a_rank_that_ends_is_named_on_all_hosts(victim, meeting):
    found = [meeting.start(rank) for rank in range(5)]
    meeting.join()
    meeting.coordinators[victim]._network.interrupt()
    found = [meeting.start(rank) for rank in range(5) if rank != victim]
    meeting.join()

    assert [error.ranks for [error] in found] == [(victim,)] * 4
