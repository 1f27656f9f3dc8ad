"""Which meshes and batch sizes should a property hold for? Strategies for hypothesis."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from paddle_shard.plan import MeshLayout

AXES = ("dp", "mp", "pp", "sharding")


@st.composite
def layouts(draw: st.DrawFn, max_ranks: int = 16) -> MeshLayout:
    """Meshes of up to 4 axes in any order, on processes that are neither sorted nor contiguous."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        shape.append(
            draw(st.integers(1, max(1, min(4, max_ranks // math.prod(shape)))))
        )
    axes = draw(st.permutations(AXES))[: len(shape)]
    ids = draw(
        st.lists(
            st.integers(0, 99),
            min_size=math.prod(shape),
            max_size=math.prod(shape),
            unique=True,
        )
    )
    return MeshLayout(
        shape=tuple(shape), axes=tuple(axes), process_ids=tuple(ids)
    )


@st.composite
def layouts_with_data_axes(
    draw: st.DrawFn, max_ranks: int = 16
) -> tuple[MeshLayout, tuple[str, ...]]:
    """A mesh and the axes that split the data: one or several, in any order."""
    layout = draw(layouts(max_ranks))
    data_axes = draw(
        st.lists(st.sampled_from(layout.axes), min_size=1, unique=True)
    )
    return layout, tuple(data_axes)
