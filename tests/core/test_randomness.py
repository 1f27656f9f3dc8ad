import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard.core.randomness import NumpyGenerator, PythonGenerator, kept

DRAWS = {
    "numpy": [
        lambda: np.random.rand(),
        # 624 words: back to the same place in the next table
        lambda: np.random.rand(312),
        lambda: np.random.randn(),
        lambda: np.random.randint(5),
        lambda: np.random.shuffle([1, 2, 3]),
        lambda: np.random.seed(3),
    ],
    "python": [
        lambda: random.random(),
        lambda: [random.random() for _ in range(312)],
        lambda: random.gauss(0, 1),
        lambda: random.shuffle([1, 2, 3]),
        lambda: random.seed(3),
    ],
}
GENERATORS = {"numpy": NumpyGenerator(), "python": PythonGenerator()}


@pytest.mark.parametrize("name", ["numpy", "python"])
@given(
    seed=st.integers(0, 2**64 - 1),
    before=st.integers(0, 700),
    which=st.integers(0, 5),
)
def test_generator_state_changes_with_every_draw(name, seed, before, which):
    generator = GENERATORS[name]
    generator.seed(seed)
    for _ in range(before):
        DRAWS[name][0]()
    before = generator.get_state()
    assert generator.get_state() == before

    DRAWS[name][which % len(DRAWS[name])]()

    assert generator.get_state() != before


@pytest.mark.parametrize("name", ["numpy", "python"])
@given(seed=st.integers(0, 1000), ahead=st.booleans(), which=st.integers(-1, 5))
def test_generator_state_includes_the_stored_gaussian(name, seed, ahead, which):
    gauss = np.random.randn if name == "numpy" else lambda: random.gauss(0, 1)
    generator = GENERATORS[name]
    generator.seed(seed)
    if ahead:
        gauss()
    expected = [gauss() for _ in range(3)]

    generator.seed(seed)
    if ahead:
        gauss()
    with kept([generator]):
        if which >= 0:
            gauss()
            DRAWS[name][which % len(DRAWS[name])]()

    assert [gauss() for _ in range(3)] == expected


def test_seeded_draws_do_not_use_the_users_stored_gaussian():
    np.random.seed(1)
    np.random.randn()  # a second one is kept for the next call
    with kept([GENERATORS["numpy"]]):
        before = GENERATORS["numpy"].get_state()
        np.random.randn()
        assert GENERATORS["numpy"].get_state() != before
