"""`SequenceSplit`: what a rank cannot do for its part of a row is done before the split, and undone after it."""

import pickle

import numpy as np
import paddle.distributed as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

from paddle_shard import Packed, SequenceSplit
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import Made, sharded
from tests.trials import trials

SEP2 = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "sep"])
LAYOUTS = ["plain", "balanced", "documents"]


def packed(sizes, length, **options):
    documents = [
        100 * (number + 1) + np.arange(size) for number, size in enumerate(sizes)
    ]
    return Packed(documents, length, **options)


@settings(max_examples=trials(60))
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    length=st.integers(3, 17),
    parts=st.integers(1, 4),
    layout=st.sampled_from(LAYOUTS),
)
def test_sequence_split_keeps_labels_positions_documents(sizes, length, parts, layout):
    rows = packed([min(size, length) for size in sizes], length, labels="labels")
    samples = [rows[row] for row in range(len(rows))]
    split = SequenceSplit("sep", parts, layout=layout, labels="next")
    batch = split.collate()(samples)
    whole = batch["input_ids"].shape[1]

    assert whole == -(-length // split.unit) * split.unit
    for name in (
        "input_ids",
        "position_ids",
        "segment_ids",
        "labels",
        "next",
        "token_index",
    ):
        assert batch[name].shape == (len(samples), whole)
    names = ("input_ids", "position_ids", "segment_ids", "next", "token_index")
    back = {name: split.unsplit(batch[name], batch["token_index"]) for name in names}
    for row, sample in enumerate(samples):
        assert back["token_index"][row].tolist() == list(range(whole))
        for name in ("input_ids", "position_ids", "segment_ids"):
            assert back[name][row].tolist() == sample[name].tolist() + [0] * (
                whole - length
            )
        # Packed shifts inside its documents, before any split; the labels made here must be the same.
        assert back["next"][row].tolist() == sample["labels"].tolist() + [-100] * (
            whole - length
        )


def attention(query, key, value, allowed):
    scores = np.where(allowed, query @ key.T, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", [2, 3])
def test_attention_over_the_parts_is_that_of_the_row(layout, parts):
    """Each rank has the queries of its own tokens, and the keys of all, as a model that gathers them."""
    rows = packed([9, 4, 7, 2, 11], 24)
    split = SequenceSplit("sep", parts, layout=layout)
    batch = split.collate()([rows[row] for row in range(len(rows))])
    embed = np.random.default_rng(0).normal(size=(2000, 8))
    for row in range(len(rows)):
        ids, index, segment = (
            batch[name][row] for name in ("input_ids", "token_index", "segment_ids")
        )
        outputs = []
        for own in np.arange(len(ids)).reshape(parts, -1):
            allowed = (segment[own][:, None] == segment) & (
                index[own][:, None] >= index
            )
            outputs.append(
                attention(embed[ids[own]], embed[ids], embed[ids] ** 2, allowed)
            )
        found = split.unsplit(np.concatenate(outputs)[None], index[None])[0]
        sample = rows[row]
        straight = np.pad(sample["input_ids"], (0, len(ids) - 24))
        segments = np.pad(sample["segment_ids"], (0, len(ids) - 24))
        causal = (segments[:, None] == segments) & np.tri(len(ids), dtype=bool)
        wanted = attention(
            embed[straight], embed[straight], embed[straight] ** 2, causal
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("workers", "layout"), [*((0, layout) for layout in LAYOUTS), (2, "documents")]
)
def test_sequence_split_gives_each_rank_its_tokens(workers, layout):
    rows = packed([9, 4, 7, 2, 11, 5], 16)
    split = SequenceSplit("sep", 2, layout=layout, labels="labels")
    names = ("input_ids", "labels", "position_ids", "token_index")
    whole = split.collate()([rows[row] for row in range(2)])

    def run():
        given = DataLoader(
            rows, batch_size=2, collate_fn=split.collate(), num_workers=workers
        )
        loader = sharded(
            given, SEP2, input_keys=names, placements=split.placements(*names, dp=0)
        )
        with iter(loader) as batches:
            return {
                name: value._local_value().numpy()
                for name, value in next(batches).items()
            }

    for rank, found in on_each_rank(range(4), run).items():
        data_rank, part = divmod(rank, 2)
        for name in names:
            width = whole[name].shape[1] // 2
            wanted = whole[name][
                data_rank : data_rank + 1, part * width : (part + 1) * width
            ]
            np.testing.assert_array_equal(found[name], wanted)


def test_sequence_split_shifts_labels_that_are_given():
    split = SequenceSplit(
        "sep", 2, layout="balanced", labels="labels", pad_values={"weight": 0.5}
    )
    sample = {
        "input_ids": np.arange(6),
        "labels": 10 * np.arange(6),
        "weight": np.ones((6, 2)),
        "name": "a",
    }
    batch = split.collate()([sample])

    assert batch["input_ids"].tolist() == [[0, 1, 0, 0, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[10, 20, -100, -100, 30, 40, 50, -100]]
    assert batch["weight"][0, :, 1].tolist() == [1, 1, 0.5, 0.5, 1, 1, 1, 1]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 2, 3, 4, 5]]
    assert batch["name"] == ["a"]


def test_padding_is_a_sequence_of_its_own():
    rows = packed([5, 4], 9)
    batch = SequenceSplit("sep", 4, layout="documents").collate()([rows[0]])

    assert batch["cu_seqlens"].tolist() == [[0, 5, 9, 12]]
    assert batch["input_ids"].shape == (1, 12)


def test_sequence_split_collate_fn_can_be_sent_to_workers():
    split = SequenceSplit("sep", 2, labels="labels")
    made = pickle.loads(pickle.dumps(split.collate(list)))
    with pytest.raises(
        BatchStructureError, match="must be a dict with the field 'input_ids'"
    ):
        made([{"input_ids": np.arange(3)}])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_ranks": 0}, "num_ranks must be an int >= 1"),
        ({"num_ranks": True}, "num_ranks must be an int >= 1"),
        (
            {"layout": "zigzag"},
            "layout must be one of 'plain', 'balanced', 'documents'",
        ),
    ],
)
def test_bad_arguments_are_named(options, says):
    with pytest.raises(ArgumentError, match=says):
        SequenceSplit("sep", **{"num_ranks": 2, **options})


