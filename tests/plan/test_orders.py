"""Each order is a bijection, and a saved run is bound to all that it depends on."""

from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard import ShardPlan
from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.order import Identity, Order, Ordering
from paddle_shard.plan.orders import ORDERINGS, find_ordering
from paddle_shard.plan.shuffle import permutation
from paddle_shard.plan.state import LoaderState
from tests.orders_and_tails import ALL, UNNAMED
from tests.trials import trials


class Backwards(Order):
    """The last sample first."""

    def __call__(self, positions):
        return self.length - 1 - positions

    inverse = __call__


@dataclass(frozen=True)
class Reversed(Ordering):
    """A fixed order that is no identity, as a curriculum is."""

    name = "reversed"

    def order(self, length, seed, epoch, width):
        return Backwards(length)


EVERY = [find_ordering(shuffle) for shuffle in [*ALL, *UNNAMED, Reversed()]]
ANY_LENGTH = [ordering for ordering in EVERY if not ordering.pads_first]
"""Those that need no table of all samples. Paddle's own orders do."""
FIXED = (False, "paddle unshuffled", Reversed.name)
"""Names of the orders that are the same in every epoch."""
SIZES = {
    "length": st.one_of(st.integers(1, 300), st.integers(1, 5000)),
    "seed": st.integers(-3, 3),
    "epoch": st.integers(0, 5),
    "width": st.integers(1, 40),
}


@pytest.mark.parametrize("ordering", EVERY, ids=repr)
@settings(max_examples=trials(60))
@given(**SIZES, data=st.data())
def test_order_is_a_bijection_however_it_is_read(
    ordering, length, seed, epoch, width, data
):
    order, positions = (
        ordering.order(length, seed, epoch, width),
        np.arange(length),
    )
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))

    samples = order(positions)

    assert sorted(samples.tolist()) == list(range(length))
    assert order.inverse(samples).tolist() == positions.tolist()
    assert order.between(start, stop).tolist() == samples[start:stop].tolist()
    if isinstance(order, Identity):
        assert samples.tolist() == positions.tolist()


@pytest.mark.parametrize("ordering", ANY_LENGTH, ids=repr)
@settings(max_examples=trials(60))
@given(
    length=st.integers(1, 1 << 62),
    seed=st.integers(0, 1 << 63),
    epoch=st.integers(0, 1 << 40),
    data=st.data(),
)
@example(length=1 << 62, seed=0, epoch=0, data=None)
@example(length=(1 << 53) + 3, seed=1 << 33, epoch=1, data=None)
def test_order_of_a_length_that_no_table_can_hold_is_exact(
    ordering, length, seed, epoch, data
):
    order = ordering.order(length, seed, epoch, 12)
    start = (
        length // 3 if data is None else data.draw(st.integers(0, length - 1))
    )
    positions = np.unique(
        np.minimum(start + np.array([0, 1, 2, 5, 300, 5000]), length - 1)
    )

    samples = order(positions)

    assert samples.dtype == np.int64
    assert ((samples >= 0) & (samples < length)).all()
    assert len(set(samples.tolist())) == len(positions)
    assert (order.inverse(samples) == positions).all()
    stop = min(start + 40, length)
    assert (
        order.between(start, stop).tolist()
        == order(np.arange(start, stop)).tolist()
    )


@pytest.mark.parametrize("ordering", EVERY, ids=repr)
def test_order_keeps_the_shape_of_its_argument(ordering):
    order, positions = (
        ordering.order(24, 0, 0, 4),
        np.arange(24).reshape(2, 3, 4),
    )

    assert order(positions).shape == order.inverse(positions).shape == (2, 3, 4)
    assert (order(positions).reshape(-1) == order(np.arange(24))).all()


@pytest.mark.parametrize(
    "ordering",
    [ordering for ordering in ANY_LENGTH if ordering.name not in FIXED],
    ids=repr,
)
def test_order_that_changes_each_epoch_differs_by_seed(ordering):
    orders = {
        tuple(ordering.order(200, seed, 0, 8)(np.arange(200)).tolist())
        for seed in (0, 1, 2, -1, 1 << 40)
    }

    assert len(orders) == 5


