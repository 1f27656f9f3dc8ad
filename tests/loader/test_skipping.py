"""`on_error="skip"`: a bad sample is a row that is not valid, and nothing shifts."""

import random
from itertools import chain

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import ArgumentError, DataReadError
from paddle_shard.testing.simulated import on_each_rank

ONE = dist.ProcessMesh([0], dim_names=["dp"])
GRID = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["mp", "dp"])
BAD = {3, 17, 18, 40, 41, 42, 43}


class Rows(paddle.io.Dataset):
    def __init__(self, bad=BAD, length=61):
        self.bad, self.length = bad, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"no {index}")
        return np.array([index, np.random.rand()])


class ManyAtOnce(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def checked(x):
    if x in BAD:
        raise OSError(f"no {x}")
    return np.array([x, np.random.rand()])


def collated(samples):
    if any(sample[0] in BAD for sample in samples):
        raise TypeError("a bad one")
    return np.stack(samples)


def unchecked(bad):
    return lambda x: np.array([x, 0.5])


KINDS = {
    "reading": lambda: (Rows(), None),
    "reading many": lambda: (ManyAtOnce(), None),
    "collating": lambda: (Rows(bad=()), collated),
    "a stream's map": lambda: (Stream.of(range(61)).map(checked), None),
    "a stream's filter": lambda: (
        Stream.of(range(61))
        .filter(lambda x: checked(x)[0] >= 0)
        .map(unchecked(0)),
        None,
    ),
}


def sharded(
    kind, *, workers=0, mesh=ONE, on_error="skip", num_parts=None, **options
):
    dataset, collate_fn = KINDS[kind]()
    dataset = (
        dataset if num_parts is None else Stream.of(dataset).in_parts(num_parts)
    )
    given = paddle.io.DataLoader(
        dataset, batch_size=8, num_workers=workers, collate_fn=collate_fn
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", on_error=on_error, **options
    )


def trace(loader, steps=None):
    batches, found = iter(loader), []
    for batch in batches:
        rows, valid = (
            batch._local_value().numpy(),
            batches.valid._local_value().numpy(),
        )
        found.append((rows.tolist(), valid.tolist()))
        if len(found) == steps:
            break
    return found


def valid_ids(found):
    return [
        int(row[0])
        for rows, valid in found
        for row, good in zip(rows, valid, strict=True)
        if good
    ]


@pytest.mark.parametrize(
    ("workers", "kind"),
    [*((0, kind) for kind in KINDS), *((2, kind) for kind in list(KINDS)[::2])],
)
def test_skipping_keeps_the_other_samples_where_they_were(
    workers, kind, caplog
):
    good = [i for i in range(61) if i not in BAD]
    options = (
        {}
        if "stream" not in kind and kind != "round robin"
        else {"num_parts": 4}
    )
    loader = sharded(kind, workers=workers, **options)
    found = trace(loader)

    assert sorted(valid_ids(found)) == good
    assert len(found) == 8
    assert loader.stats.total.skipped == len(BAD)
    assert loader.stats.total.samples == len(good)
    assert caplog.text.count("skipped sample") == len(BAD)
    if not options:
        for step, (rows, valid) in enumerate(found):
            wanted = np.arange(8 * step, min(8 * step + 8, 61))
            assert valid == [i not in BAD for i in wanted]
            assert all(
                row[0] == i
                for row, i, fine in zip(rows, wanted, valid, strict=True)
                if fine
            )
            assert not {int(row[0]) for row in rows} & (
                BAD if kind != "collating" else set()
            )
    resumed = sharded(kind, workers=workers, **options)
    half = sharded(kind, **options)
    trace(half, 3)
    resumed.load_state_dict(half.state_dict())
    assert trace(resumed) == found[3:]


def test_skipping_fills_a_batch_of_bad_samples():
    given = paddle.io.DataLoader(Rows(bad=set(range(8, 16))), batch_size=8)
    found = trace(
        paddle_shard.shard_dataloader(
            given, ONE, shard_dims="dp", on_error="skip"
        )
    )

    assert found[1][1] == [False] * 8
    assert [row[0] for row in found[1][0]] == [0.0] * 8


def test_replicas_get_the_same_bytes_and_the_same_mask():
    def rank():
        return trace(sharded("reading", mesh=GRID, tail="fill"))

    ranks = on_each_rank(GRID.process_ids, rank)

    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    assert sorted(valid_ids(ranks[0]) + valid_ids(ranks[1])) == [
        i for i in range(61) if i not in BAD
    ]


def test_skipping_is_off_by_default():
    for kind in KINDS:
        with pytest.raises(DataReadError):
            trace(sharded(kind, on_error="raise"))


def test_skipping_all_of_a_data_set_is_an_error():
    given = paddle.io.DataLoader(Rows(bad=set(range(61))), batch_size=8)
    with pytest.raises(DataReadError, match="no 0"):
        trace(
            paddle_shard.shard_dataloader(
                given, ONE, shard_dims="dp", on_error="skip"
            )
        )
    nothing = Stream.of(range(61)).map(lambda x: 1 / 0)
    with pytest.raises(
        DataReadError,
        match="ZeroDivisionError: division by zero; and no sample",
    ):
        trace(
            paddle_shard.shard_dataloader(
                paddle.io.DataLoader(nothing, batch_size=8),
                ONE,
                on_error="skip",
            )
        )


def test_skipping_is_counted_by_the_certificate():
    loader = sharded("reading")
    trace(loader)
    certificate = loader.certificate()

    assert not certificate.exact
    assert certificate.missed == len(BAD)


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_error", "ignore"), ("on_lost", None), ("on_error", True)],
)
def test_skipping_rejects_other_values(name, value):
    with pytest.raises(ArgumentError, match=f"{name} must be 'raise' or"):
        paddle_shard.shard_dataloader(
            paddle.io.DataLoader(Rows(), batch_size=8),
            ONE,
            shard_dims="dp",
            **{name: value},
        )


