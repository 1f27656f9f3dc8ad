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
    └── MissingDependencyError (ImportError)

Each names the argument, the value and the way out.
"""

from __future__ import annotations


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


class MissingDependencyError(PaddleShardError, ImportError):
    """A package of an extra is not installed; the text names the extra."""
