"""Nothing is silent between ranks that were never introduced, or were given other arguments."""

import json
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import paddle.io
import pytest

import paddle_shard
from paddle_shard.core import warn_once
from tests.deadlines import HANG
from tests.jobs import run_ranks

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent
ROWS = (101, 58)
CASES = {
    2: [
        "streams",
        "mixed",
        "fails",
        "certificate",
        "too_large",
        "not_made",
        "differ",
        "split_fails",
        "split_empty",
        "different_data",
        "alone",
        "forked",
        "resumed_apart",
        "nothing_ahead",
        "one_data_rank",
    ],
    3: ["on_the_mesh_only", "on_no_mesh", "stages"],
}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What each of so many ranks reports of a case; the cases of a number of ranks are one job."""
    found = {}

    def reports(num_ranks, case):
        if num_ranks not in found:
            folder = tmp_path_factory.mktemp("edges")
            number = 0
            for file, rows in enumerate(ROWS):
                lines = [str(number := number + 1) for _ in range(rows)]
                (folder / f"{file}.csv").write_text(
                    "n\n" + "\n".join(lines) + "\n"
                )
            names = [*CASES[num_ranks], "initialized"]
            environment = {"PYTHONPATH": str(HERE.parents[1])}
            found[num_ranks] = run_ranks(
                HERE / "edges_worker.py",
                num_ranks,
                folder,
                args=[json.dumps(names)],
                env=environment,
                timeout=4 * HANG,
            )
        return [report[case] for report in found[num_ranks]]

    return reports


def test_uneven_files_give_equal_steps_and_each_row_once(
    of_ranks,
):
    for passes in zip(*of_ranks(2, "streams"), strict=True):
        assert len({len(steps) for steps in passes}) == 1
        assert sorted(
            row for steps in passes for step in steps for row in step
        ) == list(range(1, sum(ROWS) + 1))


def test_uneven_shuffled_parts_give_equal_steps_and_rows_once(
    of_ranks,
):
    first, second = of_ranks(2, "mixed")
    for name in first:
        assert len(first[name]) == len(second[name]), name
        rows = [row for step in first[name] + second[name] for row in step]
        assert len(rows) == len(set(rows)) == int(name.split()[0]), name


def test_bad_sample_is_raised_on_all_ranks_at_the_same_step(of_ranks):
    for steps in of_ranks(2, "fails"):
        assert len(steps) == 6
        assert "DataReadError" in steps[5]
        assert "no disk" in steps[5]


def test_certificate_counts_all_ranks(of_ranks):
    for exact, text in of_ranks(2, "certificate"):
        assert exact, text
        assert "22 samples exactly once" in text


def test_certificate_counts_one_pipeline_stage(
    of_ranks,
):
    for half, whole in of_ranks(3, "stages"):
        assert half.endswith("12 of 22 samples delivered once, 10 to come"), (
            half
        )
        assert whole.endswith("each of 22 samples exactly once"), whole


def test_mesh_with_ranks_beyond_the_job_is_refused_on_all_ranks(of_ranks):
    for text in of_ranks(2, "too_large"):
        assert text.startswith(
            "ArgumentError: meshes names the global rank 2, but this job has 2 ranks"
        )
        assert "--nproc_per_node 3" in text


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("a sampler of another rank", "Use num_replicas=2 and rank=1"),
        ("an option", "tail must be"),
        ("on all", "tail must be"),
    ],
)
def test_loader_that_fails_on_one_rank_fails_on_all_at_once(
    of_ranks, case, shown
):
    found = of_ranks(2, "not_made")
    (first, waited), (second, _) = (of_rank[case] for of_rank in found)

    assert shown in second
    kind, _, text = second.partition(": ")
    assert first == (
        second
        if case == "on all"
        else f"{kind}: global rank 1: its shard_dataloader() failed: {text}"
    )
    assert waited < HANG / 4, "not only when the timeout is over"


def test_loader_can_be_made_after_one_that_failed_on_one_rank(of_ranks):
    first, second = (of_rank["later"] for of_rank in of_ranks(2, "not_made"))

    assert [a + b for a, b in zip(first, second, strict=True)] == [
        list(range(4 * i, 4 * i + 4)) for i in range(4)
    ]


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("batch size", "global batch: 8 on global rank 0, 6 on global rank 1"),
        (
            "mesh",
            "meshes: [{'axes': {'dp': 2}, 'process_ids': (0, 1), 'data_axes': ('dp',)",
        ),
        (
            "shard_dims",
            "on global rank 0, [{'axes': {'dp': 2}, 'process_ids': (0, 1), 'data_axes': (), ",
        ),
        ("seed", "seed: 0 on global rank 0, 1 on global rank 1"),
        ("length", "num_samples: 48 on global rank 0, 40 on global rank 1"),
        ("tail", "tail: pad on global rank 0, drop on global rank 1"),
        ("epoch", "epoch: 0 on global rank 0, 1 on global rank 1"),
        ("timeout", "timeout: 60.0 on global rank 0, 70.0 on global rank 1"),
        (
            "data set",
            "data set: Numbers on global rank 0, Stream on global rank 1",
        ),
        (
            "version",
            "paddle_shard: "
            + paddle_shard.__version__
            + " on global rank 0, 9.9 on global rank 1",
        ),
        ("stream", "num_batches: 3 on global rank 0, 2 on global rank 1"),
        ("on_error", "on_error: raise on global rank 0, skip on global rank 1"),
        (
            "skip",
            "skip_steps: [(0, 2)] on global rank 0, [(1, 2)] on global rank 1",
        ),
        (
            "weights",
            "'segments': [[0, [1, 0]], [16, [1, 2]]]} on global rank 1",
        ),
        (
            "a file",
            "file b.csv: 18 bytes on global rank 0, nothing on global rank 1",
        ),
        (
            "a file's size",
            "file b.csv: 18 bytes on global rank 0, 12 bytes on global rank 1",
        ),
        (
            "a file's rows",
            "file b.csv: 18 bytes on global rank 0, 12 bytes on global rank 1",
        ),
        (
            "a file of a source",
            "file own: b.csv: nothing on global rank 0, 18 bytes on global rank 1",
        ),
        (
            "batch size by schedule",
            "batch_size: [(0, 8), (16, 12)] on global rank 0, [(0, 8), (16, 4)] on global rank",
        ),
    ],
)
def test_arguments_that_differ_between_ranks_are_named_on_all(
    argument, shown, of_ranks
):
    for found in of_ranks(2, "differ"):
        [text] = found[argument]  # before any batch
        assert text.startswith("ArgumentError: ")
        assert shown in text


def test_balance_costs_that_differ_are_an_error_at_their_step(of_ranks):
    for found in of_ranks(2, "differ"):
        *steps, text = found["balance"]
        assert steps == steps[:2]  # whose rows are dealt alike
        assert text.startswith("DifferentDataError: At step 2 ")
        assert "with balance=, the same costs" in text


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("split_fails", "no disk"),
        ("split_empty", "has yielded no batch in epoch 0"),
    ],
)
def test_split_data_without_a_first_batch_is_named_on_all_ranks(
    case, text, of_ranks
):
    for (error,), seconds in of_ranks(2, case):
        assert text in error
        assert seconds < HANG


@pytest.mark.parametrize(
    ("kind", "delivered"),
    [
        ("stream", 0),
        ("stream, late", 5),
        ("stream, workers", 0),
        ("within a turn", 1),
        ("length", 8),
        ("tail", 0),
        ("batches", 0),
        ("cut later", 0),
        ("sampler", 0),
        ("costs", 0),
    ],
)
def test_streams_that_differ_between_ranks_are_named(kind, delivered, of_ranks):
    reports = of_ranks(2, "different_data")
    for found in reports:
        *steps, text = found[kind]
        assert text.startswith("DifferentDataError: "), text
        assert "have read different data" in text
        assert "Use the same seed on all ranks" in text
        assert len(steps) <= delivered or kind != "stream"
    rows = [
        row
        for found in reports
        for step in found[f"{kind}, seeded"]
        for row in step
    ]
    assert sorted(rows) == list(range(64))


def test_loader_names_ranks_with_other_numbers_of_whole_batches(of_ranks):
    for found in of_ranks(2, "different_data"):
        *_, text = found["number of batches"]
        assert text.startswith("UnequalEndsError: ")
        assert (
            "the data of global rank 1 has ended and that of global rank 0 has not"
            in text
        )


def test_whole_batches_resume_with_other_numbers_of_workers(of_ranks):
    assert of_ranks(2, "resumed_apart") == [9, 9]


def test_rank_alone_logs_whom_it_waits_for_and_continues(
    of_ranks,
):
    (steps, said), (others, silent) = of_ranks(2, "alone")

    assert "global rank 1 did not begin" in said
    assert "step 0 of Numbers, epoch 0" in said
    assert "a mesh of this rank" in said
    assert silent == ""
    assert [a + b for a, b in zip(steps, others, strict=True)] == [
        list(range(4 * k, 4 * k + 4)) for k in range(4)
    ]


def test_loop_that_changes_its_data_has_nothing_read_ahead(of_ranks):
    for read in of_ranks(2, "nothing_ahead"):
        # by which the ranks see that they have the same data
        looked_at = read[0] - 2
        assert looked_at == 4
        assert [count - looked_at for count in read] == [
            2,
            4,
            6,
            8,
            10,
            12,
            14,
            16,
        ]


def test_sampler_with_its_own_generator_serves_one_data_rank(
    of_ranks,
):
    """How it splits need not be found out, for which each pass would have a copy of it as it was in the beginning."""
    own = np.random.RandomState(3)
    epochs = [own.permutation(8).reshape(2, 4).tolist() for _ in range(3)]

    assert of_ranks(2, "one_data_rank") == [epochs, epochs]


def test_forked_children_of_ranks_that_have_met_meet_themselves(of_ranks):
    for passes in zip(*of_ranks(2, "forked"), strict=True):
        joined = [a + b for a, b in zip(*passes, strict=True)]
        assert joined == [list(range(4 * k, 4 * k + 4)) for k in range(4)]


@pytest.mark.parametrize("num_ranks", CASES)
def test_paddles_own_environment_can_be_made_later(num_ranks, of_ranks):
    rows = [
        row
        for steps in of_ranks(num_ranks, "initialized")
        for step in steps
        for row in step
    ]

    assert sorted(rows) == list(range(24))


def test_loader_waits_only_for_the_ranks_of_its_mesh(of_ranks):
    others, *passes = of_ranks(3, "on_the_mesh_only")

    assert others is None
    assert len({len(steps) for steps in passes}) == 1
    assert sorted(
        row for steps in passes for step in steps for row in step
    ) == list(range(1, sum(ROWS) + 1))


def test_rank_on_no_mesh_makes_the_steps_of_the_others(of_ranks):
    assert len(set(of_ranks(3, "on_no_mesh"))) == 1


def test_single_process_with_a_mesh_of_two_warns_how_to_launch(
    caplog, monkeypatch
):
    monkeypatch.setattr(warn_once, "_WARNED", set())
    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    data = paddle.io.TensorDataset([paddle.arange(8)])

    paddle_shard.shard_dataloader(
        paddle.io.DataLoader(data, batch_size=4), mesh, shard_dims="dp"
    )

    assert (
        "only process of its job, and reads at most 1/2 of the rows"
        in caplog.text
    )
    assert "--nproc_per_node 2" in caplog.text
