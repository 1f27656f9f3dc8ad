"""Batch placer: which layout each field of a batch has, and the recipes of the forms that batches have had."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from operator import itemgetter
from typing import Any

import numpy as np

from paddle_shard.core.trees import (
    is_sequence,
    map_leaves,
    named_leaves,
    rebuild,
)
from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import BatchStructureError
from paddle_shard.placement.field import FieldLayout, field_layout
from paddle_shard.placement.layouts import Entry, layouts_of_fields
from paddle_shard.placement.lengths import PadTo
from paddle_shard.placement.recipe import (
    BatchRecipe,
    Leaf,
    compile_leaf,
    is_row_like,
)
from paddle_shard.placement.rows import BatchRows
from paddle_shard.plan.step import Step
from paddle_shard.reading.tensors import becomes_tensor, is_tensor

_MOST_RECIPES = 256
"""Recipes that are kept; forms of batches may be many, such as those of texts of all lengths."""


@dataclass(frozen=True, kw_only=True)
class BatchPlacer:
    """Chooses the layouts of a batch's fields; the structure of the batch and its other leaves stay as they are."""

    meshes: Any
    """This and the fields below are arguments of `shard_dataloader`."""
    shard_dims: Any
    input_keys: Sequence[Any] | None
    placements: Any
    dense_tensor_idx: Sequence[Sequence[int]] | None
    local: bool
    pad_to: PadTo | None
    """If given, fields that it names are placed when all ranks' lengths are known."""
    global_rank: int
    """Paddle's process id."""
    replicated_in_name: bool
    """See `FieldLayout`."""
    _recipes: dict[Any, BatchRecipe] = field(default_factory=dict, init=False)
    _key_orders: dict[frozenset[Any], Sequence[Any]] = field(
        default_factory=dict, init=False
    )
    """The keys of batches -> their order in the first such batch."""

    @cached_property
    def _entries(self) -> tuple[list[Entry], dict[Any, Entry]]:
        """See `layouts_of_fields`."""
        make = partial(
            field_layout,
            global_rank=self.global_rank,
            replicated_in_name=self.replicated_in_name,
            is_local=self.local,
        )
        return layouts_of_fields(
            self.meshes, self.shard_dims, self.input_keys, self.placements, make
        )

    @cached_property
    def layouts(self) -> list[FieldLayout]:
        """Every layout.

        Raises:
            ArgumentError: An argument is empty, or does not match the others.
            AxisError: A mesh does not have a given axis.
        """
        entries, overrides = self._entries
        return [
            layout
            for entry in (*entries, *overrides.values())
            for layout in (entry if isinstance(entry, list) else [entry])
        ]

    @cached_property
    def num_data_ranks(self) -> int:
        """The least number by which a batch can be split over the data ranks of every field."""
        return math.lcm(*(layout.num_data_ranks for layout in self.layouts))

    @cached_property
    def row_layout(self) -> FieldLayout:
        """Layout of the field whose rows this rank reads: the one with most data ranks."""
        local = [layout for layout in self.layouts if layout.on_mesh]
        return max(
            local or self.layouts, key=lambda layout: layout.num_data_ranks
        )

    def recipe(
        self,
        batch: Any,
        step: Step,
        rows_of: Callable[[Step, Any, BatchPlacer], BatchRows],
    ) -> tuple[BatchRecipe, list[Any]]:
        """Return how a batch is placed, and the leaves that are delivered.

        Args:
            batch: A batch that was read: arrays, tensors and other leaves.
            step: Its step.
            rows_of: Returns the rows of a batch that was read for a step.

        Raises:
            BatchStructureError: A field does not fit its mesh or cannot be split.
            TypeError: An array has a dtype that Paddle does not have.
        """
        fields = self._fields(batch)
        leaves: list[Any] = []
        forms = [_form(value, leaves) for value in fields.values()]
        form = type(batch), step.num_rows, step.micro_size, *fields, *forms
        recipe = self._recipes.get(form)
        if recipe is None:
            recipe = self._compile(batch, fields, rows_of(step, batch, self))
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
            self._recipes[form] = recipe
        return recipe, leaves

    def _compile(
        self, batch: Any, fields: dict[Any, Any], rows: BatchRows
    ) -> BatchRecipe:
        """Return the recipe of batches like this one."""
        self._warn_about_keys(batch)
        leaves = list(self._laid_out_leaves(fields))
        if not any(becomes_tensor(leaf.value) for leaf in leaves):
            warn_once(
                "no field of the batch is an array or a tensor, so nothing is split: got %s. Make arrays of bytes "
                "and texts with .decode() or .map(). For single samples, set batch_size= of the DataLoader, or end the "
                "stream with .batch(rows).",
                f"{batch!r:.100}",
            )
        numbers = count()
        numbered = map_leaves(fields, lambda *_: next(numbers), "", is_row_like)
        if isinstance(batch, Mapping):
            template = rebuild(batch, numbered)
        else:
            children = list(numbered.values())
            template = (
                rebuild(batch, children) if is_sequence(batch) else children[0]
            )
        recipe = BatchRecipe(
            rows=rows,
            is_host=not any(is_tensor(leaf.value) for leaf in leaves),
            last=self._last_layout(leaves),
            template=None if template == list(range(len(leaves))) else template,
        )
        for number, leaf in enumerate(leaves):
            compile_leaf(recipe, self.pad_to, number, leaf)
        return recipe

    def _last_layout(self, leaves: Sequence[Leaf]) -> FieldLayout:
        """Return the layout of the last leaf that is not local, or is local and here."""
        layouts = [leaf.layout for leaf in leaves] or self.layouts
        return next(
            (
                layout
                for layout in reversed(layouts)
                if layout.on_mesh or not layout.is_local
            ),
            layouts[-1],
        )

    def num_rows(self, batch: Any) -> int | None:
        """Return the number of rows of a global batch that was read whole; None if no field has rows."""
        # That of a field that is split, if there is one, and is not local.
        sizes = [
            (not layout.data_axes, layout.is_local, int(leaf.shape[0]))
            for _, leaf, layout in self._laid_out_leaves(self._fields(batch))
            if becomes_tensor(leaf) and len(leaf.shape) and not layout.own_rows
        ]
        return min(sizes, key=itemgetter(0, 1))[2] if sizes else None

    def _fields(self, batch: Any) -> dict[Any, Any]:
        """Return the fields that are delivered, by key or position, in their order; 0 for a batch that is a leaf."""
        if is_sequence(batch):
            return dict(enumerate(batch))
        if not isinstance(batch, Mapping):
            return {0: batch}
        names = self.input_keys
        if names is None:  # samples of two writers may differ in their order
            names = self._key_orders.setdefault(frozenset(batch), tuple(batch))
        try:
            return {name: batch[name] for name in names}
        except KeyError as error:
            raise BatchStructureError(
                f"input_keys: {error} is not in the batch, which has {list(batch)}."
            ) from None

    def _laid_out_leaves(self, fields: Mapping[Any, Any]) -> Iterator[Leaf]:
        """Yield the leaves of the fields, in order.

        Raises:
            BatchStructureError: The fields do not match the meshes.
        """
        entries, overrides = self._entries
        padded = {} if self.pad_to is None else self.pad_to.fields
        for argument, named in (("placements", overrides), ("pad_to", padded)):
            unknown = [name for name in named if name not in fields]
            if unknown:
                raise BatchStructureError(
                    f"{argument} names {unknown}, but the fields that are delivered are {list(fields)} (input_keys "
                    "chooses them, if it is given)."
                )
        if len(entries) == 1:
            entries = entries * len(fields)
        if len(fields) != len(entries):
            raise BatchStructureError(
                f"the batch has the {len(fields)} fields {list(fields)}, but meshes has {len(entries)} entries: give "
                "one mesh per field, or one for all."
            )
        local_items = dict(enumerate(self.dense_tensor_idx or ()))
        if len(local_items) > len(fields):
            raise BatchStructureError(
                f"dense_tensor_idx has {len(local_items)} entries, but the batch has the {len(fields)} fields "
                f"{list(fields)}. Give one entry for each field."
            )
        for number, (name, value) in enumerate(fields.items()):
            entry = overrides.get(name, entries[number])
            yield from _leaves_of_field(
                value, f"[{name!r}]", entry, local_items.get(number, ())
            )

    def _warn_about_keys(self, batch: Any) -> None:
        if self.input_keys is not None and not isinstance(batch, Mapping):
            warn_once(
                "input_keys=%s has no effect: the batch is a %s, whose fields have no keys.",
                repr(list(self.input_keys)),
                type(batch).__name__,
            )
        elif self.input_keys is not None:
            dropped = [key for key in batch if key not in self.input_keys]
            if dropped:
                warn_once(
                    "input_keys=%s: the keys %s of the batch are left out.",
                    repr(list(self.input_keys)),
                    repr(dropped),
                )


