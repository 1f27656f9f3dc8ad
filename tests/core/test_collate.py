import collections

import numpy as np
import pytest
from paddle.io.dataloader.collate import default_collate_fn

from paddle_shard.core.collate import collate

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
def test_collate_equals_paddles(samples):
    ours, theirs = collate(samples), default_collate_fn(samples)

    assert repr(ours) == repr(theirs)


def test_collate_keeps_namedtuples_and_makes_dicts_of_mappings():
    made = collate([Pair(1, collections.OrderedDict(x=(1,)))] * 2)

    assert type(made) is Pair
    assert type(made.b) is dict
    assert made.b["x"][0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("samples", "error", "text"),
    [
        (
            [np.ones(2), np.ones(3)],
            ValueError,
            r"different shapes cannot be stacked: \(2,\), \(3,\)\. Pad them",
        ),
        (
            [{"x": [np.ones(2)]}, {"x": [np.ones(3)]}],
            ValueError,
            r"at field \['x'\]\[0\]",
        ),
        (
            [{"x": 1}, {"y": 1}],
            ValueError,
            r"samples differ in their keys: \['x'\], \['y'\]",
        ),
        (
            [[1, 2], [1]],
            ValueError,
            r"samples differ in their number of fields: 2, 1\. .*with_format\('numpy'\).* pad_to=",
        ),
        (
            [{"x": None}],
            TypeError,
            r"cannot stack NoneType at field \['x'\]",
        ),
        (
            [{1: 1, "x": 1}, {"x": 1}],
            ValueError,
            "samples differ in their keys",
        ),
        (
            [1, np.ones(2)],
            ValueError,
            r"different shapes cannot be stacked: \(\), \(2,\)",
        ),
        (
            [1 << 70, 1],
            TypeError,
            "cannot stack int: give every sample arrays or numbers",
        ),
    ],
)
def test_samples_that_do_not_fit_are_named_with_their_field(
    samples, error, text
):
    with pytest.raises(error, match=text):
        collate(samples)


KINDS = {
    "number": [1, 2.5, np.float32(3), True],
    "array": [np.ones(2), np.zeros(2, "int64")],
    "array of no dims": [np.array(1), np.array(2.0)],
    "array of text": [np.array(["a", "b"])],
    "text": ["ab", b"ab"],
    "none": [None],
    "dict": [{"x": 1}],
    "list": [[1, 2], (3, 4)],
    "object": [object(), slice(2)],
}
# other errors
SHAPED = [
    {"number", "array", "array of no dims"},
    {"number", "array of text", "array of no dims"},
]


@pytest.mark.parametrize(
    "path", [lambda x: x, lambda x: {"x": [x]}], ids=["", "nested"]
)
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_collate_of_mixed_kinds_is_a_type_error(kind, other, path):
    if kind == other or any({kind, other} <= shaped for shaped in SHAPED):
        return
    for one in KINDS[kind]:
        for odd in KINDS[other]:
            for place in range(3):
                samples = [one] * 3
                samples[place] = odd
                with pytest.raises(TypeError, match="cannot stack"):
                    collate(list(map(path, samples)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.ones(2, "int32"), np.ones(2, "int64")),
        (np.float32(1), np.float64(1)),
        # uint16 is Paddle's bfloat16
        (np.ones(2, "float16"), np.ones(2, "uint16")),
    ],
)
def test_samples_of_different_dtypes_are_not_cast(one, other):
    with pytest.raises(
        ValueError,
        match=rf"differ in their dtype at field \['x'\]: {one.dtype}, {other.dtype}",
    ):
        collate([{"x": one}, {"x": one}, {"x": other}])