@pytest.mark.parametrize("ordering", EVERY, ids=repr)
def test_order_has_every_setting_in_its_fingerprint(ordering):
    asked = {"num_data_ranks": 2, "accumulation": 1}
    for setting in fields_of(ordering):
        other = replace(
            ordering, **{setting.name: getattr(ordering, setting.name) + 1}
        )
        assert other.fingerprint(**asked) != ordering.fingerprint(**asked), (
            setting.name
        )


@pytest.mark.parametrize("ordering", EVERY, ids=repr)
def test_order_of_every_short_length_is_a_bijection(ordering):
    for length in range(1, 130):
        samples = ordering.order(length, 3, 1, 4)(np.arange(length))
        assert np.array_equal(np.sort(samples), np.arange(length)), length


@pytest.mark.parametrize("ordering", EVERY, ids=repr)
def test_order_changes_each_epoch_as_it_says(ordering):
    first, second = (
        ordering.order(200, 0, epoch, 8)(np.arange(200)).tolist()
        for epoch in range(2)
    )

    assert (first != second) == (ordering.name not in FIXED)
    assert (first == sorted(first)) == (
        ordering.name in (False, "paddle unshuffled")
    )


@dataclass(frozen=True)
class Forgetful(Ordering):
    """A planted defect: its order depends on `salt`, which no saved state tells."""

    salt: int = 0
    name = "forgetful"

    def order(self, length, seed, epoch, width):
        return permutation(length, f"salted {self.salt}", seed, epoch)


def check_that_states_tell_orders_apart(orderings, sizes):
    """Each pair of runs whose orders differ is told apart by the saved state.

    The batch size is none of the fingerprint: it may change on the way, and a state tells it in its segments.
    """
    plans = [
        ShardPlan(
            num_samples=60,
            batch_size=12,
            num_data_ranks=ranks,
            accumulation=steps,
            shuffle=ordering,
            seed=seed,
        )
        for ordering in orderings
        for ranks, steps, seed in sizes
    ]
    orders = [
        (plan.num_positions, plan.samples(epoch=3, first=0, end=60).tolist())
        for plan in plans
    ]
    fingerprints = [plan.fingerprint() for plan in plans]
    for one, order, fingerprint in zip(
        plans, orders, fingerprints, strict=True
    ):
        saved = LoaderState(fingerprint=fingerprint).to_dict()
        for other, its_order, now in zip(
            plans, orders, fingerprints, strict=True
        ):
            try:
                LoaderState.from_dict(saved, now)
            except StateError:
                continue
            assert order == its_order, f"{one} is resumed as {other}"


def fields_of(ordering):
    return fields(ordering) if is_dataclass(ordering) else ()


SIZE_PAIRS = [(1, 1, 0), (1, 1, 5), (2, 1, 0), (2, 3, 5)]


@pytest.mark.parametrize("shuffle", ALL + UNNAMED, ids=repr)
def test_order_of_a_state_rejects_another_order(shuffle):
    ordering = find_ordering(shuffle)
    other_values = [
        replace(ordering, **{f.name: getattr(ordering, f.name) + 1})
        for f in fields_of(ordering)
    ]

    check_that_states_tell_orders_apart(
        [ordering, *other_values, *EVERY], SIZE_PAIRS
    )


@pytest.mark.parametrize("shuffle", ALL + UNNAMED, ids=repr)
def test_order_of_a_state_rejects_another_seed(shuffle):
    saved, now = (
        ShardPlan(
            num_samples=60,
            batch_size=12,
            num_data_ranks=2,
            shuffle=shuffle,
            seed=seed,
        ).fingerprint()
        for seed in (1, 2)
    )

    with pytest.raises(StateError, match="seed: saved 1, now 2"):
        LoaderState.from_dict(LoaderState(fingerprint=saved).to_dict(), now)


def test_order_with_a_setting_outside_its_fingerprint_is_found():
    with pytest.raises(AssertionError, match="is resumed as"):
        check_that_states_tell_orders_apart(
            [Forgetful(0), Forgetful(1)], SIZE_PAIRS
        )


@pytest.mark.parametrize(
    "shuffle", ["yes", "paddle unshuffled", None, 2, 1.0, [1]]
)
def test_find_ordering_names_the_orders_there_are(shuffle):
    names = ", ".join(map(repr, ORDERINGS))
    with pytest.raises(
        ArgumentError,
        match=f"shuffle must be one of {names}, or a paddle_shard.Blocks, got",
    ):
        find_ordering(shuffle)
