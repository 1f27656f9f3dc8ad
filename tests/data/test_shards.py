import pickle
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard.data.files.files import redacted
from paddle_shard.data.files.shards import ShardSource
from paddle_shard.data.stages.stage import Opening
from paddle_shard.errors import ArgumentError, ShardReadError

UNEQUAL = [5, 0, 1, 12, 3, 7, 0, 2]


class Shards:
    """Shards in memory, and which of them were opened, from which sample."""

    def __init__(self, lengths):
        self.lengths = {f"s{i}": length for i, length in enumerate(lengths)}
        self.opened = []

    def read(self, name, skip, _ahead):
        self.opened.append((name, skip))
        for number in range(skip, self.lengths[name]):
            yield f"{name}/{number}"

    def all(self):
        return [
            f"{name}/{i}"
            for name, length in self.lengths.items()
            for i in range(length)
        ]


def source(lengths, *, counted=True, **settings):
    shards = Shards(lengths)
    counts = lengths if counted else None
    return shards, ShardSource(
        list(shards.lengths), shards.read, counts=counts, **settings
    )


def opening(num_parts, parts=None, **what):
    return Opening(
        parts=tuple(range(num_parts)) if parts is None else parts,
        num_parts=num_parts,
        **what,
    )


def read_all(source, num_parts, **what):
    return [list(items) for items in source.open(opening(num_parts, **what))]


lengths_of_shards = st.lists(st.integers(0, 12), min_size=1, max_size=9)


@given(
    lengths=lengths_of_shards,
    num_parts=st.integers(1, 12),
    shuffled=st.booleans(),
    counted=st.booleans(),
    seed=st.integers(0, 9),
)
def test_parts_together_are_every_sample_once(
    lengths, num_parts, shuffled, counted, seed
):
    shards, stage = source(lengths, counted=counted, shuffle_shards=shuffled)
    if not counted:
        num_parts = min(num_parts, len(lengths))

    parts = read_all(stage, num_parts, seed=seed)

    assert sorted(item for part in parts for item in part) == sorted(
        shards.all()
    )


@given(lengths=lengths_of_shards, num_parts=st.integers(1, 40))
def test_counted_parts_differ_by_at_most_one_sample(lengths, num_parts):
    _, stage = source(lengths)

    lengths_read = [len(part) for part in read_all(stage, num_parts)]

    assert max(lengths_read) - min(lengths_read) <= 1
    assert stage.lengths(opening(num_parts)) == lengths_read


def test_counted_parts_joined_are_the_shards_in_order():
    shards, stage = source(UNEQUAL, shuffle_shards=False)

    parts = read_all(stage, 4)

    assert [item for part in parts for item in part] == shards.all()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_opening_after_s_samples_equals_dropping_s(counted, num_parts):
    _, stage = source(UNEQUAL, counted=counted)
    straight = [
        list(islice(items, 40))
        for items in stage.open(opening(num_parts, epoch=1, seed=3))
    ]

    for skip in range(max(map(len, straight)) + 1):
        resumed = [
            list(islice(items, max(0, 40 - skip)))
            for items in stage.open(
                opening(num_parts, epoch=1, seed=3, skip=skip)
            )
        ]

        assert resumed == [part[skip:] for part in straight]


@pytest.mark.parametrize("counted", [True, False])
def test_shard_part_is_the_same_for_all_readers(counted):
    _, stage = source(UNEQUAL, counted=counted)
    together = [list(islice(items, 30)) for items in stage.open(opening(4))]

    for part in range(4):
        _, other = source(UNEQUAL, counted=counted)
        assert (
            list(islice(other.open(opening(4, (part,)))[0], 30))
            == together[part]
        )


@pytest.mark.parametrize("counted", [True, False])
def test_shard_order_depends_on_seed_epoch_and_round(
    counted,
):
    _, stage = source([3] * 20, counted=counted)

    def order(**what):
        return list(islice(stage.open(opening(2, **what))[0], 30))

    orders = [order(), order(epoch=1), order(round=1), order(seed=1)]

    assert len({tuple(o) for o in orders}) == 4
    assert order(epoch=1) == orders[1]


def test_counted_parts_open_only_the_files_they_need_and_seek():
    shards, stage = source([10] * 6, shuffle_shards=False)

    list(stage.open(opening(4, (1,)))[0])  # samples 15 to 30

    assert shards.opened == [("s1", 5), ("s2", 0)]


def test_shards_that_are_skipped_by_count_are_not_opened():
    shards, stage = source([10] * 6, shuffle_shards=False)
    list(stage.open(opening(1, skip=47))[0])
    assert shards.opened == [("s4", 7), ("s5", 0)]


def test_shards_are_opened_when_a_part_is_read():
    shards, stage = source(UNEQUAL)

    stage.open(opening(4))
    stage.lengths(opening(4))
    stage.fingerprint()

    assert shards.opened == []
    assert (stage.num_shards, stage.cuts, stage.endless) == (8, True, False)


