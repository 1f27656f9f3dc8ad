"""Ranks of several hosts, of which the first of each host relays."""

import logging

import pytest

from paddle_shard.ranks import network
from paddle_shard.ranks.network import parents_of
from tests.ranks.local_network import Meeting

HOSTS = ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.2"]


@pytest.fixture
def meeting(monkeypatch, caplog):
    monkeypatch.setattr(network, "MAX_DIRECT", 2)
    with caplog.at_level(logging.CRITICAL), Meeting(range(5), hosts=HOSTS) as found:
        yield found


def test_parents_are_the_hub_or_the_first_rank_of_the_host(monkeypatch):
    monkeypatch.setattr(network, "MAX_DIRECT", 2)
    assert parents_of(range(5), HOSTS) == {1: 0, 2: 0, 3: 2, 4: 2}
    monkeypatch.setattr(network, "MAX_DIRECT", 64)
    assert parents_of(range(5), HOSTS) == dict.fromkeys(range(1, 5), 0)


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
