"""SFT and DPO of PaddleFormers, whole and unedited, over its own data sets: each row once, losses of one process.

The oracle is one process that reads the package's data set and trains on it, collated by the package's function; and
plain Paddle, where that splits the data. 1.2.0 trains on the mean of what the slices lose, 0.4.1 on the global batch.
"""

import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import paddle
import pytest

import paddle_shard
from paddle_shard.testing import RanksFailed
from tests.deadlines import HANG
from tests.jobs import launch_ranks
from tests.trainers import tuning_auto_worker, tuning_worker
from tests.trainers.tuning_worker import BATCH, FIRST, ROWS, write_rows

TRAINER = os.environ["PADDLE_SHARD_TRAINER"]
if TRAINER == "paddlenlp":
    pytest.skip("of PaddleFormers", allow_module_level=True)
OF_SLICES = TRAINER == "paddleformers"
worker = tuning_worker if OF_SLICES else tuning_auto_worker

# the package is imported here, too
pytestmark = pytest.mark.filterwarnings("ignore")

MAP, ITERATOR = {"dataset": "map"}, {"dataset": "iterator", "steps": 6}
SAVED = {"save_steps": 2}
CASES = {  # of 1.2.0
    "sft": {"task": "sft", **MAP, **SAVED, "evaluate": True},
    "sft, shuffle": {"task": "sft", **MAP, "shuffle": True},
    "sft, workers": {"task": "sft", **MAP, "workers": 2},
    "sft, bins": {"task": "sft", **MAP, "packing": "bins"},
    "dpo": {"task": "dpo", **MAP},
    "dpo, reference model": {"task": "dpo", **MAP, "reference": True},
    "dpo, packed": {"task": "dpo", **MAP, "packing": "base", **SAVED},
    "sft stream": {"task": "sft", **ITERATOR},
    "sft stream, packed": {"task": "sft", **ITERATOR, "packing": "base"},
    "sft stream, greedy": {
        "task": "sft",
        **ITERATOR,
        "packing": "greedy",
        **SAVED,
    },
    "sft stream, bins, workers": {
        "task": "sft",
        **ITERATOR,
        "packing": "bins",
        "workers": 2,
    },
    "dpo stream": {"task": "dpo", **ITERATOR},
    "dpo stream, packed": {"task": "dpo", **ITERATOR, "packing": "base"},
    "dpo stream, greedy": {
        "task": "dpo",
        **ITERATOR,
        "packing": "greedy",
        **SAVED,
    },
}
if not OF_SLICES:
    CASES = {
        "sft": {"task": "sft", **MAP, **SAVED, "evaluate": True},
        "sft, static": {"task": "sft", **MAP, **SAVED, "static": True},
        "sft, ragged": {"task": "sft", **MAP, "ragged": True},
        "sft, shuffled": {"task": "sft", **MAP, "shuffle": True},
        "sft stream": {"task": "sft", **ITERATOR},
        "sft stream, packed": {"task": "sft", **ITERATOR, "packing": "base"},
        "sft stream, greedy": {
            "task": "sft",
            **ITERATOR,
            "packing": "greedy",
            **SAVED,
        },
    }
LIKE_PLAIN = [
    name
    for name in CASES
    if "stream" not in name and name not in ("sft, ragged", "sft, shuffled")
]


