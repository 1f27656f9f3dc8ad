"""Trainers that nobody edits: each row once an epoch, and the losses of a plain loop over the same rows on one process.

`make test-trainers` runs this in an environment of each package, whose trainer PADDLE_SHARD_TRAINER names.
"""

import json
import os
from pathlib import Path

import numpy as np
import paddle
import pytest

from tests.deadlines import HANG
from tests.jobs import launch_ranks
from tests.trainers.trainer_worker import Loss, Rows, model

TRAINER = os.environ["PADDLE_SHARD_TRAINER"]
WORKER = Path(__file__).with_name("trainer_worker.py")
ROWS, STEPS = 40, 5
"""Rows of the data set, and steps of an epoch over it."""
STATIC = pytest.mark.skipif(
    TRAINER == "paddleformers", reason="this trainer refuses to_static"
)
MODES = [False, pytest.param(True, marks=STATIC, id="static")]


def each_trained(folder, runs):
    """[(rows, mean loss)] of each micro-step, over both ranks, for each of several runs."""
    runs = [
        {"name": TRAINER, "rows": ROWS, "out": str(folder / "out"), **options}
        for options in runs
    ]
    reports = launch_ranks(
        WORKER, 2, folder / "run", args=[json.dumps(runs)], timeout=3 * HANG
    )
    return [
        [(a[0] + b[0], (a[1] + b[1]) / 2) for a, b in zip(*ranks, strict=True)]
        for ranks in zip(*reports, strict=True)
    ]


def trained(folder, **options):
    return each_trained(folder, [options])[0]


@pytest.fixture(scope="module", params=MODES)
def straight(request, tmp_path_factory):
    """(static, folder, steps) of a run that saves at every third step."""
    folder = tmp_path_factory.mktemp("straight")
    return (
        request.param,
        folder,
        trained(folder, static=request.param, save_steps=3),
    )


def losses_of_a_plain_loop(steps, length, accumulation=1):
    """What one process loses that trains on the same rows."""
    layer, loss_of, data, losses = model(), Loss(), Rows(length), []
    optimizer = paddle.optimizer.AdamW(
        learning_rate=1e-2, parameters=layer.parameters(), weight_decay=0.0
    )
    for number, (rows, _) in enumerate(steps, start=1):
        samples = [data[row] for row in rows]
        tokens, labels = (
            paddle.to_tensor(np.stack([s[name] for s in samples]))
            for name in ("input_ids", "labels")
        )
        loss = loss_of(layer(tokens), labels)
        (loss / accumulation).backward()
        losses.append(float(loss))
        if number % accumulation == 0:
            optimizer.step()
            optimizer.clear_grad()
    return losses


def check_epochs(steps, length, per_epoch):
    assert len(steps) == 2 * per_epoch
    for first in (0, per_epoch):
        rows = [
            row for rows, _ in steps[first : first + per_epoch] for row in rows
        ]
        assert sorted(rows) == list(range(length))


def test_trainer_epochs_have_each_row_once_and_equal_losses(straight):
    _, _, steps = straight

    check_epochs(steps, ROWS, STEPS)
    # for which Paddle's DataLoader, in its automatic mode, replaces the sampler
    if TRAINER != "paddleformers":
        assert [rows for rows, _ in steps[:STEPS]] != [
            rows for rows, _ in steps[STEPS:]
        ]
    assert np.allclose(
        [loss for _, loss in steps],
        losses_of_a_plain_loop(steps, ROWS),
        atol=1e-5,
    )


def test_accumulation_takes_each_row_once_too(tmp_path):
    steps = trained(
        tmp_path, rows=2 * ROWS, accumulation=2, max_steps=2 * STEPS
    )

    check_epochs(steps, 2 * ROWS, 2 * STEPS)
    assert np.allclose(
        [loss for _, loss in steps],
        losses_of_a_plain_loop(steps, 2 * ROWS, accumulation=2),
        atol=1e-5,
    )


@pytest.mark.skipif(
    TRAINER != "paddleformers", reason="other trainers do not take such data"
)
@pytest.mark.parametrize("data", ["stream", "ragged"])
def test_stream_and_rows_of_several_lengths_are_each_row_once(data, tmp_path):
    check_epochs(trained(tmp_path, data=data), ROWS, STEPS)


@pytest.mark.skipif(
    TRAINER == "paddleformers",
    reason="in its mode Paddle's DataLoader replaces the sampler",
)
def test_trainer_sampler_skips_consumed_samples_once(
    tmp_path,
):
    steps = trained(tmp_path, consumed=0, save_steps=2)

    resume = str(tmp_path / "out" / "checkpoint-2")
    for rest in each_trained(
        tmp_path,
        [
            {"consumed": told, "resume": resume}
            for told in (0, 2 * ROWS // STEPS)
        ],
    ):
        assert [rows for rows, _ in rest] == [rows for rows, _ in steps[2:]]


def test_resumed_run_goes_on_with_the_next_row(straight, tmp_path):
    static, folder, steps = straight
    stops = 3, 6

    saved = [
        {"static": static, "resume": str(folder / "out" / f"checkpoint-{stop}")}
        for stop in stops
    ]
    # a process has one static program
    jobs = [[one] for one in saved] if static else [saved]
    found = [
        rest
        for number, runs in enumerate(jobs)
        for rest in each_trained(tmp_path / str(number), runs)
    ]
    for stop, rest in zip(stops, found, strict=True):
        assert [rows for rows, _ in rest] == [rows for rows, _ in steps[stop:]]
        assert np.allclose(
            [loss for _, loss in rest],
            [loss for _, loss in steps[stop:]],
            atol=1e-5,
        )
