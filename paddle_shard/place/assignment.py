"""Which field of the batch goes to which mesh?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.place.field import FieldLayout, field_layout

Entry = FieldLayout | list[FieldLayout]
"""The layout of all leaves of a field, or one for each item of a field that is a list."""


AS_READ = "as read"
"""A field's entry in `placements`: its rows are not the samples; each data rank keeps what was made of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The layout of each field of a batch, found by the field's position or key."""

    entries: tuple[Entry, ...]
    """One entry for each given mesh; a single entry is used for every field."""
    keys: tuple[Any, ...] | None
    """`input_keys`: the keys that the entries belong to, if the batch is a dict."""
    overrides: Mapping[Any, FieldLayout]
    """Layouts of single fields, from `placements`."""

    def layouts(self) -> Iterator[FieldLayout]:
        """Yield every layout."""
        for entry in (*self.entries, *self.overrides.values()):
            yield from entry if isinstance(entry, list) else [entry]

    def fields(self, batch: Any, keys: Sequence[Any] | None) -> list[tuple[Any, Entry]]:
        """Return (key or position, layouts) for each field of a batch, in the order of the result.

        Args:
            batch: A dict or a list.
            keys: The current `input_keys`, since Paddle's trainers assign them after construction.

        Raises:
            BatchStructureError: The fields do not match the meshes.
        """
        wanted: Sequence[Any] = range(len(batch))
        what, kind = f"is a list of {len(batch)} fields", "field"
        if isinstance(batch, Mapping):
            keys = self.keys if keys is None else tuple(keys)
            wanted = tuple(batch) if keys is None else keys
            missing = [key for key in wanted if key not in batch]
            if missing:
                raise BatchStructureError(f"input_keys {missing} are not in the batch, which has {list(batch)}.")
            what, kind = f"has {len(wanted)} keys {list(wanted)}", "key"
        entries = self.entries * len(wanted) if len(self.entries) == 1 else self.entries
        if len(wanted) != len(entries):
            raise BatchStructureError(
                f"the batch {what}, but meshes has {len(entries)} entries: give one mesh per {kind}, or one for all."
            )
        unknown = [key for key in self.overrides if key not in wanted]
        if unknown:
            raise BatchStructureError(
                f"placements names {unknown}, which the batch does not have, or input_keys leaves out; there are "
                f"{list(wanted)}."
            )
        return [(key, self.overrides.get(key, entry)) for key, entry in zip(wanted, entries, strict=True)]


def assignment(
    meshes: Any,
    input_keys: Sequence[Any] | None,
    shard_dims: Any,
    placements: Any,
    global_rank: int,
    *,
    replicated_in_name: bool = False,
) -> Assignment:
    """Read the arguments of `shard_dataloader` that say where fields go.

    Raises:
        ArgumentError: An argument is empty, or does not match the others.
        AxisError: A mesh does not have a given axis.
    """
    given = list(meshes) if isinstance(meshes, list | tuple) else [meshes]
    if meshes is None or not given or any(isinstance(m, list | tuple) and not m for m in given):
        raise ArgumentError(f"meshes must hold at least one ProcessMesh, got {meshes!r}.")
    if input_keys is not None and (isinstance(input_keys, str) or not isinstance(input_keys, list | tuple)):
        raise ArgumentError(f"input_keys must be a list of keys, got {input_keys!r}.")
    if input_keys is not None and len(given) > 1 and len(input_keys) != len(given):
        raise ArgumentError(
            f"input_keys {list(input_keys)} has {len(input_keys)} entries and meshes has {len(given)}: "
            "give one mesh per key, or one for all."
        )
    axes = _axes_by_mesh(shard_dims, len(given))
    common: dict[str, Any] = {"global_rank": global_rank, "replicated_in_name": replicated_in_name}
    entries: list[Entry] = []
    for number, (mesh, dims) in enumerate(zip(given, axes, strict=True)):
        if isinstance(mesh, list | tuple):
            each = dims if isinstance(dims, list) else [dims] * len(mesh)
            if len(each) != len(mesh):
                raise ArgumentError(
                    f"shard_dims[{number}] {dims!r} has {len(each)} entries and meshes[{number}] has {len(mesh)}: "
                    "give one per mesh, or one for all."
                )
            entries.append([field_layout(m, d, **common) for m, d in zip(mesh, each, strict=True)])
        elif isinstance(dims, list) and len(given) > 1:
            entries.append([field_layout(mesh, d, **common) for d in dims])
        else:
            entries.append(field_layout(mesh, dims, **common))
    overrides = {}
    for key, wanted in _placement_items(placements):
        number, mesh = _mesh_of(key, given, input_keys)
        as_read = wanted == AS_READ
        overrides[key] = field_layout(mesh, axes[number] if as_read else wanted, own_rows=as_read, **common)
    return Assignment(
        entries=tuple(entries),
        keys=None if input_keys is None else tuple(input_keys),
        overrides=overrides,
    )


def _axes_by_mesh(shard_dims: Any, num_meshes: int) -> list[Any]:
    """Return the `shard_dims` of each mesh.

    For one mesh, a list names several axes that act as one. For several meshes, a list has one entry per mesh. Such an
    entry can be a tuple, which names several axes, or a list, which has one entry for each item of a field that is a
    list (Paddle's rule).
    """
    if shard_dims is None or isinstance(shard_dims, str | int):
        return [shard_dims] * num_meshes
    if not isinstance(shard_dims, list | tuple):
        raise ArgumentError(f"shard_dims must be an axis, a list of them, or None, got {shard_dims!r}.")
    if not shard_dims:
        raise ArgumentError("shard_dims is an empty list; to split nothing, leave it at None.")
    if num_meshes == 1:
        if len(shard_dims) == 1:
            return [shard_dims[0]]
        if any(axis is None for axis in shard_dims):
            raise ArgumentError(
                f"shard_dims {shard_dims!r} has {len(shard_dims)} entries, but meshes has 1, for which they "
                "are several axes that act as one. To give each field its own, repeat the mesh: "
                f"meshes=[mesh] * {len(shard_dims)}."
            )
        return [tuple(shard_dims)]
    if len(shard_dims) != num_meshes:
        raise ArgumentError(
            f"shard_dims {shard_dims!r} has {len(shard_dims)} entries and meshes has {num_meshes}: "
            "give one per mesh, or one for all."
        )
    return list(shard_dims)


def _placement_items(placements: Any) -> list[tuple[Any, Any]]:
    if placements is None:
        return []
    items = list(placements.items()) if isinstance(placements, Mapping) else None
    if isinstance(placements, list | tuple):
        items = [(i, wanted) for i, wanted in enumerate(placements) if wanted is not None]
    if items is None or not all(isinstance(wanted, Mapping) or wanted == AS_READ for _, wanted in items):
        raise ArgumentError(
            "placements must map a field's key or position to {axis: tensor dim}, such as "
            f"{{'input_ids': {{'dp': 0, 'sep': 1}}}}, or to 'as read', got {placements!r}."
        )
    return items


def _mesh_of(key: Any, meshes: Sequence[Any], input_keys: Sequence[Any] | None) -> tuple[int, Any]:
    """Return the number of a field's mesh, and the mesh."""
    if len(meshes) == 1:
        number = 0
    elif input_keys is not None and key in input_keys:
        number = list(input_keys).index(key)
    elif isinstance(key, int) and 0 <= key < len(meshes):
        number = key
    else:
        raise ArgumentError(
            f"placements names the field {key!r}, whose mesh is unknown: name it in input_keys, or give one mesh."
        )
    mesh = meshes[number]
    if isinstance(mesh, list | tuple):
        raise ArgumentError(f"placements for {key!r}: a field with a list of meshes cannot have placements.")
    return number, mesh
