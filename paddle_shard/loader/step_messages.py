"""Step messages: what the ranks send each other about a step, besides that they can serve it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_shard.errors import BatchStructureError, SplitError
from paddle_shard.loader import stopping
from paddle_shard.loader.setup import LoaderSetup
from paddle_shard.placement.lengths import finished
from paddle_shard.ranks.batch_check import compare_batches
from paddle_shard.reading.batch import Batch

_EXCHANGE_SECONDS = 1.0
"""Seconds between two exchanges of what the ranks have waited for, with at most `_MANY_RANKS`; more with more ranks."""
_MANY_RANKS = 64


class StepMessages:
    """Composes the message that this rank sends with a step, and applies those that it receives.

    A message is a dict with some of these entries:

    - "shapes": the dtype and shape of a row, when they change. If only they differed between ranks, the global batch
      would be ragged and no rank could see it. With `pad_to`, all ranks pad their rows to the longest.
    - "rows": the number of rows, when it changes, if each rank has rows of its own. All must have as many.
    - "skipped": the rows that the rank could not read (`on_error="skip"`), so that all ranks that hold them mark them
      invalid.
    - "read": a summary of the batch, if the ranks compare this step's.
    - "stop": that the rank was asked to stop (`stopping`).
    - "ask": the first rank asks all ranks for "time": what they have waited for (`LoaderStats.summary`).
    """

    def __init__(self, setup: LoaderSetup) -> None:
        """Initialize.

        Args:
            setup: Setup of the loader. With `pad_to`, the batches are not placed yet.
        """
        self._setup = setup
        self._pad_to = setup.placer.pad_to
        self._is_split = setup.source.split
        self._holds_rows = setup.row_layout.on_mesh or not self._is_split
        """True if this rank's rows are in the global batch. False: it reads rows that no rank uses."""
        self._sent_recipe: Any = None
        self._sent_shapes: Any = None
        self._sent_rows: int | None = None
        self._shapes: dict[int, Any] = {}
        self._rows: dict[int, int] = {}
        self._sent_stop = False
        self._is_first_rank = setup.row_layout.global_rank == min(setup.ranks)
        self._is_asked_for_time = False
        self._exchange_at = time.perf_counter() + _EXCHANGE_SECONDS
        self._handlers = {
            "stop": self._on_stop,
            "ask": self._on_ask,
            "time": self._on_time,
            "skipped": self._on_skipped,
            "read": self._on_read,
            "rows": self._on_rows,
            "shapes": self._on_shapes,
        }

    def compose(self, batch: Batch) -> str | None:
        """Return the message to send with a batch; None if there is nothing to send."""
        message: dict[str, Any] = {}
        if not self._sent_stop and stopping.has_news(self._setup.ranks):
            self._sent_stop = True
            message["stop"] = True
        if self._is_asked_for_time:
            self._is_asked_for_time = False
            message["time"] = self._setup.stats.summary()
        elif self._is_first_rank and time.perf_counter() > self._exchange_at:
            num_ranks = len(self._setup.ranks)
            seconds = _EXCHANGE_SECONDS * max(1.0, num_ranks / _MANY_RANKS)
            self._exchange_at = time.perf_counter() + seconds
            message["ask"] = True
        recipe = batch.placed
        if recipe is not None:
            if recipe is not self._sent_recipe:
                self._sent_recipe = recipe
                self._describe_form(batch, message)
            if batch.is_skipped is not None and self._holds_rows:
                message["skipped"] = recipe.rows.read[batch.is_skipped].tolist()
            if batch.summary is not None:
                message["read"] = batch.summary
        return json.dumps(message) if message else None

    def _describe_form(self, batch: Batch, message: dict[str, Any]) -> None:
        shapes = batch.placed.row_shapes
        is_used = self._holds_rows or self._pad_to is None
        if is_used and shapes != self._sent_shapes:
            self._sent_shapes = message["shapes"] = shapes
        # Rows that stay local are not joined, so ranks may have more of them or fewer.
        has_own_rows = self._is_split and self._holds_rows
        has_own_rows = has_own_rows and not self._setup.placer.local
        if has_own_rows and batch.num_rows != self._sent_rows:
            self._sent_rows = message["rows"] = batch.num_rows

    def finish_alone(self, batch: Batch) -> Any:
        """Return what would be delivered if there were no other ranks."""
        if batch.placed is not None and self._pad_to is not None:
            batch.value = finished(batch.value, {0: batch.placed.row_shapes})
        return batch.value

    def apply(self, batch: Batch, received: Sequence[tuple[int, str]]) -> Batch:
        """Apply the messages of all ranks on a step that is about to be delivered, and return its batch.

        Args:
            batch: The batch.
            received: (global rank, message).

        Raises:
            SplitError: The data is split already, and the ranks' batches have different numbers of rows.
            BatchStructureError: The rows of the ranks do not fit together.
            DifferentDataError: Ranks that have read the same samples hold different data.
        """
        if not received and self._pad_to is None:  # most steps
            return batch
        by_kind: dict[str, dict[int, Any]] = {}
        parsed = {text: json.loads(text) for text in {text for _, text in received}}
        for rank, text in received:
            for kind, value in parsed[text].items():
                by_kind.setdefault(kind, {})[rank] = value
        for kind, handler in self._handlers.items():
            if kind in by_kind:
                handler(batch, by_kind[kind])
        if self._pad_to is not None and batch.placed is not None:
            batch.value = finished(batch.value, self._shapes)
        return batch

    def _on_stop(self, batch: Batch, of_ranks: Mapping[int, Any]) -> None:
        stopping.agree(self._setup.ranks)

    def _on_ask(self, batch: Batch, of_ranks: Mapping[int, Any]) -> None:
        self._is_asked_for_time = True

    def _on_time(self, batch: Batch, of_ranks: Mapping[int, Any]) -> None:
        self._setup.stats.of_ranks |= of_ranks

    def _on_skipped(self, batch: Batch, of_ranks: Mapping[int, Any]) -> None:
        if batch.placed is None or not self._holds_rows:
            return
        rows = [row for rows in of_ranks.values() for row in rows]
        skipped = np.isin(batch.placed.rows.read, rows)
        batch.is_skipped = (
            skipped if batch.is_skipped is None else batch.is_skipped | skipped
        )
        batch.count(self._setup.sliced_layout)

    def _on_read(self, batch: Batch, of_ranks: Mapping[int, Any]) -> None:
        if self._setup.compared_ranks is not None:
            compare_batches(of_ranks, self._setup.compared_ranks)

    def _on_rows(self, batch: Batch, of_ranks: Mapping[int, Any]) -> None:
        self._rows |= of_ranks
        _check_num_rows(self._rows)

    def _on_shapes(self, batch: Batch, of_ranks: Mapping[int, Any]) -> None:
        self._shapes |= of_ranks
        if self._pad_to is None:
            _check_shapes(self._shapes)


