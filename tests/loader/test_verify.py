"""What a loader of one process, and the comparison itself, do about `verify=`."""

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.errors import ArgumentError, DifferentDataError
from paddle_shard.ranks.batch_check import compare_batches, summary
from tests.helpers import ONE, Made, locals_of, sharded


def told(arrays, key="the same", step=3):
    return summary(
        list(arrays.items()),
        step=step,
        first=False,
        key=key,
        num_steps=None,
    )


@pytest.mark.parametrize("verify", ["first", None, 1, 5, np.int64(2)])
def test_process_that_is_alone_compares_nothing(verify):
    assert locals_of(
        sharded(DataLoader(Made(length=4), batch_size=2), ONE, verify=verify)
    ) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("verify", ["last", 0, -1, True, 2.0, "2"])
def test_bad_verify_is_named(verify):
    with pytest.raises(
        ArgumentError, match="verify must be 'first', an int >= 1"
    ):
        sharded(DataLoader(Made(length=4), batch_size=2), ONE, verify=verify)


@pytest.mark.parametrize(
    "kind", ["value", "dtype", "shape", "a field less", "nan"]
)
def test_verify_finds_any_difference_of_the_same_samples(kind):
    mine = {"['a']": np.zeros((3, 2)), "['b']": np.arange(3.0)}
    other = {name: array.copy() for name, array in mine.items()}
    if kind == "value":
        other["['a']"][1, 1] = 1e-300
    elif kind == "dtype":
        other["['a']"] = other["['a']"].astype("float32")
    elif kind == "shape":
        other["['a']"] = np.zeros((3, 1, 2))
    elif kind == "nan":
        other["['a']"][1] = np.nan
    else:
        del other["['a']"]

    with pytest.raises(
        DifferentDataError,
        match=r"step 3: global ranks 1 and 4 .*\['a'\]: \d+ on global rank 1, ",
    ):
        compare_batches(
            {4: told(other), 1: told(mine), 2: told(other, "others")}, {}
        )
    same = {name: array.copy() for name, array in mine.items()}
    compare_batches({1: told(mine), 4: told(same)}, {})


def test_summary_of_a_large_batch_stays_small():
    found = told({"['a']": np.zeros((10_000, 3))})
    assert len(str(found)) < 500
    with pytest.raises(
        DifferentDataError,
        match=r"digests: \['a'\]: \d+ on global rank 0, \d+ on global rank 1\. ",
    ):
        other = told({"['a']": np.ones((10_000, 3))})
        compare_batches({0: found, 1: other}, {})
