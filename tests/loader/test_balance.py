"""Rows dealt to data ranks by cost: the same global batches, resumed exactly; other costs on a rank are refused."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import BatchSampler, DataLoader, IterableDataset

from paddle_shard import BucketBatchSampler, Mixture
from paddle_shard.errors import ArgumentError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, indices_of, mesh, sharded
from tests.trials import trials

COSTS = np.random.default_rng(5).lognormal(0, 1, 61)
KINDS = {
    "array": COSTS,
    "list": COSTS.tolist(),
    "function": lambda ids: COSTS[ids],
    "zeros": np.zeros(61),
}


def make(
    at, batch_size, balance, *, accumulation=1, workers=0, data=None, **options
):
    data = Made(length=61) if data is None else data
    sampler = BatchSampler(data, batch_size=batch_size, shuffle=True)
    sampler._acc_steps = accumulation
    given = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    return sharded(given, at, balance=balance, **options)


def rows_of(batches, most=None):
    """(ids, valid) of this rank at each of up to `most` steps."""
    found = []
    while most is None or len(found) < most:
        try:
            batch = next(batches)
        except StopIteration:
            break
        found.append(
            (
                batch._local_value().numpy().tolist(),
                batches.valid._local_value().numpy().tolist(),
            )
        )
    return found


@settings(max_examples=trials(40))
@given(
    data_ranks=st.sampled_from([1, 2, 3, 4]),
    each=st.integers(1, 5),
    accumulation=st.sampled_from([1, 2]),
    kind=st.sampled_from(list(KINDS)),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    workers=st.sampled_from([0, 0, 0, 2]),
    stop=st.integers(0, 6),
    other_ranks=st.sampled_from([1, 2, 4]),
)
def test_global_batches_stay_the_same_sets_and_ranks_cost_alike(
    data_ranks, each, accumulation, kind, tail, workers, stop, other_ranks
):
    at, balance = mesh(list(range(data_ranks))), KINDS[kind]
    size = data_ranks * each

    def run(balance=balance):
        own = 0 if balance is None else workers
        loader = make(
            at,
            size,
            balance,
            accumulation=accumulation,
            workers=own,
            tail=tail,
            seed=3,
        )
        with iter(loader) as batches:
            found = rows_of(batches)
        assert [ids for ids, _ in found] == indices_of(
            make(
                at, size, balance, accumulation=accumulation, tail=tail, seed=3
            )
        )
        return (
            found,
            loader.where(sample=17, epoch=0),
            loader.stats.total.imbalance,
        )

    dealt = on_each_rank(range(data_ranks), run)
    plain = on_each_rank(range(data_ranks), lambda: run(None))
    num_steps = len(plain[0][0])
    assert {len(found) for found, *_ in dealt.values()} == {num_steps}
    for step in range(num_steps):
        mine, theirs = (
            [per_rank[rank][0][step] for rank in range(data_ranks)]
            for per_rank in (dealt, plain)
        )
        assert {len(ids) for ids, _ in mine} == {len(ids) for ids, _ in theirs}
        micro = len(mine[0][0]) // accumulation
        for part in range(accumulation):  # each micro-batch for itself
            stretch = slice(part * micro, (part + 1) * micro)
            sets = [
                sorted(
                    (row, real)
                    for ids, valid in side
                    for row, real in zip(
                        ids[stretch], valid[stretch], strict=True
                    )
                )
                for side in (mine, theirs)
            ]
            assert sets[0] == sets[1]
            if kind in ("array", "list", "function"):
                largest = [
                    max(COSTS[ids[stretch]].sum() for ids, _ in side)
                    for side in (mine, theirs)
                ]
                assert largest[0] <= largest[1] * (1 + 1e-5)
    place = dealt[0][1]
    if place is not None:
        ids = [row for rank in dealt for row in dealt[rank][0][place.step][0]]
        assert 17 in ids
        assert (place.data_rank, place.row) == (None, None)
    assert all(
        imbalance is None or imbalance >= 1 for *_, imbalance in dealt.values()
    )

    def first():
        loader = make(at, size, balance, tail="pad", seed=3)
        with iter(loader) as batches:
            found = rows_of(batches, stop)
        return found, json.loads(json.dumps(loader.state_dict()))

    begun = on_each_rank(range(data_ranks), first)

    def second():
        loader = make(
            mesh(list(range(other_ranks))), other_ranks * each, balance, seed=3
        )
        loader.load_state_dict(begun[0][1])
        with iter(loader) as batches:
            return rows_of(batches)

    rest = on_each_rank(range(other_ranks), second)
    delivered = [
        row
        for per_rank in (
            {rank: found for rank, (found, _) in begun.items()},
            rest,
        )
        for found in per_rank.values()
        for ids, valid in found
        for row, real in zip(ids, valid, strict=True)
        if real
    ]
    if begun[0][1]["epoch"] == 0 and not begun[0][1]["ended"]:
        assert sorted(delivered) == list(range(61))


def test_certificate_is_exact_and_the_imbalance_is_counted():
    loader = make(ONE, 8, COSTS)
    with iter(loader) as batches:
        rows_of(batches)
    assert loader.certificate().exact
    assert loader.stats.total.imbalance == 1.0

    two = make(mesh([0, 1]), 8, COSTS, tail="drop")
    with iter(two) as batches:
        rows_of(batches)
    costs = two.stats.total
    assert 1.0 <= costs.imbalance < 1.2
    assert two.stats.scalars()["data/imbalance"] == costs.imbalance
    batches = on_each_rank(
        [0, 1], lambda: indices_of(make(mesh([0, 1]), 8, COSTS, tail="drop"))
    )
    largest = sum(
        max(COSTS[batches[0][step]].sum(), COSTS[batches[1][step]].sum())
        for step in range(7)
    )
    assert np.isclose(costs.largest_cost, largest)


def test_mixture_has_costs_by_a_function_of_ids():
    sources = {
        "web": Made(length=20),
        "code": Made(lambda i: np.array(100 + i), 9),
    }
    mixture = Mixture(sources, {"web": 2, "code": 1}, num_samples=30)
    web, code = COSTS[:20], COSTS[20:29]

    def balance(ids):
        return [
            {"web": web, "code": code}[name][at]
            for name, at in map(mixture.sample_name, ids)
        ]

    known = {
        **dict(enumerate(web)),
        **{100 + i: cost for i, cost in enumerate(code)},
    }

    def run(balance):
        with iter(make(mesh([0, 1]), 6, balance, data=mixture)) as batches:
            return [ids for ids, _ in rows_of(batches)]

    dealt, plain = (
        on_each_rank([0, 1], lambda balance=balance: run(balance))
        for balance in (balance, None)
    )
    for step in range(5):
        assert sorted(dealt[0][step] + dealt[1][step]) == sorted(
            plain[0][step] + plain[1][step]
        )
        largest = [
            max(sum(known[row] for row in side[rank][step]) for rank in (0, 1))
            for side in (dealt, plain)
        ]
        assert largest[0] <= largest[1] * (1 + 1e-5)
    with pytest.raises(
        ArgumentError, match="for a Mixture, it must be a function of ids"
    ):
        make(ONE, 6, web, data=mixture)


def test_batches_of_an_own_sampler_are_dealt():
    lengths = np.random.default_rng(0).integers(1, 99, 60)

    def run(balance):
        sampler = BucketBatchSampler(lengths, max_tokens=400, multiple_of=2)
        given = DataLoader(Made(length=60), batch_sampler=sampler)
        with iter(sharded(given, mesh([0, 1]), balance=balance)) as batches:
            return [ids for ids, _ in rows_of(batches)]

    dealt, plain = (
        on_each_rank([0, 1], lambda balance=balance: run(balance))
        for balance in (lengths, None)
    )
    assert len(dealt[0]) == len(plain[0])
    for step in range(len(plain[0])):
        assert sorted(dealt[0][step] + dealt[1][step]) == sorted(
            plain[0][step] + plain[1][step]
        )


class Endless(IterableDataset):
    def __iter__(self):
        return iter([np.arange(2)])


@pytest.mark.parametrize(
    ("balance", "error", "says"),
    [
        ("length", ArgumentError, "balance must be a function of ids"),
        (3.0, ArgumentError, "balance must be a function"),
        (
            np.ones(60),
            ArgumentError,
            "for each sample (61 here), got float64 of shape (60,)",
        ),
        (
            np.array(["1"] * 61),
            ArgumentError,
            "balance must be a function of ids, or one number for each sample",
        ),
        (np.ones((61, 1, 1)), ArgumentError, r"of shape (61, 1, 1)"),
        (
            [1.0] * 60 + [-1.0],
            ArgumentError,
            "a cost must be a number >= 0, got -1.0 for sample 60",
        ),
        (
            [float("nan")] * 61,
            ArgumentError,
            "a cost must be a number >= 0, got nan for sample 0",
        ),
    ],
)
def test_bad_costs_are_named_at_once(balance, error, says):
    with pytest.raises(error) as caught:
        make(ONE, 6, balance)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda ids: 1.0, "got float64 of shape ()"),
        (lambda ids: ["a"] * len(ids), "got <U1"),
        (
            lambda ids: -np.ones(len(ids)),
            "a cost must be a number >= 0, got -1.0 for sample",
        ),
    ],
)
def test_balance_function_results_are_checked(function, says):
    with pytest.raises(ArgumentError) as caught:
        next(iter(make(mesh([0, 1]), 6, function)))
    assert says in str(caught.value)


def test_function_may_change_the_ids_that_it_is_given():
    def costs(ids):
        ids *= 0
        return np.ones(len(ids))

    loader = make(mesh([0, 1]), 6, costs, tail="drop")
    with iter(loader) as batches:
        assert len({row for ids, _ in rows_of(batches) for row in ids}) == 30


@pytest.mark.parametrize(
    ("loader", "options", "says"),
    [
        (
            DataLoader(Endless(), batch_size=2),
            {},
            "samples have no number",
        ),
        (DataLoader(Made(), batch_size=None), {}, "each item is a whole batch"),
        (
            DataLoader(Made(), batch_size=2),
            {"is_dataset_splitted": True},
            "is split already",
        ),
    ],
)
def test_balance_is_refused_where_rows_cannot_be_dealt(loader, options, says):
    with pytest.raises(ArgumentError) as caught:
        sharded(loader, ONE, balance=np.ones(16), **options)
    assert says in str(caught.value)
