"""How does the main process read a stream for its workers, and deal it to them?"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.opening import Stage
from paddle_shard.reading.chunk import ChunkRequest
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.samplers.randomness import Generator, kept
from paddle_shard.stages.repeat import in_rounds
from paddle_shard.stages.stripe import FAILED_AT

Fed = dict[int, list[tuple[int, Any]]]
"""For each part: (round, sample)."""


def fed(
    requests: Iterator[list[ChunkRequest]], stage: Stage, generators: Sequence[Generator], *, to_workers: bool
) -> Iterator[Any]:
    """Yield each step's requests with the samples that they are for.

    Args:
        requests: Without an end.
        stage: What stands before the dealing; all parts of this rank are opened at once.
        generators: Global generators to seed before each piece of the user's code; they are put back.
        to_workers: Whether the samples go to other processes. They are pickled here then: what cannot be would be
            lost in the queue's thread.
    """

    def seed(number: int) -> None:
        for generator in generators:
            generator.seed(number)

    parts: dict[int, Iterator[tuple[int, Any]]] | None = None
    failure: ReadFailure | None = None
    for step in requests:
        asked = []
        for request in step:
            samples: Fed = {}
            part = at = 0
            if failure is None:
                try:
                    with kept(generators):
                        if parts is None:
                            mine = tuple(sorted(part for chunk in step for part in chunk.opening.parts))
                            opening = replace(
                                request.opening, parts=mine, seed_generators=seed, skip_errors=request.skip_errors
                            )
                            opened = in_rounds(stage, opening, None if request.repeat else 1)
                            parts = dict(zip(mine, opened, strict=True))
                        for part in request.opening.parts:
                            samples[part], at = [], request.position
                            for found in islice(parts[part], request.samples_per_part):
                                samples[part].append(found)
                                at = request.position + len(samples[part])
                except Exception as error:
                    raise_if_a_handlers(error)
                    part, at = getattr(error, FAILED_AT, (part, at))
                    what = f"reading sample {at} of part {part}"
                    failure = ReadFailure.of(error, what=what, index=(part, at), worker=None)
            sent: Any = samples
            if to_workers and failure is None:
                try:
                    sent = pickle.dumps(samples)
                except Exception as error:
                    raise_if_a_handlers(error)
                    what = f"sending samples of parts {list(request.opening.parts)} to a worker"
                    failure = ReadFailure.of(error, what=what, index=None, worker=None)
            asked.append(replace(request, fed=None if failure else sent, failure=failure))
        yield asked
