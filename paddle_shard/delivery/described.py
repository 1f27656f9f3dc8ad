"""What does a rank get that holds none of the data, if the user has described the batches?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_shard.delivery.placing import row_shapes
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.inputs.options import LoaderOptions
from paddle_shard.inputs.source import Source
from paddle_shard.reading.chunk import Slice
from paddle_shard.reading.parcel import map_leaves
from paddle_shard.reading.passes import Pass
from paddle_shard.tree import leaves, mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The batches of a loader, as the user has described them."""

    example: Any
    """A batch of one row, with tensors."""
    row_shapes: Sequence[Any]
    """(dtype, *shape of a row) of each tensor."""

    def check(self, found: Sequence[Any]) -> None:
        """Refuse a batch that is not as described.

        Args:
            found: (dtype, *shape of a row) of each of its tensors.

        Raises:
            BatchStructureError: It has other fields, dtypes or shapes.
        """
        if list(found) != list(self.row_shapes):
            raise BatchStructureError(
                f"describe= says that the tensors of a batch have rows of {_shown(self.row_shapes)}, but this batch "
                f"has {_shown(found)}. Ranks on no mesh go by describe=: give a batch as the collate_fn makes it."
            )


def described_of(
    options: LoaderOptions, source: Source, to_tensors: Callable[[Sequence[Any]], Sequence[Any]], *, on_mesh: bool
) -> Described | None:
    """Return how the user describes the batches; None if he does not.

    Args:
        options: The loader's options.
        source: What is read.
        to_tensors: Converts arrays to tensors.
        on_mesh: True if this rank is on a mesh.

    Raises:
        ArgumentError: The description is of no use, or a rank on no mesh could not know when the data ends.
    """
    example = options.describe
    if example is None:
        return None
    if source.item_is_batch or options.pad_to is not None:
        why = "the items of the data set are whole batches, of any size" if source.item_is_batch else "pad_to= is given"
        raise ArgumentError(f"describe= is for batches whose rows all have one shape, but {why}. Leave describe out.")
    if not on_mesh and source.stream is not None and not source.batches.knows_length:
        raise ArgumentError(
            "describe=: this rank is on none of the meshes and would read nothing, so it could not know when this "
            "stream ends. Give num_batches=, or a source that is counted, or leave describe out."
        )
    arrays = [leaf for leaf in leaves(example) if getattr(leaf, "shape", ())]
    rows = {len(array) for array in arrays}
    if len(rows) != 1 or 0 in rows:
        raise ArgumentError(
            "describe must be an example of a batch, as the collate_fn makes it: arrays or tensors with as many rows "
            f"each, at least one; got arrays with {sorted(rows)} rows in a {type(example).__name__}."
        )
    one_row = mapped(example, lambda leaf: np.asarray(leaf[:1]) if getattr(leaf, "shape", ()) else leaf)
    tensors = map_leaves(one_row, to_tensors)
    return Described(example=tensors, row_shapes=row_shapes(tensors)[0])


class DescribedPass(Pass):
    """A pass that reads nothing: each batch is the example."""

    def __init__(self, requests: Iterator[Any], example: Any) -> None:
        self._requests, self._example = requests, example
        self.skipped: deque[list[tuple[int, str]]] = deque()

    def __next__(self) -> Any:
        next(self._requests)
        self.skipped.append([])
        return self._example

    def close(self) -> None:
        """End the pass."""
        self._requests = iter(())


def slices_of(example: Any) -> Iterator[Slice]:
    """Yield the example as the slice of each step of a stream, forever."""
    while True:
        yield Slice(example, np.ones(1, np.bool_), True)


class DescribedStreamPass(DescribedPass):
    """The same for a stream."""

    def __init__(self, example: Any) -> None:
        super().__init__(slices_of(example), example)

    def __next__(self) -> Slice:
        found: Slice = next(self._requests)
        return found


def _shown(shapes: Sequence[Any]) -> str:
    return ", ".join(f"{kind}{list(shape)}" for kind, *shape in shapes) or "no tensor"
