import collections

import numpy as np
import pytest
from paddle.io.dataloader.collate import default_collate_fn

from paddle_shard.collate import collate

Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "samples",
    [
        [np.ones(2), np.zeros(2)],
        [1, 2],
        [1.5, 2.5],
        [True, False],
        ["a", "b"],
        [b"a", b"b"],
        [{"x": np.ones(2), "y": 1}, {"x": np.zeros(2), "y": 2}],
        [(np.ones(2), [1, 2.5]), (np.zeros(2), [2, 3.5])],
        [np.float32(1), np.float32(2)],
    ],
)
def test_it_is_what_paddle_makes(samples):
    ours, theirs = collate(samples), default_collate_fn(samples)

    assert repr(ours) == repr(theirs)


def test_namedtuples_and_dict_subclasses_stay_what_they_are():
    made = collate([Pair(1, collections.OrderedDict(x=(1,)))] * 2)

    assert type(made) is Pair
    assert type(made.b) is collections.OrderedDict
    assert made.b["x"][0].tolist() == [1, 1]


def test_a_default_dict_keeps_its_factory():
    made = collate([collections.defaultdict(int, x=1)])

    assert made["missing"] == 0


@pytest.mark.parametrize(
    ("samples", "error", "text"),
    [
        ([np.ones(2), np.ones(3)], ValueError, r"different shapes cannot be stacked: \(2,\), \(3,\)\. Pad them"),
        ([{"x": [np.ones(2)]}, {"x": [np.ones(3)]}], ValueError, r"at field \['x'\]\[0\]"),
        ([{"x": 1}, {"y": 1}], ValueError, r"samples differ in their keys: \['x'\], \['y'\]"),
        ([[1, 2], [1]], ValueError, "samples differ in their number of fields: 2, 1"),
        ([{"x": None}], TypeError, r"cannot stack NoneType at field \['x'\]"),
    ],
)
def test_samples_that_do_not_fit_are_named_with_their_field(samples, error, text):
    with pytest.raises(error, match=text):
        collate(samples)
