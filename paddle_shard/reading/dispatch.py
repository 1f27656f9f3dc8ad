"""How does the main process read a stream and dispatch it to its workers?"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from paddle_shard.errors import text_of
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.chunk import ChunkRequest, Dispatched
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.first_samples import opened_with_first
from paddle_shard.reading.padding import Padding
from paddle_shard.samplers.randomness import Generator, kept
from paddle_shard.stages.stage import Stage
from paddle_shard.stages.stripe import FAILED_AT

_SPARE = 64
"""Samples that are sent for missing rows, in case the workers cannot use one of them."""


def dispatch(
    requests: Iterator[list[ChunkRequest]], stage: Stage, generators: Sequence[Generator], *, to_workers: bool
) -> Iterator[Any]:
    """Yield each step's requests with the samples that they are for.

    Args:
        requests: The requests of the pass, without an end.
        stage: The stage before the dispatch; all parts of this rank are opened at once.
        generators: Global generators to seed before each piece of the user's code; their state is restored.
        to_workers: True if the samples go to other processes. They are pickled here then: what cannot be would be
            lost in the queue's thread.
    """

    def seed(number: int) -> None:
        for generator in generators:
            generator.seed(number)

    parts: dict[int, Iterator[tuple[int, Any]]] | None = None
    padding: Padding | None = None
    told: set[int] = set()  # parts whose first samples were sent
    failure: ReadFailure | None = None
    first = b""
    for step in requests:
        asked = []
        for request in step:
            samples: dict[int, list[tuple[int, Any]]] = {}
            found = Dispatched(samples, {})
            part = at = 0
            if failure is None:
                try:
                    with kept(generators):
                        if parts is None:
                            mine = tuple(sorted(part for chunk in step for part in chunk.opening.parts))
                            opening = replace(
                                request.opening, parts=mine, seed_generators=seed, skip_errors=request.skip_errors
                            )
                            padding = Padding(stage, opening)
                            opened, looked = opened_with_first(stage, opening, None if request.repeat else 1)
                            parts = dict(zip(mine, opened, strict=True))
                            first = _pickled(looked) if looked else b""
                        for part in request.opening.parts:
                            own: list[tuple[int, Any]] = []
                            samples[part], at = own, request.position
                            for pair in islice(parts[part], request.samples_per_part):
                                own.append(pair)
                                at = request.position + len(own)
                            if request.pad:
                                ended = len(own) < request.samples_per_part
                                assert padding is not None
                                padding.note(part, [sample for _, sample in own], ended=ended)
                                if ended and part not in told:
                                    told.add(part)
                                    found = _with_spare(found, part, padding, _SPARE if request.skip_errors else 1)
                except Exception as error:
                    raise_if_a_handlers(error)
                    part, at = getattr(error, FAILED_AT, (part, at))
                    what = f"reading sample {at} of part {part}"
                    failure = ReadFailure.of(error, what=what, index=(part, at), worker=None)
            sent: Any = found._replace(first=first) if request.step == request.first_step else found
            if to_workers and failure is None:
                try:
                    sent = pickle.dumps(sent)
                except Exception as error:
                    raise_if_a_handlers(error)
                    what = f"sending samples of parts {list(request.opening.parts)} to a worker"
                    failure = ReadFailure.of(error, what=what, index=None, worker=None)
            asked.append(replace(request, dispatched=None if failure else sent, failure=failure))
        yield asked


def _pickled(first: Any) -> bytes:
    """Return the samples pickled on their own; nothing if they cannot be pickled, which is reported with their step."""
    try:
        return pickle.dumps(first)
    except Exception as error:
        raise_if_a_handlers(error)
        return b""


def _with_spare(found: Dispatched, part: int, padding: Padding, count: int) -> Dispatched:
    """Return the samples of a step, and samples that can fill a part's missing rows, if there are any."""
    spare, why = {number: list(samples) for number, samples in found.spare.items()}, "every part is empty"
    try:
        for number, sample in islice(padding.candidates(part), count):
            spare.setdefault(number, []).append(sample)
    except Exception as error:  # it cannot be opened again, which matters only if a row is missing that is delivered
        raise_if_a_handlers(error)
        why = text_of(error)
    for number in padding.empty():
        spare.setdefault(number, [])
    return found._replace(spare=spare, why=why)
