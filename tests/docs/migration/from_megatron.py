"""Lines for those who come from Megatron's data sets."""

import numpy as np
from paddle.io import DataLoader, Subset

from paddle_shard import Packed
from tests.docs.migration import DATA, IDS, case, flat, real, steps
from tests.docs.migration.claims import replicas_agree, resumes, seeds_differ
from tests.helpers import ONE, Made, local, sharded

MEGATRON = "From Megatron's data sets"
WEB, CODE = Made(length=60), Made(lambda i: 1000 + i, length=20)
DOCUMENTS = [
    np.arange(100 * at + 1, 100 * at + 1 + length)
    for at, length in enumerate([5, 16, 3, 9, 40, 1, 12, 7])
]


@case(
    MEGATRON,
    'BlendedMegatronDatasetConfig(blend=(["web", "code"], [0.7, 0.3]))',
)
def exact_shares(new, old):
    rows = flat(
        real(
            sharded(
                DataLoader(new(web=WEB, code=CODE), batch_size=8, shuffle=True),
                ONE,
            )
        )
    )
    assert len(rows) == 96
    for end in range(1, len(rows) + 1):
        assert abs(sum(row >= 1000 for row in rows[:end]) - 0.3 * end) <= 1 / 2
    code = [row for row in rows if row >= 1000]
    assert len(code) > 20 == len(set(code[:20])), (
        "a source that is used up begins its next epoch"
    )
    assert code[:20] != code[20 : 2 * 20]


@case(MEGATRON, 'BlendedMegatronDatasetConfig(blend=(["web", "code"], None))')
def each_once(new, old):
    rows = flat(
        real(
            sharded(
                DataLoader(new(web=WEB, code=CODE), batch_size=8, shuffle=True),
                ONE,
            )
        )
    )
    assert sorted(rows) == [*range(60), *range(1000, 1020)]


def rows_of(packed):
    return [packed[at] for at in range(len(packed))]


@case(MEGATRON, "GPTDataset, sequence_length=16")
def every_token_once(new, old):
    rows = rows_of(new(documents=DOCUMENTS))
    tokens = [
        token
        for row in rows
        for token in row["input_ids"][row["segment_ids"] > 0].tolist()
    ]
    assert sorted(tokens) == sorted(
        token for document in DOCUMENTS for token in document.tolist()
    )
    assert {row["input_ids"].shape for row in rows} == {(16,)}


@case(MEGATRON, "eod_mask_loss=True")
def labels_within_a_document(new, old):
    for row in rows_of(new(documents=DOCUMENTS)):
        tokens, pieces = row["input_ids"].tolist(), row["segment_ids"].tolist()
        for at, label in enumerate(row["labels"].tolist()):
            has_next = (
                at < 15 and pieces[at] > 0 and pieces[at] == pieces[at + 1]
            )
            if has_next:
                assert label == tokens[at + 1]
            elif label != -100:  # a document that goes on in another row
                assert pieces[at] > 0
                assert label == tokens[at] + 1
                assert label in DOCUMENTS[4]


@case(MEGATRON, "reset_position_ids=True, reset_attention_mask=True")
def fields_of_a_row(new, old):
    for row in rows_of(new(documents=DOCUMENTS)):
        assert {*new.codes[1:], "cu_seqlens"} <= set(row)
        begins = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
        assert (row["position_ids"][begins] == 0).all()
        assert set(begins.tolist()) <= set(row["cu_seqlens"].tolist())


@case(MEGATRON, 'path_to_cache="cache"')
def lengths_are_kept(new, old):
    read = []

    class Noting(list):
        def __getitem__(self, at):
            read.append(at)
            return super().__getitem__(at)

    many = Noting(DOCUMENTS * 8)
    first = Packed(many, 16)
    assert first.lengths.tolist() == [
        len(document) for document in DOCUMENTS * 8
    ]
    np.save("lengths.npy", first.lengths)
    read.clear()
    assert len(new(documents=many)) == len(first)
    assert not read, "no document is counted again"


@case(MEGATRON, 'split="75,25,0"')
def cut_by_documents(new, old):
    train, valid = (
        [data[i].tolist() for i in range(len(data))]
        for data in (new(0, data=DATA), new(1, data=DATA))
    )
    assert (train, valid) == (IDS[:18], IDS[18:])
    assert isinstance(new(0), Subset)


case(MEGATRON, "random_seed=7")(seeds_differ)
case(MEGATRON, "data_parallel_rank=rank, data_parallel_size=2")(replicas_agree)


@case(MEGATRON, "MegatronPretrainingSampler(consumed_samples=consumed)")
def next_sample(new, old):
    resumes(new)
    resumes(new, workers=2)


@case(MEGATRON, "--rampup-batch-size 4 4 16 --global-batch-size 8")
def larger_batches(new, old):
    found = steps(lambda: sharded(DataLoader(DATA, batch_size=8), **new()))
    assert [len(batch) for batch in found] == [4, 4, 4, 4, 8]
    assert flat(found) == IDS
    assert (
        local(next(iter(sharded(DataLoader(DATA, batch_size=8), ONE, **new()))))
        == IDS[:4]
    )
