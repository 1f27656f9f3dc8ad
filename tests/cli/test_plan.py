"""`paddle-shard plan`: what it shows is what loaders deliver."""

import json
import subprocess
import sys

import numpy as np
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader

from paddle_shard.extras.cli.main import COMMANDS, main
from paddle_shard.testing.simulated import on_each_rank
from tests.deadlines import HANG
from tests.helpers import Made, sharded
from tests.run.record_runs import asked

MESHES = [
    ("dp=2,mp=2", "dp", [[0, 1], [2, 3]], ["dp", "mp"]),
    ("mp=2,dp=2", "dp", [[0, 1], [2, 3]], ["mp", "dp"]),
    ("dp=2,sharding=2", "dp,sharding", [[0, 1], [2, 3]], ["dp", "sharding"]),
    ("sep=2,dp=2", "dp", [[0, 1], [2, 3]], ["sep", "dp"]),
]


def planned(capsys, *arguments):
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def given_to_ranks(data, batch_size, accumulation, ids, names, dims, **options):
    """[(ids, None for what is not real) of each rank] of each step."""
    mesh, shuffles = (
        dist.ProcessMesh(ids, dim_names=names),
        options.pop("shuffles"),
    )

    def rows():
        sampler = BatchSampler(data, batch_size=batch_size, shuffle=shuffles)
        sampler._acc_steps = accumulation
        batches = iter(
            sharded(
                DataLoader(data, batch_sampler=sampler), mesh, dims, **options
            )
        )
        found = []
        for batch in batches:
            values, valid = (
                one._local_value().numpy().reshape(-1).tolist()
                for one in (batch, batches.valid)
            )
            found.append(
                [
                    one if real else None
                    for one, real in zip(values, valid, strict=True)
                ]
            )
        return found

    return on_each_rank(range(4), rows)


RUNS = [
    (43, 8, 1, "pad", "True"),
    (43, 4, 2, "fill", "False"),
    (43, 8, 1, "drop", "paddle"),
    (41, 8, 1, "pad", "paddle"),
    (42, 8, 1, "fill", "True"),
    (70, 16, 4, "fill", "True"),
    (33, 8, 2, "pad", "True"),
]


