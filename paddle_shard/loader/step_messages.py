"""Step messages: what the ranks send each other about a step, besides that they can serve it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_shard.errors import BatchStructureError
from paddle_shard.loader import stopping
from paddle_shard.loader.setup import LoaderSetup
from paddle_shard.placement.lengths import PadTo, Row
from paddle_shard.ranks.batch_check import compare_batches
from paddle_shard.ranks.reports import differences
from paddle_shard.reading.batch import Batch

_SUMMARY_SECONDS = 1.0
"""Seconds after which a rank sends again what it has waited for, with at most `_MANY_RANKS`; more with more ranks."""
_MANY_RANKS = 64


class StepMessages:
    """Composes the message that this rank sends with a step, and applies those that it receives.

    A message is a dict with some of these entries:

    - "form": the number of rows, if each rank has rows of its own, and the dtype and shape of a row, when they change.
      If they differed between ranks, the global batch would be ragged and no rank could see it. With `pad_to`, all
      ranks pad their rows to the longest.
    - "skipped": the rows that the rank could not read (`on_error="skip"`), so that all ranks that hold them mark them
      invalid.
    - "read": a summary of the batch, if the ranks compare this step's.
    - "stop": that the rank was asked to stop (`stopping`).
    - "time": what the rank has waited for (`LoaderStats.summary`), from time to time.
    """

    def __init__(self, setup: LoaderSetup) -> None:
        """Initialize.

        Args:
            setup: Setup of the loader. With `pad_to`, the batches are local leaves.
        """
        self._setup = setup
        self._pad_to = setup.placer.pad_to
        # Rows that stay local are not joined, so ranks may have more of them or fewer.
        self._joins_own_rows = setup.source.split and not setup.placer.local
        self._sent_recipe: Any = None
        self._sent_form: Any = None
        self._forms: dict[int, Any] = {}
        self._sent_stop = False
        self._send_time_at = time.perf_counter() + _SUMMARY_SECONDS

    def compose(self, batch: Batch) -> str | None:
        """Return the message to send with a batch; None if there is nothing to send."""
        message: dict[str, Any] = {}
        if not self._sent_stop and stopping.has_news(self._setup.ranks):
            self._sent_stop = True
            message["stop"] = True
        now = time.perf_counter()
        if now > self._send_time_at:
            num_ranks = len(self._setup.ranks)
            seconds = _SUMMARY_SECONDS * max(1.0, num_ranks / _MANY_RANKS)
            self._send_time_at = now + seconds
            message["time"] = self._setup.stats.summary()
        recipe = batch.placed
        if recipe is not None:
            if recipe is not self._sent_recipe:
                self._sent_recipe = recipe
                num_rows = batch.num_rows if self._joins_own_rows else None
                form = [num_rows, recipe.row_shapes]
                if form != self._sent_form:
                    self._sent_form = message["form"] = form
            if batch.is_skipped is not None:
                message["skipped"] = recipe.rows.read[batch.is_skipped].tolist()
            if batch.summary is not None:
                message["read"] = batch.summary
        return json.dumps(message) if message else None

    def finish_alone(self, batch: Batch) -> Any:
        """Return what would be delivered if there were no other ranks."""
        recipe = batch.placed
        if recipe.pads and not self._setup.is_alone:
            return recipe.placed(list(batch.value), [recipe.row_shapes])
        return batch.value

    def apply(self, batch: Batch, received: Sequence[tuple[int, str]]) -> Batch:
        """Apply the messages of all ranks on a step that is about to be delivered, and return its batch.

        Args:
            batch: The batch.
            received: (global rank, message).

        Raises:
            BatchStructureError: The rows of the ranks do not fit together.
            DifferentDataError: Ranks that have read the same samples hold different data.
        """
        if not received and self._pad_to is None:  # most steps
            return batch
        setup = self._setup
        by_kind = _parsed(received)
        if by_kind["stop"]:
            stopping.agree(setup.ranks)
        setup.stats.of_ranks |= by_kind["time"]
        if by_kind["skipped"] and batch.placed is not None:
            self._mark_skipped(batch, by_kind["skipped"])
        if by_kind["read"] and setup.compared_ranks is not None:
            compare_batches(by_kind["read"], setup.compared_ranks)
        if by_kind["form"]:
            self._forms |= by_kind["form"]
            _check_forms(self._forms, self._pad_to)
        if batch.placed is not None and batch.placed.pads:
            row_shapes = [shapes for _, shapes in self._forms.values()]
            batch.value = batch.placed.placed(batch.value, row_shapes)
        return batch

    def _mark_skipped(
        self, batch: Batch, of_ranks: Mapping[int, Sequence[int]]
    ) -> None:
        """Mark the rows that other ranks could not read."""
        rows = [row for rows in of_ranks.values() for row in rows]
        skipped = np.isin(batch.placed.rows.read, rows)
        batch.is_skipped = (
            skipped if batch.is_skipped is None else batch.is_skipped | skipped
        )
        batch.count(self._setup.sliced_layout)


def _parsed(
    received: Sequence[tuple[int, str]],
) -> defaultdict[str, dict[int, Any]]:
    """Return the entries of messages by their kind and global rank."""
    by_kind: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    parsed = {text: json.loads(text) for text in {text for _, text in received}}
    for rank, text in received:
        for kind, value in parsed[text].items():
            by_kind[kind][rank] = value
    return by_kind


def _check_forms(
    forms: Mapping[int, tuple[int | None, Mapping[str, Row]]],
    pad_to: PadTo | None,
) -> None:
    """Check that the rows of all ranks fit together, if need be padded to one length.

    Args:
        forms: Global rank -> (number of rows, `BatchRecipe.row_shapes`).
        pad_to: What rows are padded to.
    """
    texts = {}
    for rank, (num_rows, shapes) in sorted(forms.items()):
        texts[rank] = {"number of rows": str(num_rows)}
        for path, (kind, *row) in shapes.items():
            is_padded = pad_to is not None and pad_to.pad_of(path)
            shape = f" of {len(row)} dims" if is_padded else row
            texts[rank][path or "batch"] = f"{kind}{shape}"
    first, *others = texts.values()
    if any(other != first for other in others):
        raise BatchStructureError(
            "the rows that the ranks have read do not fit together into a global batch. They differ in the dtype and "
            f"shape of a row, or in their number: {differences(texts)}. {_FIXES}"
        )


_FIXES = (
    "All ranks need the same fields, dtypes, shapes of a row and, if each has rows of its own, as many of them: a last "
    "batch that is short is filled with tail='fill', or left out with tail='drop', if the batch_sampler has a "
    "batch_size. Rows that a collate_fn pads to the longest: give "
    "shard_dataloader pad_to={field: ('longest', value)}, pad to a fixed length, or make whole global batches, which "
    "every rank reads: .batch(B).map(collate_fn) of a Stream, or items that are batches. A field with rows of its own, "
    "as one for each pair of a packed sample: fill it up to a number that all batches have."
)
