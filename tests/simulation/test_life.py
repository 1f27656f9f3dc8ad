"""A few lives of a run; `make simulate` lives them for as long as one likes."""

import pytest

from tests.simulation import life, life_defects
from tests.simulation.seeds import planted
from tests.trials import trials

CAUGHT_BY = {
    "counts_skipped_rows": 12,
    "forgets_what_was_delivered": 1,
    "counts_padding": 7,
    "rounds_down": 9,
    "skips_steps_of_the_epoch": 3,
    "forgets_the_cut": 8,
    "forgets_the_position": 6,
    "accepts_any_schedule": 2,
    "keeps_the_position": 1,
    "forgets_the_end": 9,
    "moved_by_old_iterators": 7,
}
"""Defect -> a seed that catches it soon; `python -m tests.simulation.life --defect NAME` finds others."""


def test_lives_of_a_run_are_those_of_the_documentation():
    for seed in range(60, 60 + trials(8) // 4):
        life.run(seed)


# Steps that another schedule had skipped counted as delivered; a rank could read none of its rows.
@pytest.mark.parametrize("seed", [103, 1111])
def test_seeds_of_lives_that_once_failed(seed):
    life.run(seed)


@pytest.mark.parametrize("defect", life_defects.DEFECTS)
def test_life_catches_a_planted_defect(defect):
    with planted(life_defects.DEFECTS, defect), pytest.raises(life.Failed):
        life.run(CAUGHT_BY.get(defect, 0))
