"""Packed documents: each token once, fields for attention kernels, rows that the loader treats as any others."""

import json
from itertools import pairwise

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

from paddle_shard import Mixture, Packed
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataReadError,
    StateError,
)
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, local, mesh, sharded
from tests.trials import trials


class Texts(paddle.io.Dataset):
    """Token t of document d is 1000 d + t + 1; its mask is 1."""

    def __init__(self, lengths, as_dict=True):
        self.lengths, self.as_dict, self.reads = lengths, as_dict, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.reads += 1
        tokens = 1000 * index + np.arange(1, self.lengths[index] + 1)
        if not self.as_dict:
            return tokens
        return {
            "input_ids": tokens,
            "mask": np.ones(len(tokens), "float32"),
            "name": f"text {index}",
        }


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


@settings(max_examples=trials(100))
@given(
    lengths=LENGTHS,
    length=st.integers(1, 16),
    window=st.sampled_from([2, 4096]),
)
def test_packed_tokens_are_delivered_once_with_their_targets(
    lengths, length, window
):
    packed = Packed(
        Texts(lengths), length, lengths=lengths, labels="labels", window=window
    )
    seen, shapes = [], set()
    for number in range(len(packed)):
        row = packed[number]
        shapes.add(
            tuple(
                (name, value.shape, str(value.dtype))
                for name, value in sorted(row.items())
            )
        )
        real = row["segment_ids"] > 0
        tokens = row["input_ids"][real].tolist()
        seen += tokens
        assert (row["mask"] == real).all()
        assert not row["input_ids"][~real].any()
        assert (row["labels"][~real] == -100).all()
        for token, label in zip(
            tokens, row["labels"][real].tolist(), strict=True
        ):
            document, place = divmod(token - 1, 1000)
            assert label == (
                token + 1 if place + 1 < lengths[document] else -100
            )
        check_segments(row, length)

    assert sorted(seen) == [
        1000 * d + t + 1 for d, n in enumerate(lengths) for t in range(n)
    ]
    assert len(shapes) == 1, "all rows have the same shapes"


def check_segments(row, length):
    """Segments, positions and `cu_seqlens` say the same, each on its own."""
    segments, positions, ends = (
        row["segment_ids"].tolist(),
        row["position_ids"].tolist(),
        row["cu_seqlens"].tolist(),
    )
    assert ends[0] == 0
    assert ends[-1] == length
    assert ends == sorted(ends)
    sequences = [(a, b) for a, b in pairwise(ends) if b > a]
    assert int(row["max_seqlen"]) == max(b - a for a, b in sequences)
    for number, (begin, end) in enumerate(sequences):
        padding = segments[begin] == 0
        assert segments[begin:end] == [0 if padding else number + 1] * (
            end - begin
        )
        assert positions[begin:end] == (
            [0] * (end - begin) if padding else list(range(end - begin))
        )
        assert not padding or number == len(sequences) - 1


def ids_of(batches):
    return [
        batch["input_ids"]._local_value().numpy().tolist() for batch in batches
    ]


@pytest.mark.parametrize(
    ("workers", "shuffle"),
    [(0, False), (2, True), (0, "blocks"), (2, "blocks")],
)
def test_packed_rows_resume_on_another_mesh(workers, shuffle):
    lengths = np.random.default_rng(0).integers(1, 40, 60).tolist()

    def loader(at, batch_size, workers=0):
        packed = Packed(Texts(lengths), 16, lengths=lengths, window=8)
        given = DataLoader(
            packed,
            batch_size=batch_size,
            shuffle=shuffle is True,
            num_workers=workers,
        )
        return sharded(
            given,
            at,
            shuffle=shuffle if isinstance(shuffle, str) else None,
            tail="drop",
        )

    straight = [row for batch in ids_of(loader(ONE, 4)) for row in batch]

    def first():
        one = loader(mesh([0, 1], "dp"), 4, workers)
        with iter(one) as batches:
            found = [
                next(batches)["input_ids"]._local_value().numpy().tolist()
                for _ in range(5)
            ]
        return found, json.loads(json.dumps(one.state_dict()))

    per_rank = on_each_rank([0, 1], first)
    before = [
        row
        for parts in zip(
            *(found for found, _ in per_rank.values()), strict=True
        )
        for part in parts
        for row in part
    ]
    again = loader(ONE, 2)
    again.load_state_dict(per_rank[0][1])
    after = [row for batch in ids_of(again) for row in batch]

    assert before + after[: len(straight) - 20] == straight


