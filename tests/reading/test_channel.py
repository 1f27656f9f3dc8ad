"""Whole messages in order, both ways, through slots that are taken in turn."""

import copyreg
import errno
import gc
import itertools
import multiprocessing
import os
import socket
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from paddle_shard.reading.channel import Channel
from tests.deadlines import HANG
from tests.descriptors import open_files
from tests.trials import trials

BELOW = 15_000
"""Bytes of an array that goes through the socket."""
ABOVE = 20_000
"""Bytes of an array that goes through shared memory."""
SIZES = st.sampled_from(
    [
        0,
        1,
        63,
        BELOW,
        *range(16_000, 16_500, 37),
        ABOVE,
        65_536,
        65_537,
        300_000,
    ]
)
ARRAYS = st.lists(SIZES, max_size=4)


def pair(num_slots, blocking=False):
    """Both ends of a channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(blocking)
    return [Channel(end, num_slots) for end in ends]


@pytest.fixture
def channels():
    """Makes pairs, which are closed in the end."""
    made = []

    def make(num_slots, blocking=False):
        made.extend(pair(num_slots, blocking))
        return made[-2:]

    yield make
    for channel in made:
        channel.close()


class BreaksWhenRead:
    def __reduce__(self):
        return int, ("no number",)


class RaisesWhenRead:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return raised, (self.error,)


def raised(error):
    raise error


WORDS = st.text("ab", max_size=2)
VALUES = st.recursive(
    WORDS | st.integers(0, 3) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner),
)


def receive(channel):
    """What was sent by itself; raises what goes wrong."""
    return channel.receive()


def message_of(number, sizes):
    """A message that says which it is, in each of its bytes."""
    return (
        number,
        b"x" * (number % 7),
        [np.full(size, number % 251, np.uint8) for size in sizes],
    )


def is_message(found, number, sizes):
    arrays = found[2]
    return (
        found[:2] == (number, b"x" * (number % 7))
        and [len(array) for array in arrays] == sizes
        and all((array == number % 251).all() for array in arrays)
    )


# Every message


@settings(max_examples=trials(80))
@given(num_slots=st.integers(1, 4), data=st.data())
def test_channel_delivers_messages_of_any_size_in_order(num_slots, data):
    asking, answering = pair(num_slots)
    try:
        # sizes of the arrays of each request, of each answer; answers
        asked, answered, taken = (
            [],
            [],
            [],
        )
        for _ in range(data.draw(st.integers(1, 25))):
            may = []
            if len(asked) - len(taken) < num_slots:
                may.append("ask")
            if len(answered) < len(asked):
                may.append("answer")
            if len(taken) < len(answered):
                may.append("take")
            step = data.draw(st.sampled_from(may))
            if step == "ask":
                asked.append(data.draw(ARRAYS))
                asking.send(message_of(len(asked), asked[-1]))
            elif step == "answer":
                answered.append(data.draw(ARRAYS))
                assert is_message(
                    receive(answering), len(answered), asked[len(answered) - 1]
                )
                answering.send(message_of(100 + len(answered), answered[-1]))
            else:
                taken.append(receive(asking))
        # Looked at in the end only: what was received must not have changed.
        assert all(
            is_message(found, 101 + at, answered[at])
            for at, found in enumerate(taken)
        )
    finally:
        asking.close()
        answering.close()


def echo(end, num_slots):
    channel = Channel(end, num_slots)
    while True:
        try:
            number, _, arrays = receive(channel)
        except EOFError:
            os._exit(0)
        channel.send(message_of(number, [2 * len(array) for array in arrays]))


@settings(max_examples=trials(10))
@given(num_slots=st.integers(1, 4), requests=st.lists(ARRAYS, max_size=30))
def test_channel_works_between_processes(num_slots, requests):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: [ours.close(), echo(theirs, num_slots)]
    )
    child.start()
    theirs.close()
    channel, under_way, found = Channel(ours, num_slots), deque(), []
    try:
        for number, sizes in enumerate(requests):
            if len(under_way) == num_slots:
                assert channel.wait(HANG)
                found.append((receive(channel), *under_way.popleft()))
            channel.send(message_of(number, sizes))
            under_way.append((number, sizes))
        for request in under_way:
            assert channel.wait(HANG)
            found.append((receive(channel), *request))
    finally:
        channel.close()
        child.join(HANG)
        child.kill()
    assert child.exitcode == 0
    assert [number for _, number, _ in found] == list(range(len(requests)))
    assert all(
        is_message(answer, number, [2 * size for size in sizes])
        for answer, number, sizes in found
    )


def test_slots_grow_while_others_are_under_way(channels):
    sender, receiver = channels(4)
    sizes = [[ABOVE << number] for number in range(4)]
    for number, size in enumerate(sizes):
        sender.send(message_of(number, size))

    assert all(
        is_message(receive(receiver), number, size)
        for number, size in enumerate(sizes)
    )


def test_channel_message_is_stable_and_writable(channels):
    sender, receiver = channels(1)
    received = []
    for number in range(5):
        for size in (BELOW, ABOVE):
            sender.send(message_of(number, [size]))
            received.append((receive(receiver), number, [size]))
    assert all(is_message(*one) for one in received)

    received[0][0][2][0][:] = 255
    received[1][0][2][0][:] = 255
    assert all(is_message(*one) for one in received[2:])


def test_channel_copies_what_it_sends(channels):
    sender, receiver = channels(2)
    for size in (BELOW, ABOVE):
        message = message_of(7, [size])
        sender.send(message)
        message[2][0][:] = 0
        assert is_message(receive(receiver), 7, [size])


def test_array_that_is_in_a_message_twice_is_one_array_of_it(channels):
    sender, receiver = channels(1)
    array = np.arange(ABOVE)
    sender.send([array, array, array[1:]])
    once, again, view = receive(receiver)

    assert once is again
    assert not np.shares_memory(once, view)
    assert np.array_equal(view, once[1:])


def test_message_of_many_arrays_needs_no_large_one(channels):
    sender, receiver = channels(1)
    sizes = [number % 3 for number in range(5000)]
    sender.send(message_of(1, sizes))

    assert is_message(receive(receiver), 1, sizes)


def test_reducers_that_are_registered_later_count(channels, monkeypatch):
    class Wrapped:
        def __init__(self, value):
            self.value = value

        def __reduce_ex__(self, protocol):
            raise TypeError("no way of its own")

    monkeypatch.setitem(
        copyreg.dispatch_table,
        Wrapped,
        lambda wrapped: (list, ([wrapped.value],)),
    )
    sender, receiver = channels(1)
    sender.send(Wrapped(3))

    assert receive(receiver) == [3]


@settings(max_examples=trials(80))
@given(
    messages=st.lists(VALUES, min_size=1, max_size=6),
    size=st.sampled_from([1, ABOVE]),
)
def test_messages_of_any_structure_arrive_apart(messages, size):
    sender, receiver = pair(len(messages))
    array, word = np.arange(size), "a word that is in all of them"
    try:
        for message in messages:
            sender.send((word, message, message, array))
        found = [receive(receiver) for _ in messages]
    finally:
        sender.close()
        receiver.close()

    assert [(again, message) for again, message, _, _ in found] == [
        (word, message) for message in messages
    ]
    assert all(message == again for _, message, again, _ in found)
    assert all(np.array_equal(other, array) for *_, other in found)
    assert not any(
        np.shares_memory(one[3], other[3])
        for one, other in itertools.combinations(found, 2)
    )


@pytest.mark.parametrize("kind", [BlockingIOError, EOFError, ConnectionError])
def test_channel_survives_an_exception_of_unpickling(channels, kind):
    sender, receiver = channels(1)
    sender.send(RaisesWhenRead(kind("of the user's")))
    sender.send("next")

    with pytest.raises(ValueError, match="of the user's"):
        receive(receiver)
    assert receive(receiver) == "next"


# The end


@pytest.mark.parametrize("size", [BELOW, ABOVE])
@pytest.mark.parametrize("unread", [0, 2])
def test_end_is_known_when_all_was_received(channels, size, unread):
    left, staying = channels(4)
    for number in range(3):
        left.send(message_of(number, [size]))
    # which makes the end another one to the operating system
    for number in range(unread):
        staying.send(message_of(number, [1]))
    left.close()

    assert all(
        is_message(receive(staying), number, [size]) for number in range(3)
    )
    for _ in range(3):
        assert staying.wait(0.0)
        with pytest.raises(EOFError):
            receive(staying)
    with pytest.raises(ConnectionError):
        staying.send(1)


def test_channel_that_is_interrupted_has_come_to_its_end(channels):
    channel, _ = channels(1)
    channel.interrupt()

    assert channel.wait(0.0)
    with pytest.raises(EOFError):
        receive(channel)


# What goes wrong


def test_channel_receives_nothing_before_it_is_sent(channels):
    sender, receiver = channels(1)
    with pytest.raises(BlockingIOError):
        receive(receiver)
    assert not receiver.wait(0.0)
    sender.send(message_of(1, [ABOVE]))

    assert receiver.wait(0.0)
    assert is_message(receive(receiver), 1, [ABOVE])


@pytest.mark.parametrize("then", [BELOW, ABOVE])
def test_channel_sends_later_what_did_not_fit(channels, then):
    sender, receiver = channels(1000)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sender.send(message_of(sent, [BELOW]))
            sent += 1
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            sender.send(message_of(sent, [then]))
    assert all(
        is_message(receive(receiver), number, [BELOW]) for number in range(sent)
    )
    sender.send(message_of(sent, [then]))
    sender.send(message_of(sent + 1, [then + 1]))

    assert is_message(receive(receiver), sent, [then])
    assert is_message(receive(receiver), sent + 1, [then + 1])


def test_channel_sends_no_part_of_what_it_cannot_send(channels):
    """A receiver that has other work looks first whether something has come, and then waits for the whole message."""
    sender, _ = channels(1000)
    most = 0
    with pytest.raises(BlockingIOError):
        while True:
            sender.send(most)
            most += 1
    for num_before in range(most - 3, most + 1):
        sender, receiver = channels(1000)
        for number in range(num_before):
            sender.send(number)
        is_sent = True
        try:
            sender.send(message_of(0, [ABOVE]))
        except BlockingIOError:
            is_sent = False
        for number in range(num_before):
            assert receive(receiver) == number
        assert receiver.wait(0.0) == is_sent
        if is_sent:
            assert is_message(receive(receiver), 0, [ABOVE])


@pytest.mark.parametrize("before", [[], [ABOVE]])
def test_channel_without_memory_fails_for_large_messages_only(
    channels, monkeypatch, before
):
    sender, receiver = channels(2)
    for size in before:
        sender.send(message_of(1, [size]))
        assert is_message(receive(receiver), 1, [size])
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", fails(errno.ENOSPC))
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                sender.send(message_of(2, [10 * ABOVE]))
        sender.send(message_of(3, [BELOW]))
        assert is_message(receive(receiver), 3, [BELOW])
    for number, size in enumerate([10 * ABOVE, ABOVE, 20 * ABOVE]):
        sender.send(message_of(number, [size]))
        assert is_message(receive(receiver), number, [size])


def fails(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_memory_that_cannot_be_mapped_costs_no_other_message(
    channels, monkeypatch
):
    sender, receiver = channels(2)
    sender.send(message_of(1, [ABOVE]))
    sender.send(message_of(2, [BELOW]))
    with monkeypatch.context() as patched:
        patched.setattr("mmap.mmap", fails(errno.EMFILE))
        with pytest.raises(OSError, match="ulimit"):
            receive(receiver)
    assert is_message(receive(receiver), 2, [BELOW])
    with pytest.raises(BlockingIOError):
        receive(receiver)
    sender.send(message_of(3, [10 * ABOVE]))
    assert is_message(receive(receiver), 3, [10 * ABOVE])


def test_channel_does_not_send_what_cannot_be_pickled(channels):
    sender, receiver = channels(1)
    for bad in (lambda: None, [np.zeros(ABOVE), lambda: None]):
        with pytest.raises(Exception, match="pickle"):
            sender.send(bad)
    sender.send(message_of(1, [ABOVE]))

    assert is_message(receive(receiver), 1, [ABOVE])


@pytest.mark.parametrize("size", [1, ABOVE])
def test_channel_loses_only_what_cannot_be_unpickled(channels, size):
    sender, receiver = channels(1)
    for number in range(3):
        sender.send([BreaksWhenRead(), np.zeros(size)])
        with pytest.raises(ValueError, match="no number"):
            receive(receiver)
        sender.send(message_of(number, [size]))
        assert is_message(receive(receiver), number, [size])


# What it takes


def test_channel_works_without_memfd(channels, monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    sender, receiver = channels(2)
    for number in range(5):
        sender.send(message_of(number, [ABOVE << number]))
        assert is_message(receive(receiver), number, [ABOVE << number])


def test_channel_slots_take_few_open_files():
    gc.collect()
    before = open_files()
    sender, receiver = pair(500)
    for number in range(500):
        sender.send(message_of(number, [ABOVE + 100 * number]))
        assert is_message(receive(receiver), number, [ABOVE + 100 * number])
    assert len(open_files() - before) < 10
    sender.close()
    receiver.close()
    del sender, receiver
    assert not open_files() - before


def test_memory_is_taken_for_slots_that_are_used():
    def taken():
        with open("/proc/self/smaps_rollup") as sums:
            return (
                next(
                    int(line.split()[1])
                    for line in sums
                    if line.startswith("Pss_Shmem")
                )
                << 10
            )

    sender, receiver = pair(1000)
    before = taken()
    for _ in range(2):
        sender.send(message_of(1, [4_000_000]))
        receive(receiver)
    assert 8_000_000 <= taken() - before < 20_000_000
    sender.close()
    receiver.close()
