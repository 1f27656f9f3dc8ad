"""`on_error="skip"`: a bad sample is a row that is not valid, and nothing shifts."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import ArgumentError, DataReadError, MissingDependencyError
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
    "a stream's filter": lambda: (Stream.of(range(61)).filter(lambda x: checked(x)[0] >= 0).map(unchecked(0)), None),
    "round robin": lambda: (Stream.of(range(61)).round_robin().map(checked), None),
}


def sharded(kind, *, workers=0, mesh=ONE, on_error="skip", **options):
    dataset, collate_fn = KINDS[kind]()
    given = paddle.io.DataLoader(dataset, batch_size=8, num_workers=workers, collate_fn=collate_fn)
    return paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", on_error=on_error, **options)


def trace(loader, steps=None):
    batches, found = iter(loader), []
    for batch in batches:
        rows, valid = batch._local_value().numpy(), batches.valid._local_value().numpy()
        found.append((rows.tolist(), valid.tolist()))
        if len(found) == steps:
            break
    return found


def valid_ids(found):
    return [int(row[0]) for rows, valid in found for row, good in zip(rows, valid, strict=True) if good]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_other_samples_stand_where_they_would_and_each_is_delivered_once(kind, workers, caplog):
    good = [i for i in range(61) if i not in BAD]
    options = {} if "stream" not in kind and kind != "round robin" else {"num_parts": 4}
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
            assert all(row[0] == i for row, i, fine in zip(rows, wanted, valid, strict=True) if fine)
            assert not {int(row[0]) for row in rows} & (BAD if kind != "collating" else set())
    resumed = sharded(kind, workers=workers, **options)
    half = sharded(kind, workers=workers, **options)
    trace(half, 3)
    resumed.load_state_dict(half.state_dict())
    assert trace(resumed) == found[3:]


def test_where_all_of_a_batch_are_bad_another_sample_of_the_data_set_stands_in():
    given = paddle.io.DataLoader(Rows(bad=set(range(8, 16))), batch_size=8)
    found = trace(paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", on_error="skip"))

    assert found[1][1] == [False] * 8
    assert [row[0] for row in found[1][0]] == [0.0] * 8


def test_replicas_get_the_same_bytes_and_the_same_mask():
    def rank():
        return trace(sharded("reading", mesh=GRID, tail="fill"))

    ranks = on_each_rank(GRID.process_ids, rank)

    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    assert sorted(valid_ids(ranks[0]) + valid_ids(ranks[1])) == [i for i in range(61) if i not in BAD]


def test_without_it_the_first_bad_sample_ends_the_loop():
    for kind in KINDS:
        with pytest.raises(DataReadError):
            trace(sharded(kind, on_error="raise"))


def test_a_data_set_of_which_nothing_can_be_read_is_an_error():
    given = paddle.io.DataLoader(Rows(bad=set(range(61))), batch_size=8)
    with pytest.raises(DataReadError, match="no 0"):
        trace(paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", on_error="skip"))
    nothing = Stream.of(range(61)).map(lambda x: 1 / 0)
    with pytest.raises(DataReadError, match="ZeroDivisionError: division by zero; and no other sample"):
        trace(paddle_shard.shard_dataloader(paddle.io.DataLoader(nothing, batch_size=8), ONE, on_error="skip"))


def test_the_certificate_says_how_many_were_missed():
    loader = sharded("reading")
    trace(loader)
    certificate = loader.certificate()

    assert not certificate.exact
    assert certificate.missed == len(BAD)


@pytest.mark.parametrize(("name", "value"), [("on_error", "ignore"), ("on_lost", None), ("on_error", True)])
def test_other_values_are_refused(name, value):
    with pytest.raises(ArgumentError, match=f"{name} must be 'raise' or"):
        paddle_shard.shard_dataloader(paddle.io.DataLoader(Rows(), batch_size=8), ONE, shard_dims="dp", **{name: value})


def test_a_bar_shows_the_epoch_and_needs_tqdm(capsys, monkeypatch):
    loader = sharded("reading", progress=True)
    trace(loader, 3)
    assert "epoch 0" in (shown := capsys.readouterr().err)
    assert "3/8" in shown
    assert "waiting for data" in shown
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    with pytest.raises(MissingDependencyError, match=r"paddle_shard\[progress\]"):
        sharded("reading", progress=True)