def test_state_of_other_lengths_is_refused():
    one, other = [5, 3, 4, 4], [4, 4, 5, 3]
    states = [
        sharded(
            DataLoader(Packed(Texts(n), 8, lengths=n), batch_size=2), ONE
        ).state_dict()
        for n in (one, other)
    ]

    assert (
        states[0]["fingerprint"]["num_samples"]
        == states[1]["fingerprint"]["num_samples"]
    )
    with pytest.raises(StateError, match="packed: saved"):
        sharded(
            DataLoader(Packed(Texts(other), 8, lengths=other), batch_size=2),
            ONE,
        ).load_state_dict(states[0])
    mixed = [
        Mixture({"a": Packed(Texts(n), 8, lengths=n)}) for n in (one, other)
    ]
    state = sharded(DataLoader(mixed[0], batch_size=2), ONE).state_dict()
    with pytest.raises(StateError, match="packed: saved"):
        sharded(DataLoader(mixed[1], batch_size=2), ONE).load_state_dict(state)


def test_packed_sources_of_a_mixture_have_rows_of_one_form():
    few, many = [9, 9], [1] * 9
    made = {
        "few": Packed(Texts(few), 9, lengths=few),
        "many": Packed(Texts(many), 9, lengths=many),
    }
    with pytest.raises(DataReadError, match=r"different shapes .*cu_seqlens"):
        list(sharded(DataLoader(Mixture(made), batch_size=3), ONE))
    made = {
        name: Packed(Texts(n), 9, lengths=n, max_pieces=9)
        for name, n in (("few", few), ("many", many))
    }
    assert len(list(DataLoader(Mixture(made), batch_size=3))) == 1
    with pytest.raises(
        ArgumentError, match="max_pieces=8, but a row holds 9 pieces"
    ):
        Packed(Texts(many), 9, lengths=many, max_pieces=8)


def test_sources_of_a_mixture_may_be_packed():
    packed = {
        name: Packed(Texts([9] * 20), 10, lengths=[9] * 20)
        for name in ("web", "code")
    }
    loader = sharded(
        DataLoader(
            Mixture(packed, {"web": 3, "code": 1}, num_samples=24), batch_size=4
        ),
        ONE,
    )

    assert sum(len(batch["input_ids"]) for batch in loader) == 24
    assert {name: drawn.drawn for name, drawn in loader.sources().items()} == {
        "web": 18,
        "code": 6,
    }


def test_long_documents_are_split_dropped_or_refused():
    lengths = [3, 20, 5]

    assert (
        sum(
            n["segment_ids"].astype(bool).sum()
            for n in rows(Packed(Texts(lengths), 8, lengths=lengths))
        )
        == 28
    )
    dropped = Packed(Texts(lengths), 8, lengths=lengths, long="drop")
    assert sum(n["segment_ids"].astype(bool).sum() for n in rows(dropped)) == 8
    assert dropped.num_dropped == 1
    with pytest.raises(ArgumentError, match="'split' or 'drop', got 'error'"):
        Packed(Texts(lengths), 8, lengths=lengths, long="error")


def rows(packed):
    return [packed[at] for at in range(len(packed))]


# Counting


# Errors


