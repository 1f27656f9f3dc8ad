from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).parent / "stream_faults_worker.py"
PARTS = 8


def part_lengths():
    """Samples of each of the 8 parts of range(60), dispatched by turns, that the worker's filter keeps."""
    kept = [0] * PARTS
    for i in range(60):
        kept[i % PARTS] += i % 8 > 1 or i < 40
    return kept


@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(4, marks=pytest.mark.long)]
)
def test_stream_ends_or_fails_at_one_step_on_all_ranks(num_ranks, run_once):
    reports = run_once(WORKER, num_ranks)
    lengths = part_lengths()
    assert (min(lengths), max(lengths)) == (5, 8)

    for workers in (0, 2):
        expected = {
            "every rank": (3, "ValueError: sample 30 is broken"),
            "its own part": (3, "ValueError: sample 30 is broken"),
            # Its first sample of 20 or more: 20 // 8 samples stand before it in its parts.
            "one rank": (2, "OSError: no disk"),
        }
        for name, (steps, text) in expected.items():
            found = [report[f"{name} {workers}"] for report in reports]
            assert [one[0] for one in found] == [steps] * num_ranks
            assert all(
                one[1][0] == "DataReadError" and text in one[1][1]
                for one in found
            ), found
            assert len({tuple(one[1][2]) for one in found}) == 1, (
                "the same sample is named"
            )
            assert all(one[2] < 2 for one in found), "within 2 s"
        found = [report[f"indexed {workers}"] for report in reports]
        assert [one[0] for one in found] == [5] * num_ranks
        assert all(
            one[1][0] == "DataReadError" and one[1][2] == 47 for one in found
        ), found
        assert all(
            ("global rank" in one[1][1]) == (rank < num_ranks - 1)
            for rank, one in enumerate(found)
        )
        steps, error, *_ = reports[-1][f"indexed, alone {workers}"]
        assert steps == 5
        assert error[0] == "DataReadError"
        for tail, steps in (("pad", 8), ("drop", 5), ("repeat", 8)):
            found = [
                report[f"uneven {tail} {workers}"][:2] for report in reports
            ]
            assert found == [[steps, "end"]] * num_ranks, (tail, workers)
        assert [report[f"num_batches {workers}"][:2] for report in reports] == [
            [11, "end"]
        ] * num_ranks
        found = [report[f"uneven error {workers}"] for report in reports]
        assert [one[0] for one in found] == [5] * num_ranks
        assert all(
            one[1][0] == "UnequalEndsError"
            and "choose tail=" in one[1][1].lower()
            for one in found
        ), found


def test_local_batches_of_unequal_number_and_length_are_padded(run_once):
    reports = run_once(WORKER, 2)

    for rank, report in enumerate(reports):
        own = [
            [100 * rank + 10 * k + i for i in range(4 if k < 2 + rank else 2)]
            for k in range(3 + rank)
        ]
        padded = [
            [
                rows + rows[-1:] * (4 - len(rows)),
                [True] * len(rows) + [False] * (4 - len(rows)),
            ]
            for rows in own
        ]
        assert report["own pad"][: len(own)] == padded
        assert len(report["own pad"]) == 4
        assert all(not any(valid) for _, valid in report["own pad"][len(own) :])
        assert report["own drop"] == padded[:2]
        assert len(report["own repeat"]) == 4
        assert report["own error"] == "UnequalEndsError"
