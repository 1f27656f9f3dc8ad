"""Read failures: exceptions as values, from where they are raised to where they are reported."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_shard.core.checks import listed
from paddle_shard.errors import DataReadError, text_of
from paddle_shard.plan.step import Step

_MOST_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailure:
    """A failed read as a value: picklable, small, complete."""

    what: str
    """The action that failed, such as "reading sample 7"."""
    cause_type: str
    cause: str
    """The exception's text."""
    traceback: str
    index: Any = None
    """The sample at fault; None if no single one is."""
    worker: int | None = None
    """Number of the worker; None: the main process."""
    where: str = ""
    """Place of the worker, if it is not on this host."""

    @classmethod
    def of(cls, error: BaseException, **where: Any) -> ReadFailure:
        """Return the failure for an exception, with the fields that say where it was raised."""
        return cls(
            cause_type=type(error).__name__,
            cause=text_of(error),
            traceback="".join(traceback.format_exception(error)),
            **where,
        )

    def error(self, step: Step) -> DataReadError:
        """Return the exception to raise for a step that failed."""
        where = "the main process"
        if self.worker is not None:
            where = f"worker {self.worker}{self.where}"
        samples = [index for part in step.parts for index in part.indices]
        indices = [
            index.item() if isinstance(index, np.generic) else index
            for index in samples or step.ids
        ]
        text = listed(list(map(repr, indices)), _MOST_SHOWN)
        error = DataReadError(
            f"{self.what} failed in {where} (epoch {step.epoch}, step {step.number}): "
            f"{self.cause_type}: {self.cause}\n"
            f"Samples of this read: [{text}].\nOriginal traceback:\n{self.traceback}"
        )
        error.index = self.index
        error.indices = tuple(indices)
        error.worker = self.worker
        error.epoch = step.epoch
        error.step = step.number
        error.cause_type = self.cause_type
        return error