@pytest.mark.parametrize("workers", [0, 2])
def test_error_names_the_row_and_its_documents(workers):
    class Wrong(Texts):
        def __getitem__(self, index):
            if index == 2:
                raise OSError("gone")
            return super().__getitem__(index)

    loader = sharded(
        DataLoader(
            Packed(Wrong([5, 5, 5]), 8, lengths=[5, 5, 5]),
            batch_size=1,
            num_workers=workers,
        ),
        ONE,
    )
    with pytest.raises(
        DataReadError,
        match=r"reading sample 'row \d of documents \[2\]' failed.*\n?.*gone",
    ):
        list(loader)


def test_packed_lengths_that_are_wrong_are_found_on_reading():
    with pytest.raises(
        ValueError, match="document 1 has 3 tokens, but 2 by lengths="
    ):
        rows(Packed(Texts([4, 3]), 8, lengths=[4, 2]))


def test_documents_of_other_fields_or_dtypes_are_named():
    one, other = (
        {"input_ids": np.arange(3)},
        {"input_ids": np.arange(3), "mask": np.ones(3)},
    )
    with pytest.raises(
        ValueError,
        match=r"document 1 has the fields .*, but document 0 has .*'mask'.* leave the others out",
    ):
        rows(Packed([other, one], 8, lengths=[3, 3]))
    with pytest.raises(ValueError, match="dtype float64 and shape"):
        rows(Packed([np.arange(3), np.ones(3)], 8, lengths=[3, 3]))
    with pytest.raises(
        ValueError, match=r"has the fields \['position_ids'\] already"
    ):
        rows(
            Packed(
                [{"input_ids": np.arange(3), "position_ids": np.arange(3)}],
                8,
                lengths=[3],
            )
        )


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"lengths": [1]},
            ArgumentError,
            "an entry for each of the 2 documents",
        ),
        ({"long": "cut"}, ArgumentError, "long must be .split. or .drop."),
        ({"length": 0}, ArgumentError, "length must be an int"),
        (
            {"documents": iter([])},
            ArgumentTypeError,
            "must have a length and an index",
        ),
        (
            {"documents": "text"},
            ArgumentTypeError,
            "must have a length and an index",
        ),
        (
            {"documents": [1, 2], "lengths": None},
            ArgumentError,
            "tokens of document 0 cannot be counted",
        ),
        ({"key": "cu_seqlens"}, ArgumentError, "must differ from each other"),
        ({"labels": "input_ids"}, ArgumentError, "must differ from each other"),
        (
            {"labels": ""},
            ArgumentError,
            "labels must be the name of a field or None, got ''",
        ),
        (
            {"ignore_index": 1.5},
            ArgumentError,
            "ignore_index must be an int in .*, got 1.5",
        ),
        (
            {"ignore_index": 2**70},
            ArgumentError,
            "ignore_index must be an int in",
        ),
    ],
)
def test_bad_arguments_are_named(options, error, says):
    given = {
        "documents": Texts([3, 4]),
        "length": 8,
        "lengths": [3, 4],
        **options,
    }
    with pytest.raises(error, match=says):
        Packed(given.pop("documents"), given.pop("length"), **given)


def test_packed_field_as_long_as_a_document_is_named():
    documents = [
        {
            "input_ids": np.arange(size),
            "mask": np.ones(size, bool),
            "box": np.zeros(4),
        }
        for size in (4, 3)
    ]

    with pytest.raises(
        ValueError, match="document 1 .*, but document 0 has .*'box'"
    ):
        Packed(documents, 8)[0]


def test_document_without_a_field_of_tokens_is_named():
    documents = [
        {"input_ids": np.arange(4), "mask": np.ones(4 if at != 29 else 3)}
        for at in range(40)
    ]
    packed = Packed(documents, 8)

    with pytest.raises(
        ValueError,
        match=r"document 29 has the fields .*, but document 28 has .*'mask'",
    ):
        for row in range(len(packed)):
            packed[row]


