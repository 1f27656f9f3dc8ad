"""Layouts of all fields, from the arguments of `shard_dataloader` that say where fields go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.placement.field import FieldLayout

Entry = FieldLayout | list[FieldLayout]
"""The layout of all leaves of a field, or one for each item of a field that is a list."""

AS_READ = "as read"
"""A field's entry in `placements`: its rows are not the samples; each data rank keeps what was made of its samples."""
ROW_INDEX = "row index"
"""The same, and its numbers, or those in its first column, are places of samples in the batch."""


def layouts_of_fields(
    meshes: Any,
    shard_dims: Any,
    input_keys: Any,
    placements: Any,
    make: Callable[..., FieldLayout],
) -> tuple[list[Entry], dict[Any, Entry]]:
    """Return an entry for each given mesh, and those of single fields from `placements`, by key or position.

    Args:
        meshes: See `shard_dataloader`.
        shard_dims: See `shard_dataloader`.
        input_keys: See `shard_dataloader`.
        placements: See `shard_dataloader`.
        make: `field_layout`, given a mesh, axes and further fields of `FieldLayout`.

    Raises:
        ArgumentError: An argument is empty, or does not match the others.
        AxisError: A mesh does not have a given axis.
    """
    meshes = _as_list(meshes)
    if [] in (meshes, *map(_as_list, meshes)):
        raise ArgumentError(
            f"meshes must hold at least one ProcessMesh, got {meshes!r}."
        )
    if input_keys is None:
        input_keys = range(len(meshes))
    elif not isinstance(input_keys, list | tuple):
        raise ArgumentError(
            f"input_keys must be a list of keys, got {input_keys!r}."
        )
    elif len(meshes) > 1:
        _for_each_mesh("input_keys", list(input_keys), meshes)
    axes = _axes_by_mesh(meshes, shard_dims)

    entries: list[Entry] = []
    for number, (mesh, dims) in enumerate(zip(meshes, axes, strict=True)):
        is_nested = isinstance(mesh, list | tuple)
        if not is_nested and not isinstance(dims, list):
            entries.append(make(mesh, dims))
            continue
        # A field that is a list: its items have a mesh each, or an entry of `shard_dims` each, or both.
        items = list(mesh) if is_nested else [mesh] * len(dims)
        item_dims = _for_each_mesh(f"shard_dims[{number}]", dims, items)
        entries.append(list(map(make, items, item_dims)))

    placements = _placements_by_field(placements)
    by_mesh = list(zip(meshes, axes, strict=True))
    if len(meshes) == 1:  # for all fields
        by_key = dict.fromkeys(placements, by_mesh[0])
    else:
        by_key = dict(zip(input_keys, by_mesh, strict=True))
    overrides: dict[Any, Entry] = {}
    for key, items in placements.items():
        mesh, dims = by_key.get(key, (None, None))
        if mesh is None or isinstance(mesh, list | tuple):
            raise ArgumentError(
                f"placements names the field {key!r}, which has no mesh of its own: name it in input_keys, or give one "
                "mesh. A field with a list of meshes cannot have placements."
            )
        layouts = [
            make(
                mesh,
                item if isinstance(item, Mapping) else dims,
                own_rows=item in (AS_READ, ROW_INDEX),
                row_index=item == ROW_INDEX,
            )
            for item in _as_list(items)
        ]
        overrides[key] = layouts if isinstance(items, list) else layouts[0]
    return entries, overrides


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _for_each_mesh(name: str, value: Any, meshes: Sequence[Any]) -> list[Any]:
    """Return the entries of an argument: one for each mesh, or a single one for all of them."""
    values = value if isinstance(value, list) else [value] * len(meshes)
    if len(values) != len(meshes):
        raise ArgumentError(
            f"{name} {value!r} has {len(values)} entries and meshes has {len(meshes)}: give one per mesh, or one for "
            "all."
        )
    return values


def _axes_by_mesh(meshes: Sequence[Any], shard_dims: Any) -> list[Any]:
    """Return the `shard_dims` of each mesh.

    For one mesh, a list names several axes that act as one. For several meshes, a list has one entry per mesh. Such an
    entry can be a tuple, which names several axes, or a list, which has one entry for each item of a field that is a
    list (Paddle's rule).
    """
    dims = list(shard_dims) if isinstance(shard_dims, tuple) else shard_dims
    if dims == [] or not isinstance(dims, str | int | list | None):
        raise ArgumentError(
            f"shard_dims must be an axis, a list of them, or None, got {shard_dims!r}."
        )
    if len(meshes) == 1 and isinstance(dims, list):
        dims = tuple(dims) if len(dims) > 1 else dims[0]
        if isinstance(dims, list) and not isinstance(meshes[0], list | tuple):
            dims = tuple(dims)
        return [dims]
    return _for_each_mesh("shard_dims", dims, meshes)


def _placements_by_field(placements: Any) -> Mapping[Any, Any]:
    """Return the entries of `placements` by key or position of their field."""
    if placements is None:
        return {}
    if not isinstance(placements, Mapping) or not all(
        isinstance(item, Mapping) or item in (AS_READ, ROW_INDEX, None)
        for entry in placements.values()
        for item in (entry if isinstance(entry, list) else [entry or ""])
    ):
        raise ArgumentError(
            "placements must map a field's key or position to {axis: tensor dim}, such as "
            f"{{'input_ids': {{'dp': 0, 'sep': 1}}}}, or to 'as read' or 'row index'; a field that is a list, "
            f"to a list of these, with None for the others; got {placements!r}."
        )
    return placements
