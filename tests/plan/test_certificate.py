"""What a run has missed or repeated is found."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard import ShardPlan
from paddle_shard.plan.certificate import (
    ALL,
    DRAWN,
    Delivered,
    account_from_json,
    account_to_json,
    added,
    certify,
    merged,
    total_of,
)

PLAN = ShardPlan(num_samples=100, batch_size=10, num_data_ranks=2, shuffle=True)


def leg(ids, first, end, data_rank=0, num_data_ranks=1):
    """The account of one pass over positions [first, end), in which a data rank should get its part of them."""
    of_rank = (end - first) // num_data_ranks
    return {
        (data_rank, num_data_ranks, 0): Delivered(
            ((first, end),), (), total_of(list(ids), of_rank)
        )
    }


def samples(first, end):
    return PLAN.samples(epoch=0, first=first, end=end).tolist()


def judged(*of_ranks):
    """Each is what a rank has delivered itself, or that after what it knows."""
    accounts = [
        one if isinstance(one, tuple) else ({}, one) for one in of_ranks
    ]
    return certify(accounts, 0, PLAN, (), None, "")


def test_certify_adds_ranges_of_different_meshes():
    half = samples(0, 40)
    certificate = judged(
        (
            added(leg(half[:20], 0, 40, 0, 2), leg(half[20:], 0, 40, 1, 2)),
            leg(samples(40, 100), 40, 100),
        ),
    )

    assert certificate.exact, certificate
    assert str(certificate) == "epoch 0: each of 100 samples exactly once"
    assert (
        certificate.delivered,
        certificate.missed,
        certificate.repeated,
    ) == (
        100,
        0,
        0,
    )


def test_certify_counts_pipeline_stages_once_if_they_agree():
    ids, one = samples(0, 100), leg(samples(0, 100), 0, 100)
    two = [leg(ids[at::2], 0, 100, at, 2) for at in range(2)]
    four = [leg(ids[at::4], 0, 100, at, 4) for at in range(4)]

    for stages in (
        [*two, one],
        [one, *two],
        [*two, *four],
        [*four, one, one, *two, *two],
    ):
        assert judged(*stages).exact, judged(*stages)
    other = leg([*ids[:99], ids[0]], 0, 100)
    assert (
        "pipeline stages with different numbers of data ranks delivered different"
        in str(judged(*two, other))
    )
    assert not judged(*two, leg(ids[:50], 0, 50)).exact
    assert "what data ranks [1] of 2 delivered in [0, 100) is not known" in str(
        judged(one, two[0])
    )


def test_certify_counts_replicas_once_if_they_agree():
    mine = leg(samples(0, 100), 0, 100)

    assert judged(mine, mine, mine).exact
    other = leg([*samples(0, 99), 1], 0, 100)
    assert "replicas of data rank 0 delivered different samples" in str(
        judged(mine, other)
    )
    assert "replicas of data rank 0 delivered different samples" in str(
        judged(mine, {(0, 1, 0): Delivered()})
    )


def test_certify_compares_replicas_over_several_iterators():
    whole, part = leg(samples(0, 100), 0, 100), leg(samples(0, 30), 0, 30)
    twice = added(whole, part)

    assert "positions [0, 30) were delivered again" in str(judged(twice, twice))
    assert "or a different number" in str(judged(twice, whole))
    again = judged(added(whole, whole))
    assert str(again).endswith("positions [0, 100) were delivered again")
    assert (again.delivered, again.repeated) == (200, 100)


@pytest.mark.parametrize(
    ("legs", "text", "counts"),
    [
        (
            [(0, 60), (70, 100)],
            "positions [60, 70) were not delivered",
            (90, 10, 0),
        ),
        (
            [(0, 60), (50, 100)],
            "positions [50, 60) were delivered again",
            (110, 0, 10),
        ),
        ([(10, 100)], "positions [0, 10) were not delivered", (90, 10, 0)),
        (
            [(0, 90)],
            "90 of 100 samples delivered once, 10 to come",
            (90, 10, 0),
        ),
        ([], "0 of 100 samples delivered once, 100 to come", (0, 100, 0)),
    ],
)
def test_certify_counts_gaps_and_overlaps(legs, text, counts):
    certificate = judged(
        added(*(leg(samples(*stretch), *stretch) for stretch in legs))
    )

    assert not certificate.exact
    assert text in str(certificate)
    assert (
        certificate.delivered,
        certificate.missed,
        certificate.repeated,
    ) == counts


def test_miss_and_repeats_that_cancel_in_a_plain_sum_are_found():
    ids = samples(0, 100)
    for missed, instead in ((5, 6), (5, 0)):
        planted = [instead if i == missed else i for i in ids]
        assert "some samples were missed and as many repeated" in str(
            judged(leg(planted, 0, 100))
        )
    # 5 and 15 never, 4 and 16 twice: the plain sum of the ids is the same.
    planted = [i for i in ids if i not in (5, 15)] + [4, 16]
    assert sum(planted) == sum(ids)
    assert "some samples were missed and as many repeated" in str(
        judged(leg(planted, 0, 100))
    )


def test_certify_counts_too_few_and_too_many():
    ids = samples(0, 100)

    assert (
        judged(leg(ids[:-2], 0, 100)).missed,
        judged(leg([*ids, 3], 0, 100)).repeated,
    ) == (2, 1)


def test_certify_names_a_data_rank_that_is_missing():
    certificate = judged(
        leg(samples(0, 50), 0, 100, 0, 3), leg(samples(50, 60), 0, 100, 2, 3)
    )

    assert "what data ranks [1] of 3 delivered in [0, 100) is not known" in str(
        certificate
    )


def test_certify_raises_no_alarm_for_what_is_not_known():
    """A run that is resumed from a state that was saved without `certificate()` has one rank's account."""
    rest = [leg(samples(40, 100)[at::2], 40, 100, at, 2) for at in range(2)]
    before = leg(samples(0, 20), 0, 40, 0, 2)

    certificate = judged((before, rest[0]), (before, rest[1]))

    assert not certificate.exact
    assert str(certificate).startswith(
        "epoch 0: not proved that each of 100 samples was delivered exactly once: what"
    )
    twice = judged(
        (before, rest[0]),
        (before, leg([*samples(40, 100)[2::2], 0], 40, 100, 1, 2)),
    )
    assert str(twice).startswith(
        "epoch 0: NOT each of 100 samples exactly once: "
    )


