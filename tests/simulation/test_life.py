"""A few lives of a run; `make simulate` lives them for as long as one likes."""

import hypothesis
import pytest
from hypothesis import HealthCheck

from tests.simulation import life, life_defects
from tests.simulation.seeds import planted
from tests.trials import trials

CAUGHT_BY = {}
"""Defect -> a seed that catches it soon; `python -m tests.simulation.life --defect NAME` finds others."""

TestLifeOfARun = life.LifeOfARun.TestCase
TestLifeOfARun.settings = hypothesis.settings(
    max_examples=trials(60),
    stateful_step_count=life.ACTS,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("defect", life_defects.DEFECTS)
def test_life_catches_a_planted_defect(defect):
    with planted(life_defects.DEFECTS, defect), pytest.raises(life.Failed):
        life.run(CAUGHT_BY.get(defect, 0))