def test_unsigned_tokens_stay_numbers():
    """Paddle takes uint16 for bfloat16."""
    documents = [
        np.array([40_000, 50_001], "uint16"),
        {"input_ids": np.array([7], "uint32")},
    ]
    packed = Packed(documents, 4)

    assert packed[0]["input_ids"].tolist() == [40_000, 50_001, 7, 0]
    assert packed[0]["input_ids"].dtype == np.int64


def test_text_unknown_pads_and_labels_without_a_name_are_refused():
    with pytest.raises(
        ArgumentError,
        match="a document is text, 'abc'; give the numbers of its tokens",
    ):
        Packed(["abc"], 4)
    with pytest.raises(
        ArgumentError,
        match="labels must be the name of a field or None, got True",
    ):
        Packed([np.arange(3)], 4, labels=True)
    with pytest.raises(
        ValueError, match=r"pad_values names \['foo'\], which rows do not have"
    ):
        Packed([np.arange(3)], 4, pad_values={"foo": 1})[0]


def test_packed_documents_may_grow_only_between_epochs():
    def loader(number):
        return sharded(
            DataLoader(Packed(Texts([5] * number), 12), batch_size=2), ONE
        )

    old = loader(20)
    batches = iter(old)
    next(batches)
    with pytest.raises(
        StateError, match=r"num_samples: saved 10, now 15, packed: saved"
    ):
        loader(30).load_state_dict(old.state_dict())
    list(batches)
    new = loader(30)
    new.load_state_dict(old.state_dict(), override=["num_samples", "packed"])
    assert len(list(new)) == len(new) == 8
    with pytest.raises(StateError, match=r"override names \['pakced'\]"):
        loader(20).load_state_dict(old.state_dict(), override=["pakced"])


def test_packed_source_may_join_a_mixture():
    def loader(weights, **sources):
        mixture = Mixture(sources, weights, num_samples=12)
        return sharded(DataLoader(mixture, batch_size=2), ONE)

    def rows(number):
        return Packed(Texts([5] * number), 12, max_pieces=4)

    begun, joins = (0, {"a": 1, "b": 1}), (2, {"a": 1, "b": 1, "c": 1})
    old = loader([begun], a=rows(20), b=rows(30))
    next(iter(old))
    new = loader([begun, joins], a=rows(20), b=rows(30), c=rows(10))
    new.load_state_dict(old.state_dict())
    assert len(list(new)) == 5
    with pytest.raises(StateError, match=r"mixture: saved .*, packed: saved"):
        loader(
            [begun, joins], a=rows(20), b=rows(31), c=rows(10)
        ).load_state_dict(old.state_dict())


def test_documents_that_are_empty_or_too_long_are_left_out():
    documents = [np.arange(n) for n in (0, 5, 40, 3, 0)]
    rows = Packed(documents, 8, lengths=[0, 5, 40, 3, 0], long="drop")
    assert rows[0]["input_ids"].tolist() == [*range(5), *range(3)]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (
            np.array([0.5, 1.0]),
            r"dtype float64 and shape \[2\]; the tokens of a document are ints",
        ),
        (
            np.ones((3, 2), int),
            r"shape \[3, 2\]; the tokens of a document are ints, of one dim",
        ),
    ],
)
def test_documents_that_are_no_tokens_are_refused(document, says):
    with pytest.raises(ValueError, match=says):
        Packed([document], 4)[0]


@pytest.mark.parametrize("pad", [0.5, float("nan"), 2**70])
def test_pad_value_that_the_field_cannot_hold_is_refused(pad):
    with pytest.raises(
        (ValueError, OverflowError), match="pad_values|too large|too big"
    ):
        Packed([np.arange(3)], 4, pad_values={"input_ids": pad})[0]


def test_packed_fills_labels_of_the_documents_by_ignore_index():
    documents = [{"input_ids": np.arange(1, 4), "labels": np.arange(11, 14)}]

    assert Packed(documents, 5)[0]["labels"].tolist() == [
        11,
        12,
        13,
        -100,
        -100,
    ]
    row = Packed(documents, 5, ignore_index=-1)[0]
    assert row["labels"].tolist() == [11, 12, 13, -1, -1]
    row = Packed(documents, 5, pad_values={"labels": 0})[0]
    assert row["labels"].tolist() == [11, 12, 13, 0, 0]