def test_uncounted_shards_fewer_than_parts_are_refused():
    _, stage = source([3, 3, 3], counted=False)

    with pytest.raises(
        ArgumentError, match="3 shards cannot be assigned to 4 parts"
    ) as caught:
        stage.lengths(opening(4))
    for way in (
        "at most 3",
        "paddle-shard index",
        "each reader reads all",
    ):
        assert way in str(caught.value)


@pytest.mark.parametrize(
    ("really", "said", "part", "num_parts", "text"),
    [
        ([4, 6], [4, 5], 0, 1, "s1 has 6 samples, but its count says 5"),
        ([4, 5], [4, 6], 0, 1, "s1 has 5 samples, but its count says 6"),
        # the part that begins before its end
        (
            [4, 5],
            [4, 12],
            2,
            4,
            "s1 has 5 samples, but its count says 12",
        ),
        # and one that begins behind it
        (
            [4, 5],
            [4, 12],
            3,
            4,
            "s1 has at most 8 samples, but its count says 12",
        ),
    ],
)
def test_shard_that_does_not_have_its_count_is_an_error(
    really, said, part, num_parts, text
):
    shards = Shards(really)
    stage = ShardSource(
        list(shards.lengths), shards.read, counts=said, shuffle_shards=False
    )

    with pytest.raises(ShardReadError, match=text) as caught:
        list(stage.open(opening(num_parts, (part,)))[0])

    assert "paddle-shard index" in str(caught.value)
    assert caught.value.shard == "s1"


def test_shard_with_too_many_samples_is_found_in_time():
    shards = Shards([4])
    stage = ShardSource(["s0"], shards.read, counts=[3])
    items = stage.open(opening(1))[0]

    assert list(islice(items, 2)) == ["s0/0", "s0/1"]
    # or a loader that needs three would never ask
    with pytest.raises(ShardReadError):
        next(items)


@pytest.mark.parametrize(
    ("counted", "skip"), [(True, 0), (False, 0), (True, 6), (False, 6)]
)
def test_shard_read_error_names_shard_and_sample(counted, skip):
    def read(name, start, _ahead):
        for number in range(start, 5):
            if (name, number) == ("b", 3):
                raise OSError("disk on fire")
            yield number

    stage = ShardSource(
        ["a", "b"],
        read,
        counts=[5, 5] if counted else None,
        shuffle_shards=False,
    )

    with pytest.raises(
        ShardReadError,
        match="b: reading sample 3 failed: OSError: disk on fire",
    ) as caught:
        list(stage.open(opening(1, skip=skip))[0])

    assert (caught.value.shard, caught.value.offset) == ("b", 3)
    assert isinstance(caught.value.__cause__, OSError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.shard, again.offset, str(again)) == (
        "b",
        3,
        str(caught.value),
    )


def test_shard_is_closed_when_a_part_ends_inside_it_or_is_left():
    closed = []

    def read(name, skip, _ahead):
        try:
            yield from range(skip, 10)
        finally:
            closed.append(name)

    stage = ShardSource(["a"], read, counts=[10])
    first, second = stage.open(opening(2))
    assert list(first) == [0, 1, 2, 3, 4]
    assert closed == ["a"]
    next(second)
    second.close()
    assert closed == ["a", "a"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"names": ["a", "c"]}, False),
        ({"names": ["b", "a"]}, False),
        ({"counts": [1, 3]}, False),
        ({"counts": None}, False),
        ({"shuffle_shards": False}, False),
    ],
)
def test_fingerprint_is_of_what_samples_and_order_depend_on(change, same):
    settings = {"names": ["a", "b"], "counts": [1, 2]}

    before = ShardSource(**settings, read=iter).fingerprint()
    after = ShardSource(**{**settings, **change}, read=iter).fingerprint()

    assert (before == after) is same


def test_shard_secrets_are_in_no_fingerprint_and_no_error():
    def read(name, skip, _ahead):
        raise OSError("no such host")
        yield

    first, second = (
        ShardSource([f"https://u:pw@h/0.tar?sig={n}"], read) for n in (1, 2)
    )

    assert first.fingerprint() == second.fingerprint()
    with pytest.raises(ShardReadError) as caught:
        list(first.open(opening(1))[0])
    assert "pw" not in str(caught.value)
    assert "sig" not in str(caught.value)
    assert redacted("what?.tar") == "what?.tar"


@pytest.mark.parametrize(
    ("names", "settings", "error", "text"),
    [
        ([], {}, ArgumentError, "at least one file"),
        (["a", "b", "a"], {}, ArgumentError, "'a' more than once"),
    ],
)
def test_wrong_arguments_are_refused(names, settings, error, text):
    with pytest.raises(error, match=text):
        ShardSource(names, iter, **settings)
