"""SFT and DPO of PaddleFormers 1.2.0, whole and unedited, over its own data sets: each row once, losses of one process.

The oracle is one process that reads the package's data set, collates each rank's slice by the package's function, and
trains on the mean of the losses of all slices, as this trainer does; and plain Paddle, where that splits the data.
"""

import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_shard.testing import RanksFailed
from tests.deadlines import HANG
from tests.jobs import launch_ranks
from tests.trainers import tuning_worker as worker

if os.environ["PADDLE_SHARD_TRAINER"] != "paddleformers":
    pytest.skip("of PaddleFormers 1.2.0", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # the package is imported here, too

MAP, ITERATOR = {"dataset": "map"}, {"dataset": "iterator", "steps": 6}
CASES = {
    "sft": {"task": "sft", **MAP, "save_steps": 2},
    "sft, workers": {"task": "sft", **MAP, "workers": 2},
    "sft, bins": {"task": "sft", **MAP, "packing": "bins"},
    "dpo": {"task": "dpo", **MAP},
    "dpo, reference model": {"task": "dpo", **MAP, "reference": True},
    "dpo, packed": {"task": "dpo", **MAP, "packing": "base", "save_steps": 2},
    "sft stream": {"task": "sft", **ITERATOR},
    "sft stream, packed": {"task": "sft", **ITERATOR, "packing": "base"},
    "sft stream, greedy": {"task": "sft", **ITERATOR, "packing": "greedy", "save_steps": 2},
    "sft stream, bins, workers": {"task": "sft", **ITERATOR, "packing": "bins", "workers": 2},
    "dpo stream": {"task": "dpo", **ITERATOR},
    "dpo stream, packed": {"task": "dpo", **ITERATOR, "packing": "base"},
    "dpo stream, greedy": {"task": "dpo", **ITERATOR, "packing": "greedy", "save_steps": 2},
}
IS_MAP = [name for name, case in CASES.items() if case["dataset"] == "map"]


def tuned(folder, cases, num_ranks=2, rows=None):
    """{case: [[(items, loss) of each rank]] of each step}."""
    options = {"out": str(folder), "rows": str(rows or folder / "rows"), "cases": cases}
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    args = [json.dumps(options)]
    for attempt in range(1, 4):
        try:
            reports = launch_ranks(worker.__file__, num_ranks, folder / "run", args=args, env=env, timeout=3 * HANG)
            break
        except RanksFailed as failed:  # gloo, when the trainer makes its dozen groups
            if "Connection refused" not in str(failed) or attempt == 3:
                raise
    return {name: list(zip(*(report[name] for report in reports), strict=True)) for name in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("straight")
    worker.write_rows(made / "rows")
    return made


@pytest.fixture(scope="module")
def straight(folder):
    """Steps of each case, and of plain Paddle where it splits the data."""
    return tuned(folder, {**CASES, **{f"plain {name}": {**CASES[name], "plain": True} for name in IS_MAP}})


def slices_of(case, folder, num_ranks=2):
    """The items that each rank should read at each step, as the data set gives them to one process."""
    data, found = worker.dataset(case, folder / "rows"), []
    if case["dataset"] == "map":
        items = [data[i] for i in range(len(data))]
        items += items[: -len(items) % num_ranks]  # Paddle's padding
        batches = [items[first : first + worker.BATCH] for first in range(0, len(items), worker.BATCH)] * 2
    else:
        items = list(itertools.islice(data, case["steps"] * worker.BATCH))
        batches = [items[first : first + worker.BATCH] for first in range(0, len(items), worker.BATCH)]
    for batch in batches:
        per_rank = len(batch) // num_ranks
        found.append([batch[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)])
    return found


def rows_of(item):
    return [token - worker.FIRST for row in item for token in row.token_ids if 0 <= token - worker.FIRST < worker.ROWS]


def losses_of_one_process(case, steps):
    """What each slice of each step loses in one process."""
    layer, collate, losses = worker.toy(case.get("reference")), worker.collate_of(case), []
    loss_of = worker.loss_of(case, layer)
    optimizer = paddle.optimizer.AdamW(learning_rate=1e-2, parameters=layer.parameters(), weight_decay=0.0)
    for slices in steps:
        batches = [{name: paddle.to_tensor(field) for name, field in collate(items).items()} for items in slices]
        of_slices = [loss_of(batch) for batch in batches]
        (sum(of_slices) / len(of_slices)).backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append([float(loss) for loss in of_slices])
    return losses


def items(steps):
    return [[rows for rows, _ in ranks] for ranks in steps]


def losses(steps):
    return [[loss for _, loss in ranks] for ranks in steps]


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_train_on_each_item_of_the_data_set_once_and_lose_what_one_process_loses(name, straight, folder):
    expected = slices_of(CASES[name], folder)

    assert items(straight[name]) == [[[rows_of(item) for item in one] for one in slices] for slices in expected]
    assert np.allclose(losses(straight[name]), losses_of_one_process(CASES[name], expected), atol=1e-5)
    if name in ("sft", "sft, bins", "dpo, packed"):  # without packing, the data set of DPO gives its last row twice
        epoch = [row for step in items(straight[name]) for one in step for item in one for row in item]
        assert set(epoch) == set(range(worker.ROWS))


@pytest.mark.parametrize("name", IS_MAP)
def test_items_and_losses_of_a_map_are_plain_paddles(name, straight):
    assert items(straight[name]) == items(straight[f"plain {name}"])
    assert np.allclose(losses(straight[name]), losses(straight[f"plain {name}"]), atol=1e-5)


def test_a_killed_run_and_others_go_on_with_the_next_item(straight, folder, tmp_path):
    name = "sft stream, greedy"
    with pytest.raises(RanksFailed, match=f"-{signal.SIGKILL:d}"):
        tuned(tmp_path / "killed", {name: {**CASES[name], "die_at": 3}}, rows=folder / "rows")
    saved = dict.fromkeys([("sft", 2), ("sft", 4), ("dpo, packed", 2), ("dpo stream, greedy", 4)], folder)
    saved[name, 2] = tmp_path / "killed"
    resumed = {
        f"{one} {at}": {**CASES[one], "resume": str(of / one / f"checkpoint-{at}")} for (one, at), of in saved.items()
    }

    found = tuned(tmp_path, resumed, rows=folder / "rows")

    for one, at in saved:
        assert items(found[f"{one} {at}"]) == items(straight[one][at:])
        assert np.allclose(losses(found[f"{one} {at}"]), losses(straight[one][at:]), atol=1e-5)


def test_a_run_of_two_ranks_goes_on_with_three(straight, folder, tmp_path):
    names = [name for name, case in CASES.items() if "save_steps" in case]
    saved = {name: {**CASES[name], "resume": str(folder / name / "checkpoint-2")} for name in names}

    found = tuned(tmp_path, saved, num_ranks=3, rows=folder / "rows")

    for name in names:
        expected = slices_of(CASES[name], folder)[:2] + slices_of(CASES[name], folder, num_ranks=3)[2:]
        assert items(found[name]) == [[[rows_of(item) for item in one] for one in slices] for slices in expected[2:]]
        # The weights are back. Later losses are the trainer's, which does not get all of the optimizer's state back.
        assert np.allclose(losses(found[name])[0], losses_of_one_process(CASES[name], expected)[2], atol=1e-5)