def test_merged_again_changes_nothing():
    parts = [leg(samples(k, k + 10), k, k + 10) for k in range(0, 100, 10)]
    found, problems = merged([({}, added(*parts))])

    assert problems == []
    assert list(found) == [ALL]
    assert found[ALL].once == ((0, 100),)
    assert merged([(found, {})] * 2) == (found, [])
    assert (
        account_from_json(json.loads(json.dumps(account_to_json(found))))
        == found
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 30)),
        min_size=1,
        max_size=8,
    ),
    st.randoms(),
)
def test_added_is_the_same_in_any_order(stretches, rng):
    """The oracle counts positions one by one."""
    ends = [(first, min(100, first + size)) for first, size in stretches]
    legs = [leg(samples(*stretch), *stretch) for stretch in ends]
    cut = rng.randrange(len(legs) + 1)
    parts = added(*legs[:cut]), added(*legs[cut:])
    times = Counter(
        position for stretch in ends for position in range(*stretch)
    )
    found = judged(added(*legs))

    assert added(*parts) == added(*parts[::-1]) == added(*legs)
    assert (found.missed, found.repeated) == (
        100 - len(times),
        times.total() - len(times),
    )
    again = {
        p
        for first, end in added(*legs)[0, 1, 0].again
        for p in range(first, end)
    }
    assert again == {position for position, count in times.items() if count > 1}
    assert found.exact == (list(times.values()) == [1] * 100)


def test_added_stays_small_for_an_epoch_begun_many_times():
    account, count, furthest = {}, 0, 0
    for end in [*range(1, 61), *[30] * 60]:
        account = added(account, leg(samples(0, end), 0, end))
        count, furthest = count + end, max(furthest, end)
        found = judged(account)
        assert (found.delivered, found.repeated, found.missed) == (
            count,
            count - furthest,
            100 - furthest,
        )
        assert found.repeated or end == 1

    assert len(json.dumps(account_to_json(account))) < 200


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_total_of_ids_depends_on_each_and_not_on_their_order(ids):
    array = np.array(ids)

    assert total_of(array) == total_of(array[::-1])
    assert total_of(array) != total_of(np.append(array[1:], array[0] ^ 1))


def test_total_of_ids_of_any_type():
    assert total_of(["a", ("b", 1), 3]) == total_of([3, "a", ("b", 1)])


def drawn(ids, first, end):
    return {
        DRAWN: Delivered(((first, end),), (), total_of(list(ids), end - first))
    }


def of_a_sampler(*accounts, end=6):
    return certify(accounts, 0, None, (), end, "a Sampler")


def test_certify_expects_what_a_sampler_drew_as_often():
    all_of_it, mine, others = (
        drawn([7, 7, 9, 1, 2, 3], 0, 6),
        leg([7, 7, 9], 0, 6, 0, 2),
        leg([1, 2, 3], 0, 6, 1, 2),
    )
    ranks = ({}, mine | all_of_it), ({}, others | all_of_it)

    assert (
        str(of_a_sampler(*ranks))
        == "epoch 0: each of 6 draws of a Sampler exactly once"
    )
    assert "has not ended after position 6" in str(
        of_a_sampler(*ranks, end=None)
    )
    assert "delivered once, 2 to come" in str(of_a_sampler(*ranks, end=8))
    wrong = {}, leg([1, 2, 7], 0, 6, 1, 2) | all_of_it
    assert "some samples were missed and as many repeated" in str(
        of_a_sampler(ranks[0], wrong)
    )
    parted = {}, others | drawn([7, 7, 9, 1, 2, 4], 0, 6)
    assert "replicas of the sampler delivered different samples" in str(
        of_a_sampler(ranks[0], parted)
    )
    known, _ = merged(ranks)
    assert [(owner, known[owner].once) for owner in sorted(known)] == [
        (DRAWN, ((0, 6),)),
        (ALL, ((0, 6),)),
    ]
    assert of_a_sampler((known, {})).exact


def test_certify_does_not_prove_states_that_differ():
    whole, part = leg(samples(0, 100), 0, 100), leg(samples(0, 30), 0, 30)

    assert (
        "the states that the ranks have loaded differ in what data rank 0 delivered"
        in str(judged((whole, {}), (part, {})))
    )