@pytest.mark.parametrize(
    ("mesh", "run"),
    # Each run on two meshes, each mesh with three or four runs.
    [
        (MESHES[(at + 2 * turn) % 4], run)
        for at, run in enumerate(RUNS)
        for turn in (0, 1)
    ],
    ids=str,
)
def test_plan_is_what_loaders_deliver(mesh, run, capsys):
    text, axes, ids, names = mesh
    samples, batch_size, accumulation, tail, shuffle = run
    dims, how = (
        axes.split(","),
        {"True": {}, "False": {}, "paddle": {"shuffle": "paddle"}}[shuffle],
    )
    data = Made(lambda i: np.array([i]), samples)
    per_rank = given_to_ranks(
        data,
        batch_size,
        accumulation,
        ids,
        names,
        dims,
        tail=tail,
        shuffles=shuffle == "True",
        **how,
    )
    flags = (
        "--samples",
        samples,
        "--batch-size",
        batch_size,
        "--accumulation",
        accumulation,
        "--mesh",
        text,
    )
    flags = *flags, "--data-axes", axes, "--tail", tail, "--shuffle", shuffle

    found = planned(capsys, *flags)

    steps, real = len(per_rank[0]), found["plan"]
    groups = [group["ranks"] for group in found["meshes"]]
    assert real["steps of an epoch"] == steps
    for ranks in groups:
        assert all(per_rank[rank] == per_rank[ranks[0]] for rank in ranks)
    rows = [
        [row for ranks in groups for row in per_rank[ranks[0]][step]]
        for step in range(steps)
    ]
    assert real["rows of the last step"] == len(rows[-1])
    assert real["rows of a data rank"] == len(per_rank[0][0])
    assert (
        real["rows of padding in an epoch"]
        == sum(row is None for of_step in rows for row in of_step)
        or tail == "drop"
    )
    served = sum(row is not None for of_step in rows for row in of_step)
    assert real["samples dropped in an epoch"] == (
        samples - served if shuffle != "paddle" else 4 * (tail == "drop")
    )
    for step in {0, steps // 2, steps - 1}:
        for one in planned(capsys, *flags, "--step", step)["step"]:
            assert [per_rank[rank][step] for rank in one["ranks"]] == [
                one["samples"]
            ] * len(one["ranks"])


FINE = ["--samples", "64", "--batch-size", "8", "--mesh", "dp=4"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--samples", 64, "--batch-size", 6, "--mesh", "dp=4"],
            ["6 cannot be split evenly over 4", "4 or 8"],
        ),
        (
            [
                *FINE[:2],
                "--batch-size",
                10,
                "--accumulation",
                2,
                "--mesh",
                "dp=4",
            ],
            [
                "a global batch of 20 cannot be split evenly over 4 data ranks times 2 accumulation steps",
                "16 or 24",
            ],
        ),
        (
            [*FINE, "--tail", "error", "--samples", 70],
            ["70 samples do not fill the last batch of 8", "tail='pad'"],
        ),
        (["--samples", 0, *FINE[2:]], ["num_samples"]),
    ],
)
def test_plan_that_is_impossible_exits_with_2(flags, parts):
    text = asked("plan", *flags, code=2)
    assert all(part in text for part in parts)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            [*FINE[:4], "--mesh", "dp4"],
            "must be axes and sizes such as dp=4,mp=2, got 'dp4'",
        ),
        ([*FINE[:4], "--mesh", "dp=2,dp=2"], "different axes"),
        (
            ["--mesh", "dp=2"],
            "the following arguments are required: --batch-size",
        ),
        (
            ["--mesh", "dp=2", "--batch-size", "2"],
            "the following arguments are required: --samples",
        ),
        ([*FINE[:4], "--mesh", "mp=2"], "the mesh has no axis 'dp'"),
        ([*FINE, "--data-axes", "DP"], "the mesh has no axis 'DP'"),
        ([*FINE, "--step", "99"], "step must be in range"),
        (
            ["--batch-size", "many"],
            "argument --batch-size: invalid int value: 'many'",
        ),
        ([*FINE, "--batch-size", "0"], "batch_size must be an int >= 1, got 0"),
        (
            [*FINE, "--accumulation", "-2"],
            "batch_size must be an int >= 1, got -16",
        ),
        ([*FINE, "--step", "-1"], "step must be in range"),
    ],
)
def test_plan_bad_arguments_exit_with_2(flags, text):
    assert text in asked("plan", *flags, code=2)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_help_with_an_example(name):
    shown = asked(name, "--help")
    assert f"example: paddle-shard {name} " in shown.replace("\n", " ")
    assert "--json" in shown


def test_plan_page_that_cannot_be_written_exits_with_2():
    said = asked("plan", *FINE, "--html", "no/such/folder", code=2)
    assert "No such file or directory: " in said


def test_main_ends_quietly_when_its_reader_closes_the_pipe():
    command = f"{sys.executable} -m paddle_shard plan --samples 5000 --batch-size 4000 --mesh dp=2000 --step 0 --json"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (done.stdout, done.stderr) == ("{\n", "")
    assert done.returncode in (0, 1)


@pytest.mark.parametrize("flag", ["--html", "--svg"])
def test_plan_without_a_step_is_not_drawn(flag, tmp_path):
    said = asked(
        "plan",
        *FINE,
        "--tail",
        "drop",
        "--samples",
        7,
        flag,
        tmp_path / "plan",
        code=2,
    )
    assert "there is no step that could be drawn" in said
    assert not list(tmp_path.iterdir())


def test_plan_page_draws_from_the_given_step(tmp_path):
    asked(
        "plan",
        *FINE,
        "--step",
        "3",
        "--epoch",
        "2",
        "--html",
        tmp_path / "plan.html",
    )
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "epoch 2, step 3" in page
    assert "epoch 2, step 2" not in page
    assert "<script" not in page
