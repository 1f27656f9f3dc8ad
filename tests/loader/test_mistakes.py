"""Mistakes that users make: each is an error with argument, value and fix, or a warning; none passes in silence."""

import logging
import re

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Checkpoints, ExternalLoader, Stream
from paddle_shard.core import warn_once
from tests.helpers import ONE, Made, sharded


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x,y\n1,2\n3,4\n")
    return path


def loader(data=None, **options):
    return sharded(data or DataLoader(Made(), batch_size=4), ONE, **options)


MISTAKES = {
    "a stream of files without batches": (
        lambda rows: loader(Stream.csv(rows).shuffle(2)),
        r"single samples.* End it with .batch\(rows\)",
    ),
    "packed rows without batches": (
        lambda rows: loader(Stream.of([[1, 2]]).pack(2)),
        "single samples",
    ),
    "valid of a loader": (
        lambda rows: loader().valid,
        r"batches = iter\(loader\).*batches.valid",
    ),
    "text for a bool": (
        lambda rows: loader(is_dataset_splitted="yes"),
        "is_dataset_splitted must be True or False, got 'yes'",
    ),
    "more fields than there are": (
        lambda rows: next(iter(loader(dense_tensor_idx=[[], [], [0]]))),
        "dense_tensor_idx has 3 entries, but the batch has the 1 fields",
    ),
    "an option of files": (
        lambda rows: Stream.lines(rows, shuffle_shard=False),
        "unexpected keyword argument 'shuffle_shard'",
    ),
    "an option of pandas": (
        lambda rows: Stream.csv(rows, sep=";"),
        "unexpected keyword argument 'sep'",
    ),
    "a delimiter by position": (
        lambda rows: Stream.csv(rows, ";"),
        "header must be True or False, got ';'",
    ),
    "text for counts": (
        lambda rows: Stream.csv(rows, counts="no"),
        "counts.* must be True or False, got 'no'",
    ),
    "no weights": (
        lambda rows: Stream.mixture({"a": Stream.of([1])}, {}),
        "weights: at least one must be above 0, got {}",
    ),
    "another key": (
        lambda rows: list(Stream.of([{"tokens": [1]}]).pack(4)),
        r"no field 'input_ids'; its fields are \['tokens'\]",
    ),
    "an option of the patch": (
        lambda rows: paddle_shard.patch_paddle(on_error="ignore"),
        "on_error must be 'raise' or 'skip', got 'ignore'",
    ),
    "a library's loader": (
        lambda rows: ExternalLoader([1, 2], name="mine"),
        r"build must be a function of ShardOptions .* got \[1, 2\]",
    ),
    "a number in a checkpoint": (
        lambda rows: Checkpoints(rows.parent / "saved").save(1, number=3),
        r"save\(number=\): .* got int: 3. Put it into a dict",
    ),
    "the state of a model": (
        lambda rows: loader().load_state_dict(
            paddle.nn.Linear(1, 1).state_dict()
        ),
        r"state must be what the loader's state_dict\(\) returned, got .*'weight'",
    ),
    "the text of a state": (
        lambda rows: loader().load_state_dict("state.json"),
        "state_dict.* returned, got 'state.json'",
    ),
    "an override": (
        lambda rows: loader().load_state_dict(
            loader().state_dict(), override=["sede"]
        ),
        r"override names \['sede'\], but may name .*'seed'",
    ),
    "a dim": (
        lambda rows: next(iter(loader(placements={0: {"dp": 5}}))),
        r"placements splits dim 5, but its shape is \[4\]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_an_error_with_the_value(mistake, rows):
    make, text = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, AttributeError), match=text):
        make(rows)


WARNED = {
    "keys of fields without keys": (
        {"input_keys": ["x"]},
        Made(),
        "input_keys=['x'] has no effect: the batch is a",
    ),
    "batches without an array": (
        {},
        [1, 2, 3],
        "no field of the batch is an array or a tensor",
    ),
}


@pytest.mark.parametrize("mistake", WARNED)
def test_mistake_is_logged_at_the_line_of_the_user(
    mistake, caplog, monkeypatch
):
    options, data, text = WARNED[mistake]
    monkeypatch.setattr(warn_once, "_WARNED", set())
    given = DataLoader(data, batch_size=4) if isinstance(data, Made) else data
    with caplog.at_level(logging.WARNING, "paddle_shard"):
        next(iter(loader(given, prefetch=0, **options)))

    [record] = [each for each in caplog.records if text in each.getMessage()]
    assert record.pathname == __file__


def test_misspelled_name_of_the_package_has_a_suggestion():
    with pytest.raises(AttributeError) as info:
        paddle_shard.shard_dataloder  # noqa: B018
    # What the interpreter needs to say "Did you mean: 'shard_dataloader'?"
    assert info.value.name == "shard_dataloder"
    assert info.value.obj is paddle_shard
    assert re.search("no attribute 'shard_dataloder'", str(info.value))
    assert np.isin("shard_dataloader", dir(paddle_shard))
