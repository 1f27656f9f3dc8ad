"""What do ranks tell each other about a step, besides that they can serve it?"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_shard.delivery import stopping
from paddle_shard.delivery.advice import FEWEST, TELLING_SECONDS, of_told
from paddle_shard.delivery.placing import PassSetup
from paddle_shard.errors import BatchStructureError, SplitError
from paddle_shard.place.lengths import finished
from paddle_shard.plan.step import Content
from paddle_shard.reading.batch import Batch


class StepNotes:
    """The notes that a rank sends and receives on the steps of a pass.

    A note holds up to eight things:

    - The dtype and shape of a row, when they change. If only they differed between ranks, the global batch would be
      ragged and no rank could see it. With `pad_to`, all ranks pad their rows to the longest.
    - The number of rows, when it changes, if each rank has rows of its own. All must have as many.
    - The rows that the rank could not read (`on_error="skip"`), so that all ranks that hold them mark them invalid.
    - A summary of the batch, if the ranks compare this step's.
    - What some samples hold that all ranks have read; of a stream, the files that the rank has opened. So the state of
      each rank knows those of all.
    - That the rank was asked to stop (`stopping`).
    - Where its time went (`advice`), when the first rank asks all ranks for it: every few seconds.
    """

    def __init__(self, setup: PassSetup) -> None:
        """Begin a pass.

        Args:
            setup: Of the loader. With `pad_to`, the batches are not placed yet.
        """
        self._batch_check, self._pad_to, self._split = setup.batch_check, setup.placer.pad_to, setup.source.split
        self._holds_rows = setup.own_layout.on_mesh or not self._split
        """True if this rank's rows are in the global batch. False: it reads rows that no rank uses."""
        self._said: Any = None
        self._said_rows: int | None = None
        self._shapes: dict[int, Any] = {}
        self._rows: dict[int, int] = {}
        self._ranks, self._asked_to_stop = setup.agreeing_ranks, False
        self._stats, self._asks = setup.stats, setup.own_layout.global_rank == min(setup.agreeing_ranks)
        self._asked, self._times = False, dict[int, Any]()
        """True if the first rank has asked for summaries, and this one has not told its own; what was told since."""

    def say(self, batch: Batch) -> str | None:
        """Return the note on a step; None if there is nothing to say."""
        told: dict[str, Any] = {}
        if not self._asked_to_stop and stopping.has_news(self._ranks):
            self._asked_to_stop = told["stop"] = True
        if self._asked:
            self._asked, told["time"] = False, self._stats.summary()
        elif self._asks and len(self._stats.recent) >= FEWEST and time.perf_counter() > self._stats.tells_at:
            self._stats.tells_at = time.perf_counter() + self._stats.tells_after
            self._stats.tells_after = min(2 * self._stats.tells_after, TELLING_SECONDS[1])
            told["ask"] = True
        if batch.placed is None:
            return json.dumps(told) if told else None
        if batch.placed.row_shapes != self._said and (self._holds_rows or self._pad_to is None):
            self._said = told["shapes"] = batch.placed.row_shapes
        if self._split and self._holds_rows and batch.num_rows != self._said_rows:
            self._said_rows = told["rows"] = batch.num_rows
        if batch.skipped is not None and self._holds_rows:
            told["skipped"] = batch.placed.rows.read[batch.skipped].tolist()
        if batch.summary is not None:
            told["read"] = batch.summary
        if batch.contents and self._batch_check is not None:
            known = [one if isinstance(one.sample, int | str) else one._replace(sample=None) for one in batch.contents]
            told["contents"] = known
        return json.dumps(told) if told else None

    def alone(self, batch: Batch) -> Batch:
        """Return what would be delivered if there were no other ranks."""
        if batch.placed is not None and self._pad_to is not None:
            batch.value = finished(batch.value, {0: batch.placed.row_shapes})
        return batch

    def heed(self, batch: Batch, heard: Sequence[tuple[int, str]]) -> Batch:
        """Apply the ranks' notes on a step that is about to be delivered, and return the step to deliver.

        Raises:
            SplitError: The data is split already, and the ranks' batches have different numbers of rows.
            BatchStructureError: The rows of the ranks do not fit together.
            DifferentDataError: Ranks that have read the same samples hold different data.
        """
        notes = [(rank, json.loads(said)) for rank, said in heard]
        if any("stop" in told for _, told in notes):
            stopping.agree(self._ranks)
        if any("ask" in told for _, told in notes):
            self._asked, self._times = True, {}
        self._times |= {rank: told["time"] for rank, told in notes if "time" in told}
        if len(self._times) == len(self._ranks):  # all ranks hear all notes at the same step, and so say the same
            self._stats.of_ranks = {rank: of_told(one) for rank, one in sorted(self._times.items()) if one}
            self._times = {}
        if batch.placed is None or not (heard or self._pad_to):
            return batch
        read, contents = dict[int, Any](), dict[int, Any]()
        of_ranks = {"read": read, "contents": contents, "shapes": self._shapes, "rows": self._rows}
        for rank, told in notes:
            for what in of_ranks.keys() & told.keys():
                of_ranks[what][rank] = told[what]
            if "skipped" in told and self._holds_rows:
                found = np.isin(batch.placed.rows.read, told["skipped"])
                batch.skipped = found if batch.skipped is None else batch.skipped | found
        if self._batch_check is not None:
            self._batch_check.compare(read)
            contents = {rank: [Content(*one) for one in said] for rank, said in contents.items()}
            self._batch_check.compare_contents(contents)
            if batch.step.parts:
                batch.contents = tuple(one for rank in sorted(contents) for one in contents[rank])
        if len(set(self._rows.values())) > 1:
            shown = ", ".join(f"{rows} on global rank {rank}" for rank, rows in sorted(self._rows.items()))
            raise SplitError(
                f"the data is split already, and the ranks' batches have different numbers of rows: {shown}. Give "
                "every data rank as many rows at each step; a last batch that is short is filled with tail='fill', or "
                "left out with tail='drop', if the batch_sampler has a batch_size by which it is known to be short."
            )
        if self._pad_to is not None:
            batch.value = finished(batch.value, self._shapes)
            return batch
        every = list(self._shapes.values())
        differ = {path for found in every for path in found if any(one.get(path) != found[path] for one in every)}
        if differ:
            of_rank = {
                rank: ", ".join(f"{path} {kind}{row}".lstrip() for path, (kind, *row) in one.items() if path in differ)
                for rank, one in sorted(self._shapes.items())
            }
            shown = "; ".join(f"global rank {rank}: {text}" for rank, text in of_rank.items())
            kinds = [{path: row[0] for path, row in one.items()} for one in every]
            dtypes = [{path: kind.partition(",")[0] for path, kind in one.items()} for one in kinds]
            alike = all(one == kinds[0] for one in kinds)
            way_out = _RAGGED if alike else _OWN_ROWS if all(one == dtypes[0] for one in dtypes) else _OTHER_FIELDS
            raise BatchStructureError(
                "the rows that the ranks have read do not fit together into a global batch. Dtype and shape of a row "
                f"in the fields that differ: {shown}. {way_out}"
            )
        return batch


_RAGGED = (
    "Give shard_dataloader pad_to={field: ('longest', value)}: rows are padded to the longest of all "
    "ranks. Or pad to a fixed length in the collate_fn; or make whole global batches, which every rank reads: "
    ".batch(B).map(collate_fn) of a Stream, or items that are batches."
)
"""The ways out for a collate_fn that pads to the longest row."""
_OWN_ROWS = (
    "A field with rows of its own, as one for each pair of a packed sample, has as many of them on each rank: fill it "
    "up in the collate_fn to a number that all batches have."
)
_OTHER_FIELDS = "Make the samples on all ranks of the same fields, with the same dtypes."
