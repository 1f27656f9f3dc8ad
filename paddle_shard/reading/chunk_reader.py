"""How does a reader go through the parts of a stream that it holds?"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.plan.handlers import raised_by_a_handler
from paddle_shard.plan.opening import Opening, Stage, Stated, Unreadable
from paddle_shard.reading.chunk import Chunk, ChunkRequest
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.local_batch import filled, num_rows_of
from paddle_shard.reading.reader import collate_rows
from paddle_shard.reading.skipping import COMPARED, TRIED, Usual, collate_skipping
from paddle_shard.samplers.randomness import Generator
from paddle_shard.stages.repeat import in_rounds
from paddle_shard.stages.round_robin import RoundRobin
from paddle_shard.stages.stripe import FAILED_AT


class ChunkReader:
    """Serves the requests of one pass after another, each in the order of its steps.

    It lives in a worker, or in the main process without workers, and holds the open parts of its pass.
    """

    def __init__(
        self,
        stage: Stage,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        generators: Sequence[Generator],
        dealt: RoundRobin | None = None,
    ) -> None:
        """Set up the reader.

        Args:
            stage: What opens the parts.
            dataset: What the user's functions see as their data set.
            collate_fn: The user's, or None to stack the samples with `collate`.
            generators: Global generators to seed before each piece of the user's code.
            dealt: The stage that is fed with what the main process has read.
        """
        self._stage, self.dataset, self._dealt = stage, dataset, dealt
        self._collate_fn, self._generators = collate_fn, generators
        self._number: int | None = None
        self._next_step = 0
        self._parts: list[Iterator[tuple[int, Any]]] = []
        self._filler: list[Any] = []  # at most one sample: what missing rows are made of
        self._state: Any = None
        self._local_rows = 0
        self._usual: dict[int, Usual | None] = {}

    def read(self, request: ChunkRequest, worker: int | None) -> Chunk | ReadFailure:
        """Return the rows of a request, or its failure."""
        at: dict[str, Any] = {"what": f"opening parts {list(request.opening.parts)}", "index": None}
        if request.failure is not None:
            return request.failure
        try:
            if isinstance(request.fed, bytes):
                request = replace(request, fed=pickle.loads(request.fed))
            if request.number != self._number:
                self._begin(request)
            if isinstance(request.fed, Mapping):
                assert self._dealt is not None
                for part, pairs in request.fed.items():
                    self._dealt.feed(part, [sample for _, sample in pairs])
            if request.step != self._next_step:
                raise AssertionError(f"step {request.step} was asked for, but step {self._next_step} is next")
            self._next_step += request.stride
            samples, real, fresh = self._rows(request, at)
            if not (all(real) or request.pad) or not samples:
                return Chunk(None, bytes(real), fresh)
            at.update(what=f"collating {len(samples)} samples", index=None)
            self._seed(request.opening.key(request.opening.parts[0], "collate", request.step))
            if request.skip_errors:
                return self._skipping(samples, real, fresh, request)
            if request.local_rows is not None:
                return self._local(self._collated(samples, request), request, fresh, there=real[0])
            return Chunk(self._collated(samples, request), bytes(real), fresh)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, which would end a worker without a word
            if worker is None and raised_by_a_handler(error):
                raise
            index = getattr(error, FAILED_AT, None)
            if index is not None:  # it was read on the way to this reader's own
                at.update(what=f"reading sample {index[1]} of part {index[0]}", index=index)
            return ReadFailure.of(error, worker=worker, **at)

    def close(self) -> None:
        """Let go of the open parts."""
        self._number, self._parts, self._filler = None, [], []

    def _seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.seed(seed)

    def _begin(self, request: ChunkRequest) -> None:
        opening = replace(request.opening, seed_generators=self._seed, skip_errors=request.skip_errors)
        self._number, self._next_step, self._parts, self._filler = request.number, request.first_step, [], []
        self._state, self._local_rows = request.opening.state, request.local_rows or 0
        if request.fed is not None:  # the rounds, and what is skipped, are those of the one who feeds
            self._parts = [zip(repeat(0), items, strict=False) for items in self._stage.open(opening)]
        else:
            self._parts = in_rounds(self._stage, opening, None if request.repeat else 1)
        self._usual = self._usual_of_parts(request, opening) if request.skip_errors else {}

    def _rows(self, request: ChunkRequest, at: dict[str, Any]) -> tuple[list[Any], list[bool], bool]:
        """Return the samples in the order of their rows, which of them are real, and whether any is fresh."""
        size, fresh = request.samples_per_part, False
        if isinstance(request.fed, Mapping):
            fresh = any(number == 0 for pairs in request.fed.values() for number, _ in pairs)
        # [part][row of it]
        columns: list[list[Any]] = []
        for part, items in zip(request.opening.parts, self._parts, strict=True):
            column: list[Any] = []
            while len(column) < size:
                number = request.position + len(column)
                at.update(what=f"reading sample {number} of part {part}", index=(part, number))
                found = next(items, None)
                if found is None:
                    break
                fresh = fresh or (request.fed is None and found[0] == 0)
                sample = found[1]
                if isinstance(sample, Stated):
                    sample, self._state = sample
                column.append(sample)
            columns.append(column)
        real = [len(column) > row for column in columns for row in range(size)]
        readable = (s for column in reversed(columns) for s in reversed(column) if not isinstance(s, Unreadable))
        unread = (s for column in columns for s in column)
        self._filler = list(islice(readable, 1)) or self._filler or list(islice(unread, 1))
        if request.pad and not all(real):
            if not self._filler:  # nothing was read yet: somebody else's rows stand in
                return [], real, fresh
            columns = [column + self._filler * (size - len(column)) for column in columns]
        order = [
            (part, micro * request.stripe + row)
            for micro in range(request.accumulation)
            for part in range(len(columns))
            for row in range(request.stripe)
        ]
        real = [real[p * size + r] for p, r in order]
        if not (all(real) or request.pad):
            return [], real, fresh
        return [columns[p][r] for p, r in order], real, fresh

    def _usual_of_parts(self, request: ChunkRequest, opening: Opening) -> dict[int, Usual | None]:
        """Return what most of each part's first samples are like; of samples that are dealt nothing is known yet."""
        if request.fed is not None:
            return {}
        heads = self._read_before(opening) if opening.skip else None
        if heads is None:
            heads = [list(_head(items)) for items in self._parts]
            self._parts = [chain(head, items) for head, items in zip(heads, self._parts, strict=True)]
        found = {}
        for part, head in zip(opening.parts, heads, strict=True):
            samples = [sample for _, sample in head if not isinstance(sample, Unreadable)]
            self._seed(opening.key(part, "compare"))
            alike = self._collate_fn is None or request.rows_are_split
            found[part] = Usual.of(samples, lambda rows: self._collated(rows, request), alike=alike)
        return found

    def _read_before(self, opening: Opening) -> list[list[tuple[int, Any]]] | None:
        """Return the first samples of parts that are read from further on; None where they can be read once only."""
        try:
            return [list(_head(items)) for items in in_rounds(self._stage, replace(opening, skip=0), 1)]
        except ArgumentError:
            return None

    def _skipping(self, samples: list[Any], real: list[bool], fresh: bool, request: ChunkRequest) -> Chunk:
        """Return a chunk in which another sample stands in for each that cannot be read or collated."""
        failed = {row: sample.why for row, sample in enumerate(samples) if isinstance(sample, Unreadable)}
        places = [self._place_of(row, request) for row in range(len(samples))]

        usual = [self._usual.get(part) for part, _ in places]
        if len(failed) == len(samples) and not any(usual) and not isinstance(self._filler[0], Unreadable):
            usual = [Usual(self._filler[0])] * len(samples)
        batch = collate_skipping(samples, failed, usual, lambda rows: self._collated(rows, request))
        told = []
        for row, why in sorted(failed.items()):
            part, number = places[row]
            if real[row]:
                told.append((row, f"sample {number} of part {part}: {why}"))
        return Chunk(batch, bytes(real), fresh, None, told)

    @staticmethod
    def _place_of(row: int, request: ChunkRequest) -> tuple[int, int]:
        """Return the part and the number in it of a chunk's row."""
        parts = request.opening.parts
        micro, row = divmod(row, len(parts) * request.stripe)
        part, row = divmod(row, request.stripe)
        return parts[part], request.position + micro * request.stripe + row

    def _local(self, batch: Any, request: ChunkRequest, fresh: bool, *, there: bool) -> Chunk:
        """Return a rank's own batch, with as many rows as the ones before it."""
        found = num_rows_of(batch)
        wanted = self._local_rows = self._local_rows or found
        if found > wanted:
            raise BatchStructureError(
                f"a batch of {found} rows came after batches of {wanted}: every rank's batches must have as many rows, "
                "and only its last may have fewer."
            )
        real = bytes([there] * found + [False] * (wanted - found))
        state = {"shard": request.opening.parts[0], "rows": wanted, "library": self._state}
        if found < wanted:
            if not (request.pad or request.repeat):
                return Chunk(None, real, fresh, state)
            batch = filled(batch, found, wanted)
        return Chunk(batch, real, fresh, state)

    def _collated(self, samples: list[Any], request: ChunkRequest) -> Any:
        if request.whole_items:
            return samples[0] if self._collate_fn is None else self._collate_fn(samples[0])
        return collate_rows(samples, self._collate_fn, rows_are_split=request.rows_are_split)


def _head(items: Iterator[Any]) -> Iterator[Any]:
    """Yield samples until there are enough that can be read to know what is usual."""
    readable = 0
    for item in islice(items, TRIED):
        yield item
        readable += not isinstance(item[1], Unreadable)
        if readable == COMPARED:
            return
