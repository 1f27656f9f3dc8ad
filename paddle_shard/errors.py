"""Every error that the library raises on purpose.

    PaddleShardError
    ├── ArgumentError (ValueError)       an argument is wrong; raised on all ranks before any batch
    │   ├── AxisError                    an axis that the mesh does not have
    │   ├── BatchSizeError               a batch size that the data ranks do not divide
    │   └── SplitError                   data that is split already, or is not as it was said to be
    ├── ArgumentTypeError (TypeError)    an argument of a type that cannot serve
    ├── StateError (ValueError)          a saved state that this run cannot go on from
    ├── BatchStructureError (ValueError) a batch that does not fit the meshes, or cannot be split
    ├── DataReadError (RuntimeError)     reading, transforming or collating a sample failed
    ├── AgreedFailure (RuntimeError)     a reader's report, raised on all ranks at the same step
    ├── UnequalEndsError (RuntimeError)  readers ended at different steps though that was not to be
    ├── DifferentDataError (RuntimeError) ranks that must read the same have read different data
    ├── PeerLostError (RuntimeError)     another rank died, was silent, or left the loop alone
    ├── ShardReadError (RuntimeError)    a file of samples is missing, damaged or not as it was counted
    └── MissingDependencyError (ImportError)

Each names the argument, the value and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable


class PaddleShardError(Exception):
    """Base of all errors of this library."""


class ArgumentError(PaddleShardError, ValueError):
    """An argument has a value that cannot be honoured."""


class AxisError(ArgumentError):
    """An axis that the mesh does not have, or that is named twice."""


class BatchSizeError(ArgumentError):
    """A batch size that the number of data ranks does not divide."""


class SplitError(ArgumentError):
    """Data that is split already, or that is not split as it was said to be."""


class ArgumentTypeError(PaddleShardError, TypeError):
    """An argument of a type that cannot serve."""


class StateError(PaddleShardError, ValueError):
    """A saved state that is damaged, of another version, or of another run."""


class BatchStructureError(PaddleShardError, ValueError):
    """A batch whose fields do not fit the meshes, or cannot be split along the data axes."""


class DataReadError(PaddleShardError, RuntimeError):
    """Reading failed: in the dataset, a transform, the collate function or a worker.

    The text holds the step, the samples' indices, the worker and the original traceback.

    Attributes:
        index: Index of the sample that failed; None where the failure belongs to no single sample.
        indices: Indices of the rows that were being read.
        worker: Number of the worker; None in the main process.
        step: Step of the epoch, from 0.
        epoch: Epoch, from 0.
        cause_type: Name of the original exception's class, such as "ValueError".
    """

    index: object = None
    indices: tuple[object, ...] = ()
    worker: int | None = None
    step: int | None = None
    epoch: int | None = None
    cause_type: str = ""


class AgreedFailure(PaddleShardError, RuntimeError):
    """Reading a step failed on some ranks; all ranks raise this in place of that step.

    Attributes:
        step: The step that is not delivered, on any rank.
        reports: (global rank, what it reported) of every rank that failed at this step.
    """

    step: int = 0
    reports: tuple[tuple[int, bytes], ...] = ()


class UnequalEndsError(PaddleShardError, RuntimeError):
    """Some readers ended where others could go on, and `tail="error"` forbids that.

    Attributes:
        step: The first step that cannot be served by all.
        ended: Global ranks whose data ended there.
        went_on: Global ranks that had more.
    """

    step: int = 0
    ended: tuple[int, ...] = ()
    went_on: tuple[int, ...] = ()


class DifferentDataError(PaddleShardError, RuntimeError):
    """Ranks that must read the same data, to keep their own rows of it, have read different data."""


class PeerLostError(PaddleShardError, RuntimeError):
    """Another rank died, said nothing for too long, or left the loop alone.

    Attributes:
        ranks: Global ranks of those at fault; empty if they could not be named.
        timeout: Seconds that were waited; None where it was seen at once.
    """

    ranks: tuple[int, ...] = ()
    timeout: float | None = None

    @classmethod
    def of(cls, text: str, ranks: Iterable[int], timeout: float | None = None) -> PeerLostError:
        """Return the error for these ranks."""
        error = cls(text)
        error.ranks, error.timeout = tuple(ranks), timeout
        return error


class MissingDependencyError(PaddleShardError, ImportError):
    """A package of an extra is not installed; the text names the extra."""


class ShardReadError(PaddleShardError, RuntimeError):
    """A file of samples cannot be read, is damaged, or does not have the samples that it was said to have.

    Attributes:
        shard: Name of the file, without what may be secret in it.
        offset: Number of the sample in the file, from 0; None where it is not known.
    """

    shard: str = ""
    offset: int | None = None

    @classmethod
    def of(cls, text: str, shard: str, offset: int | None = None) -> ShardReadError:
        """Return the error for a place in a file."""
        error = cls(text)
        error.shard, error.offset = shard, offset
        return error


def text_of(error: BaseException) -> str:
    """Return an exception's text, whatever its own `__str__` does."""
    try:
        return str(error)
    except Exception as other:
        return f"(its text cannot be had: {type(other).__name__})"


def described(error: BaseException) -> str:
    """Return an exception's type and text."""
    return f"{type(error).__name__}: {text_of(error)}"
