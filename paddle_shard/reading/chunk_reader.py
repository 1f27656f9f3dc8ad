"""How does a reader read the parts of a stream that it holds?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import Any

from paddle_shard.errors import PaddleShardError
from paddle_shard.plan.handlers import raise_if_a_handlers, raised_by_a_handler
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.chunk import ChunkRequest
from paddle_shard.reading.digest import digest
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.local_batch import num_rows_of
from paddle_shard.reading.padding import Padding
from paddle_shard.reading.reader import collate_rows
from paddle_shard.reading.skipping import collate_skipping
from paddle_shard.samplers.randomness import Generator, kept
from paddle_shard.stages.cut import FAILED_AT, Stripe
from paddle_shard.stages.stage import Stage, Stated, Unreadable
from paddle_shard.stages.steps import in_rounds


class ChunkReader:
    """Serves the requests of one pass after another, in the order of the steps.

    It runs in a worker, or in the main process if there are no workers. It keeps the parts of its pass open.
    """

    def __init__(
        self,
        stage: Stage,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        generators: Sequence[Generator],
    ) -> None:
        """Set up the reader.

        Args:
            stage: The stage that opens the parts.
            dataset: The data set that the user's functions see.
            collate_fn: The user's function, or None to stack the samples with `collate`.
            generators: Global generators to seed before each call of the user's code.
        """
        self._stage, self.dataset = stage, dataset
        self._collate_fn, self.generators = collate_fn, generators
        self._number: int | None = None
        self._digest, self._see_every, self._whole_items = 0, 1, False
        self._ahead: deque[tuple[int, int]] = deque()  # (turn of the parts, digest up to the turn's first sample)
        self._ahead_digest = 0
        self._next_step = 0
        self._parts: list[Iterator[tuple[int, Any]]] = []
        self._padding: Padding | None = None
        self._why = ""  # why missing rows could not be filled
        self._state: Any = None

    draws = True
    owns_arrays = False

    def read(self, request: ChunkRequest, worker: int | None) -> Chunk | ReadFailure:
        """Return the rows of a request, or its failure; the main process's generators stay as they are."""
        with kept(self.generators) if worker is None else nullcontext():
            return self._read(request, worker)

    def _read(self, request: ChunkRequest, worker: int | None) -> Chunk | ReadFailure:
        at: dict[str, Any] = {"what": f"opening parts {list(request.opening.parts)}", "index": None}
        try:
            if request.number != self._number:
                self._begin(request)
            if request.step != self._next_step:
                raise AssertionError(f"step {request.step} was asked for, but step {self._next_step} is next")
            self._next_step += request.stride
            samples, real, fresh = self._rows(request, at)
            if not samples:
                state, seen = self._state_after(request), self._seen_at(request)
                return Chunk(None, bytes(real), fresh, state, why=self._why, digest=seen)
            at.update(what=f"collating {len(samples)} samples", index=None)
            self._seed(request.opening.key(request.opening.parts[0], "collate", request.step))
            batch, skipped = self._batch(samples, real, request)
            if request.local_rows is not None:
                real = [True] * num_rows_of(batch)
            state = self._state_after(request)
            return Chunk(batch, bytes(real), fresh, state, skipped, digest=self._seen_at(request))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, which would end a worker silently
            if worker is None and raised_by_a_handler(error):
                raise
            index = getattr(error, FAILED_AT, None)
            if index is not None:  # it failed before the cut, perhaps at another reader's sample
                at.update(what=f"reading sample {index[1]} of part {index[0]}", index=index)
            elif at["index"] is not None and not isinstance(error, PaddleShardError):
                part, number = at["index"]
                at["what"] = f"reading {self._named(part, number, request)}"
            return ReadFailure.of(error, worker=worker, indices=tuple(request.indices), **at)

    def close(self) -> None:
        """Drop the open parts."""
        self._padding = None
        self._number, self._parts = None, []

    def _seed(self, seed: int) -> None:
        for generator in self.generators:
            generator.seed(seed)

    def _begin(self, request: ChunkRequest) -> None:
        opening = replace(request.opening, seed_generators=self._seed, skip_errors=request.skip_errors)
        self._number, self._next_step, self._parts = request.number, request.first_step, []
        self._state, self._digest, self._ahead_digest = request.opening.state, 0, 0
        self._ahead.clear()
        self._padding = Padding(self._stage, opening)
        self._whole_items = request.whole_items
        self._see_every = 1 if request.whole_items else opening.num_parts * opening.stripe
        # Readers that repeat their parts may begin a round at different steps.
        compared = request.compared and not (request.repeat or _splits_after_the_cut(self._stage))
        seen = self._see if compared else opening.seen
        self._parts = in_rounds(self._stage, replace(opening, seen=seen), None if request.repeat else 1)

    def _see(self, number: int, sample: Any) -> None:
        """Add a sample to the digest. All readers get to the first sample of each turn, so digests are noted there.

        A whole batch has a digest of its own: after a resume, the workers of one rank do not all begin at one batch.
        """
        self._ahead_digest = digest(sample, 0 if self._whole_items else self._ahead_digest)
        if number % self._see_every == 0:
            self._ahead.append((number // self._see_every, self._ahead_digest))

    def _seen_at(self, request: ChunkRequest) -> int:
        """Return the digest up to the last turn of a step, which all readers reach; this one may have read further."""
        last = (request.position + request.samples_per_part - 1) // request.opening.stripe
        while self._ahead and (request.whole_items or self._ahead[0][0] <= last):
            _, self._digest = self._ahead.popleft()
        return self._digest

    def _rows(self, request: ChunkRequest, at: dict[str, Any]) -> tuple[list[Any], list[bool], bool]:
        """Return the samples in the order of the rows, whether each is real, and whether any row is fresh."""
        size, fresh, padding = request.samples_per_part, False, self._padding
        assert padding is not None
        # columns[part][row of the part]
        columns: list[list[Any]] = []
        for part, items in zip(request.opening.parts, self._parts, strict=True):
            column: list[Any] = []
            while len(column) < size:
                number = request.position + len(column)
                at.update(what=f"reading sample {number} of part {part}", index=(part, number))
                found = next(items, None)
                if found is None:
                    break
                fresh = fresh or found[0] == 0
                sample = found[1]
                if isinstance(sample, Stated):
                    sample, self._state = sample
                column.append(sample)
            columns.append(column)
            if (request.pad or request.skip_errors) and not request.whole_items:
                padding.note(part, column, ended=len(column) < size)
        order = [
            (part, micro * request.stripe + row)
            for micro in range(request.accumulation)
            for part in range(len(columns))
            for row in range(request.stripe)
        ]
        num_real = [len(column) for column in columns]
        real = [num_real[part] > row for part, row in order]
        if min(map(len, columns)) < size and not self._padded(columns, request, at):
            return [], real, fresh
        return [columns[part][row] for part, row in order], real, fresh

    def _padded(self, columns: list[list[Any]], request: ChunkRequest, at: dict[str, Any]) -> bool:
        """Fill missing rows if the request says so; return whether they are filled now."""
        if not request.pad or request.whole_items:
            return False
        assert self._padding is not None
        delivers = any(columns)
        for part, column in zip(request.opening.parts, columns, strict=True):
            missing = request.samples_per_part - len(column)
            if not missing:
                continue
            at.update(what=f"finding what stands in the missing rows of part {part}", index=None)
            try:
                column += [self._padding.of(part)] * missing
            except Exception as error:
                raise_if_a_handlers(error)
                if delivers:
                    raise
                self._why = str(error)
                return False
        return True

    def _state_after(self, request: ChunkRequest) -> Any:
        if request.local_rows is None:
            return None
        return {"shard": request.opening.parts[0], "rows": request.local_rows, "library": self._state}

    def _batch(
        self, samples: list[Any], real: list[bool], request: ChunkRequest
    ) -> tuple[Any, Sequence[tuple[int, str]]]:
        """Return a batch, and (row, why) of the rows that hold another sample, as their own failed."""
        if not request.skip_errors:
            return self._collated(samples, request), ()
        failed = {row: sample.why for row, sample in enumerate(samples) if isinstance(sample, Unreadable)}
        places = [self._place_of(row, request) for row in range(len(samples))]

        def stand_in() -> Any:
            try:
                return self._padding.of(places[0][0])  # type: ignore[union-attr]
            except LookupError:
                why = next(iter(failed.values()))
                raise ValueError(f"{why}; and no other sample was read that its row could hold") from None

        def name_of(row: int) -> str:
            return self._named(*places[row], request)

        batch = collate_skipping(samples, failed, lambda rows: self._collated(rows, request), stand_in, name_of)
        return batch, [(row, f"{name_of(row)}: {why}") for row, why in sorted(failed.items()) if real[row]]

    def _named(self, part: int, number: int, request: ChunkRequest) -> str:
        """Return the name of a sample, for messages."""
        origin = None if request.whole_items else self._stage.origin(request.opening, part, number)
        return f"sample {number} of part {part}" + (f" ({origin})" if origin else "")

    @staticmethod
    def _place_of(row: int, request: ChunkRequest) -> tuple[int, int]:
        """Return the part of a chunk's row, and the number of its sample in the part."""
        parts = request.opening.parts
        micro, row = divmod(row, len(parts) * request.stripe)
        part, row = divmod(row, request.stripe)
        return parts[part], request.position + micro * request.stripe + row

    def _collated(self, samples: list[Any], request: ChunkRequest) -> Any:
        if request.whole_items:
            return samples[0] if self._collate_fn is None else self._collate_fn(samples[0])
        return collate_rows(samples, self._collate_fn, rows_are_split=request.rows_are_split)


def _splits_after_the_cut(stage: Stage) -> bool:
    """True if samples become several after the cut: a position does not tell how far a reader must have read."""
    return any(one.makes_several for one in takewhile(lambda one: not isinstance(one, Stripe), stage.line()))
