"""Reading several batches at once gives the same as reading them one by one."""

import random
from itertools import count

import hypothesis.strategies as st
import numpy as np
import paddle
from hypothesis import given, settings

from paddle_shard.errors import DataReadError
from paddle_shard.inputs.generators import generators
from paddle_shard.place.local_tensor import TensorMaker
from paddle_shard.reading.chunk import Slice
from paddle_shard.reading.local_shuffle import MixedPass
from paddle_shard.reading.passes import DirectPass, Pass
from paddle_shard.reading.reader import BatchReader
from paddle_shard.reading.request import ReadRequest
from tests.trials import trials

STEPS = 12


class Rows:
    """Rows that say which they are; from some on, they are drawn, or cannot be read."""

    def __init__(self, draws_from, fails_at):
        self._draws_from, self._fails_at = draws_from, fails_at

    def __getitem__(self, index):
        if index == self._fails_at:
            raise ValueError("this one")
        if index >= self._draws_from:
            return np.array([index, random.getrandbits(30), np.random.randint(1 << 30)])
        return np.array([index, 0, 0])


def reading(dataset, sampler_fails_at, skip, collate_fn=None):
    def requests():
        for step in range(STEPS):
            if step == sampler_fails_at:
                raise RuntimeError("the sampler's")
            yield ReadRequest(0, step, [3 * step, 3 * step + 1, 3 * step + 2], False, 77, False)

    both = generators(with_paddle=False)
    reader, maker = BatchReader(dataset, collate_fn, both, skip_errors=skip), TensorMaker(paddle.CPUPlace())
    return DirectPass(requests(), reader, both, maker.zero_copy if reader.makes_arrays else maker.copied)


def what_comes(batches, counts):
    """(rows, how it ended, what was skipped); each next count is how many are asked for at once, 0 for `next`."""
    found = []
    try:
        for several in counts:
            before = random.getstate(), np.random.get_state()[1].tolist()
            some = batches.several(several) if several else [next(batches)]
            assert len(some) <= max(several, 1)
            assert (random.getstate(), np.random.get_state()[1].tolist()) == before
            found.extend(batch.tolist() for batch in some)
            if several:  # as there may be none
                found.append(next(batches).tolist())
    except (StopIteration, DataReadError, RuntimeError) as end:
        told = str(end).split("Original traceback")[0]
        return found, type(end), told, [[row for row, _ in skipped] for skipped in batches.skipped]
    raise AssertionError("it has no end")


NOWHERE = st.just(10**6)
INDICES = NOWHERE | st.integers(0, 3 * STEPS)


@settings(max_examples=trials(60))
@given(
    draws_from=INDICES,
    fails_at=INDICES,
    sampler_fails_at=NOWHERE | st.integers(0, STEPS),
    skip=st.booleans(),
    counts=st.lists(st.integers(0, 7), max_size=STEPS),
)
def test_several_at_once_are_what_one_by_one_are(draws_from, fails_at, sampler_fails_at, skip, counts):
    def come(counts):
        return what_comes(reading(Rows(draws_from, fails_at), sampler_fails_at, skip), counts)

    assert come([*counts, *[0] * 2 * STEPS]) == come(0 for _ in count())


def test_several_are_read_where_nothing_is_drawn():
    batches = reading(Rows(10**6, 10**6), None, False)
    assert batches.several(4) == []  # nothing is known of the data set yet
    next(batches)

    assert len(batches.several(4)) == 4
    assert len(batches.several(100)) == STEPS - 5
    assert batches.several(1) == []


def test_a_collate_fn_may_write_all_its_batches_to_the_same_memory():
    memory = np.zeros((3, 3), "int64")

    def collate(samples):
        return np.stack(samples, out=memory)

    batches = reading(Rows(10**6, 10**6), None, False, collate)
    found = [next(batches), *batches.several(5), *batches]

    assert [batch.tolist() for batch in found] == [
        [[3 * step + row, 0, 0] for row in range(3)] for step in range(STEPS)
    ]


class Waits(Pass):
    """Serves slices of one row; those that are not yet there would have to be waited for."""

    def __init__(self):
        self.there = self.taken = 0

    def __next__(self):
        self.taken += 1
        return Slice(np.array([self.taken]), np.array([True]), True)

    def at_hand(self, count=1):
        return self.taken + count <= self.there


def test_a_mixed_pass_says_whether_its_next_window_has_to_be_waited_for():
    reading = Waits()
    mixed = MixedPass(reading, gather, window=3, first_window=0, skip=0, num_steps=6, key=b"k" * 64)

    assert not mixed.at_hand()
    reading.there = 3
    assert mixed.at_hand()
    assert mixed.at_hand(3)
    assert not mixed.at_hand(4)
    next(mixed)
    assert mixed.at_hand(2), "which were read with the first"
    assert not mixed.at_hand(3)


def gather(values, rows):
    return np.concatenate(values)[rows]
