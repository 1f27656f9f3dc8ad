"""What is missed or repeated is found, by a plan's own coverage and by a run's certificate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard import ShardPlan
from paddle_shard.plan.coverage import Tally, certify, expected_of_plan, id_sums, merge_legs

PLAN = ShardPlan(num_samples=100, batch_size=10, num_data_ranks=2, shuffle=True)


@given(
    length=st.integers(1, 200),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    shuffle=st.sampled_from([False, True, "paddle", "paddle unshuffled"]),
)
def test_a_plan_delivers_each_sample_once_but_for_what_it_drops(length, ranks, multiple, accumulation, tail, shuffle):
    plan = ShardPlan(
        num_samples=length,
        batch_size=ranks * multiple * accumulation,
        num_data_ranks=ranks,
        accumulation=accumulation,
        tail=tail,
        shuffle=shuffle,
    )

    found = plan.coverage(epoch=1)

    assert found.counted
    assert found.repeated == 0
    assert found.delivered + found.missed == length
    assert tail == "drop" or found.missed == 0


def test_a_long_data_set_is_covered_by_arithmetic():
    found = ShardPlan(num_samples=10**12 + 7, batch_size=1000, num_data_ranks=10, shuffle=True).coverage()

    assert not found.counted
    assert (found.delivered, found.missed, found.repeated, found.padding) == (10**12 + 7, 0, 0, 3)


# Certificates


def leg(ids, first, end, data_rank=0, num_data_ranks=1, epoch=0):
    tally = Tally().added(list(ids))
    return (epoch, first, end, data_rank, num_data_ranks, tally.num_ids, *tally.sums)


def samples(first, end):
    return PLAN.samples(epoch=0, first=first, end=end).tolist()


def judged(*legs):
    return certify(legs, 0, 100, expected_of_plan(PLAN, 0))[0]


def test_stretches_on_different_meshes_add_up():
    half = samples(0, 40)
    certificate = judged(
        leg(half[:25], 0, 40, 0, 2),
        leg(half[25:], 0, 40, 1, 2),
        leg(samples(40, 100), 40, 100),
        leg([5], 0, 7, epoch=3),
    )

    assert certificate.exact, certificate
    assert str(certificate) == "epoch 0: each of 100 samples exactly once"
    assert (certificate.delivered, certificate.missed, certificate.repeated) == (100, 0, 0)


def test_replicas_count_once_and_must_agree():
    mine = leg(samples(0, 100), 0, 100)

    assert judged(mine, mine, mine).exact
    other = leg([*samples(0, 99), 1], 0, 100)
    assert "replicas of data rank 0 delivered different samples" in str(judged(mine, other))


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
    certificate = judged(*(leg(samples(*stretch), *stretch) for stretch in legs))

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
    merged, problems = merge_legs(parts)

    assert problems == []
    assert len(merged) == 1
    assert merge_legs([*merged, *merged]) == (merged, [])


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_sums_do_not_depend_on_the_order_but_on_every_id(ids):
    array = np.array(ids)

    assert id_sums(array) == id_sums(array[::-1])
    assert id_sums(array) != id_sums(np.append(array[1:], array[0] ^ 1))


def test_ids_may_be_anything():
    tally, other = Tally().added(["a", ("b", 1), 3]), Tally().added([3, "a", ("b", 1)])

    assert tally.sums == other.sums
