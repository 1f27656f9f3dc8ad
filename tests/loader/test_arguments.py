"""What a loader refuses, and what it says once."""

import dataclasses
import inspect
import math
import sys

import numpy as np
import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Stream
from paddle_shard.core import warn_once
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchStructureError,
    StateError,
)
from paddle_shard.testing.simulated import simulated_rank
from tests.helpers import ONE, Made, sharded


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dims": []}, r"shard_dims must be an axis, .* got \[\]"),
        (
            {"dense_tensor_idx": [None, []]},
            "dense_tensor_idx must be a list with a list",
        ),
        (
            {"dense_tensor_idx": 1},
            "dense_tensor_idx must be a list with a list",
        ),
    ],
)
def test_arguments_are_checked_at_construction(options, text):
    with pytest.raises(ArgumentError, match=text):
        sharded(DataLoader(Made(), batch_size=4), **options)


def test_patch_survives_odd_modules_and_refuses_unknown_options(monkeypatch):
    monkeypatch.setitem(sys.modules, "blocked", None)
    original = dist.shard_dataloader
    with pytest.raises(TypeError, match="unexpected keyword argument 'tale'"):
        paddle_shard.patch_paddle(tale="fill")
    assert dist.shard_dataloader is original
    with paddle_shard.patch_paddle():
        assert dist.shard_dataloader is not original
    assert dist.shard_dataloader is original


def test_loop_that_was_left_is_said_to_begin_again_once(caplog, monkeypatch):
    monkeypatch.setattr(warn_once, "_WARNED", set())
    loader = sharded(DataLoader(Made(length=8), batch_size=4), ONE)

    def said():
        return [
            text
            for record in caplog.records
            if "begins the same epoch again" in (text := record.getMessage())
        ]

    list(loader), list(zip(loader, loader, strict=True))
    loader.set_epoch(3)
    for _ in loader:
        break
    loader.set_epoch(3)  # it is meant
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


def test_iterator_after_an_unfinished_one_warns(caplog, monkeypatch):
    monkeypatch.setattr(warn_once, "_WARNED", set())
    loader = sharded(DataLoader(Made(length=16), batch_size=4), ONE)
    first, kept = iter(loader), iter(loader)
    next(first), next(kept), next(first)  # two at once are one's own business
    assert caplog.records == []
    kept = iter(loader)  # lets go of the one before only now
    next(kept)
    assert [
        record
        for record in caplog.records
        if "begins the same epoch again" in record.getMessage()
    ]


def test_closed_iterator_consumes_no_epoch():
    loader = sharded(DataLoader(Made(), batch_size=4))
    batches = iter(loader)
    next(batches)
    batches.close()

    assert list(batches) == []
    assert loader.epoch == 0


def test_public_names_stay_few():
    # Paddle's six, and eighteen of ours.
    assert (
        len(inspect.signature(paddle_shard.shard_dataloader).parameters) <= 24
    )
    for kind in (
        paddle_shard.ShardDataloader,
        paddle_shard.ShardIterator,
        paddle_shard.ShardPlan,
    ):
        methods = [
            name
            for name, one in vars(kind).items()
            if callable(one) or isinstance(one, property)
        ]
        assert sum(not name.startswith("_") for name in methods) <= 15, methods


def test_parts_of_a_mixture_are_chosen_for_all_of_it():
    cut = Stream.of(range(8)).in_parts(2)
    with pytest.raises(
        ArgumentError,
        match=r"source 'a' has in_parts\(\).*Stream.mixture\(...\).in_parts\(2\)",
    ):
        Stream.mixture({"a": cut, "b": Stream.of(range(8))})
    for number in (0, True, 1.5):
        with pytest.raises(
            ArgumentError, match="num_parts must be an int >= 1"
        ):
            Stream.of(range(8)).in_parts(number)


@pytest.mark.parametrize(
    ("names", "shape", "dims", "auto_dp", "says"),
    [
        (["mp", "dp"], (1, 2), None, False, True),
        (["data"], (2,), None, False, True),
        (["dp"], (1,), None, False, False),
        (["mp"], (2,), None, False, False),
        (["dp"], (2,), "dp", False, False),
        (["dp", "mp"], (2, 2), "mp", False, False),
        (["dp"], (2,), None, True, False),
    ],
)
def test_axis_of_data_that_splits_nothing_is_said_once(
    names, shape, dims, auto_dp, says, caplog, monkeypatch
):
    monkeypatch.setattr(warn_once, "_WARNED", set())
    monkeypatch.setattr(
        "paddle_shard.loader.api.in_auto_dp_mode", lambda: auto_dp
    )
    mesh = dist.ProcessMesh(
        np.arange(math.prod(shape)).reshape(shape), dim_names=names
    )
    for _ in range(2):
        sharded(DataLoader(Made(), batch_size=4), mesh, dims=dims)
    with simulated_rank(1, 2):
        sharded(DataLoader(Made(), batch_size=4), mesh, dims=dims)

    assert (
        caplog.text.count(
            "get the same rows, the whole of each batch. shard_dims='d"
        )
        == says
    )


@pytest.mark.parametrize("state", [{}, {"epoch": 0, "step": 3}, None, [1]])
def test_load_state_dict_refuses_what_is_no_state(state):
    with pytest.raises(
        StateError,
        match=r"state must be what the loader's state_dict\(\) returned, got ",
    ):
        sharded(DataLoader(Made(), batch_size=2), ONE).load_state_dict(state)


def test_override_that_is_a_text_is_refused():
    loader = sharded(DataLoader(Made(), batch_size=2), ONE)
    with pytest.raises(
        StateError,
        match="override must be a list of names, got 'tail'",
    ):
        loader.load_state_dict(loader.state_dict(), override="tail")
    with pytest.raises(
        StateError, match=r"override must be a list of names, got None\.$"
    ):
        loader.load_state_dict(loader.state_dict(), override=None)


@pytest.mark.parametrize(
    "data",
    [iter(range(4)), type("It", (), {"__iter__": lambda self: iter(())})()],
)
def test_stream_in_a_data_loader_is_told_how_streams_are_given(data):
    with pytest.raises(
        ArgumentTypeError,
        match=r"A stream has none: .*Stream\.of, Stream\.huggingface",
    ):
        sharded(DataLoader(data, batch_size=2), ONE)


def test_gather_valid_of_an_array_is_refused():
    with pytest.raises(
        ArgumentTypeError,
        match=r"gather_valid: values must be a paddle.Tensor, got ndarray",
    ):
        paddle_shard.gather_valid(np.ones(3), np.ones(3, bool))


def test_weight_that_no_float_holds_is_refused():
    with pytest.raises(
        ArgumentError, match="the weight of 'a' must be a finite number"
    ):
        paddle_shard.Mixture({"a": Made(), "b": Made()}, {"a": 10**400, "b": 1})


def test_batches_that_are_dataclasses_are_rejected():
    @dataclasses.dataclass
    class Pair:
        x: np.ndarray

    data = DataLoader(
        range(8), batch_size=4, collate_fn=lambda s: Pair(np.array(s))
    )
    loader = paddle_shard.shard_dataloader(data, ONE, shard_dims="dp")
    with pytest.raises(BatchStructureError, match="Pair, .* dataclass"):
        next(iter(loader))


def test_meshes_that_leave_out_the_only_process_are_rejected():
    mesh = dist.ProcessMesh([5], dim_names=["dp"])
    with pytest.raises(ArgumentError, match=r"meshes .*\[5\], but .* rank 0"):
        paddle_shard.shard_dataloader([], mesh, shard_dims="dp")
