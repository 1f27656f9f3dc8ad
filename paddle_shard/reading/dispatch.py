"""How does the main process read a stream for its workers, and dispatch the samples to them?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from paddle_shard.errors import text_of
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.step import Step
from paddle_shard.reading.chunk import ChunkRequest, Dispatched
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.padding import Padding
from paddle_shard.samplers.randomness import Generator, kept
from paddle_shard.stages.cut import FAILED_AT
from paddle_shard.stages.stage import Stage
from paddle_shard.stages.steps import in_rounds


class Dispatcher:
    """Reads the stages before a `RoundRobin`, and adds the samples to the steps of a pass, missing rows filled."""

    def __init__(self, stage: Stage, generators: Sequence[Generator]) -> None:
        """Set up; nothing is opened yet.

        Args:
            stage: The stage before the dispatch. It opens all parts of this rank at once.
            generators: Global generators to seed before each call of the user's code; their state is restored.
        """
        self._stage, self._generators = stage, generators
        self._parts: dict[int, Iterator[tuple[int, Any]]] = {}
        self._padding: Padding | None = None

    def filled(self, step: Step) -> Step:
        """Return a step with its samples.

        Raises:
            DataReadError: They cannot be read.
        """
        at = (step.parts[0].opening.parts[0], step.parts[0].position)
        try:
            with kept(self._generators):
                if not self._parts:
                    self._open(step)
                parts = list[ChunkRequest]()
                for request in step.parts:
                    at = request.opening.parts[0], request.position
                    parts.append(replace(request, dispatched=self._taken(request)))
            return replace(step, parts=tuple(parts))
        except Exception as error:
            raise_if_a_handlers(error)
            at = getattr(error, FAILED_AT, at)
            what = f"reading sample {at[1]} of part {at[0]}"
            raise ReadFailure.of(error, what=what, index=at, worker=None).error(step) from None

    def _open(self, step: Step) -> None:
        def seed(number: int) -> None:
            for generator in self._generators:
                generator.seed(number)

        first: ChunkRequest = step.parts[0]
        mine = tuple(sorted(part for request in step.parts for part in request.opening.parts))
        opening = replace(first.opening, parts=mine, seed_generators=seed, skip_errors=first.skip_errors)
        self._padding = Padding(self._stage, opening)
        opened = in_rounds(self._stage, opening, None if first.repeat else 1)
        self._parts = dict(zip(mine, opened, strict=True))

    def _taken(self, request: ChunkRequest) -> Dispatched:
        """Return the next samples of a reader's parts."""
        assert self._padding is not None
        samples, num_real, fresh, why = dict[int, list[Any]](), dict[int, int](), False, ""
        for part in request.opening.parts:
            pairs = list(islice(self._parts[part], request.samples_per_part))
            own = samples[part] = [sample for _, sample in pairs]
            num_real[part], missing = len(own), request.samples_per_part - len(own)
            fresh = fresh or any(number == 0 for number, _ in pairs)
            if request.pad:
                self._padding.note(part, own, ended=missing > 0)
                try:
                    own += [self._padding.of(part)] * missing if missing else []
                except Exception as error:  # it cannot be opened again; this matters only if the rows are delivered
                    raise_if_a_handlers(error)
                    why = text_of(error)
        return Dispatched(samples, num_real, fresh, why)
