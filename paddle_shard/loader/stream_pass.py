"""How does a pass over a stream keep in step with all other ranks?"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from paddle_shard.agree import Agreement
from paddle_shard.errors import AgreedFailure, DataReadError, UnequalEndsError
from paddle_shard.reading.chunk import Slice
from paddle_shard.reading.stream_pass import StreamPass

_TOLD = ("index", "worker", "step", "epoch", "cause_type")


class AgreedPass:
    """The slices of one pass: all ranks deliver the same steps, and fail at the same one.

    Slices are read ahead on the caller's thread, or by workers; what all ranks can serve is agreed on in the
    background, ahead of delivery.
    """

    def __init__(self, reading: StreamPass, agreement: Agreement, *, tail: str, num_steps: int | None) -> None:
        """Start the pass.

        Args:
            reading: Yields this rank's slices, without an end of its own.
            agreement: Of this pass.
            tail: Where a stream's parts end at different times.
            num_steps: Steps from here to the end, if that is known; the same on every rank.
        """
        self._reading, self._agreement = reading, agreement
        self._tail, self._num_steps = tail, num_steps
        self._ready: deque[Slice] = deque()
        self._announced = self._delivered = self._read = 0
        self._failure: DataReadError | None = None
        self._over = False
        """Nothing more is to be read."""

    def __iter__(self) -> AgreedPass:
        return self

    def __next__(self) -> Slice:
        """Return the next slice.

        Raises:
            DataReadError: Reading it failed, on this rank or another; on every rank.
            UnequalEndsError: With "error", where the ranks do not end together; on every rank.
            PeerLostError: Another rank died or is silent.
        """
        step = self._delivered
        while not self._over and self._announced < self._agreement.wanted(step):
            self._announce()
        try:
            if not self._agreement.deliver(step):
                self.close()
                raise StopIteration
        except AgreedFailure as failure:
            self.close()
            raise (self._failure or _of_another(failure)) from None
        self._delivered += 1
        return self._ready.popleft()

    def peek(self) -> Slice:
        """Return the first slice without delivering it, for its structure; nothing is agreed on.

        Raises:
            StopIteration: There is none.
        """
        if not self._ready and not self._over:
            self._read_one()
        if self._failure is not None:
            raise self._failure
        if not self._ready or self._ready[0].batch is None:
            raise StopIteration
        return self._ready[0]

    def close(self) -> None:
        """End the workers and leave the agreement; safe to call again."""
        self._over = True
        self._agreement.close()
        self._reading.close()

    def _read_one(self) -> None:
        self._read += 1
        try:
            self._ready.append(next(self._reading))
        except DataReadError as failure:
            self._failure = failure

    def _announce(self) -> None:
        """Read the next step if that has not been done, and say what can be served of it."""
        step, say = self._announced, self._agreement
        self._announced += 1
        if self._num_steps is not None and step >= self._num_steps:
            self._over = True
            say.announce_end()
            return
        if self._read <= step:
            self._read_one()
        if self._failure is not None and self._read - 1 == step:
            self._over = True
            say.announce_failure(_report(self._failure))
            return
        found = self._ready[step - self._delivered]
        if self._num_steps is not None:
            say.announce_ok()
        elif self._tail in ("pad", "repeat"):
            if found.empty or not found.fresh:
                say.announce_exhausted()
            else:
                say.announce_ok()
        elif found.whole:
            say.announce_ok()
        elif self._tail == "error" and not found.empty:
            self._over = True
            self._failure = _not_together(found)
            say.announce_failure(_report(self._failure))
        else:
            self._over = True
            say.announce_end()


def _not_together(found: Slice) -> Any:
    return UnequalEndsError(
        f"tail='error': the stream's parts do not end together: of {len(found.real)} rows of the last batch that "
        f"this rank reads {int(found.real.sum())} are there. Choose tail='pad', 'drop' or 'repeat', or num_batches=."
    )


def _report(failure: Any) -> bytes:
    told = {name: getattr(failure, name, None) for name in _TOLD}
    return json.dumps({"kind": type(failure).__name__, "text": str(failure), **told}, default=repr).encode()


def _of_another(failure: AgreedFailure) -> Exception:
    """Return the error of the rank that failed, as every other rank raises it."""
    rank, report = failure.reports[0]
    try:
        told = json.loads(report)
    except ValueError:  # cut off for its length
        told = {"kind": "DataReadError", "text": report.decode(errors="replace")}
    text = f"global rank {rank}: {told['text']}"
    if told["kind"] == UnequalEndsError.__name__:
        return UnequalEndsError(text)
    error = DataReadError(text)
    for name in _TOLD:
        value = told.get(name)
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
