import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation, SourcePermutations
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
    seed=st.integers(0, 2**32),
)
@example(lengths=[1], calls=[3], seed=0)
@example(lengths=[2**50, (2**26 - 1) ** 2, (2**26 - 1) ** 2 + 1], calls=[9], seed=0)
def test_source_permutations_are_those_of_each_epoch(lengths, calls, seed):
    drawn = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int64)
    permutations = SourcePermutations(lengths, key)
    for size in calls:
        sources = drawn.integers(0, len(lengths), size)
        epochs = drawn.integers(0, 4, size)
        places = drawn.integers(0, lengths[sources])
        samples = permutations(sources, epochs, places)
        for at in range(0, size, 1 + size // 25):
            source, epoch = int(sources[at]), int(epochs[at])
            alone = Permutation(int(lengths[source]), key(source, epoch))
            assert alone(places[at : at + 1])[0] == samples[at]
            assert alone.inverse(samples[at : at + 1])[0] == places[at]
