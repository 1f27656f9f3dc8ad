"""Paddle's suites on two data ranks: as PaddleClas and PaddleSpeech sample, and they and others make batches."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.suites.paddlespeech import batch_shuffle

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent
WORKER = HERE / "suites_worker.py"
CASES = [
    "mixed",
    "pk",
    "pk, split, each step",
    "pk, resumed",
    "identities",
    "identities, resumed",
    "augmented",
]
CASES += [
    "augmented, workers",
    "one order",
    "scales",
    "scales, split",
    "resize",
    "resize, workers",
    "resize, at once",
]
CASES += [
    "resize, stream",
    "stride",
    "padded",
    "padded, further",
    "shares",
    "halves",
    "reader",
    "reader, split",
]
CASES += ["lines", "lines, workers", "rotations", "rotations, unsaid"]
CASES += ["shapes, resumed", "shapes, resumed later"]
CASES += ["speech", "speech, padded", "speech, distributed"]
CASES += [
    "minibatches",
    "minibatches, split",
    "minibatches, inside",
    "minibatches, whole",
]


@pytest.fixture(scope="module")
def of_ranks(run_case):
    def reports(case):
        return run_case(
            WORKER,
            2,
            case,
            CASES,
            env={"PYTHONPATH": str(HERE.parents[1])},
            timeout=2 * HANG,
        )

    return reports


def rows_of(report):
    """The numbers of the rows of each step."""
    assert report["error"] == ""
    return [[row[0] for row in fields[0]] for fields in report["steps"]]


@pytest.mark.parametrize("case", ["pk", "pk, split, each step", "identities"])
def test_sampler_that_draws_for_its_rank_differs_by_data_rank(case, of_ranks):
    first, second = map(rows_of, of_ranks(case))

    assert len(first) == len(second) >= 8
    assert all(a != b for a, b in zip(first, second, strict=True))
    for rows in first + second:
        identities = [row % 12 for row in rows]
        assert len(set(identities)) == 2
        assert all(identities.count(one) == 2 for one in identities)


@pytest.mark.parametrize("case", ["pk, resumed", "identities, resumed"])
def test_sampler_draws_the_same_again_after_a_resume(case, of_ranks):
    for straight, again in of_ranks(case):
        assert rows_of(straight) == rows_of(again) != []


def test_undeclared_sampler_with_equal_rows_is_refused(of_ranks):
    for report in of_ranks("mixed"):
        assert report["steps"] == []
        assert report["error"].startswith(
            "SplitError: the data is split already, by is_dataset_splitted=True or by "
        )
        assert "sampler.draws_for_rank = True" in report["error"]


@pytest.mark.parametrize("case", ["augmented", "augmented, workers"])
def test_shared_row_is_augmented_differently_by_data_rank(case, of_ranks):
    one, other = of_ranks(case)

    assert rows_of(one) == rows_of(other)
    drawn = [
        [row for step in report["steps"] for row in step[1]]
        for report in (one, other)
    ]
    assert all(a != b for a, b in zip(*drawn, strict=True))


def test_sampler_that_cuts_one_order_draws_alike_on_all_ranks(
    of_ranks,
):
    first, second = map(rows_of, of_ranks("one order"))

    assert len(first) == 12
    for epoch in (0, 6):
        read = [
            row
            for rows in (first, second)
            for step in rows[epoch : epoch + 6]
            for row in step
        ]
        assert sorted(read) == list(range(48))
    assert first[:6] != first[6:]


def test_undeclared_rank_sampler_is_refused_until_declared(
    of_ranks,
):
    for report in of_ranks("scales"):
        assert "is_dataset_splitted=True" in report["error"]
    first, second = map(rows_of, of_ranks("scales, split"))
    assert sorted(
        row for rows in (first, second) for step in rows for row in step
    ) == list(range(48))


def sides_of(report):
    """The side of the images of each step."""
    assert report["error"] == ""
    return [len(fields[0][0]) for fields in report["steps"]]


@pytest.mark.parametrize(
    "case", ["resize", "resize, workers", "resize, at once", "resize, stream"]
)
def test_collate_fn_draws_alike_on_ranks_and_anew_each_step(case, of_ranks):
    first, second = map(sides_of, of_ranks(case))

    assert first == second
    assert len(first) == 8
    assert len(set(first[:4])) > 1
    assert first[:4] != first[4:]
    assert first == sides_of(of_ranks("resize")[0]) or case == "resize, stream"


def test_rows_of_equal_length_on_all_ranks_are_taken(
    of_ranks,
):
    for report in of_ranks("stride"):
        assert sides_of(report) == [8] * 4
        assert [
            [len(boxes) for boxes in fields[1]] for fields in report["steps"]
        ] != [[1, 1]] * 4, "what stays local"


def test_rows_of_unequal_length_are_an_error_until_padded(
    of_ranks,
):
    for report in of_ranks("padded"):
        assert len(report["steps"]) == 0
        assert report["error"].startswith(
            "BatchStructureError: epoch 0, step 0: the rows that the ranks have read do not "
        )
        assert "pad_to={field: ('longest', value)}" in report["error"]
    for report in of_ranks("padded, further"):
        assert sides_of(report) == [6] * 4


def test_worker_init_fn_split_loses_nothing_or_is_refused(
    of_ranks,
):
    rows = [
        row
        for report in of_ranks("shares")
        for step in rows_of(report)
        for row in step
    ]
    assert sorted(rows) == list(range(16))
    for report in of_ranks("halves"):
        assert report["steps"] == []
        assert "worker_init_fn" in report["error"]


def test_reader_of_rank_rows_is_refused_until_declared(
    of_ranks,
):
    for report in of_ranks("reader"):
        assert report["steps"] == []
        assert "BaseDataLoader" in report["error"]
        assert "is_dataset_splitted=True" in report["error"]
    rows = [
        row
        for report in of_ranks("reader, split")
        for step in rows_of(report)
        for row in step
    ]
    assert sorted(rows) == list(range(48))


def test_sampler_shuffling_in_place_resumes_after_its_epochs(
    of_ranks,
):
    for straight, again, _ in of_ranks("shapes, resumed"):
        assert straight[0] == again
        assert len(again["steps"]) == 4
    for straight, again, drawn in of_ranks("shapes, resumed later"):
        assert straight == drawn
        assert again["error"].startswith(
            "StateError: state is at sample 8 of epoch 1, but the first 8 samples "
        )
        assert "give it a state_dict and a load_state_dict" in again["error"]


@pytest.mark.parametrize("case", ["lines", "lines, workers"])
def test_line_drawn_for_an_unreadable_one_is_the_same_for_all(case, of_ranks):
    reports = of_ranks(case)
    assert [report["steps"] for report in reports] == [
        report["steps"] for report in of_ranks("lines")
    ]
    for rank, report in enumerate(reports):
        for step, (images, labels, paths) in enumerate(report["steps"]):
            assert (
                [row[0] for row in images]
                == labels
                == [int(path.removesuffix(".png")) for path in paths]
            )
            rows = [4 * step + 2 * rank + row for row in range(2)]
            assert all(
                label == row or row in (5, 6, 11)
                for label, row in zip(labels, rows, strict=True)
            )


def test_four_rows_a_sample_are_taken_if_declared(
    of_ranks,
):
    for rank, report in enumerate(of_ranks("rotations")):
        assert rows_of(report) == [
            [2 * rank] * 4 + [2 * rank + 1] * 4,
            [4 + 2 * rank] * 4 + [5 + 2 * rank] * 4,
        ]
    for report in of_ranks("rotations, unsaid"):
        assert "'as read'" in report["error"]


@pytest.mark.parametrize("case", ["speech, padded", "speech, distributed"])
def test_utterances_keep_their_order_padded_to_the_longest(case, of_ranks):
    reports = of_ranks(case)

    rows = list(range(14))
    orders = [rows, batch_shuffle(rows, 4, epoch=1)]
    expected = [
        order[first : first + 4]
        for order in orders
        for first in range(0, 14, 4)
    ]
    steps = list(zip(*(report["steps"] for report in reports), strict=True))
    for ranks, batch in zip(steps, expected, strict=True):
        assert [int(name[3:]) for names, *_ in ranks for name in names] == batch
        for _, sounds, _, texts, _ in ranks:
            assert {len(row) for row in sounds} == {
                max(2 + row // 3 for row in batch)
            }
            assert {len(row) for row in texts} == {
                max(row + 1 for row in batch)
            }


def test_rows_of_unequal_length_are_named_as_pad_to_names_them(
    of_ranks,
):
    for report in of_ranks("speech"):
        assert "[1]: float32[2, 2] on global rank 0, float32" in report["error"]
        assert "; [3]: int64[2] on global rank 0, int64" in report["error"]


@pytest.mark.parametrize("case", ["minibatches", "minibatches, whole"])
def test_ready_batches_are_split_over_the_ranks(case, of_ranks):
    assert [report["error"] for report in of_ranks(case)] == ["", ""]
    steps = list(
        zip(*(report["steps"] for report in of_ranks(case)), strict=True)
    )

    read = [
        [int(name[3:]) for names, *_ in ranks for name in names]
        for ranks in steps
    ]
    assert (
        sorted(read)
        == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11], [12, 13]]
        != read
    )
    assert all(len(ranks[0][0]) == len(ranks[1][0]) for ranks in steps)


def test_ready_batches_as_rows_are_refused_with_the_fix(
    of_ranks,
):
    for report in of_ranks("minibatches, inside"):
        assert report["error"].startswith(
            "BatchSizeError: batch_size: a global batch of 1 cannot be split evenly "
        )
        assert "batch_size=None" in report["error"]
    for report in of_ranks("minibatches, split"):
        assert (
            "global rank 0 has a first batch of 4 rows and global rank 1 has a first batch of 2"
            in report["error"]
        )
