from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard.core.randomness import (
    NumpyGenerator,
    PrivateRandomness,
    PythonGenerator,
)
from paddle_shard.data.samplers.user_batches import UserBatches
from paddle_shard.errors import ArgumentError, ArgumentTypeError, BatchSizeError
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import find_tail

BOTH = (NumpyGenerator(), PythonGenerator())


class Batches:
    def __init__(self, *batches, **attributes):
        self.batches = batches
        vars(self).update(attributes)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def user_batches(**options):
    defaults = {
        "nominal_size": None,
        "num_steps": None,
        "accumulation": 1,
        "seed": 0,
        "generators": (),
        "around": nullcontext,
        "takes_epoch": False,
        "consecutive": False,
        "dataset": None,
        "lengths": {},
        "balance_rows": None,
        "rank_seed": (),
    }
    return UserBatches(**{**defaults, **options})


def ids_and_padding(batch):
    return list(
        batch.take(range(batch.num_rows))
    ), batch.num_rows - batch.num_positions


def served(*batches, ranks=2, tail="pad", nominal=None):
    source = user_batches(
        batch_sampler=Batches(*batches),
        num_data_ranks=ranks,
        tail=find_tail(tail),
        nominal_size=nominal,
    )
    found = [ids_and_padding(batch) for batch in source.batches(LoaderState())]
    assert source.known_steps(LoaderState()) in (None, len(found))
    return found


@pytest.mark.parametrize(
    ("tail", "nominal", "last"),
    [
        ("pad", None, ([8, 5, 3, 8], 1)),  # up to an even split
        ("pad", 4, ([8, 5, 3, 8], 1)),
        ("fill", 4, ([8, 5, 3, 8], 1)),
        ("drop", 4, None),
        ("drop", None, None),
    ],
)
def test_short_last_batch_gets_the_tail(tail, nominal, last):
    found = served([1, 2, 9, 4], [8, 5, 3], tail=tail, nominal=nominal)

    assert found == [([1, 2, 9, 4], 0)] + ([last] if last else [])


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    ranks=st.integers(1, 3),
    nominal=st.sampled_from([None, 4, 12]),
)
def test_user_batches_of_a_sampler_with_drop_last_are_whole(
    sizes, ranks, nominal
):
    """Buckets and token budgets end on a batch that is smaller than the nominal size, and mean it."""
    ids = iter(range(100))
    batches = [[next(ids) for _ in range(size * ranks)] for size in sizes]
    sampler = Batches(*batches, drop_last=True)
    source = user_batches(
        batch_sampler=sampler,
        num_data_ranks=ranks,
        tail=find_tail("drop"),
        nominal_size=nominal,
    )

    assert [
        ids_and_padding(batch)[0] for batch in source.batches(LoaderState())
    ] == batches
    assert source.known_steps(LoaderState()) == len(batches)


def test_user_batches_refuse_an_uneven_last_batch():
    sampler = Batches([1, 2], [3], drop_last=True)

    with pytest.raises(
        BatchSizeError,
        match="batch of 1 cannot .* step 1 of the batch_sampler Batches",
    ):
        list(
            user_batches(
                batch_sampler=sampler, num_data_ranks=2, tail=find_tail("drop")
            ).batches(LoaderState())
        )


def test_fill_goes_up_to_the_nominal_size_and_round_the_batch():
    assert served([7, 8], tail="fill", nominal=6) == [([7, 8, 7, 8, 7, 8], 4)]
    assert served([7], ranks=4, tail="pad") == [([7, 7, 7, 7], 3)]


def test_user_batches_may_have_other_sizes_that_divide():
    assert served([1, 2], [3, 4, 5, 6], [7, 8]) == [
        ([1, 2], 0),
        ([3, 4, 5, 6], 0),
        ([7, 8], 0),
    ]


def test_batch_in_the_middle_that_does_not_divide_is_refused():
    with pytest.raises(
        BatchSizeError,
        match=r"batch of 3 cannot .* step 1 of the batch_sampler Batches",
    ):
        served([1, 2], [3, 4, 5], [7, 8])


def test_tail_error_refuses_a_short_last_batch():
    with pytest.raises(
        ArgumentError,
        match=r"the last batch of the batch_sampler \(step 1\) is short with 1",
    ):
        served([1, 2], [3], tail="error")


@pytest.mark.parametrize("bad", [3, "ab", {1, 2}])
def test_user_batches_refuse_what_is_no_list_of_indices(bad):
    with pytest.raises(ArgumentTypeError, match="must yield lists of indices"):
        served(bad)


def test_empty_batch_is_refused():
    with pytest.raises(ArgumentError, match="empty batch at step 0"):
        served([])


def test_indices_may_be_anything_and_numpy_ints_become_ints():
    assert served(["a", ("b", 1)]) == [(["a", ("b", 1)], 0)]
    assert served(np.array([1, 2])) == [([1, 2], 0)]
    assert all(
        type(index) is int for index in served([np.int64(1), np.int32(2)])[0][0]
    )


def test_sampler_without_a_length_still_serves():
    class Unsized:
        def __iter__(self):
            return iter([[0, 1], [2, 3]])

    source = user_batches(
        batch_sampler=Unsized(), num_data_ranks=2, tail=find_tail("pad")
    )

    assert source.known_steps(LoaderState()) is None
    assert [
        ids_and_padding(batch)[0] for batch in source.batches(LoaderState())
    ] == [
        [0, 1],
        [2, 3],
    ]


class Draws:
    """Draws its batches one by one from numpy's global generator."""

    def __iter__(self):
        for _ in range(3):
            yield np.random.permutation(1000)[:4].tolist()


def test_user_batches_draw_alike_and_restore_the_generator():
    def orders(global_seed, seed=0, epoch=0, interleave=False):
        np.random.seed(global_seed)
        before = np.random.get_state()[1].tolist()
        source = user_batches(
            batch_sampler=Draws(),
            num_data_ranks=2,
            tail=find_tail("pad"),
            generators=BOTH,
            seed=seed,
        )
        found = []
        for batch in source.batches(LoaderState(epoch=epoch)):
            found.append(ids_and_padding(batch)[0])
            if interleave:
                np.random.rand(3)
        if not interleave:
            assert np.random.get_state()[1].tolist() == before
        return found

    assert orders(1) == orders(2) == orders(3, interleave=True)
    assert orders(1) != orders(1, seed=1)
    assert orders(1) != orders(1, epoch=1)


def test_private_randomness_goes_on_where_it_was():
    private = PrivateRandomness(BOTH, 5)
    drawn = []
    for _ in range(3):
        with private():
            drawn.append(np.random.rand())
        np.random.rand()
    with PrivateRandomness(BOTH, 5)():
        straight = np.random.rand(3).tolist()

    assert drawn == straight


def test_generators_are_put_back_when_drawing_fails():
    np.random.seed(1)
    expected = np.random.rand()
    np.random.seed(1)
    with pytest.raises(ZeroDivisionError), PrivateRandomness(BOTH, 5)():
        _ = 1 / 0

    assert np.random.rand() == expected
