"""What has been read for a step, until the user gets it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.plan.step import Ids, Mask, Step


class Chunk(NamedTuple):
    """What one reader returns for a step: some rows of it."""

    value: Any
    """The collated rows; None if rows are missing and were not filled."""
    real: bytes | None = None
    """One byte for each row: 1 if the row is real, 0 if it is missing or was filled. None: as the step says."""
    fresh: bool = True
    """True if a row comes from the first round of its part."""
    state: Any = None
    """State to resume the pass after this step, if the source has a state of its own."""
    skipped: Sequence[tuple[int, str]] = ()
    """(row, why) of samples that could not be read. Such a row holds the data of another sample."""
    why: str = ""
    """Why missing rows could not be filled."""
    digest: int = 0
    """Digest of what all readers of the stream have read up to here; 0 if each reads its own data."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows of a step that this rank reads, on their way from the reader to the user."""

    step: Step
    value: Any
    """The batch: arrays, then tensors, at last distributed tensors. None if rows are missing and were not filled."""
    real: Mask | None
    """Mask of the real rows among those that were read; None: all are real."""
    skipped: Mask | None = None
    """Mask of the rows whose sample could not be read; None: there are none."""
    fresh: bool = True
    """True if a row comes from the first round of its part."""
    why: str = ""
    """Why missing rows could not be filled."""
    digest: int = 0
    """Digest of what was read or drawn so far, for the ranks to compare."""
    owned: bool = True
    """True if nothing else refers to its arrays, so that tensors may share their memory."""
    is_first: bool = False
    """True for the first step of its pass."""

    exhausted: bool = False
    """True if it holds nothing new, and nothing new will come."""

    # What is known once the batch is placed:
    rows: Any = None
    """The rows of the global batch that were read (`place.placer.BatchRows`)."""
    layout: Any = None
    """Layout of the batch's last field (`place.field.FieldLayout`)."""
    row_shapes: Any = None
    """Path -> (dtype, *shape of a row) of each tensor; with `pad_to`, of each that is `Unplaced`."""
    num_bytes: int = 0
    """Size in bytes of the rows that were read."""
    summary: dict[str, Any] | None = None
    """Summary of the batch for the ranks to compare; None: this one is not compared."""

    @property
    def placed(self) -> bool:
        """True if it can be delivered; False if nothing could be read for it."""
        return self.layout is not None

    @property
    def whole(self) -> bool:
        """True if no row is missing."""
        return self.real is None or bool(self.real.all())

    @property
    def empty(self) -> bool:
        """True if every row is missing."""
        return self.real is not None and not self.real.any()

    @property
    def num_rows(self) -> int:
        """Number of rows that this process reads."""
        return len(self.rows.read)

    def served(self) -> Mask:
        """Return one bool for each row that was read: True if the order serves a sample there."""
        if self.real is None:
            return np.ones(self.num_rows, bool)
        if self.rows is None or len(self.real) == self.num_rows:
            return self.real
        return np.full(self.num_rows, self.real[0])  # an item that is a whole batch is real or not as a whole

    def valid(self) -> Mask:
        """Return one bool for each row that was read: True if the row is real."""
        found = self.served()
        return found if self.skipped is None else found & ~self.skipped

    def num_skipped(self) -> int:
        """Return how many rows are not real because their samples are left out or could not be read."""
        lost = 0 if self.skipped is None else int(np.count_nonzero(self.skipped & self.served()))
        return self.step.left_out + lost

    def own_ids(self, layout: Any, *, local: bool) -> tuple[Ids, int]:
        """Return the ids of the samples in this process's slice, without padding, and how many more were not read.

        Args:
            layout: Layout of the field whose rows this rank reads.
            local: True if the rows are this rank's only.
        """
        ids = self.step.ids
        if local or len(ids) != self.num_rows:
            return ids, 0
        if not layout.on_mesh:
            return [], 0
        mine, lost = self.rows.positions(layout), 0
        if self.skipped is not None:
            lost = int(np.count_nonzero((self.skipped & self.served())[mine]))
        if self.real is not None or self.skipped is not None:
            mine = mine[self.valid()[mine]]
        if len(mine) == len(ids):
            return ids, lost
        return (ids[mine] if isinstance(ids, np.ndarray) else [ids[position] for position in mine.tolist()]), lost
