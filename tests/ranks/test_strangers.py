"""No stranger delays the ranks that meet, and none of them is taken for a rank."""

import contextlib
import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from paddle_shard.ranks import network
from paddle_shard.ranks.network import MAX_STRANGERS, TcpNetwork
from tests.deadlines import HANG
from tests.ranks.local_network import Meeting, Store

STRANGERS, RANKS = 400, 4
SOON = 10.0
"""Seconds: the strangers are let in one after the other in a hundred times as many."""


@contextlib.contextmanager
def meeting(host="127.0.0.1"):
    """Gives the ranks that meet, and a function that returns (port, token) of the hub."""
    with Meeting(range(RANKS), host) as found:

        def address():
            deadline = time.monotonic() + HANG
            while not found.store.values:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            [address] = found.store.values.values()
            return json.loads(address)

        yield found, address


ALL = [f"from {rank}" for rank in range(RANKS)]


def hello(token, rank):
    return f"{token} {rank}\n".encode()


def endless(peer):
    peer.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            peer.send(bytes(65536))


KINDS = {
    "silent": lambda peer, token: None,
    "wrong token": lambda peer, token: peer.sendall(hello("00" * 16, 1)),
    "half a token": lambda peer, token: peer.sendall(hello(token, 1)[:8]),
    "no such rank": lambda peer, token: peer.sendall(hello(token, RANKS + 7)),
    "endless bytes": lambda peer, token: endless(peer),
    "gone at once": lambda peer, token: peer.close(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_many_strangers_do_not_delay_the_ranks(kind):
    with meeting() as (ranks, address), contextlib.ExitStack() as kept:
        found = [ranks.start(0)]
        port, token = address()
        for number in range(STRANGERS):
            peer = kept.enter_context(
                socket.create_connection(("127.0.0.1", port), HANG)
            )
            with contextlib.suppress(ConnectionError):
                KINDS[kind](peer, token)
            if number == STRANGERS // 2:  # one of the ranks comes among them
                found.append(ranks.start(1))
        begin = time.monotonic()
        found += [ranks.start(rank) for rank in range(2, RANKS)]
        ranks.join()
        assert found == [[ALL]] * RANKS
        assert time.monotonic() - begin < SOON


def test_strangers_that_never_stop_coming_do_not_delay_the_ranks():
    with meeting() as (ranks, address):
        found = [ranks.start(0)]
        port, _ = address()
        over = threading.Event()

        def come():
            mine = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    mine.append(
                        socket.create_connection(("127.0.0.1", port), 1.0)
                    )
                for peer in mine[:-200]:
                    peer.close()
                mine = mine[-200:]
            for peer in mine:
                peer.close()

        strangers = [threading.Thread(target=come) for _ in range(4)]
        for thread in strangers:
            thread.start()
        try:
            time.sleep(0.5)
            begin = time.monotonic()
            found += [ranks.start(rank) for rank in range(1, RANKS)]
            ranks.join()
            assert found == [[ALL]] * RANKS
            assert time.monotonic() - begin < SOON
        finally:
            over.set()
            for thread in strangers:
                thread.join(HANG)


def test_network_listens_no_more_once_the_ranks_have_met():
    with meeting() as (ranks, address):
        ranks.start(0)
        port, token = address()
        for rank in range(1, RANKS):
            ranks.start(rank)
        ranks.join()
        assert len(token) == 32
        for host in ("127.0.0.1", "127.0.0.2"):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, port), HANG)


def test_ranks_of_one_host_listen_at_its_address_only():
    store = Store()
    hub = TcpNetwork(
        0, (0, 1), "127.0.0.1", "test", store, listen_host="127.0.0.1"
    )
    hub.connect()
    [address] = store.values.values()
    port, _ = json.loads(address)

    socket.create_connection(("127.0.0.1", port), HANG).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), HANG)
    hub.close(("over", [], None))


def test_few_strangers_are_kept():
    store = Store()
    hub = TcpNetwork(0, (0, 1), "127.0.0.1", "test", store)
    hub.connect()
    [address] = store.values.values()
    port, _ = json.loads(address)
    with contextlib.ExitStack() as kept:
        for _ in range(3 * MAX_STRANGERS):
            peer = socket.create_connection(("127.0.0.1", port), HANG)
            kept.enter_context(peer).sendall(b"x" * 7)
            assert hub.receive(HANG) == []
        assert len(hub._links) == MAX_STRANGERS
    hub.close(("over", [], None))


def test_hub_asks_the_store_a_few_times_whatever_the_ranks():
    """A request takes Paddle's store 44 ms: one for each missing rank kept 64 ranks from meeting within a minute."""
    store = Store()
    hub = TcpNetwork(0, range(1000), "127.0.0.1", "test", store)
    hub.connect()
    num_before = store.num_requests
    for _ in range(50):
        hub.wake()
        hub.receive(0)
    assert store.num_requests - num_before <= 2
    store.add("paddle_shard/ended/7", 1)
    store.add("paddle_shard/ended", 1)
    messages = []
    deadline = time.monotonic() + HANG
    while not messages and time.monotonic() < deadline:
        messages = hub.receive(0.1)
    assert messages[0][0] == "lost"
    assert messages[0][2] == [7]
    hub.close(("over", [], None))


def test_network_compares_the_token_in_constant_time():
    source = Path(network.__file__).read_text()

    assert "compare_digest(token, self._token.encode())" in source
    assert not re.search(r"token\s*==|==\s*(self\._)?token", source)
