from pathlib import Path

import pytest

from paddle_shard.testing.simulated import on_each_rank
from tests.deadlines import HANG
from tests.multiprocess.loader_cases import cases, summary

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).with_name("loader_worker.py")
CASES = {
    2: ["left", "loaders", "sequence"],
    4: ["loaders", "split"],
    8: ["loaders"],
}


@pytest.mark.parametrize(
    "num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.long)]
)
def test_real_ranks_get_what_simulated_ranks_get(num_ranks, run_case):
    reports = run_case(
        WORKER, num_ranks, "loaders", CASES[num_ranks], timeout=2 * HANG
    )

    for name, make in cases(num_ranks).items():
        simulated = on_each_rank(
            range(num_ranks), lambda make=make: summary(make(workers=0))
        )
        for rank in range(num_ranks):
            assert reports[rank][name] == simulated[rank], (
                f"rank {rank}: {name}"
            )


def test_loader_warns_if_an_epoch_begins_again(
    run_case,
):
    assert (
        run_case(WORKER, 2, "left", CASES[2], timeout=2 * HANG)
        == [[0, 1, 1]] * 2
    )


def test_split_data_of_another_split_is_refused_on_all_ranks(run_case):
    reports = run_case(WORKER, 4, "split", CASES[4], timeout=2 * HANG)

    for rank, report in enumerate(reports):
        data_rank = rank // 2
        for how in (
            "",
            ", shuffled",
            ", augmented",
            ", both",
            ", lists",
            ", rank forgotten",
        ):
            assert (
                "different data ranks, read the same first batches: the data is not split"
                in report[f"not split{how}"]
            ), how
        assert report["split"] == [
            [4, [4 * data_rank + i, 4 * data_rank + i + 1]] for i in (0, 2)
        ]
        assert report["split, one row"] == [
            [2, [8 * data_rank + i]] for i in range(8)
        ]
        assert report["all the same, one row"] == [[2, [7]]] * 8
        rows = [row for _, batch in report["split, lists"] for row in batch]
        assert sorted(rows) == list(range(4 * data_rank, 4 * data_rank + 4))
        if rank in (1, 3):  # ranks 0 and 2 lead their replica groups
            assert (
                "replicas (the same data rank), read different first batches"
                in report["split by global rank"]
            )
        assert (
            "replicas (the same data rank), read different first batches"
            in report["replicas of one data rank"]
        )
        assert report["the same replicas"] == [[2, [0, 1]], [2, [2, 3]]]
        assert (
            "their steps would differ. Give every data rank the same number of rows"
            in report["unequal"]
        )
        numbers = (
            "number of rows: 1 on global ranks 0, 1, 2 on global ranks 2, 3"
        )
        assert numbers in report["short last"]
        assert report["all the same"] == [[4, [7, 7]]] * 2
        assert report["sampler"] == [
            [4, [i + 2 * data_rank, i + 2 * data_rank + 1]] for i in (0, 4)
        ]
        assert (
            f"nranks=4, but shard_dims gives global rank {rank} data rank {data_rank} of 2."
            in report["sampler of the world"]
        )


def test_balanced_sequence_equals_paddles_ring_attention(run_case):
    reports = run_case(WORKER, 2, "sequence", CASES[2], timeout=2 * HANG)

    for rank, chunks in enumerate([(0, 3), (1, 2)]):
        expected = [
            [100 * row + 4 * chunk + i for chunk in chunks for i in range(4)]
            for row in range(2)
        ]
        assert reports[rank]["ours"] == expected
        assert reports[rank]["placements"] == "[Shard(dim=1)]"
        assert reports[rank]["resharded"] == [
            [100 * row + i for i in range(16)] for row in range(2)
        ]
        assert reports[rank]["paddle"] in (expected, None)