# A law: streams with any stages, whoever reads


LOST = "lost"  # what the oracle has for a row that is not valid


def unless(bad, function):
    """The function, which fails at some samples, and is never given anything but numbers and lists of them."""

    def called(given):
        numbers = given if isinstance(given, list) else [given]
        assert all(type(number) is int for number in numbers), leaked.append(
            given
        )
        if bad & set(numbers):
            raise Unprintable
        return function(given)

    return called


leaked = []


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def pair(bad):
    def items(number):
        yield number
        if number in bad:
            raise ValueError(number)
        yield number + 1000

    return unless(set(), items)


def row(odd):
    """The last stage, which fails on some samples."""

    def made(number):
        if number in odd:
            raise ValueError(f"{number} is odd")
        return {"x": np.array([number, number]), "y": number}

    return unless(set(), made)


def drawn_chain(rng, length):
    """(what is done to a stream, the same to the list of a part) for some stages; few rows are odd."""

    def some():
        # nothing readable at the beginning of any part
        first = set(range(8)) if rng.random() < 0.3 else set()
        return first | set(
            rng.sample(range(length), rng.randint(0, length // 6))
        )

    steps = []
    for kind in rng.choices(
        ["map", "filter", "groups", "group", "pairs"], k=rng.randint(0, 3)
    ):
        bad, size, mod = some(), rng.randint(1, 4), rng.randint(2, 5)
        if kind == "map":
            steps.append(
                (
                    lambda s, b=bad: s.map(unless(b, lambda x: x)),
                    lambda p, b=bad: [lost(x, b) for x in p],
                )
            )
        elif kind == "filter":
            steps.append(
                (
                    lambda s, b=bad, m=mod: s.filter(
                        unless(b, lambda x: x % m)
                    ),
                    lambda p, b=bad, m=mod: [
                        lost(x, b) for x in p if lost(x, b) == LOST or x % m
                    ],
                )
            )
        elif kind == "groups":
            # put together and taken apart: nothing has happened
            steps.append((lambda s, n=size: s.batch(n).unbatch(), lambda p: p))
        elif kind == "group":
            # with a function of the group between, one bad sample costs the group
            steps.append(
                (
                    lambda s, n=size, b=bad: (
                        s.batch(n)
                        .map(unless(b, lambda group: group[::-1]))
                        .unbatch()
                    ),
                    lambda p, n=size, b=bad: [
                        x
                        for at in range(0, len(p), n)
                        for x in (
                            [LOST]
                            if {lost(x, b) for x in p[at : at + n]} & {LOST}
                            else p[at : at + n][::-1]
                        )
                    ],
                )
            )
        else:
            steps.append(
                (
                    lambda s, b=bad: s.map(pair(b)).unbatch(),
                    lambda p, b=bad: [
                        y
                        for x in p
                        for y in (
                            [x]
                            if x == LOST
                            else [x, LOST if x in b else x + 1000]
                        )
                    ],
                )
            )
            break  # numbers from 1000 on are in no set
    odd = set(rng.sample(range(length), 5))
    steps.append(
        (
            lambda s: s.map(row(odd)),
            lambda p: [x if x == LOST or x not in odd else LOST for x in p],
        )
    )
    return steps


def lost(number, bad):
    return LOST if number in bad else number


def by_oracle(steps, length, num_parts, batch_size):
    """The rows of each batch, taken from each part in turn; None where there is none any more."""
    stripe = batch_size // num_parts
    parts = [
        [x for x in range(length) if x // stripe % num_parts == part]
        for part in range(num_parts)
    ]
    for _, of_list in steps:
        parts = [of_list(part) for part in parts]
    num_batches = max(-(-len(part) // stripe) for part in parts)
    parts = [
        part + [None] * (num_batches * stripe - len(part)) for part in parts
    ]
    return [
        [x for part in parts for x in part[k * stripe : (k + 1) * stripe]]
        for k in range(num_batches)
    ]


# one in which a rank can read none of its samples
@pytest.mark.parametrize("trial", [*range(16), 248])
def test_skipping_makes_what_fails_an_invalid_row_in_its_place(trial, caplog):
    rng, length = random.Random(trial), 96
    steps, num_parts = drawn_chain(rng, length), rng.choice([4, 8])
    wanted = by_oracle(steps, length, num_parts, 8)
    ranks, workers = (
        rng.choice([d for d in (1, 2, 4) if num_parts % d == 0]),
        trial if trial < 4 else 0,
    )
    end = {}
    if not any(None not in batch for batch in wanted):
        ranks = 1
    if ranks > 1:  # ranks that are simulated cannot agree on an end
        wanted = [batch for batch in wanted if None not in batch]
        end = {"num_batches": len(wanted)}

    def stream():
        found = Stream.of(range(length)).sharding_filter()
        for of_stream, _ in steps:
            found = of_stream(found)
        return found

    def loader():
        given = paddle.io.DataLoader(
            stream().in_parts(num_parts), batch_size=8, num_workers=workers
        )
        mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["dp"])
        return paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", on_error="skip", **end
        )

    def rank():
        mine = loader()
        batches, found = iter(mine), []
        for batch in batches:
            rows, valid = (
                batch["x"]._local_value().numpy(),
                batches.valid._local_value().numpy(),
            )
            found.append(
                [
                    int(x[0]) if good else None
                    for x, good in zip(rows, valid, strict=True)
                ]
            )
        return found, mine.stats.total.skipped

    leaked.clear()
    caplog.clear()
    found = on_each_rank(range(ranks), rank)
    rows = [
        [*chain(*of_ranks)]
        for of_ranks in zip(*(found[at][0] for at in range(ranks)), strict=True)
    ]
    num_lost = sum(x == LOST for batch in wanted for x in batch)

    assert rows == [
        [None if x == LOST else x for x in batch] for batch in wanted
    ]
    assert sum(skipped for _, skipped in found.values()) == num_lost
    told = [
        record.getMessage()
        for record in caplog.records
        if "skipped sample" in record.getMessage()
    ]
    if paddle.device.get_device() == "cpu":
        assert len(told) == num_lost
    else:  # batches are read ahead of the end, which another part may bring
        assert len(told) >= num_lost
    assert leaked == []


def test_skipping_shows_no_function_what_cannot_be_read(
    caplog,
):
    """Stages that change the order, for which the oracle above has none."""
    bad = set(range(0, 60, 7))
    stream = (
        Stream.of(range(60))
        .map(unless(bad, lambda x: x))
        .shuffle(5)
        .batch(3)
        .shuffle(2)
        .unbatch()
    )
    stream = (
        stream.map(unless(set(), lambda x: x))
        .filter(unless(set(), lambda x: True))
        .repeat(2)
    )
    for workers in (0, 2):
        given = paddle.io.DataLoader(
            stream.map(row({})).in_parts(4), batch_size=8, num_workers=workers
        )
        loader = paddle_shard.shard_dataloader(
            given, ONE, shard_dims="dp", on_error="skip"
        )
        leaked.clear()
        batches, found = iter(loader), []
        for batch in batches:
            found += (
                batch["x"][:, 0]
                ._local_value()[batches.valid._local_value()]
                .tolist()
            )
        assert sorted(found) == sorted(
            2 * [x for x in range(60) if x not in bad]
        )
        assert loader.stats.total.skipped == 2 * len(bad)
        assert leaked == []


def files(tmp_path, length):
    paths = [tmp_path / f"{number}.txt" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"{i}\n" for i in range(number, length, 8)))
    return Stream.lines(list(map(str, paths)))


def bad_of(index):
    raise ValueError(f"{index} is bad")


STREAMS = {
    "by turns": lambda made, length, path: Stream.of(range(length)).map(made),
    "behind the cut": lambda made, length, path: (
        Stream.of(range(length)).sharding_filter().map(made)
    ),
    "shuffled": lambda made, length, path: (
        Stream.of(range(length)).shuffle(5).sharding_filter().map(made)
    ),
    "twice": lambda made, length, path: (
        Stream.of(range(length)).sharding_filter().map(made).repeat(2)
    ),
    "read once": lambda made, length, path: Stream.of(iter(range(length))).map(
        made
    ),
    "files": lambda made, length, path: files(path, length).map(
        lambda line: made(int(line))
    ),
}


def bad_in(bad):
    return lambda i: bad_of(i) if i in bad else np.full(3, i)


WHERE = [(24, {0}), (24, {9}), (24, {6, 14, 22}), (16, {8, 9})]
"""How many samples there are, and which are bad."""


@pytest.mark.parametrize(
    ("stream", "length", "bad"),
    [
        (stream, *WHERE[(number + turn) % 4])  # the streams take them by turns
        for number, stream in enumerate(STREAMS)
        for turn in (0, 3)
    ],
)
def test_bad_samples_of_a_stream_are_the_same_for_any_ranks(
    stream, length, bad, tmp_path
):
    """Also where a reader sees few samples, or none but bad ones: of eight parts the first may hold them all."""
    times = 2 if stream == "twice" else 1

    def rank(ranks):
        given = paddle.io.DataLoader(
            STREAMS[stream](bad_in(bad), length, tmp_path).in_parts(8),
            batch_size=8,
        )
        mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["dp"])
        options = {"num_batches": times * length // 8} if ranks > 1 else {}
        loader = paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", on_error="skip", **options
        )
        batches, found = iter(loader), []
        for batch in batches:
            rows, valid = (
                batch._local_value().numpy(),
                batches.valid._local_value().numpy(),
            )
            assert rows.shape[1:] == (3,)
            found += rows[valid][:, 0].tolist()
        return found

    for ranks in (1, 2 + 2 * (0 in bad), 8):
        first = bad & set(range(8))
        # a rank has one row, and cannot begin the stream again
        if stream == "read once" and ranks == 8 and first:
            with pytest.raises(DataReadError, match="can be read only once"):
                on_each_rank(first, lambda: rank(8))
            continue
        found = on_each_rank(range(ranks), lambda ranks=ranks: rank(ranks))

        assert sorted(chain(*found.values())) == sorted(
            times * [i for i in range(length) if i not in bad]
        )


@pytest.mark.parametrize("stream", ["by turns", "files"])
def test_bad_samples_of_a_stream_are_the_same_for_any_workers(stream, tmp_path):
    bad, length = {6, 14, 22}, 24

    def loader(workers):
        given = STREAMS[stream](bad_in(bad), length, tmp_path).in_parts(8)
        given = paddle.io.DataLoader(given, batch_size=8, num_workers=workers)
        return paddle_shard.shard_dataloader(
            given, ONE, shard_dims="dp", on_error="skip"
        )

    def real(found):
        return [
            (
                [row for row, good in zip(rows, valid, strict=True) if good],
                valid,
            )
            for rows, valid in found
        ]

    straight = real(trace(loader(0)))
    assert sorted(row[0] for rows, _ in straight for row in rows) == [
        i for i in range(length) if i not in bad
    ]
    assert real(trace(loader(3))) == straight
    half, resumed = loader(0), loader(1 if stream == "files" else 3)
    trace(half, 2)
    resumed.load_state_dict(half.state_dict())
    assert real(trace(resumed)) == straight[2:]


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_skipping_does_not_hide_a_group_that_is_shorter(workers):
    groups = Stream.of(range(35)).batch(3).map(np.array).in_parts(4)
    given = paddle.io.DataLoader(groups, batch_size=4, num_workers=workers)
    loader = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", on_error="skip"
    )

    with pytest.raises(DataReadError, match="not fit"):
        trace(loader)


