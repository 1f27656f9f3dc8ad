"""How does a pass keep in step with all other ranks?"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from paddle_shard import errors
from paddle_shard.agree import Agreement
from paddle_shard.errors import AgreedFailure, DataReadError, UnequalEndsError
from paddle_shard.reading.chunk import Slice


class Outlook(Enum):
    """What can be done with what was read for a step."""

    OK = "deliver it"
    EXHAUSTED = "deliver it, but it holds nothing new, and nothing new will come"
    END = "end before it"
    UNEQUAL = "fail: the ends do not agree"


OK, EXHAUSTED, END, UNEQUAL = Outlook
_LONGEST = 10_000
"""Characters of an error that the other ranks are told."""
_TOLD = ("index", "worker", "step", "epoch", "cause_type")


class AgreedPass:
    """What one pass has read, step by step: all ranks deliver the same steps, and fail at the same one.

    It is read ahead on the caller's thread, or by workers; what all ranks can serve is agreed on in the background,
    ahead of delivery.
    """

    def __init__(
        self,
        reading: Any,
        agreement: Agreement,
        *,
        outlook: Callable[[Any], Outlook] = lambda found: OK,
        prepare: Callable[[Any], Any] = lambda found: found,
        num_steps: int | None = None,
    ) -> None:
        """Start the pass.

        Args:
            reading: An iterator over this rank's steps, with a `close`.
            agreement: Of this pass.
            outlook: Says of what was read whether it can be delivered.
            prepare: Makes of it what is delivered. It is called ahead, so that its failure is every rank's.
            num_steps: Steps from here to the end, if that is known; the same on every rank.
        """
        self._reading, self._agreement = reading, agreement
        self._outlook, self._prepare, self._num_steps = outlook, prepare, num_steps
        self._ready: deque[Any] = deque()
        self._announced = self._delivered = self._read = 0
        self._failure: BaseException | None = None
        self._over = False
        """Nothing more is to be read."""

    def __iter__(self) -> AgreedPass:
        return self

    def __next__(self) -> Any:
        """Return what was read for the next step.

        Raises:
            DataReadError: Reading it failed, on this rank or another; on every rank.
            UnequalEndsError: The ranks do not end together, and that is not to be; on every rank.
            PeerLostError: Another rank died or is silent.
        """
        step = self._delivered
        while not self._over and self._announced < self._agreement.wanted(step):
            self._announce()
        try:
            if not self._agreement.deliver(step):
                self._in_order()
                raise StopIteration
        except AgreedFailure as failure:
            self.close()
            raise (self._failure or _of_another(failure)) from None
        self._delivered += 1
        return self._ready.popleft()

    def _in_order(self) -> None:
        """End a pass that all ranks have come to the end of; its workers may serve another."""
        self._over = True
        self._agreement.close()
        getattr(self._reading, "finish", self._reading.close)()

    def peek(self) -> Any:
        """Return what is to be delivered first, without delivering it; nothing is agreed on.

        Raises:
            StopIteration: There is nothing.
        """
        if not self._ready and not self._over:
            self._read_one()
        if self._failure is not None:
            raise self._failure
        if not self._ready or self._outlook(self._ready[0]) in (END, UNEQUAL):
            raise StopIteration
        return self._prepare(self._ready[0])

    def close(self) -> None:
        """End the workers and leave the agreement; safe to call again."""
        self._over = True
        self._agreement.close()
        self._reading.close()

    def _read_one(self) -> None:
        self._read += 1
        try:
            self._ready.append(next(self._reading))
        except StopIteration:
            self._num_steps = self._read - 1
        except Exception as failure:  # raised at its own step, on all ranks
            self._failure = failure

    def _announce(self) -> None:
        """Read the next step if that has not been done, and say what can be served of it."""
        step, say = self._announced, self._agreement
        self._announced += 1
        if self._read <= step and (self._num_steps is None or step < self._num_steps):
            self._read_one()
        if self._failure is not None and self._read - 1 == step:
            self._fail(self._failure)
        elif self._num_steps is not None and step >= self._num_steps:
            self._over = True
            say.announce_end()
        elif (found := self._outlook(self._ready[step - self._delivered])) in (OK, EXHAUSTED):
            try:
                self._ready[step - self._delivered] = self._prepare(self._ready[step - self._delivered])
            except Exception as failure:  # a batch that does not fit the meshes
                self._fail(failure)
                return
            if found is OK:
                say.announce_ok()
            else:
                say.announce_exhausted()
        elif found is END:
            self._over = True
            say.announce_end()
        else:
            self._fail(
                UnequalEndsError(
                    "tail='error': the stream's parts do not end together with a whole batch. Choose tail='pad', "
                    "'drop' or 'repeat', or num_batches=."
                )
            )

    def _fail(self, failure: BaseException) -> None:
        self._over, self._failure = True, failure
        self._agreement.announce_failure(_report(failure))


class PlacedPass:
    """What one pass has read, without other ranks."""

    def __init__(self, reading: Any, prepare: Callable[[Any], Any]) -> None:
        self._reading, self._prepare = reading, prepare

    def __iter__(self) -> PlacedPass:
        return self

    def __next__(self) -> Any:
        """Return what is delivered next."""
        return self._prepare(next(self._reading))

    def close(self) -> None:
        """End the workers; safe to call again."""
        self._reading.close()


def stream_outlook(tail: str, num_steps: int | None) -> Callable[[Slice], Outlook]:
    """Return what says of a stream's slice whether it can be delivered.

    Args:
        tail: Where the stream's parts end at different times.
        num_steps: Whether the end is known; then all before it is.
    """

    def outlook(found: Slice) -> Outlook:
        if num_steps is not None or (found.whole and found.fresh):
            return OK if found.batch is not None or not found.empty else EXHAUSTED
        if tail in ("pad", "repeat"):
            return EXHAUSTED if found.empty or not found.fresh else OK
        return UNEQUAL if tail == "error" and not found.empty else END

    return outlook


def _report(failure: Any) -> bytes:
    told = {name: getattr(failure, name, None) for name in _TOLD}
    text = str(failure)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... [cut]"
    return json.dumps({"kind": type(failure).__name__, "text": text, **told}, default=repr).encode()


def _of_another(failure: AgreedFailure) -> Exception:
    """Return the error of the rank that failed, as every other rank raises it."""
    rank, report = failure.reports[0]
    try:
        told = json.loads(report)
    except ValueError:  # cut off for its length
        told = {"kind": "DataReadError", "text": report.decode(errors="replace")}
    text = f"global rank {rank}: {told['text']}"
    kind = getattr(errors, told["kind"], None)
    if kind is not None and kind is not DataReadError:
        found: Exception = kind(text)
        return found
    error = DataReadError(text if kind is DataReadError else f"{told['kind']}: {text}")
    for name in _TOLD:
        value = told.get(name)
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
