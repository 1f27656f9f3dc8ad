"""An order of the user's own that does not shuffle and is no identity, through the whole loader."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.errors import StateError
from paddle_shard.plan.order import Order, Ordering
from paddle_shard.testing import on_each_rank
from tests.helpers import ONE, Made, local, mesh, sharded

LENGTH = 22
LENGTHS = np.random.default_rng(1).permutation(LENGTH)


class Table(Order):
    """An order that is a table of all samples."""

    def __init__(self, samples):
        super().__init__(len(samples))
        self.samples = samples

    def __call__(self, positions):
        return self.samples[positions]

    def inverse(self, samples):
        return np.argsort(self.samples)[samples]


@dataclass(frozen=True)
class Curriculum(Ordering):
    """The shortest sample first, in every epoch; or the last sample first."""

    name = "curriculum"
    by_length: bool = True

    def order(self, length, seed, epoch, width):
        samples = (
            np.argsort(LENGTHS) if self.by_length else np.arange(length)[::-1]
        )
        return Table(samples)

    def fingerprint(self, *, num_data_ranks, accumulation):
        return {"by_length": self.by_length}


EXPECTED = {
    True: np.argsort(LENGTHS).tolist(),
    False: list(range(LENGTH))[::-1],
}


def make(by_length, ranks=1, size=4, **options):
    given = DataLoader(Made(length=LENGTH), batch_size=size)
    at = ONE if ranks == 1 else mesh(list(range(ranks)))
    return sharded(given, at, shuffle=Curriculum(by_length), **options)


def rows_of(batches, most=None):
    """The valid rows of this rank at each of up to `most` steps."""
    found = []
    for batch in batches:
        valid = batches.valid._local_value().numpy()
        found.append(np.array(local(batch))[valid].tolist())
        if len(found) == most:
            break
    return found


@pytest.mark.parametrize("by_length", [True, False])
def test_own_order_is_delivered_in_every_epoch(by_length):
    loader = make(by_length)

    for epoch in range(2):
        batches = iter(loader)
        delivered = [row for rows in rows_of(batches) for row in rows]
        assert delivered == EXPECTED[by_length]
        assert (
            loader.where(sample=EXPECTED[by_length][5], epoch=epoch).step == 1
        )
    assert loader.certificate().exact
    assert "shuffle 'curriculum'" in repr(loader)


@pytest.mark.parametrize("stop", range(1, 6))
def test_own_order_resumes_on_another_mesh(stop):
    def first():
        loader = make(by_length=True, ranks=2)
        with iter(loader) as batches:
            found = rows_of(batches, stop)
        return found, json.loads(json.dumps(loader.state_dict()))

    begun = on_each_rank(range(2), first)
    state = begun[0][1]

    def second():
        loader = make(by_length=True, ranks=4, size=8)
        loader.load_state_dict(state)
        with iter(loader) as batches:
            return rows_of(batches)

    rest = on_each_rank(range(4), second)
    steps = [*zip(*(rows for rows, _ in begun.values()), strict=True)]
    steps += zip(*rest.values(), strict=True)
    delivered = [row for step in steps for rows in step for row in rows]
    assert delivered == EXPECTED[True]


def test_own_order_of_a_state_rejects_another_setting():
    before = make(by_length=True)
    next(iter(before))

    with pytest.raises(StateError, match="by_length: saved True, now False"):
        make(by_length=False).load_state_dict(before.state_dict())
