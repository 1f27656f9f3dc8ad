"""How does the main process read a stream for its workers, and dispatch the samples to them?"""

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
"""Samples that are sent to fill missing rows if errors are skipped: the workers' stages may fail on some of them."""


def dispatch(
    requests: Iterator[list[ChunkRequest]], stage: Stage, generators: Sequence[Generator], *, to_workers: bool
) -> Iterator[Any]:
    """Yield the requests of each step, with their samples.

    Args:
        requests: The requests of each step, without an end.
        stage: The stage before the dispatch. It opens all parts of this rank at once.
        generators: Global generators to seed before each call of the user's code; their state is restored.
        to_workers: True if the samples go to other processes. Then they are pickled here, so that an error in
            pickling is a failure of its step, and names the parts.
    """

    def seed(number: int) -> None:
        for generator in generators:
            generator.seed(number)

    parts: dict[int, Iterator[tuple[int, Any]]] | None = None
    padding: Padding | None = None
    told: set[int] = set()  # parts whose spare samples were sent
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
    """Return the pickled samples; empty if they cannot be pickled, which raises an error when they are delivered."""
    try:
        return pickle.dumps(first)
    except Exception as error:
        raise_if_a_handlers(error)
        return b""


def _with_spare(found: Dispatched, part: int, padding: Padding, count: int) -> Dispatched:
    """Return what is dispatched, with samples added that can fill a part's missing rows, as far as there are any."""
    spare, why = {number: list(samples) for number, samples in found.spare.items()}, "every part is empty"
    try:
        for number, sample in islice(padding.candidates(part), count):
            spare.setdefault(number, []).append(sample)
    except Exception as error:  # it cannot be opened again; this matters only if missing rows are delivered
        raise_if_a_handlers(error)
        why = text_of(error)
    for number in padding.empty():
        spare.setdefault(number, [])
    return found._replace(spare=spare, why=why)