class Drawn(Texts):
    """Documents whose tokens are one number that was drawn for each."""

    def __getitem__(self, index):
        return {
            "input_ids": np.full(
                self.lengths[index], np.random.randint(1, 1 << 40)
            )
        }


def drawn_by_row(loader, epochs=1):
    """[the numbers in each row], in order."""
    rows = [
        row
        for _ in range(epochs)
        for batch in loader
        for row in batch["input_ids"]._local_value().numpy()
    ]
    return [sorted(set(row[row > 0].tolist())) for row in rows]


def test_packed_documents_drawn_again_have_new_random_numbers():
    small, large = Packed(Drawn([8] * 4), 8), Packed(Drawn([8] * 40), 8)
    twin = Packed(Drawn([8] * 40), 8)
    mixture = Mixture(
        {"small": small, "large": large, "twin": twin},
        {"small": 1, "large": 1, "twin": 1},
    )
    rows = drawn_by_row(
        sharded(DataLoader(mixture, batch_size=4, shuffle=True), ONE), epochs=2
    )
    assert len({tuple(row) for row in rows}) == len(rows), (
        "each has a number of its own"
    )


class Masked(paddle.io.Dataset):
    """Draws for each row, too, after its documents."""

    def __init__(self, packed):
        self.packed = packed

    def __len__(self):
        return len(self.packed)

    def __getitem__(self, row):
        return {
            "input_ids": self.packed[row]["input_ids"],
            "mask": np.random.randint(1 << 40),
        }


@pytest.mark.parametrize("documents", [Texts, Drawn])
def test_packed_rows_have_random_numbers_of_their_own(documents):
    loader = sharded(
        DataLoader(Masked(Packed(documents([40] * 4), 8)), batch_size=4), ONE
    )
    masks = [
        int(one)
        for _ in range(2)
        for batch in loader
        for one in batch["mask"]._local_value().numpy()
    ]
    assert len(set(masks)) == len(masks) == 40


def test_reading_a_row_oneself_draws_for_its_documents_only():
    class Paddles(Texts):
        def __getitem__(self, index):
            return {
                "input_ids": paddle.randint(
                    1, 1000, [self.lengths[index]]
                ).numpy()
            }

    def draws(packed):
        paddle.seed(3)
        first = packed[0]["input_ids"].tolist()
        return first, paddle.rand([2]).tolist()

    packed = Packed(Paddles([16] * 8), 8)
    assert draws(packed) == draws(packed)


@pytest.mark.parametrize(
    "lengths", [[3, 7, 12, 5, 5, 1, 9, 2, 4, 6, 6], [3, 7, 12, 5]]
)
@pytest.mark.parametrize("in_the_loop", [True, False])
def test_packed_documents_may_change_at_the_end_of_an_epoch(
    lengths, in_the_loop
):
    def loader(lengths):
        documents = [
            np.full(length, number) for number, length in enumerate(lengths)
        ]
        return sharded(
            DataLoader(Packed(documents, length=6), batch_size=2, shuffle=True),
            ONE,
        )

    begun = loader([3, 7, 12, 5, 5, 1, 9, 2, 4])
    batches = iter(begun)
    for _ in range(len(begun)):
        next(batches)
    if not in_the_loop:
        assert next(batches, None) is None
    resumed, fresh = loader(lengths), loader(lengths)
    resumed.load_state_dict(
        begun.state_dict(), override=["packed", "num_samples"]
    )
    fresh.set_epoch(1)

    if in_the_loop:
        assert list(resumed) == [], "nothing is left of that epoch"
    rows = [
        [local(batch["input_ids"]) for batch in one] for one in (resumed, fresh)
    ]
    assert rows[0] == rows[1]
    assert len(resumed) == len(rows[0]) == len(fresh)