@pytest.mark.parametrize(  # each pair of settings
    ("on_error", "kind", "counts", "workers"),
    [
        ("skip", "lines", None, 0),
        ("skip", "csv", False, 2),
        ("raise", "lines", False, 0),
        ("raise", "csv", None, 2),
        ("skip", "csv", None, 0),
        ("raise", "lines", False, 2),
    ],
)
def test_bad_sample_of_counted_files_is_named_by_file(
    on_error, kind, counts, workers, tmp_path, caplog
):
    paths = [tmp_path / f"{letter}.txt" for letter in "abc"]
    for path, values in zip(
        paths, (range(7), range(100, 104), range(200, 211)), strict=True
    ):
        path.write_text("".join(f"{value}\n" for value in values))

    def number(sample):
        value = int(sample if isinstance(sample, str) else sample[0])
        if value == 103:
            raise ValueError(value)
        return np.array([value, 0])

    options = {"header": False} if kind == "csv" else {}
    given = getattr(Stream, kind)(
        list(map(str, paths)), shuffle_shards=False, counts=counts, **options
    )
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(
            given.map(number).in_parts(2), batch_size=4, num_workers=workers
        ),
        ONE,
        shard_dims="dp",
        on_error=on_error,
    )
    where = "" if counts is False else f" (sample 3 of {paths[1]})"
    if on_error == "raise":
        with pytest.raises(
            DataReadError, match=r"reading sample \d+ of part \d"
        ) as raised:
            trace(loader)
        text = str(raised.value)
        assert f"{where} failed" in text
    else:
        trace(loader)
        text = caplog.text
        assert f"{where}: ValueError: 103" in text
    assert ("b.txt)" in text) == bool(where)


