"""No stranger delays the ranks that meet, and none of them is taken for a rank."""

import contextlib
import logging
import re
import select
import socket
import threading
import time
from pathlib import Path

import pytest

from paddle_shard.ranks import reception
from paddle_shard.ranks.reception import Reception, hello
from tests.deadlines import HANG
from tests.ranks.local_network import Meeting

STRANGERS, RANKS = 1000, 4
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
            [said] = found.store.values.values()
            port, token = said.decode().split()
            return int(port), token

        yield found, address


ALL = [f"from {rank}" for rank in range(RANKS)]


def reception_at(host, several_hosts=False):
    return contextlib.closing(
        Reception(host, several_hosts=several_hosts, poll=select.poll())
    )


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
def test_a_thousand_strangers_do_not_delay_the_ranks(kind):
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
                    mine.append(socket.create_connection(("127.0.0.1", port), 1.0))
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


def test_a_rank_that_was_dropped_among_strangers_comes_again(monkeypatch):
    dropped = []

    def drop_the_first(self):
        found = list(arrived(self))
        if found and len(dropped) < 3:
            dropped.extend(found)
            for _, peer in found:
                peer.close()
            return []
        return found

    arrived = Reception.arrived
    monkeypatch.setattr(Reception, "arrived", drop_the_first)
    with meeting() as (ranks, _):
        found = [ranks.start(rank) for rank in range(RANKS)]
        ranks.join()

    assert len(dropped) >= 3
    assert found == [[ALL]] * RANKS


def test_nothing_listens_once_the_ranks_have_met():
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


def test_few_strangers_are_kept_and_no_more_than_a_token_is_read_of_each():
    with reception_at("127.0.0.1") as found, contextlib.ExitStack() as kept:
        for _ in range(3 * reception._STRANGERS):
            peer = kept.enter_context(
                socket.create_connection(("127.0.0.1", found.port), HANG)
            )
            peer.sendall(b"x" * 7)
            assert found.arrived() == []
        assert len(found._strangers) == reception._STRANGERS
        assert {len(said) for _, said, _ in found._strangers.values()} == {7}


def test_a_silent_stranger_is_shut_out_after_a_while(monkeypatch):
    monkeypatch.setattr(reception, "_GRACE", 0.1)
    with contextlib.ExitStack() as kept:
        found = kept.enter_context(reception_at("127.0.0.1"))
        peer = kept.enter_context(
            socket.create_connection(("127.0.0.1", found.port), HANG)
        )
        found.arrived()
        time.sleep(0.2)
        found.arrived()
        assert peer.recv(1) == b""


# Where it listens


def listens_at(host, port):
    try:
        socket.create_connection((host, port), 5.0).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_it_listens_where_the_ranks_are_and_nowhere_else(host, caplog):
    with reception_at(host) as found:
        assert listens_at(host, found.port)
        assert not listens_at("127.0.0.2", found.port)
    assert not caplog.records


@pytest.mark.parametrize(
    ("host", "several_hosts", "reason"),
    [
        (
            "192.0.2.1",
            False,
            "Cannot assign requested address",
        ),  # of nobody: for documentation
        ("no.such.host.invalid", False, "not known|resolution|No address"),
        ("127.0.0.1", True, "127.0.0.1 is another machine on each host"),
    ],
)
def test_where_it_cannot_listen_there_it_listens_everywhere_and_says_why(
    host, several_hosts, reason, caplog
):
    with caplog.at_level(logging.WARNING), reception_at(host, several_hosts) as found:
        assert listens_at("127.0.0.1", found.port)
        assert listens_at("127.0.0.2", found.port)
    [record] = caplog.records
    assert f"meet at {host}" in record.getMessage()
    assert re.search(reason, record.getMessage())
    assert "PADDLE_TRAINER_ENDPOINTS" in record.getMessage()


def test_the_token_is_compared_in_constant_time():
    source = Path(reception.__file__).read_text()

    assert "compare_digest(token, self.token)" in source
    assert not re.search(r"token\s*==|==\s*(self\.)?token", source)
