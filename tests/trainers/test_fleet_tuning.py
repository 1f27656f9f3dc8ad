"""SFT and DPO of PaddleFormers 1.2.0 in its default mode (fleet), whole and unedited, over its own data sets.

Without `patch_paddle()`, ranks lose what does not divide, and a resume with another number of ranks repeats rows.
"""

import os
import signal
from itertools import islice

import numpy as np
import pytest

if os.environ["PADDLE_SHARD_TRAINER"] != "paddleformers":
    pytest.skip("of PaddleFormers 1.2.0", allow_module_level=True)

from paddle_shard.testing import RanksFailed
from tests.trainers import tuning_worker
from tests.trainers.test_tuning import (
    CASES,
    items,
    losses,
    losses_of_one_process,
    rows_of,
    slices_of,
    tuned,
)
from tests.trainers.tuning_worker import BATCH, ROWS, write_rows

# the package is imported here, too
pytestmark = pytest.mark.filterwarnings("ignore")

FLEET = {"fleet": True, "evaluate": False, "save_steps": 2}
MAPS = ["sft", "sft, workers", "dpo", "dpo, packed"]
STREAMS = ["sft stream, greedy", "dpo stream, packed"]
RUNS = {name: {**CASES[name], **FLEET} for name in (*MAPS, *STREAMS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fleet")
    write_rows(made / "rows")
    return made


@pytest.fixture(scope="module")
def straight(folder):
    return tuned(folder, RUNS)


def items_of(name, folder):
    """The rows of each item of the data set, as one process sees it."""
    data = tuning_worker.dataset(CASES[name], folder / "rows")
    return sorted(rows_of(data[number]) for number in range(len(data)))


def flat(steps):
    return [item for ranks in items(steps) for one in ranks for item in one]


@pytest.mark.parametrize("name", MAPS)
def test_fleet_tuning_reads_each_item_once_an_epoch(name, straight, folder):
    steps = straight[name]
    expected = items_of(name, folder)
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        found = sorted(flat(epoch))
        assert len(found) == len(expected) + len(expected) % 2
        for item in expected:
            assert found.count(item) >= expected.count(item)


@pytest.mark.parametrize("name", STREAMS)
def test_fleet_tuning_reads_a_stream_in_its_order(name, straight, folder):
    assert items(straight[name]) == [
        [[rows_of(item) for item in one] for one in slices]
        for slices in slices_of(CASES[name], folder)
    ]


@pytest.mark.parametrize("name", [*MAPS, *STREAMS])
def test_fleet_tuning_has_the_losses_of_one_process(name, straight, folder):
    data = tuning_worker.dataset(CASES[name], folder / "rows")
    num_items = len(data) if name in MAPS else CASES[name]["steps"] * BATCH
    numbers = map(data.__getitem__, range(num_items)) if name in MAPS else data
    by_rows = {
        tuple(rows_of(item)): item for item in islice(numbers, num_items)
    }
    slices = [
        [[by_rows[tuple(rows)] for rows in one] for one in ranks]
        for ranks in items(straight[name])
    ]
    expected = losses_of_one_process(CASES[name], slices)
    assert np.allclose(losses(straight[name]), expected, atol=1e-5)


def test_fleet_tuning_resumes_with_the_next_item_after_sigkill(
    straight, folder, tmp_path
):
    name = "dpo, packed"
    with pytest.raises(RanksFailed, match=f"-{signal.SIGKILL:d}"):
        killed = {name: {**RUNS[name], "die_at": 3}}
        tuned(tmp_path / "killed", killed, rows=folder / "rows")
    saved = {
        (name, 2): tmp_path / "killed",
        ("sft", 2): folder,
        ("sft", 8): folder,
        ("sft stream, greedy", 4): folder,
    }
    runs = {
        f"{one} {at}": {
            **RUNS[one],
            "resume": str(of / one / f"checkpoint-{at}"),
        }
        for (one, at), of in saved.items()
    }
    found = tuned(tmp_path, runs, rows=folder / "rows")
    for one, at in saved:
        assert items(found[f"{one} {at}"]) == items(straight[one][at:])
        assert np.allclose(
            losses(found[f"{one} {at}"]), losses(straight[one][at:]), atol=1e-5
        )


def test_fleet_tuning_resumes_on_three_ranks(straight, folder, tmp_path):
    names = ["sft", "sft stream, greedy"]
    runs = {
        name: {**RUNS[name], "resume": str(folder / name / "checkpoint-2")}
        for name in names
    }
    found = tuned(tmp_path, runs, num_ranks=3, rows=folder / "rows")
    epoch = flat(straight["sft"][:2]) + flat(found["sft"][:4])
    assert sorted(epoch) == [[row] for row in range(ROWS)]
    stream = flat(straight["sft stream, greedy"])
    done = flat(straight["sft stream, greedy"][:2])
    assert done + flat(found["sft stream, greedy"]) == stream
