"""What a leader sends arrives at every follower, once, in order and unchanged, whenever each of them looks."""

import gc
import itertools
import os
import random
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard.core.forks import no_fork
from paddle_shard.ranks.broadcast import Broadcast, connected
from tests.deadlines import HANG
from tests.descriptors import open_files

NUMBERS = itertools.count()


@pytest.fixture
def closed():
    """Returns what it is given, and closes it in the end."""
    given = []

    def kept(one):
        given.append(one)
        return one

    yield kept
    for one in given:
        one.close()


def address():
    return f"\0paddle_shard-test-{os.getpid()}-{next(NUMBERS)}"


class Pass:
    """A leader's end, what its followers need to find it, and how much they have taken."""

    def __init__(self, num_followers=1):
        self.address = address()
        self.taken = [0] * num_followers
        self.is_decided = False
        self.is_over = False
        self.leader = Broadcast(self.address, num_followers, self)

    @property
    def released(self):
        return min(self.taken)

    def close(self):
        self.is_decided = self.is_over = True

    def join(self, follower=0):
        return Follower(self, follower)


class Follower:
    """A follower's end, whose agreement announces what it takes."""

    def __init__(self, opened, follower):
        self.opened, self.follower = opened, follower
        self.channel = connected(opened.address)
        self.wait, self.close = self.channel.wait, self.channel.close

    def receive(self):
        found = self.channel.receive()
        self.opened.taken[self.follower] += 1
        return found