def test_sequence_split_rejects_what_cannot_be_split():
    documents = SequenceSplit("sep", 2, layout="documents")
    with pytest.raises(
        BatchStructureError, match="needs a field segment_ids or cu_seqlens"
    ):
        documents.collate()([{"input_ids": np.arange(4)}])
    with pytest.raises(BatchStructureError, match=r"must be \[rows, length\]"):
        documents.collate()([{"input_ids": 4}])


def test_samples_of_a_plain_data_set_are_prepared():
    given = DataLoader(
        Made(lambda i: {"input_ids": np.arange(5) + i}, 4),
        batch_size=2,
        collate_fn=None,
    )
    assert SequenceSplit("sep", 5).collate()([given.dataset[0]])[
        "position_ids"
    ].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("sizes", "length"), [([5, 4], 9), ([5, 3], 9), ([9], 9), ([2, 2, 1], 9)]
)
@pytest.mark.parametrize("most", [0, 1, 4])
def test_sequence_split_pads_with_sequences(sizes, length, most):
    """Else attention crosses from one row into the next."""
    rows = Packed([np.arange(n) for n in sizes], length, max_pieces=len(sizes) + most)
    batch = SequenceSplit("sep", 4).collate()([rows[0]])
    (ends,), whole = batch["cu_seqlens"].tolist(), batch["input_ids"].shape[1]

    assert ends[: len(sizes) + 1] == np.cumsum([0, *sizes]).tolist()
    assert ends == sorted(ends)
    assert ends[-1] == whole == 12
    assert batch["max_seqlen"].tolist() == [max(np.diff(ends))]


@pytest.mark.parametrize("ids", [[[0, 0, 1, 1]], [[0, 0, 0, 0]]])
def test_documents_that_are_numbered_from_0_are_refused(ids):
    batch = {"input_ids": np.arange(4)[None], "segment_ids": np.array(ids)}
    with pytest.raises(BatchStructureError, match="segment_ids begin at 0"):
        SequenceSplit("sep", 2, labels="labels").prepare(batch)
