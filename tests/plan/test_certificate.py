"""What a run has missed or repeated is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard import ShardPlan
from paddle_shard.plan.certificate import (
    ALL,
    DRAWN,
    Account,
    Leg,
    Tally,
    certify,
    expected_of_plan,
    folded,
    id_sums,
    merge,
)
from paddle_shard.plan.skips import Skips

PLAN = ShardPlan(num_samples=100, batch_size=10, num_data_ranks=2, shuffle=True)


def leg(ids, first, end, data_rank=0, num_data_ranks=1):
    return Leg(0, first, end, data_rank, num_data_ranks, *Tally().added(list(ids)).total)


def samples(first, end):
    return PLAN.samples(epoch=0, first=first, end=end).tolist()


def account(*legs):
    """Of a rank that has delivered the last of them itself."""
    return Account(legs[-1][3:5] if legs else None, legs[:-1], folded(legs[-1:]))


def judged(*accounts):
    accounts = [one if isinstance(one, Account) else account(one) for one in accounts]
    return certify(accounts, 0, 100, expected_of_plan(PLAN, 0, Skips()))


def test_stretches_on_different_meshes_add_up():
    half = samples(0, 40)
    certificate = judged(
        account(leg(half[:25], 0, 40, 0, 2), leg(half[25:], 0, 40, 1, 2), leg(samples(40, 100), 40, 100)),
    )

    assert certificate.exact, certificate
    assert str(certificate) == "epoch 0: each of 100 samples exactly once"
    assert (certificate.delivered, certificate.missed, certificate.repeated) == (100, 0, 0)


def test_replicas_count_once_and_must_agree():
    mine = leg(samples(0, 100), 0, 100)

    assert judged(mine, mine, mine).exact
    other = leg([*samples(0, 99), 1], 0, 100)
    assert "replicas of data rank 0 delivered different samples" in str(judged(mine, other))
    assert "replicas of data rank 0 delivered different samples" in str(judged(mine, Account((0, 1), [], [])))


def test_what_replicas_delivered_by_several_iterators_must_agree_too():
    whole, part = leg(samples(0, 100), 0, 100), leg(samples(0, 30), 0, 30)
    twice = Account((0, 1), [], folded([whole, part]))

    assert "positions [0, 30) were delivered again" in str(judged(twice, twice))
    assert "or a different number" in str(judged(twice, Account((0, 1), [], [whole])))
    again = judged(Account((0, 1), [], folded([whole, whole])))
    assert str(again).endswith("positions [0, 100) were delivered 2 times")
    assert (again.delivered, again.repeated) == (200, 100)


@pytest.mark.parametrize(
    ("legs", "text", "counts"),
    [
        ([(0, 60), (70, 100)], "positions [60, 70) were not delivered", (90, 10, 0)),
        ([(0, 60), (50, 100)], "positions [50, 60) were delivered again", (110, 0, 10)),
        ([(10, 100)], "positions [0, 10) were not delivered", (90, 10, 0)),
        ([(0, 90)], "positions [90, 100) were not delivered", (90, 10, 0)),
        ([], "positions [0, 100) were not delivered", (0, 100, 0)),
    ],
)
def test_gaps_and_overlaps_are_counted(legs, text, counts):
    certificate = judged(Account((0, 1), [], [leg(samples(*stretch), *stretch) for stretch in legs]))

    assert not certificate.exact
    assert text in str(certificate)
    assert (certificate.delivered, certificate.missed, certificate.repeated) == counts


def test_a_miss_and_repeats_that_cancel_in_a_plain_sum_are_found():
    ids = samples(0, 100)
    for missed, instead in ((5, 6), (5, 0)):
        planted = [instead if i == missed else i for i in ids]
        assert "some samples were missed and as many repeated" in str(judged(leg(planted, 0, 100)))
    # 5 and 15 never, 4 and 16 twice: the plain sum of the ids is the same.
    planted = [i for i in ids if i not in (5, 15)] + [4, 16]
    assert sum(planted) == sum(ids)
    assert "some samples were missed and as many repeated" in str(judged(leg(planted, 0, 100)))


def test_too_few_and_too_many_are_counted():
    ids = samples(0, 100)

    assert (judged(leg(ids[:-2], 0, 100)).missed, judged(leg([*ids, 3], 0, 100)).repeated) == (2, 1)


def test_a_data_rank_whose_leg_is_missing_is_named():
    certificate = judged(leg(samples(0, 50), 0, 100, 0, 3), leg(samples(50, 60), 0, 100, 2, 3))

    assert "what data ranks [1] of 3 delivered in [0, 100) is not known" in str(certificate)


def test_merging_again_changes_nothing_and_keeps_it_small():
    parts = [leg(samples(k, k + 10), k, k + 10) for k in range(0, 100, 10)]
    merged, problems = merge([account(*parts)])

    assert problems == []
    assert len(merged) == 1
    assert merge([Account(None, merged, [])] * 2) == (merged, [])


def test_an_account_stays_small_however_often_an_epoch_is_begun_again():
    legs, count, furthest = [], 0, 0
    for end in [*range(1, 61), *[30] * 60]:
        legs = folded([*legs, leg(samples(0, end), 0, end)])
        count, furthest = count + end, max(furthest, end)
        found = judged(Account((0, 1), [], legs))
        assert (found.delivered, found.repeated, found.missed) == (count, count - furthest, 100 - furthest)
        assert found.repeated or end == 1

    assert len(legs) <= 17


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_sums_do_not_depend_on_the_order_but_on_every_id(ids):
    array = np.array(ids)

    assert id_sums(array) == id_sums(array[::-1])
    assert id_sums(array) != id_sums(np.append(array[1:], array[0] ^ 1))


def test_ids_may_be_anything():
    tally, other = Tally().added(["a", ("b", 1), 3]), Tally().added([3, "a", ("b", 1)])

    assert tally.total == other.total


def drawn(ids, first, end):
    return Leg(0, first, end, DRAWN, 1, *Tally().added(list(ids)).total)


def of_a_sampler(*accounts, end=6):
    return certify(accounts, 0, end, None, "a Sampler")


def test_what_a_sampler_drew_is_to_be_delivered_as_often_as_it_was_drawn():
    all_of_it, mine, others = drawn([7, 7, 9, 1, 2, 3], 0, 6), leg([7, 7, 9], 0, 6, 0, 2), leg([1, 2, 3], 0, 6, 1, 2)
    ranks = Account((0, 2), [], [mine, all_of_it]), Account((1, 2), [], [others, all_of_it])

    assert str(of_a_sampler(*ranks)) == "epoch 0: each of 6 samples that a Sampler drew exactly once"
    assert "has not ended after position 6" in str(of_a_sampler(*ranks, end=None))
    assert "positions [6, 8) were not delivered" in str(of_a_sampler(*ranks, end=8))
    wrong = Account((1, 2), [], [leg([1, 2, 7], 0, 6, 1, 2), all_of_it])
    assert "some samples were missed and as many repeated" in str(of_a_sampler(ranks[0], wrong))
    parted = Account((1, 2), [], [others, drawn([7, 7, 9, 1, 2, 4], 0, 6)])
    assert "the samplers drew different samples on some ranks in [0, 6)" in str(of_a_sampler(ranks[0], parted))
    known, _ = merge(ranks)
    assert [(leg.data_rank, leg.first, leg.end) for leg in known] == [(DRAWN, 0, 6), (ALL, 0, 6)]
    assert of_a_sampler(Account(None, known, [])).exact