IMAGES = {
    5: np.zeros((4, 4)),
    11: None,
    17: {"x": 1},
    23: np.zeros((3, 4, 5)),
    29: "text",
}
IMAGES[30] = np.zeros((3, 4, 4), "U1")


class Images(paddle.io.Dataset):
    def __len__(self):
        return 61

    def __getitem__(self, index):
        return {
            "image": IMAGES.get(index, np.full((3, 4, 4), index)),
            "label": index,
        }


class ImagesAtOnce(Images):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "dataset", [Images(), ImagesAtOnce()], ids=["", "at once"]
)
# None and an array are a list, as without skipping
@pytest.mark.parametrize("odd", sorted(set(IMAGES) - {11}))
@pytest.mark.parametrize("ranks", [1, 2])
def test_skipping_does_not_hide_a_sample_that_does_not_fit(
    dataset, odd, ranks, monkeypatch
):
    """Skipping is for samples that raise. A row of another shape is a fault of the data, or of the collate_fn."""
    monkeypatch.setattr(f"{__name__}.IMAGES", {odd: IMAGES[odd]})

    def rank():
        given = paddle.io.DataLoader(dataset, batch_size=8)
        mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["dp"])
        return list(
            paddle_shard.shard_dataloader(
                given, mesh, shard_dims="dp", on_error="skip"
            )
        )

    reads = odd % 8 // (8 // ranks)  # the rank whose row it is
    with pytest.raises(
        DataReadError,
        match="Each sample can be collated alone, but they do not fit",
    ):
        on_each_rank([reads], rank)