def tuned(folder, cases, num_ranks=2, rows=None):
    """{case: [[(items, loss) of each rank]] of each step}."""
    options = {
        "out": str(folder),
        "rows": str(rows or folder / "rows"),
        "cases": cases,
    }
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    args = [json.dumps(options)]
    for attempt in range(1, 4):
        try:
            reports = launch_ranks(
                worker.__file__,
                num_ranks,
                folder / "run",
                args=args,
                env=env,
                timeout=3 * HANG,
            )
            break
        except RanksFailed as failed:
            # gloo, when the trainer makes its dozen groups
            if "Connection refused" not in str(failed) or attempt == 3:
                raise
    return {
        name: list(zip(*(report[name] for report in reports), strict=True))
        for name in reports[0]
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("straight")
    write_rows(made / "rows")
    return made


@pytest.fixture(scope="module")
def straight(folder):
    """Steps of each case, and of plain Paddle where it can do them."""
    plain = [*LIKE_PLAIN, *(["sft stream"] if OF_SLICES else [])]
    others = {
        f"plain {name}": {**CASES[name], "plain": True, "evaluate": False}
        for name in plain
    }
    return tuned(folder, {**CASES, **others})


def slices_of(case, folder, num_ranks=2):
    """The items that each rank should read at each step, as the data set gives them to one process."""
    data, found = worker.dataset(case, folder / "rows"), []
    if case["dataset"] == "map":
        plan = paddle_shard.ShardPlan(
            num_samples=len(data),
            batch_size=BATCH,
            num_data_ranks=1,
            shuffle=case.get("shuffle", False) and not OF_SLICES,
        )
        epochs = [
            [data[i] for i in plan.samples(epoch=epoch, first=0, end=len(data))]
            for epoch in range(2)
        ]
        # Paddle's padding
        epochs = [
            [*epoch, *epoch[: -len(epoch) % num_ranks]] for epoch in epochs
        ]
    else:
        epochs = [list(itertools.islice(data, case["steps"] * BATCH))]
    for batch in (
        epoch[first : first + BATCH]
        for epoch in epochs
        for first in range(0, len(epoch), BATCH)
    ):
        per_rank = len(batch) // num_ranks
        found.append(
            [
                batch[rank * per_rank : (rank + 1) * per_rank]
                for rank in range(num_ranks)
            ]
        )
    return found


def rows_of(item):
    tokens = (
        item["input_ids"]
        if isinstance(item, dict)
        else [token for row in item for token in row.token_ids]
    )
    return [token - FIRST for token in tokens if 0 <= token - FIRST < ROWS]


def losses_of_one_process(case, steps, rows=()):
    """What each slice of each step loses in one process; and then, what each of some rows loses."""
    layer, collate, losses = (
        worker.toy(case.get("reference")),
        worker.collate_of(case),
        [],
    )
    loss_of = worker.loss_of(case, layer)
    optimizer = paddle.optimizer.AdamW(
        learning_rate=1e-2, parameters=layer.parameters(), weight_decay=0.0
    )
    for slices in steps:
        of_slices = []
        for one in slices if OF_SLICES else [list(itertools.chain(*slices))]:
            of_slices.append(
                loss_of(
                    {
                        name: paddle.to_tensor(field)
                        for name, field in collate(one).items()
                    }
                )
            )
        (sum(of_slices) / len(of_slices)).backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(
            [float(loss) for loss in of_slices]
            * (1 if OF_SLICES else len(slices))
        )
    if rows:
        return [
            float(
                loss_of(
                    {
                        name: paddle.to_tensor(field)
                        for name, field in collate([row]).items()
                    }
                )
            )
            for row in rows
        ]
    return losses


def items(steps):
    return [[rows for rows, _ in ranks] for ranks in steps]


def losses(steps):
    return [[loss for _, loss in ranks] for ranks in steps]


@pytest.mark.parametrize("name", CASES)
def test_tuning_has_each_item_once_and_equal_losses(name, straight, folder):
    expected = slices_of(CASES[name], folder)

    assert items(straight[name]) == [
        [[rows_of(item) for item in one] for one in slices]
        for slices in expected
    ]
    assert np.allclose(
        losses(straight[name]),
        losses_of_one_process(CASES[name], expected),
        atol=1e-5,
    )
    steps = items(straight[name])
    epoch = [
        row
        for step in steps[: len(steps) // 2]
        for one in step
        for item in one
        for row in item
    ]
    if name in (
        "sft",
        "sft, static",
        "sft, ragged",
        "sft, shuffled",
        "sft, workers",
    ):
        assert sorted(epoch) == list(range(ROWS))
    # and padding; the data set of DPO gives its last row twice
    if name in (
        "sft, bins",
        "dpo",
        "dpo, packed",
    ):
        assert set(epoch) == set(range(ROWS))


@pytest.mark.parametrize("name", LIKE_PLAIN)
def test_items_and_losses_of_a_map_are_plain_paddles(name, straight):
    assert items(straight[name]) == items(straight[f"plain {name}"])
    assert np.allclose(
        losses(straight[name]), losses(straight[f"plain {name}"]), atol=1e-5
    )


def test_tuning_evaluation_equals_that_of_one_process(straight, folder):
    data = worker.dataset(CASES["sft"], folder / "rows")
    rows = [data[i] for i in range(ROWS - 1)]

    of_rows = losses_of_one_process(
        CASES["sft"], slices_of(CASES["sft"], folder), rows
    )
    assert np.allclose(
        straight["rows"], np.stack([of_rows] * 2, axis=1), atol=1e-5
    )


@pytest.mark.skipif(
    not OF_SLICES,
    reason="plain Paddle has no streams there, and 0.4.1 shuffles if it is told to",
)
def test_tuning_on_a_stream_differs_by_rank_and_rejects_shuffle(
    straight, folder
):
    assert all(
        one == other for one, other in items(straight["plain sft stream"])
    )
    assert (
        "patch_paddle(shuffle=True) is left out"
        in (folder / "run" / "workerlog.0").read_text()
    )


def test_killed_run_and_others_go_on_with_the_next_item(
    straight, folder, tmp_path
):
    name = "dpo stream, greedy" if OF_SLICES else "sft stream, greedy"
    with pytest.raises(RanksFailed, match=f"-{signal.SIGKILL:d}"):
        tuned(
            tmp_path / "killed",
            {name: {**CASES[name], "die_at": 3}},
            rows=folder / "rows",
        )
    others = [
        ("sft", 2),
        ("sft", 6),
        ("sft, static", 4),
        ("dpo, packed", 2),
        ("sft stream, greedy", 4),
    ]
    saved = {(one, at): folder for one, at in others if one in CASES}
    saved[name, 2] = tmp_path / "killed"
    resumed = {
        f"{one} {at}": {
            **CASES[one],
            "resume": str(of / one / f"checkpoint-{at}"),
        }
        for (one, at), of in saved.items()
    }

    found = tuned(tmp_path, resumed, rows=folder / "rows")

    for one, at in saved:
        assert items(found[f"{one} {at}"]) == items(straight[one][at:])
        assert np.allclose(
            losses(found[f"{one} {at}"]), losses(straight[one][at:]), atol=1e-5
        )


def test_run_of_two_ranks_goes_on_with_three(straight, folder, tmp_path):
    names = [
        name
        for name, case in CASES.items()
        if "save_steps" in case and (OF_SLICES or "stream" not in name)
    ]
    saved = {
        name: {**CASES[name], "resume": str(folder / name / "checkpoint-2")}
        for name in names
    }

    found = tuned(tmp_path, saved, num_ranks=3, rows=folder / "rows")

    for name in names:
        expected = (
            slices_of(CASES[name], folder)[:2]
            + slices_of(CASES[name], folder, num_ranks=3)[2:]
        )
        assert items(found[name]) == [
            [[rows_of(item) for item in one] for one in slices]
            for slices in expected[2:]
        ]
        one_process = losses_of_one_process(CASES[name], expected)[2:]
        # The weights are back. 1.2.0 does not get all of the optimizer's state back, so that its later losses differ.
        known = 1 if OF_SLICES else None
        assert np.allclose(
            losses(found[name])[:known], one_process[:known], atol=1e-5
        )


@pytest.mark.skipif(
    OF_SLICES, reason="the trainer of 0.4.1 gives such a batch in lists"
)
def test_tuning_pairs_equal_plain_paddles_if_declared_as_read(
    tmp_path,
):
    cases = {
        "unsaid": {},
        "said": {"as read": True},
        "packed": {"as read": True, "packing": True},
        "plain": {"plain": True},
    }
    args = [
        json.dumps(
            {
                "out": "",
                "rows": "",
                "cases": {
                    name: {"task": "pairs", **case}
                    for name, case in cases.items()
                },
            }
        )
    ]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}

    for report in launch_ranks(
        worker.__file__, 2, tmp_path, args=args, env=env, timeout=3 * HANG
    ):
        assert report["said"] == report["plain"]
        assert (
            "field ['input_ids'][3] has shape [1] for 3 samples"
            in report["unsaid"]
        )
        assert "placements={field: 'as read'}" in report["unsaid"]
        # ranks have 4 and 5 pairs at step 0
        assert "as one for each pair of a packed sample" in report["packed"]
