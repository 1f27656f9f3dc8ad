import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paddle_shard.data.external import ShardOptions
from paddle_shard.errors import ArgumentTypeError, SplitError, StateError

sys.path.insert(0, str(Path(__file__).parents[3] / "demos/adapters"))
from shares import build_watched, check_same, from_json, to_json

SHARE = ShardOptions(shard=1, num_shards=3, seed=0, epoch=0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, True, "x"], "b": {}},
        (1, (2, b"\x00\xff")),
        {1: "a", (2, 3): b""},
        {"$": "a key that is also the mark"},
    ],
)
def test_state_comes_back_from_json(value):
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "bool"])
def test_arrays_and_tensors_come_back_from_json(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for value in (array, torch.from_numpy(array), array[:, 1:], array[0, 0]):
        back = from_json(json.loads(json.dumps(to_json({"at": value}))))["at"]
        assert type(back) is (
            type(value)
            if not isinstance(value, np.generic)
            else type(value.item())
        )
        assert np.array_equal(np.asarray(back), np.asarray(value))


def test_torchdata_state_that_json_cannot_hold_is_named():
    with pytest.raises(
        ArgumentTypeError, match=r"state\['a'\]\[1\] is a object"
    ):
        to_json({"a": [0, object()]})
    with pytest.raises(StateError, match="'pickle' is no kind"):
        from_json({"$": ["pickle", "<u1", [0], ""]})


def test_state_of_other_data_is_refused():
    resumed = replace(SHARE, state={"samples": 5})
    check_same(resumed, samples=5)
    check_same(SHARE, samples=6)
    with pytest.raises(
        StateError, match="samples was 5 when it was saved, and is 6 now"
    ):
        check_same(resumed, samples=6)


def test_share_that_is_not_read_is_refused():
    assert build_watched(
        lambda share: (share.shard, share.num_shards), SHARE, "x"
    ) == (
        1,
        3,
    )
    for build in (
        lambda share: 0,
        lambda share: share.shard,
        lambda share: share.epoch,
    ):
        with pytest.raises(
            SplitError, match="each of the 3 data ranks would read all"
        ):
            build_watched(build, SHARE, "x")
    assert (
        build_watched(
            lambda share: 0,
            ShardOptions(shard=0, num_shards=1, seed=0, epoch=0),
            "x",
        )
        == 0
    )