def test_skipping_holds_data_of_several_sizes_to_none():
    """Buckets: the rows of a batch are of one size, which that of most samples need not be."""

    class Buckets(Images):
        def __getitem__(self, index):
            if index == 9:
                raise OSError("bad")
            return np.full(1 + index // 8, index)

    given = paddle.io.DataLoader(Buckets(), batch_size=8)
    found = trace(
        paddle_shard.shard_dataloader(
            given, ONE, shard_dims="dp", on_error="skip"
        )
    )

    assert valid_ids(found) == [i for i in range(61) if i != 9]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_skipping_reports_an_exception_without_a_text(
    workers, on_error, caplog
):
    class Bad(Rows):
        def __getitem__(self, index):
            if index == 3:
                raise Unprintable
            return np.array([index, 0])

    given = paddle.io.DataLoader(Bad(), batch_size=8, num_workers=workers)
    loader = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", on_error=on_error
    )
    if on_error == "skip":
        assert valid_ids(trace(loader)) == [i for i in range(61) if i != 3]
        assert (
            "skipped sample 3: Unprintable: (its text cannot be had: RuntimeError)"
            in caplog.text
        )
    else:
        with pytest.raises(
            DataReadError, match="reading sample 3 failed .* Unprintable"
        ):
            trace(loader)


