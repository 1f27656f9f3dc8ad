"""`EpochCounter`: the epoch that the next iterator serves, and the user's samplers, which follow it or set it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.core.checks import check_count
from paddle_shard.data.samplers.user_batches import owner_of, samplers
from paddle_shard.errors import ArgumentError


class EpochCounter:
    """The epoch of the next iterator, shared with the user's own sampler."""

    def __init__(self, sampler: Any) -> None:
        """Begin at epoch 0, or at the epoch of the sampler.

        Args:
            sampler: The user's own sampler; None if there is none.
        """
        self._sampler = sampler
        # The epoch of Paddle's own sampler is the loader's: it moves on there, as Paddle moves it, and users set it.
        self._is_shared = isinstance(sampler, paddle.io.DistributedBatchSampler)
        self._assign(self._of_sampler() or 0)

    def _of_sampler(self) -> int | None:
        epoch = getattr(self._sampler, "epoch", None)
        return int(epoch) if isinstance(epoch, int | np.integer) else None

    def _assign(self, epoch: int) -> None:
        self._epoch = epoch
        self._seen = self._of_sampler() or 0

    @property
    def epoch(self) -> int:
        """The epoch that the next iterator will serve."""
        # A user may set the epoch of the sampler instead: it counts if it is not the one that was seen last.
        epoch = self._of_sampler()
        if epoch is not None and (self._is_shared or epoch != self._seen):
            self._assign(epoch)
        return self._epoch

    def set(self, epoch: int, others: Mapping[str, Any]) -> int:
        """Choose the epoch of the iterators that begin from now on; return it as an int.

        Args:
            epoch: The epoch.
            others: Further arguments of the `set_epoch` of the user's samplers.

        Raises:
            ArgumentError: It is no epoch, or no sampler takes the other arguments.
        """
        epoch = check_count("epoch", epoch, 0)
        self._set_samplers(epoch, others)
        self._assign(epoch)
        return epoch

    def move_to(self, epoch: int) -> None:
        """Move on to the next epoch, as a run does that is resumed there."""
        self._set_samplers(epoch, {})
        if self._is_shared and owner_of(self._sampler) is not None:
            self._sampler.epoch = epoch
        self._assign(epoch)

    def _set_samplers(self, epoch: int, others: Mapping[str, Any]) -> None:
        """Call `set_epoch` of the user's samplers; the first that has it gets the other arguments."""
        for sampler in samplers(self._sampler):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch, **others)
                others = {}
        if others:
            raise ArgumentError(
                f"set_epoch: the loader's sampler takes no {sorted(others)}."
            )
