"""A short run of the simulated disk; `make simulate` runs it for as long as one likes."""

import pytest

from tests.simulation import disk, disk_defects
from tests.simulation.seeds import planted
from tests.trials import trials

CAUGHT_BY = {
    "syncs_no_files": (100, 101),
    "syncs_no_directories": (100, 101),
    "syncs_only_the_nearest": (100, 102),
    "renames_before_the_data": (100, 101),
    "marks_first": (100, 101),
    "knows_no_fence": (103, 105),
    "shares_a_generation": (113, 140),
    "looks_once": (127,),
    "looks_on_each_rank": (105, 137),
    "counts_what_has_failed": (126, 129),
    "cleans_before_the_end": (102, 105),
    "deletes_the_manifest_last": (474,),
    "takes_errors_for_nothing": (189, 206),
    "syncs_no_lines": (100, 101),
    "keeps_half_lines": (123, 132),
}
"""Defect -> seeds that catch it; `python -m tests.simulation.disk --defect NAME` finds others."""
FAULTS = (
    "syncs_only_the_nearest",
    "looks_once",
    "counts_what_has_failed",
    "takes_errors_for_nothing",
    "syncs_no_lines",
)
"""Defects that `Checkpoints` and the record once had."""


def test_checkpoints_and_record_outlast_simulated_crashes():
    for seed in range(trials(80)):
        disk.run(seed)


def test_load_looks_again_if_a_failed_save_is_deleted_meanwhile():
    disk.run(6097)


@pytest.mark.parametrize("fault", FAULTS)
def test_seeds_that_once_failed_keep_what_was_acknowledged(fault):
    for seed in CAUGHT_BY[fault]:
        disk.run(seed)


def test_simulated_disk_keeps_acknowledged_saves_at_any_crash():
    calls, states = disk.explore(2, 1)
    assert states > calls > 100


def test_simulated_disk_replays_from_its_seed():
    assert disk.run(17) == disk.run(17)


@pytest.mark.parametrize("defect", disk_defects.DEFECTS)
def test_simulated_disk_catches_a_planted_defect(defect):
    with planted(disk_defects.DEFECTS, defect):
        for seed in CAUGHT_BY[defect]:
            with pytest.raises(disk.Failed):
                disk.run(seed)
