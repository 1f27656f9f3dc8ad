"""What a loader refuses, and what it says once."""

import inspect
import sys

import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Stream, say_once
from paddle_shard.errors import ArgumentError
from tests.helpers import ONE, Made, sharded


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dims": []}, "shard_dims is an empty list"),
        ({"dense_tensor_idx": [None, []]}, "dense_tensor_idx must be a list with a list"),
        ({"dense_tensor_idx": 1}, "dense_tensor_idx must be a list with a list"),
    ],
)
def test_arguments_are_checked_at_construction(options, text):
    with pytest.raises(ArgumentError, match=text):
        sharded(DataLoader(Made(), batch_size=4), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"agree": False}, r"no argument agree=.*give a mesh of that rank: ProcessMesh\(\[rank\]\)"),
        ({"pad_values": {0: 0}}, "no argument pad_values=.*pad_to={field: "),
        ({"seed_paddle": True}, r"no argument seed_paddle=.*dataset.seed_paddle = True"),
        ({"num_parts": 4}, r"no argument num_parts=.*Stream.in_parts\(num_parts\)"),
        ({"tails": "drop"}, "no argument tails=. Did you mean tail="),
        ({"xyz": 1}, "no argument xyz=. It has dataloader, meshes, "),
    ],
)
def test_an_argument_that_is_not_there_is_refused_with_what_to_do(options, text):
    with pytest.raises(TypeError, match=text):
        sharded(DataLoader(Made(), batch_size=4), **options)


def test_patching_survives_odd_modules_and_refuses_unknown_options(monkeypatch):
    monkeypatch.setitem(sys.modules, "blocked", None)
    original = dist.shard_dataloader
    with pytest.raises(ArgumentError, match=r"unknown options \['tale'\]"):
        paddle_shard.patch_paddle(tale="fill")
    assert dist.shard_dataloader is original
    with paddle_shard.patch_paddle():
        assert dist.shard_dataloader is not original
    assert dist.shard_dataloader is original


def test_a_loop_that_was_left_is_said_to_begin_again_once(caplog, monkeypatch):
    monkeypatch.setattr(say_once, "_SAID", set())
    loader = sharded(DataLoader(Made(length=8), batch_size=4), ONE)

    def said():
        return [text for record in caplog.records if "begins the same epoch again" in (text := record.getMessage())]

    list(loader), list(zip(loader, loader, strict=True))
    loader.set_epoch(3)
    for _ in loader:
        break
    loader.set_epoch(4)
    iterator = iter(loader)
    next(iterator)
    list(iterator)
    assert said() == []
    for _ in range(2):
        next(iter(loader))
    list(loader)
    assert len(said()) == 1


def test_a_closed_iterator_consumes_no_epoch():
    loader = sharded(DataLoader(Made(), batch_size=4))
    batches = iter(loader)
    next(batches)
    batches.close()

    assert list(batches) == []
    assert loader.epoch == 0


def test_what_there_is_to_know_stays_little():
    assert len(inspect.signature(paddle_shard.shard_dataloader).parameters) <= 20
    for kind in (paddle_shard.ShardDataloader, paddle_shard.ShardIterator, paddle_shard.ShardPlan):
        methods = [name for name, one in vars(kind).items() if callable(one) or isinstance(one, property)]
        assert sum(not name.startswith("_") for name in methods) <= 12, methods


def test_the_parts_of_a_mixture_are_chosen_for_all_of_it():
    cut = Stream.of(range(8)).in_parts(2)
    with pytest.raises(ArgumentError, match=r"source 'a' has in_parts\(\).*Stream.mixture\(...\).in_parts\(2\)"):
        Stream.mixture({"a": cut, "b": Stream.of(range(8))})
    for number in (0, True, 1.5):
        with pytest.raises(ArgumentError, match="num_parts must be an int >= 1"):
            Stream.of(range(8)).in_parts(number)
