"""All errors that the library raises on purpose.

    PaddleShardError
    ├── ArgumentError (ValueError)       an argument is wrong; raised on all ranks before any batch
    │   ├── AxisError                    the mesh does not have this axis
    │   ├── BatchSizeError               the batch size cannot be split evenly over the data ranks
    │   └── SplitError                   the data is already split, or is not split as declared
    ├── ArgumentTypeError (TypeError)    an argument has an unsupported type
    ├── CheckpointError (RuntimeError)   a checkpoint cannot be written or read; raised on all ranks
    │   └── TakenOverError               a newer job has started while this process was held up
    ├── StateError (ValueError)          this run cannot resume from the saved state
    ├── BatchStructureError (ValueError) a batch does not fit the meshes, or cannot be split
    ├── DataReadError (RuntimeError)     reading, transforming or collating a sample failed
    ├── UnequalEndsError (RuntimeError)  readers ended at different steps, which tail="error" forbids
    ├── DifferentDataError (RuntimeError) ranks that must read the same data have read different data
    ├── PeerLostError (RuntimeError)     another rank died, did not respond, or left the loop early
    ├── ShardReadError (RuntimeError)    a file of samples is missing, damaged, or does not match its count
    └── MissingDependencyError (ImportError) a package of an extra is not installed

Each message names the argument, its value and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


class PaddleShardError(Exception):
    """Base of all errors of this library."""


class ArgumentError(PaddleShardError, ValueError):
    """An argument has a value that the library cannot use."""


class AxisError(ArgumentError):
    """The mesh does not have this axis, or the axis is named twice."""


class BatchSizeError(ArgumentError):
    """The batch size cannot be split evenly over the data ranks."""


class SplitError(ArgumentError):
    """The data is already split, or it is not split as declared."""


class ArgumentTypeError(PaddleShardError, TypeError):
    """An argument has an unsupported type."""


class StateError(PaddleShardError, ValueError):
    """The saved state is damaged, has another version, or belongs to another run."""


class CheckpointError(PaddleShardError, RuntimeError):
    """A rank could not write or read a checkpoint; raised on all ranks."""


class TakenOverError(CheckpointError):
    """A newer job has started while this process was held up. This process has saved nothing and must end."""


class BatchStructureError(PaddleShardError, ValueError):
    """The fields of a batch do not fit the meshes, or cannot be split along the data axes."""


class DataReadError(PaddleShardError, RuntimeError):
    """Reading failed: in the dataset, a transform, the collate function or a worker.

    The text holds the step, the samples' indices, the worker and the original traceback.

    Attributes:
        index: Index of the sample that failed; None if the failure does not belong to a single sample.
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


class UnequalEndsError(PaddleShardError, RuntimeError):
    """Some readers ended at a step that others could still serve, and `tail="error"` forbids that.

    Attributes:
        step: The first step that not all ranks can serve.
        ended: Global ranks whose data ended there.
        went_on: Global ranks that had more data.
    """

    step: int = 0
    ended: tuple[int, ...] = ()
    went_on: tuple[int, ...] = ()


class DifferentDataError(PaddleShardError, RuntimeError):
    """Ranks that must read the same data have read different data. Each of them keeps its own rows of that data."""


class PeerLostError(PaddleShardError, RuntimeError):
    """Another rank died, did not respond before the timeout expired, or left the loop early.

    Attributes:
        ranks: Global ranks at fault; empty if they are not known.
        timeout: Seconds that this rank waited; None if the loss was seen at once.
    """

    ranks: tuple[int, ...] = ()
    timeout: float | None = None

    @classmethod
    def of(
        cls, text: str, ranks: Iterable[int], timeout: float | None = None
    ) -> PeerLostError:
        """Return the error for these ranks."""
        error = cls(text)
        error.ranks, error.timeout = tuple(ranks), timeout
        return error


class MissingDependencyError(PaddleShardError, ImportError):
    """A package of an extra is not installed; the text names the extra."""


class ShardReadError(PaddleShardError, RuntimeError):
    """A file of samples cannot be read, is damaged, or does not match its count.

    Attributes:
        shard: Name of the file, without parts that may be secret.
        offset: Number of the sample in the file, from 0; None if it is not known.
    """

    shard: str = ""
    offset: int | None = None

    @classmethod
    def of(
        cls, text: str, shard: str, offset: int | None = None
    ) -> ShardReadError:
        """Return the error for a place in a file."""
        error = cls(text)
        error.shard, error.offset = shard, offset
        return error


def text_of(error: BaseException) -> str:
    """Return an exception's text, even if its own `__str__` fails; and the sample that has it, if its stage says so."""
    try:
        return f"{error}{getattr(error, 'of_sample', '')}"
    except Exception as other:
        return f"(its text cannot be had: {type(other).__name__})"


def described(error: BaseException) -> str:
    """Return an exception's type and text."""
    return f"{type(error).__name__}: {text_of(error)}"
