"""`SampleRng`: who uses the global generators."""

import random

import pytest

from paddle_shard.core.randomness import PythonGenerator
from paddle_shard.data.sample_rng import SampleRng


@pytest.mark.parametrize("declared", [True, False])
def test_sample_rng_keeps_the_declaration_after_a_plain_read(declared):
    """Two samples are read to know the data; they are seeded, whatever the data set has declared."""
    rng = SampleRng([PythonGenerator()], uses_rng=declared)
    with rng.reading(look=False, keep=True):
        rng.seed(7)
        assert random.random() == random.Random(7).random()
    assert rng.seeds is declared
