"""What a leader sends arrives at every follower, once, in order and unchanged, whenever each of them looks."""

import gc
import os
import random
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard.ranks.broadcast import END, MESSAGE, STOP, Broadcast, Receiver, Reception, connected
from tests.deadlines import HANG


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


def pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def join(broadcast, follower):
    ours, theirs = pair()
    broadcast.connect(follower, ours)
    return Receiver(follower, theirs)


def fail(error):
    raise error


def message_of(number, size):
    return {"rows": np.full(size, number % 256, np.uint8), "number": number, "more": [np.arange(number % 7), "text"]}


def same(one, other):
    return repr(one["number"]) == repr(other["number"]) and all(
        np.array_equal(a, b) for a, b in ((one["rows"], other["rows"]), (one["more"][0], other["more"][0]))
    )


def memory_files():
    return sum("/memfd:paddle_shard" in os.readlink(f"/proc/self/fd/{fd}") for fd in open_files())


def open_files():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        found.append(fd)
    return found


@given(
    sizes=st.lists(st.sampled_from([0, 1, 1000, 70_000, 300_000]), max_size=30),
    followers=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_each_follower_gets_every_message_whenever_it_connects_and_looks(sizes, followers, seed):
    rng = random.Random(seed)
    broadcast, receivers = Broadcast(followers), {}
    taken = dict.fromkeys(range(followers), 0)
    sent = [message_of(number, size) for number, size in enumerate(sizes)]
    broadcast_done = 0

    def take(follower):
        kind, key, message = receivers[follower].take(fail)
        assert (kind, key) == (MESSAGE, taken[follower] * 10)
        assert same(message, sent[taken[follower]])
        message["rows"][:] = 0  # the follower's own
        taken[follower] += 1

    while broadcast_done < len(sent):
        move = rng.randrange(3)
        if move == 0:
            broadcast.send(10 * broadcast_done, sent[broadcast_done])
            broadcast_done += 1
        else:
            follower = rng.randrange(followers)
            if follower not in receivers:
                receivers[follower] = join(broadcast, follower)
            elif receivers[follower].at_hand():
                take(follower)
    broadcast.say(END)
    for follower in range(followers):
        receivers.setdefault(follower, None)
        if receivers[follower] is None:
            receivers[follower] = join(broadcast, follower)
        while taken[follower] < len(sent):
            assert receivers[follower].wait(HANG)
            take(follower)
        assert receivers[follower].at_hand() == 1
        assert receivers[follower].take(fail)[0] == END
    broadcast.close()
    for receiver in receivers.values():
        while receiver.wait(0.01):
            assert not receiver.at_hand()
        receiver.close()


def test_memory_is_used_again_and_followers_that_are_gone_are_not_waited_for():
    before = memory_files()
    broadcast = Broadcast(3)
    quick, slow, gone = (join(broadcast, follower) for follower in range(3))
    for number in range(200):
        broadcast.send(number, message_of(number, 50_000))
        if number == 20:
            gone.close()
        for receiver in (quick, slow):
            assert receiver.at_hand()
            receiver.take(fail)
        assert memory_files() - before <= 10  # the table and two others, each mapped and open
    sizes = [
        os.fstat(int(fd)).st_size for fd in open_files() if "memfd:paddle_shard" in os.readlink(f"/proc/self/fd/{fd}")
    ]
    assert sum(sizes) < 100 * 50_000
    broadcast.close()
    quick.close(), slow.close()
    del broadcast, quick, slow, gone, receiver
    gc.collect()
    assert memory_files() == before


@pytest.mark.parametrize("looks", [True, False])
def test_a_follower_that_never_has_to_wait_is_not_taken_for_gone_however_long_the_pass(looks, closed):
    """It finds its messages in the table, and has no reason to read its connection."""
    broadcast = closed(Broadcast(1))
    receiver = closed(join(broadcast, 0))
    for number in range(1000):
        message = message_of(number, 1_000_000 if number > 900 else 100)
        broadcast.send(number, message)
        assert receiver.at_hand() or (looks and receiver.wait(HANG))
        kind, key, found = receiver.take(fail)
        assert (kind, key) == (MESSAGE, number)
        assert same(found, message)


def test_what_was_sent_before_the_end_is_taken_after_it(closed):
    broadcast = Broadcast(1)
    receiver = closed(join(broadcast, 0))
    broadcast.send(1, message_of(1, 100_000))
    broadcast.say(STOP)
    broadcast.close()
    assert receiver.wait(HANG)
    assert same(receiver.take(fail)[2], message_of(1, 100_000))
    assert receiver.take(fail)[0] == STOP
    while receiver.wait(0.01):
        pass
    assert not receiver.at_hand()


def test_a_follower_asleep_is_woken_for_messages_that_are_sent_together(closed):
    broadcast = closed(Broadcast(1))
    receiver = closed(join(broadcast, 0))
    assert receiver.wait(0.01)
    assert not receiver.at_hand()
    found = []

    def wait():
        while len(found) < 5:
            while not receiver.at_hand():
                receiver.wait(HANG)
            found.append(receiver.take(fail)[1])

    thread = threading.Thread(target=wait)
    thread.start()
    broadcast.holds = True
    for number in range(5):
        broadcast.send(number, message_of(number, 10))
    broadcast.wake()
    thread.join(HANG)
    assert found == [0, 1, 2, 3, 4]


def test_what_cannot_be_pickled_is_an_error_and_nothing_is_sent(closed):
    broadcast = closed(Broadcast(1))
    receiver = closed(join(broadcast, 0))
    with pytest.raises(Exception, match="pickle"):
        broadcast.send(0, [np.zeros(5), lambda: 0])
    broadcast.send(1, message_of(1, 5))
    assert receiver.wait(HANG)
    assert receiver.take(fail)[1] == 1


# How followers find their pass.


@pytest.fixture
def receiver_of(closed):
    def of(reception, key, follower=0):
        receiver = connected(reception.name, key, follower)
        assert receiver is not None
        return closed(receiver)

    return of


@pytest.mark.parametrize("early", [True, False])
def test_a_follower_may_connect_before_its_pass_is_opened(early, closed, receiver_of):
    reception, broadcast, other = Reception(), closed(Broadcast(1)), closed(Broadcast(1))
    assert connected(reception.name, (1, 1), 0) is None  # there is no socket yet
    reception.enter((1, 0), other)
    receivers = [receiver_of(reception, (1, 1))] if early else []
    broadcast.send(7, message_of(7, 10))
    reception.enter((1, 1), broadcast)
    receivers += [] if early else [receiver_of(reception, (1, 1))]
    while not receivers[0].at_hand():
        assert receivers[0].wait(HANG)
    assert receivers[0].take(fail)[1] == 7


def test_a_pass_that_was_left_is_closed_to_followers(closed, receiver_of):
    reception, broadcast = Reception(), closed(Broadcast(1))
    reception.enter((1, 3), broadcast)
    reception.leave((1, 3))
    receiver = receiver_of(reception, (1, 3))
    while receiver.wait(0.05):
        pass
    assert not receiver.at_hand()


def test_a_pass_that_is_collected_while_another_is_opened_may_leave():
    reception = Reception()

    class Collects(dict):
        def __setitem__(self, key, value):
            reception.leave((1, 0))  # as the garbage collector does, anywhere
            super().__setitem__(key, value)

    reception._open = Collects()
    done = threading.Thread(target=lambda: reception.enter((1, 1), Broadcast(1)), daemon=True)
    done.start()
    done.join(HANG / 4)
    assert not done.is_alive()