def taken(receiver, seconds=HANG):
    """The next message, for which it may have to wait; what has no memory yet comes without one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return receiver.receive()
        except BlockingIOError:
            assert receiver.wait(max(0.0, deadline - time.monotonic())), (
                "nothing comes"
            )


def has_ended(receiver):
    with pytest.raises(EOFError):
        taken(receiver)
    return True


def message_of(number, size):
    return {
        "rows": np.full(size, number % 256, np.uint8),
        "number": number,
        "more": [np.arange(number % 7), "text"],
    }


def same(one, other):
    return repr(one["number"]) == repr(other["number"]) and all(
        np.array_equal(a, b)
        for a, b in (
            (one["rows"], other["rows"]),
            (one["more"][0], other["more"][0]),
        )
    )


def memory_files():
    return {one for one in open_files() if one.is_memory}


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 1000, 15_000, 70_000, 300_000]), max_size=30
    ),
    followers=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_broadcast_reaches_each_follower_whenever_it_looks(
    sizes, followers, seed
):
    rng = random.Random(seed)
    opened, receivers, num_sent = Pass(followers), {}, 0
    got = dict.fromkeys(range(followers), 0)
    sent = [message_of(number, size) for number, size in enumerate(sizes)]

    def take(follower):
        message = taken(receivers[follower])
        assert same(message, sent[got[follower]])
        message["rows"][:] = 0  # the follower's own
        got[follower] += 1

    while num_sent < len(sent):
        if rng.randrange(3) == 0:
            opened.leader.send(sent[num_sent])
            num_sent += 1
        else:
            follower = rng.randrange(followers)
            if follower not in receivers:
                receivers[follower] = opened.join(follower)
            elif len(receivers) == followers and got[follower] < num_sent:
                take(follower)
    opened.leader.send("end")
    for follower in range(followers):
        if follower not in receivers:
            receivers[follower] = opened.join(follower)
    for follower in range(followers):
        while got[follower] < len(sent):
            take(follower)
        assert taken(receivers[follower]) == "end"
    opened.close()
    for receiver in receivers.values():
        assert has_ended(receiver)
        receiver.close()


def test_broadcast_uses_memory_again():
    gc.collect()
    before = memory_files()
    opened = Pass(3)
    quick, slow, gone = (opened.join(follower) for follower in range(3))
    for number in range(200):
        opened.leader.send(message_of(number, 50_000))
        if number == 20:
            gone.close()
        for receiver in (quick, slow):
            assert taken(receiver)["number"] == number
        opened.taken[2] = number
        # One memory, mapped and open at the leader, on its way to one that is gone.
        assert len(memory_files() - before) <= 6
    sizes = [
        os.fstat(memory.number).st_blocks * 512
        for memory in memory_files() - before
    ]
    assert sum(sizes) < 4 * 100 * 50_000
    opened.close()
    quick.close(), slow.close()
    del opened, quick, slow, gone, receiver
    deadline = time.monotonic() + HANG
    while memory_files() - before:  # the thread that sends ends soon
        assert time.monotonic() < deadline
        gc.collect()


def test_broadcast_keeps_a_follower_that_never_waits(
    closed,
):
    opened = closed(Pass())
    receiver = closed(opened.join())
    for number in range(1000):
        message = message_of(number, 1_000_000 if number > 900 else 100)
        opened.leader.send(message)
        assert same(taken(receiver), message)


@pytest.mark.parametrize("size", [0, 15_000, 30_000])
def test_broadcast_sends_what_does_not_fit_as_soon_as_it_does(size, closed):
    opened = closed(Pass(2))
    early = closed(opened.join())
    for number in range(1000):
        opened.leader.send(message_of(number, size))
    late = closed(opened.join(1))
    for number in range(1000):
        for receiver in (early, late):
            assert same(taken(receiver), message_of(number, size))


def test_broadcast_can_be_taken_after_its_end(closed):
    opened = closed(Pass())
    receiver = closed(opened.join())
    opened.leader.send(message_of(1, 100_000))
    opened.leader.send("stop")
    opened.is_over = True
    assert same(taken(receiver), message_of(1, 100_000))
    assert taken(receiver) == "stop"
    assert has_ended(receiver)


def test_follower_that_waits_is_woken(closed):
    opened = closed(Pass())
    receiver, found = closed(opened.join()), []
    assert not receiver.wait(0.01)
    thread = threading.Thread(
        target=lambda: found.extend(taken(receiver) for _ in range(5))
    )
    thread.start()
    for number in range(5):
        time.sleep(0.01)
        opened.leader.send(number)
    thread.join(HANG)
    assert found == [0, 1, 2, 3, 4]


def test_broadcast_does_not_send_what_cannot_be_pickled(closed):
    opened = closed(Pass())
    receiver = closed(opened.join())
    with pytest.raises(Exception, match="pickle"):
        opened.leader.send([np.zeros(50_000), lambda: 0])
    opened.leader.send("sound")
    assert taken(receiver) == "sound"


# How followers find their leader.


def is_refused(address):
    """Whether a connection is refused at once, or ended."""
    try:
        return has_ended(connected(address))
    except (BlockingIOError, ConnectionRefusedError):
        return True


def test_connected_may_look_for_a_leader_that_is_not_there(closed):
    with pytest.raises(ConnectionRefusedError):
        connected(address())
    opened = Pass()
    receiver = closed(opened.join())
    opened.close()
    assert has_ended(receiver)
    assert is_refused(opened.address)


def test_broadcast_gives_nothing_to_one_more_follower(closed):
    opened = closed(Pass())
    receiver = closed(opened.join())
    opened.leader.send("first")
    assert taken(receiver) == "first"
    assert is_refused(opened.address)


def test_broadcast_lets_others_fork_while_it_waits(closed):
    closed(Pass())
    start = time.monotonic()
    for _ in range(20):
        with no_fork:
            pass
        time.sleep(0.001)
    assert time.monotonic() - start < 1.0


def test_broadcast_rejects_a_process_of_another_user(closed, monkeypatch):
    opened, other = closed(Pass()), closed(Pass())
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        connected(other.address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(HANG)
        stranger.connect(opened.address)
        assert stranger.recv(1) == b"", "it is turned away"
    monkeypatch.undo()
    receiver = closed(opened.join())
    opened.leader.send("for its own user")
    assert taken(receiver) == "for its own user"
