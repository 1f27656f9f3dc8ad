"""What do ranks tell each other of a step, besides that they can serve it?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_shard.errors import BatchStructureError
from paddle_shard.replicas.split_check import SplitCheck

if TYPE_CHECKING:
    from paddle_shard.loader.begin import Pending


class StepNotes:
    """What one rank says, and hears, of the steps of a pass.

    The dtype and shape of a row, when they change: rows that differ between ranks only would make a global batch that
    is ragged, which no rank could see. And the rows that it could not read (`on_error="skip"`), so that all ranks that
    hold them call them invalid. And, where each data rank has rows of its own, what they have read first.
    """

    def __init__(self, *, holds_rows: bool, split_check: SplitCheck | None = None) -> None:
        """Begin a pass.

        Args:
            holds_rows: Whether what this rank reads is of the global batch, and not rows of its own that nobody uses.
            split_check: Compares the first batches, where the data is said to be split.
        """
        self._holds_rows, self._split_check = holds_rows, split_check
        self._said: Sequence[Any] | None = None
        self._shapes: dict[int, str] = {}

    def say(self, item: Any) -> bytes | None:
        """Return what the others should know of a step's (batch, what was read), if anything."""
        if item is None:
            return None
        pending: Pending = item[1]
        told: dict[str, Any] = {}
        if pending.row_shapes != self._said:
            self._said = pending.row_shapes
            told["shapes"] = ", ".join(f"{str(dtype).split('.')[-1]}{list(shape)}" for dtype, *shape in self._said)
        if pending.skipped is not None and self._holds_rows:
            assert pending.rows is not None
            told["skipped"] = pending.rows.read[pending.skipped].tolist()
        if pending.first is not None:
            told["first"] = pending.first
        return json.dumps(told).encode() if told else None

    def heed(self, item: Any, heard: Sequence[tuple[int, bytes]]) -> None:
        """Take over what the ranks have said of a step that is about to be delivered.

        Raises:
            BatchStructureError: The rows of the ranks differ in dtype or shape; on all of them.
            SplitError: The data is not split as was said; on all of them.
        """
        if item is None or not heard:
            return
        pending: Pending = item[1]
        firsts = {}
        for rank, said in heard:
            told = json.loads(said)
            if "first" in told:
                firsts[rank] = told["first"]
            if "shapes" in told:
                self._shapes[rank] = told["shapes"]
            if "skipped" in told and self._holds_rows:
                assert pending.rows is not None
                found = np.isin(pending.rows.read, told["skipped"])
                pending.skipped = found if pending.skipped is None else pending.skipped | found
        if self._split_check is not None and firsts:
            self._split_check.compare(firsts)
        if len(set(self._shapes.values())) > 1:
            shown = "; ".join(f"global rank {rank}: {shapes}" for rank, shapes in sorted(self._shapes.items()))
            raise BatchStructureError(
                "the rows that the ranks have read do not fit together into a global batch. Dtype and shape of a row, "
                f"field by field: {shown}. Pad to a length that does not depend on the other rows of the slice."
            )
