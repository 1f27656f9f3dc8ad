"""What does a user's batch sampler draw in one pass, and how is it resumed?"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError
from paddle_shard.plan.seeding import as_ids
from paddle_shard.samplers.randomness import PrivateRandomness

Drawn = tuple[list[Any], Any]
"""A batch, and the sampler's own state after drawing it."""


class Draw:
    """The batches of a sampler in one pass, drawn with private random generators, and a digest of the draws so far."""

    def __init__(self, sampler: Any, epoch: int, randomness: PrivateRandomness) -> None:
        self._sampler, self.epoch, self._randomness = sampler, epoch, randomness
        self.owner = owner_of(sampler)
        """The object that holds the sampler's state, or None."""
        self._hash = hashlib.blake2b(digest_size=8)
        with randomness:
            self.began = self._state()
            """The owner's state at the beginning of the epoch."""

    def _state(self) -> Any:
        # Copy, since the sampler may go on to change the object that it returns.
        return None if self.owner is None else copy.deepcopy(self.owner.state_dict())

    def load(self, now: Any, began: Any) -> None:
        """Resume the sampler from its own state."""
        if self.owner is None:
            raise StateError(
                f"state has the state of a sampler, but the loader's {type(self._sampler).__name__} has no "
                "load_state_dict. Give the loader the sampler that it had."
            )
        with self._randomness:
            self.owner.load_state_dict(copy.deepcopy(now))
        self.began = began

    def __iter__(self) -> Iterator[Drawn]:
        with self._randomness:
            source = iter(self._sampler)
        for step in count():
            with self._randomness:
                found = next(source, _END)
                after = self._state() if found is not _END else None
            if found is _END:
                return
            yield _indices(found, step), after

    @property
    def digest(self) -> str:
        """Digest of the samples that were noted, in their order."""
        return self._hash.hexdigest()

    def noted(self, batch: list[Any], state: Any) -> dict[str, Any]:
        """Record that a batch is served; return its samples and the state that resumes the sampler after it."""
        ids = as_ids(batch)
        if self.owner is not None:
            return {"drawn": ids, "sampler_state": {"now": state, "began": self.began}}
        self._hash.update(ids.tobytes())
        return {"drawn": ids, "sampler_state": {"drawn": self.digest}}


_END = object()


def samplers(sampler: Any) -> list[Any]:
    """Return a batch sampler and the sampler that it draws from, or None."""
    return [sampler, getattr(sampler, "sampler", None)]


def owner_of(sampler: Any) -> Any:
    """Return the batch sampler or its sampler, whichever has a state; None if neither has one."""
    wanted = ("state_dict", "load_state_dict")
    return next((s for s in samplers(sampler) if all(callable(getattr(s, name, None)) for name in wanted)), None)


def _indices(found: Any, step: int) -> list[Any]:
    if isinstance(found, np.ndarray):
        found = found.tolist()
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise ArgumentTypeError(
            f"batch_sampler must yield lists of indices, got {type(found).__name__} at step {step}: "
            f"{found!r}. A sampler of single indices goes into paddle.io.BatchSampler(sampler=...)."
        )
    if len(found) == 0:
        raise ArgumentError(f"batch_sampler yielded an empty batch at step {step}.")
    return [index.item() if isinstance(index, np.integer) else index for index in found]