def refusing(*refused):
    def collate_fn(samples):
        if {*refused} & {*samples}:
            raise ValueError(f"cannot collate {samples}")
        return np.array(samples)

    return collate_fn


@pytest.mark.parametrize("stream", [False, True])
def test_skipping_a_read_whose_samples_all_fail_to_collate(stream):
    data = list(range(6))
    given = paddle.io.DataLoader(
        Stream.of(data) if stream else data,
        batch_size=1,
        collate_fn=refusing(3),
    )
    batches = iter(
        paddle_shard.shard_dataloader(
            given, ONE, shard_dims="dp", on_error="skip"
        )
    )

    found = [
        (
            int(batch._local_value().numpy()[0]),
            bool(batches.valid._local_value().numpy()[0]),
        )
        for batch in batches
    ]

    assert found == [
        (0, True),
        (1, True),
        (2, True),
        (2, False),
        (4, True),
        (5, True),
    ]


def test_skipping_padding_that_cannot_be_collated():
    """A part's missing rows hold its first sample."""
    stream = Stream.of(lambda: iter(range(5))).in_parts(1)
    given = paddle.io.DataLoader(stream, batch_size=3, collate_fn=refusing(0))
    batches = iter(
        paddle_shard.shard_dataloader(
            given, ONE, shard_dims="dp", on_error="skip"
        )
    )

    valid = [batches.valid._local_value().numpy().tolist() for _ in batches]

    assert valid == [[False, True, True], [True, True, False]]
