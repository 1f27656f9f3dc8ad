"""`SharedList`: a list that worker processes share."""

import copy
import gc
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle.io import DataLoader

from paddle_shard import SharedList
from tests.descriptors import open_files
from tests.helpers import ONE, Made, locals_of, sharded

values = st.one_of(
    st.text(max_size=9),
    st.integers(),
    st.none(),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    st.tuples(st.integers(), st.text(max_size=3)),
)


@given(items=st.lists(values, max_size=12), data=st.data())
def test_shared_list_is_a_list(items, data):
    shared = SharedList(iter(items))
    assert len(shared) == len(items)
    assert list(shared) == items
    assert pickle.loads(pickle.dumps(shared))[:] == items
    part = data.draw(st.slices(len(items)))
    assert shared[part] == items[part]
    for index in range(-len(items), len(items)):
        assert shared[index] == items[index]
    for index in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            shared[index]


def test_shared_list_holds_arrays():
    arrays = [np.arange(n, dtype="float32") for n in range(5)]
    shared = SharedList(arrays)
    for array, item in zip(arrays, shared, strict=True):
        assert item.dtype == array.dtype
        assert item.tolist() == array.tolist()
    assert shared[3] is not shared[3]


def test_shared_list_is_shared_by_its_deep_copies():
    shared = SharedList(["first"])
    assert copy.deepcopy({"names": shared})["names"] is shared


def test_list_that_could_not_be_made_leaves_no_file():
    def broken():
        yield "first"
        raise RuntimeError

    before = open_files()
    for items in (broken(), ["first", lambda: None]):
        with pytest.raises(
            (RuntimeError, AttributeError, pickle.PicklingError)
        ):
            SharedList(items)
    gc.collect()
    assert not [file for file in open_files() - before if file.is_memory]


def own_memory():
    """Bytes that no file or shared memory holds; those that this and another process hold count half."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Pss_Anon: +(\d+) kB", text)[1]) << 10


def test_shared_list_is_not_copied_into_workers():
    """Each worker reads all of 300,000 strings, which are 25 MB as a list."""
    length, rows = 300_000, 30
    names = [f"a/long/path/to/some/image-{i}.jpg" for i in range(length)]
    random.Random(0).shuffle(names)

    def grown(items):
        def read(index):
            before = own_memory()
            total = sum(
                len(items[i]) for i in range(index % rows, length, rows)
            )
            return np.array([total, own_memory() - before])

        loader = DataLoader(
            Made(read, 2 * rows), batch_size=2 * rows, num_workers=1
        )
        ((batch,),) = [locals_of(sharded(loader, ONE, verify=None))]
        assert sum(total for total, _ in batch) == 2 * sum(map(len, names))
        return sum(growth for _, growth in batch)

    assert grown(SharedList(names)) < 2 << 20 < grown(names)
