"""Step messages: what the ranks tell each other about a step, besides that they can serve it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_shard.errors import BatchStructureError, SplitError
from paddle_shard.loader import stopping
from paddle_shard.loader.placing import PassSetup
from paddle_shard.placement.lengths import finished
from paddle_shard.reading.batch import Batch

_EXCHANGE_SECONDS = 1.0
"""Seconds between two exchanges of what the ranks have waited for."""


class StepNotes:
    """The messages that a rank sends and receives on the steps of a pass.

    A message holds up to six things:

    - "shapes": the dtype and shape of a row, when they change. If only they differed between ranks, the global batch
      would be ragged and no rank could see it. With `pad_to`, all ranks pad their rows to the longest.
    - "rows": the number of rows, when it changes, if each rank has rows of its own. All must have as many.
    - "skipped": the rows that the rank could not read (`on_error="skip"`), so that all ranks that hold them mark them
      invalid.
    - "read": a summary of the batch, if the ranks compare this step's.
    - "stop": that the rank was asked to stop (`stopping`).
    - "ask": the first rank asks all ranks for "time": what they have waited for (`LoaderStats.summary`).
    """

    def __init__(self, setup: PassSetup) -> None:
        """Begin a pass.

        Args:
            setup: Of the loader. With `pad_to`, the batches are not placed yet.
        """
        self._setup = setup
        self._batch_check = setup.batch_check
        self._pad_to = setup.placer.pad_to
        self._is_split = setup.source.split
        self._holds_rows = setup.own_layout.on_mesh or not self._is_split
        """True if this rank's rows are in the global batch. False: it reads rows that no rank uses."""
        self._sent_recipe: Any = None
        self._sent_shapes: Any = None
        self._sent_rows: int | None = None
        self._shapes: dict[int, Any] = {}
        self._rows: dict[int, int] = {}
        self._ranks = setup.agreeing_ranks
        self._asked_to_stop = False
        self._stats = setup.stats
        self._asks_for_time = setup.own_layout.global_rank == min(setup.agreeing_ranks)
        self._sends_time = False
        self._exchange_at = time.perf_counter() + _EXCHANGE_SECONDS

    def say(self, batch: Batch) -> str | None:
        """Return the message on a step; None if there is nothing to say."""
        message: dict[str, Any] = {}
        if not self._asked_to_stop and stopping.has_news(self._ranks):
            self._asked_to_stop = True
            message["stop"] = True
        if self._sends_time:
            self._sends_time = False
            message["time"] = self._stats.summary()
        elif self._asks_for_time and (now := time.perf_counter()) > self._exchange_at:
            self._exchange_at = now + _EXCHANGE_SECONDS
            message["ask"] = True
        if batch.placed is not None:
            self._describe(batch, message)
        return json.dumps(message) if message else None

    def _describe(self, batch: Batch, message: dict[str, Any]) -> None:
        recipe = batch.placed
        if recipe is not self._sent_recipe:
            self._sent_recipe = recipe
            if recipe.row_shapes != self._sent_shapes and (
                self._holds_rows or self._pad_to is None
            ):
                self._sent_shapes = message["shapes"] = recipe.row_shapes
            if (
                self._is_split
                and self._holds_rows
                and batch.num_rows != self._sent_rows
            ):
                self._sent_rows = message["rows"] = batch.num_rows
        if batch.skipped is not None and self._holds_rows:
            message["skipped"] = recipe.rows.read[batch.skipped].tolist()
        if batch.summary is not None:
            message["read"] = batch.summary

    def alone(self, batch: Batch) -> Any:
        """Return what would be delivered if there were no other ranks."""
        if batch.placed is not None and self._pad_to is not None:
            batch.value = finished(batch.value, {0: batch.placed.row_shapes})
        return batch.value

    def heed(self, batch: Batch, received: Sequence[tuple[int, str]]) -> Batch:
        """Apply the ranks' messages on a step that is about to be delivered, and return the step to deliver.

        Raises:
            SplitError: The data is split already, and the ranks' batches have different numbers of rows.
            BatchStructureError: The rows of the ranks do not fit together.
            DifferentDataError: Ranks that have read the same samples hold different data.
        """
        if not received and self._pad_to is None:
            return batch
        by_kind: dict[str, dict[int, Any]] = {}
        for rank, text in received:
            for kind, value in json.loads(text).items():
                by_kind.setdefault(kind, {})[rank] = value
        if "stop" in by_kind:
            stopping.agree(self._ranks)
        if "ask" in by_kind:
            self._sends_time = True
        self._stats.of_ranks |= by_kind.get("time", {})
        if batch.placed is None:
            return batch
        for rows in by_kind.get("skipped", {}).values():
            if self._holds_rows:
                skipped = np.isin(batch.placed.rows.read, rows)
                batch.skipped = (
                    skipped if batch.skipped is None else batch.skipped | skipped
                )
                batch.count()
                batch.delivered_ids = self._setup.delivered_ids(batch)
        if self._batch_check is not None:
            self._batch_check.compare(by_kind.get("read", {}))
        if "rows" in by_kind:
            self._rows |= by_kind["rows"]
            _check_num_rows(self._rows)
        self._shapes |= by_kind.get("shapes", {})
        if self._pad_to is not None:
            batch.value = finished(batch.value, self._shapes)
        elif "shapes" in by_kind:
            _check_shapes(self._shapes)
        return batch


def _check_num_rows(rows_of_ranks: Mapping[int, int]) -> None:
    if len(set(rows_of_ranks.values())) > 1:
        shown = ", ".join(
            f"{rows} on global rank {rank}"
            for rank, rows in sorted(rows_of_ranks.items())
        )
        raise SplitError(
            f"the data is split already, and the ranks' batches have different numbers of rows: {shown}. Give "
            "every data rank as many rows at each step; a last batch that is short is filled with tail='fill', or "
            "left out with tail='drop', if the batch_sampler has a batch_size by which it is known to be short."
        )


def _check_shapes(shapes_of_ranks: Mapping[int, Mapping[str, Any]]) -> None:
    shapes = list(shapes_of_ranks.values())
    differ = {
        path
        for one in shapes
        for path in one
        if any(other.get(path) != one[path] for other in shapes)
    }
    if not differ:
        return
    of_rank = {
        rank: ", ".join(
            f"{path} {kind}{row}".lstrip()
            for path, (kind, *row) in one.items()
            if path in differ
        )
        for rank, one in sorted(shapes_of_ranks.items())
    }
    shown = "; ".join(f"global rank {rank}: {text}" for rank, text in of_rank.items())
    raise BatchStructureError(
        "the rows that the ranks have read do not fit together into a global batch. Dtype and shape of a row "
        f"in the fields that differ: {shown}. {_FIXES}"
    )


_FIXES = (
    "All ranks need the same fields, dtypes and shapes of a row. Rows that a collate_fn pads to the longest: give "
    "shard_dataloader pad_to={field: ('longest', value)}, pad to a fixed length, or make whole global batches, which "
    "every rank reads: .batch(B).map(collate_fn) of a Stream, or items that are batches. A field with rows of its own, "
    "as one for each pair of a packed sample: fill it up to a number that all batches have."
)
