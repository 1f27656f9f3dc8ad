from collections import OrderedDict, UserDict, defaultdict, namedtuple

import numpy as np
import pytest

from paddle_shard.core.trees import leaves, map_leaves

Pair = namedtuple("Pair", ["a", "b"])


def nested():
    counts = defaultdict(list, x=[1, "text"])
    return {
        "a": (b"raw", None),
        "b": Pair(counts, OrderedDict(y=2.5)),
        "c": [],
        "d": UserDict(z=np.zeros(2)),
    }


def test_leaves_come_in_order_and_texts_and_arrays_are_some():
    found = list(leaves(nested()))

    assert found[:5] == [b"raw", None, 1, "text", 2.5]
    assert found[5].tolist() == [0, 0]


def test_map_leaves_keeps_containers_and_gives_paths():
    given = nested()
    found = map_leaves(given, lambda leaf, path: [leaf])
    assert found["a"] == [[b"raw"], [None]]
    assert type(found["b"]) is Pair
    assert type(found["b"].a) is dict, "as Paddle has it"
    assert found["b"].a["x"] == [[1], ["text"]]
    assert found["b"].b == {"y": [2.5]}
    assert found["c"] == []
    assert given["b"].a["x"] == [1, "text"], "what is given is not changed"
    assert list(
        leaves(map_leaves(given, lambda leaf, path: path, "batch"))
    ) == [
        *(
            "batch['a'][0]",
            "batch['a'][1]",
            "batch['b'][0]['x'][0]",
            "batch['b'][0]['x'][1]",
        ),
        *("batch['b'][1]['y']", "batch['d']['z']"),
    ]


@pytest.mark.parametrize("value", ["text", b"raw", 3, None, np.arange(3)])
def test_leaf_alone_is_mapped_too(value):
    assert list(leaves(value)) == [value] or isinstance(value, np.ndarray)
    assert map_leaves(value, lambda leaf, path: "seen" + path) == "seen"


def test_map_leaves_may_take_containers_for_leaves():
    found = map_leaves(
        [["a", "b"], [1]],
        lambda leaf, path: (leaf, path),
        "",
        lambda value: value == ["a", "b"],
    )

    assert found == [(["a", "b"], "[0]"), [(1, "[1][0]")]]
