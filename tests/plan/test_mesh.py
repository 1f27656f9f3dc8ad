import itertools

import numpy as np
import pytest
from hypothesis import given

from paddle_shard import MeshLayout
from paddle_shard.errors import ArgumentError, AxisError
from paddle_shard.plan.mesh import replica_groups
from tests.strategies import layouts_with_data_axes


def mesh(shape, axes, process_ids):
    return MeshLayout(shape=shape, axes=axes, process_ids=process_ids)


@given(layouts_with_data_axes())
def test_mesh_coordinates_are_those_of_numpy(drawn):
    layout, _ = drawn
    array = np.array(layout.process_ids).reshape(layout.shape)

    for rank in layout.process_ids:
        assert array[layout.coordinate(rank)] == rank


@given(layouts_with_data_axes())
def test_replica_groups_partition_the_mesh_by_data_rank(drawn):
    layout, axes = drawn
    groups = replica_groups(layout, axes)

    assert sorted(itertools.chain(*groups)) == sorted(layout.process_ids)
    assert len(groups) == layout.num_data_ranks(axes)
    for group in groups:
        assert len({layout.data_rank(rank, axes) for rank in group}) == 1
    ranks = {layout.data_rank(rank, axes) for rank in layout.process_ids}
    assert ranks == set(range(layout.num_data_ranks(axes)))


@given(layouts_with_data_axes())
def test_data_rank_of_several_axes_is_in_the_order_of_the_mesh(drawn):
    layout, axes = drawn
    array = np.array(layout.process_ids).reshape(layout.shape)
    kept = [layout.axes.index(axis) for axis in axes]
    others = [axis for axis in range(len(layout.shape)) if axis not in kept]
    # [data rank, replica]
    rows = array.transpose(sorted(kept) + others).reshape(
        layout.num_data_ranks(axes), -1
    )

    for data_rank, row in enumerate(rows):
        assert {layout.data_rank(int(rank), axes) for rank in row} == {
            data_rank
        }


def test_data_rank_without_a_data_axis_is_0():
    layout = mesh((2, 2), ("dp", "mp"), (0, 1, 2, 3))

    assert layout.num_data_ranks(None) == 1
    assert {layout.data_rank(rank, ()) for rank in range(4)} == {0}


def test_data_rank_takes_axes_by_index():
    layout = mesh((2, 3), ("dp", "mp"), (0, 1, 2, 3, 4, 5))

    assert (
        layout.data_rank(4, 0)
        == layout.data_rank(4, "dp")
        == layout.data_rank(4, -2)
        == 1
    )


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (
            "DP",
            r"no axis 'DP'; its axes are \['dp', 'mp'\] with shape \[2, 2\]\.$",
        ),
        (
            "tensor",
            r"no axis 'tensor'; its axes are \['dp', 'mp'\] with shape \[2, 2\]\.$",
        ),
        (2, r"no axis 2; its axes are \['dp', 'mp'\]"),
        (["dp", 0], "names an axis twice"),
    ],
)
def test_axis_indices_names_an_axis_that_is_not_there(axes, text):
    with pytest.raises(AxisError, match=text):
        mesh((2, 2), ("dp", "mp"), (0, 1, 2, 3)).num_data_ranks(axes)


@pytest.mark.parametrize(
    ("shape", "axes", "ids"),
    [
        ((), (), ()),
        ((2, 0), ("a", "b"), ()),
        ((2,), ("a", "b"), (0, 1)),
        ((2, 1), ("a", "a"), (0, 1)),
        ((2, 1), ("a", "b", "b"), (0, 1)),
        ((2,), ("a",), (0, 1, 2)),
        ((2,), ("a",), (1, 1)),
        ((2,), ("a",), (0, 1, 1)),
    ],
)
def test_mesh_layout_rejects_what_is_no_mesh(shape, axes, ids):
    with pytest.raises(
        ArgumentError, match=r"a mesh needs different axes.*got Mesh"
    ):
        mesh(shape, axes, ids)


def test_data_rank_names_a_rank_that_is_not_on_the_mesh():
    with pytest.raises(
        ArgumentError,
        match=r"global_rank 7 is not on the mesh; its process_ids are \[3, 5\]",
    ):
        mesh((2,), ("dp",), (3, 5)).data_rank(7, "dp")
