"""`patch_paddle` reads DataLoaders that are cut for data ranks: each row once, equal steps, one failure."""

from collections import Counter
from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

pytestmark = pytest.mark.multiprocess

BATCH = 4
"""Rows of a global batch."""


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """What the two data ranks have read, after a check that replicas have read the same."""
    reports = run_ranks(
        Path(__file__).with_name("rank_loaders_worker.py"),
        request.param,
        tmp_path_factory.mktemp("run"),
        timeout=HANG,
    )
    replicas = request.param // 2
    for data_rank in range(2):
        first, *others = reports[
            data_rank * replicas : (data_rank + 1) * replicas
        ]
        for other in others:
            assert {**other, "failing": 0, "messages": 0} == {
                **first,
                "failing": 0,
                "messages": 0,
            }
    return reports[::replicas]


def batches_of(first, second):
    """Global batches of the batches of two data ranks, which make equal steps."""
    return [a + b for a, b in zip(first, second, strict=True)]


def flat(batches):
    return [row for batch in batches for row in batch]


def padded(length):
    """The rows of each global batch, filled up so that two ranks have as many, with the first rows."""
    rows = [*range(length), *range(length % 2)]
    return [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]


def test_rank_loader_reads_each_row_once_in_order(ranks):
    for number, length in enumerate((1, 3, 4, 7, 8)):
        (num_steps, first), (_, second) = (
            found["in order"][number] for found in ranks
        )
        assert batches_of(first, second) == padded(length)
        assert num_steps == len(first)
    assert batches_of(*(found["workers"][1] for found in ranks)) == padded(7)
    assert [found["drop_last"] for found in ranks] == [
        [1, [[0, 1]]],
        [1, [[2, 3]]],
    ]
    assert batches_of(*(found["whole"] for found in ranks)) == [
        [0, 1, 2, 3],
        [4, 0, 1, 2],
    ]
    assert batches_of(*(found["paddle"] for found in ranks)) == padded(7)


def test_rank_loader_leaves_rows_to_a_sampler_of_the_users(ranks):
    assert [found["own"] for found in ranks] == [
        [[0, 2], [4, 6]],
        [[1, 3], [5]],
    ]
    rows = [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert [found["scales"] for found in ranks] == rows
    assert [found["endless"] for found in ranks] == [
        ["no length", each] for each in rows
    ]


def test_rank_loader_shuffles_anew_each_epoch(ranks):
    for name in ("shuffled", "paddle, shuffled"):
        of_ranks = [found[name] for found in ranks]
        moved_on, set_by_loop = zip(*of_ranks, strict=True)
        epochs = [batches_of(*epoch) for epoch in zip(*moved_on, strict=True)]
        assert epochs == [
            batches_of(*epoch) for epoch in zip(*set_by_loop, strict=True)
        ]
        assert len(set(map(str, epochs))) == 3
        for epoch in epochs:
            assert sorted(flat(epoch)) == list(range(8))
    assert ranks[0]["seed"] != ranks[0]["shuffled"][1]


def test_rank_loader_resumes_where_the_sampler_stands(ranks):
    (first, after), (second, _) = (found["resumed"] for found in ranks)
    rest, whole = zip(first, second, strict=True)
    assert batches_of(*rest) == padded(11)[2:]
    assert batches_of(*whole) == padded(11)
    assert after == ranks[0]["resumed"][1]


def test_rank_loader_reads_a_stream_once(ranks):
    for number, length in enumerate((1, 4, 7)):
        (first, again, num), (second, _, same) = (
            found["stream"][number] for found in ranks
        )
        rows = Counter(flat(batches_of(first, second)))
        assert first == again
        assert num == same == length
        assert set(rows) == set(range(length))
        assert rows.total() == -(-length // BATCH) * BATCH
    assert ranks[0]["stream, workers"] == ranks[0]["stream"][2]
    assert batches_of(*(found["stream, drop_last"] for found in ranks)) == [
        [0, 1, 2, 3]
    ]


def test_rank_loader_has_padding_ignored_by_the_loss(ranks):
    assert [found["labels"] for found in ranks] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, -100]],
    ]


def test_rank_loader_fails_on_all_ranks_at_the_same_step(ranks):
    for found in ranks:
        rows, text = found["failing"]
        assert len(rows) == 1
        assert "sample 5 failed" in text


def test_patch_paddle_says_what_it_reads(ranks):
    (found, _) = ranks
    assert found["not cut"] == [[0, 1], [2, 3]]
    assert found["undone"] == [[0, 1]]
    text = "\n".join(found["messages"])
    assert (
        "the DataLoader of Made is read by paddle_shard, as local tensors of 2"
        in text
    )
    assert (
        "the DataLoader of Made is read by Paddle: its BatchSampler does not"
        in text
    )