def _leaves_of_field(
    value: Any, path: str, entry: Entry, local_items: Sequence[int]
) -> Iterator[Leaf]:
    """Yield the leaves of a field."""
    has_items = is_sequence(value) and not is_row_like(value)
    if isinstance(entry, list) and not (has_items and len(value) == len(entry)):
        raise BatchStructureError(
            f"field {path} must be a list of {len(entry)} items, as its entry in meshes, shard_dims or placements is, "
            f"got a {type(value).__name__}: {value!r:.100}."
        )
    items = value if has_items else [value]
    if has_items and max(local_items, default=0) >= len(value):
        raise BatchStructureError(
            f"dense_tensor_idx names item {max(local_items)} of field {path}, which has {len(value)} items, 0 to "
            f"{len(value) - 1}."
        )
    layouts = entry if isinstance(entry, list) else [entry] * len(items)
    for number, (item, layout) in enumerate(zip(items, layouts, strict=True)):
        is_local = number in local_items if has_items else len(local_items) > 0
        item_path = f"{path}[{number}]" if has_items else path
        for leaf_path, leaf in named_leaves(item, item_path, is_row_like):
            yield Leaf(leaf_path, leaf, layout.local if is_local else layout)


def _form(value: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """Return what the recipe of a part of a batch depends on, and append its leaves to a list."""
    kind = type(value)
    if kind is not np.ndarray:
        if is_sequence(value):
            if not is_row_like(value):
                return kind, *[_form(child, leaves) for child in value]
        elif isinstance(value, Mapping):
            forms = [_form(child, leaves) for child in value.values()]
            return kind, *value, *forms
    leaves.append(value)
    if isinstance(value, list):
        return kind, len(value)
    place = "" if kind is np.ndarray else str(getattr(value, "place", ""))
    return (
        kind,
        *getattr(value, "shape", ()),
        getattr(value, "dtype", None),
        place,
    )
