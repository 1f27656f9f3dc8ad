import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.plan import shuffle as module
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation, Permutations
from tests.trials import trials


def key(source, epoch):
    return derive_key("source", source, epoch, size=64)


LENGTHS = st.one_of(
    st.integers(1, 9), st.integers(4000, 4200), st.integers(1, 10**12), st.just(2**40)
)


@settings(max_examples=trials(60))
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=12),
    calls=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    most=st.sampled_from([module.MAX_ENTRIES, 5]),
    seed=st.integers(0, 2**32),
)
@example(lengths=[1], calls=[3], most=5, seed=0)
def test_entry_by_entry_it_is_the_permutation_of_each_epoch(lengths, calls, most, seed):
    drawn = np.random.default_rng(seed)
    many = Permutations(len(lengths), key)
    before, module.MAX_ENTRIES = (
        module.MAX_ENTRIES,
        most,
    )  # few entries: tables are thrown away and drawn again
    try:
        for size in calls:
            sources = drawn.integers(0, len(lengths), size)
            epochs = drawn.integers(0, 4, size)
            own = np.array(lengths, np.int64)[sources]
            places = drawn.integers(0, own)
            found = many(sources, epochs, own, places)
            for at in range(0, size, 1 + size // 25):
                one = Permutation(int(own[at]), key(int(sources[at]), int(epochs[at])))
                assert one(places[at : at + 1])[0] == found[at]
                assert one.inverse(found[at : at + 1])[0] == places[at]
    finally:
        module.MAX_ENTRIES = before