def _check_num_rows(rows_of_ranks: Mapping[int, int]) -> None:
    if len(set(rows_of_ranks.values())) > 1:
        raise SplitError(
            "the data is split already, and the ranks' batches have different numbers of rows, by global rank: "
            f"{dict(sorted(rows_of_ranks.items()))}. Give "
            "every data rank as many rows at each step; a last batch that is short is filled with tail='fill', or "
            "left out with tail='drop', if the batch_sampler has a batch_size by which it is known to be short."
        )


def _check_shapes(shapes_of_ranks: Mapping[int, Mapping[str, Any]]) -> None:
    first, *others = shapes_of_ranks.values()
    differing = {
        path
        for shapes in others
        for path in {**first, **shapes}
        if shapes.get(path) != first.get(path)
    }
    if not differing:
        return
    texts = []
    for rank, shapes in sorted(shapes_of_ranks.items()):
        rows = [(path, *shapes[path]) for path in shapes if path in differing]
        fields = ", ".join(f"{path} {kind}{row}".lstrip() for path, kind, *row in rows)
        texts.append(f"global rank {rank}: {fields}")
    raise BatchStructureError(
        "the rows that the ranks have read do not fit together into a global batch. Dtype and shape of a row "
        f"in the fields that differ: {'; '.join(texts)}. {_FIXES}"
    )


_FIXES = (
    "All ranks need the same fields, dtypes and shapes of a row. Rows that a collate_fn pads to the longest: give "
    "shard_dataloader pad_to={field: ('longest', value)}, pad to a fixed length, or make whole global batches, which "
    "every rank reads: .batch(B).map(collate_fn) of a Stream, or items that are batches. A field with rows of its own, "
    "as one for each pair of a packed sample: fill it up to a number that all batches have."
)
