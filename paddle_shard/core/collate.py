"""Collate: stack samples field by field into one batch."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from paddle_shard.core.checks import listed
from paddle_shard.core.trees import TEXT, rebuild

_NOT_NUMBERS = "OSUV"
"""Kinds of numpy dtypes that are not numeric."""
_DTYPE = attrgetter("dtype")
_NUMERIC = (np.ndarray, np.generic, numbers.Number)
_KINDS: tuple[Any, ...] = (TEXT, _NUMERIC, Mapping, Sequence)
"""What is collated alike. A type is of the first kind that it is a subclass of."""


class Texts(list[Any]):
    """Collated texts, one for each row; so a list of them is known to hold fields, and not rows."""


def collate(
    samples: Sequence[Any],
    stack_other: Callable[[Sequence[Any], str], Any] | None = None,
    path: str = "",
) -> Any:
    """Stack samples field by field; the result has the structure of a sample.

    This is what `paddle.io.DataLoader` does without a `collate_fn`, except that namedtuples keep their type, where
    Paddle makes lists of them. A plain tuple becomes a list, and a subclass of dict a dict, as in Paddle.

    Args:
        samples: One or more samples of the same structure: arrays, numbers, strings, and lists, tuples,
            namedtuples and dicts of them.
        stack_other: Stacks leaves of other types, such as a framework's tensors, given (leaves, name of the field).
        path: Name of the field that holds these values, for errors.

    Returns:
        The structure of a sample, with each array or number replaced by an array with a new first dim of
        `len(samples)` rows, and each string by the list of strings.

    Raises:
        ValueError: The samples differ in shape, in dtype, in keys or in the number of fields; the text names the field.
        TypeError: A leaf has a type that cannot be stacked, or is of uint16.

    Examples:
        >>> collate([(np.zeros(2), 1, "a"), (np.ones(2), 2, "b")])
        [array([[0., 0.],
               [1., 1.]]), array([1, 2]), ['a', 'b']]
    """
    kinds = set(map(_kind_of, set(map(type, samples))))
    if len(kinds) > 1:
        raise cannot_stack(samples, path)
    first = samples[0]
    kind = kinds.pop()
    if kind is TEXT:
        return Texts(samples)
    if kind is _NUMERIC:
        check_dtypes(samples, path)
        rows = stack(samples, path)
        reject_uint16(rows, path)
        return rows
    if kind is Mapping:
        if any(sample.keys() != first.keys() for sample in samples):
            keys = _some(sorted(sample, key=str) for sample in samples)
            raise ValueError(
                f"samples differ in their keys{_at_field(path)}: {keys}"
            )
        fields = {
            key: collate(
                [sample[key] for sample in samples],
                stack_other,
                f"{path}[{key!r}]",
            )
            for key in first
        }
        return rebuild(first, fields)
    if kind is Sequence:
        if len(set(map(len, samples))) > 1:
            lengths = _some(map(len, samples))
            raise ValueError(
                f"samples differ in their number of fields{_at_field(path)}: {lengths}. A list is a structure "
                "of fields, as in Paddle. If it is a row of numbers, make an array of it (Hugging Face: "
                "with_format('numpy')), and "
                "pad rows of different lengths in a collate_fn; see pad_to=."
            )
        columns = enumerate(zip(*samples, strict=True))
        return rebuild(
            first,
            [
                collate(column, stack_other, f"{path}[{i}]")
                for i, column in columns
            ],
        )
    if stack_other is not None:
        return stack_other(samples, path)
    raise cannot_stack(samples, path)


@lru_cache(maxsize=256)
def _kind_of(sample_type: type) -> Any:
    """Return which of `_KINDS` the values of a type are; None: another one."""
    return next(
        (kind for kind in _KINDS if issubclass(sample_type, kind)), None
    )


def cannot_stack(samples: Sequence[Any], path: str) -> TypeError:
    """Return the error for samples of types that cannot be stacked, whichever type comes first."""
    kinds = dict.fromkeys(type(sample).__name__ for sample in samples)
    return TypeError(
        f"cannot stack {' and '.join(kinds)}{_at_field(path)}: give every sample arrays or numbers of one type there "
        "(of Hugging Face: set_transform), leave the field out, or give the loader a collate_fn."
    )


def reject_uint16(leaf: Any, path: str) -> None:
    """Reject an array of uint16: Paddle stores bfloat16 in such arrays, and would read the numbers as its bits."""
    if getattr(leaf, "dtype", None) == np.uint16:
        raise TypeError(
            f"{path or 'the batch'} is an array of uint16, which Paddle takes for bfloat16: convert the numbers, for "
            "instance with .astype('int32'), or give bfloat16 as a tensor of Paddle."
        )


def check_dtypes(samples: Sequence[Any], path: str) -> None:
    """Reject arrays or tensors of different dtypes: the dtype of a row would depend on the rest of its batch."""
    try:
        dtypes = dict.fromkeys(map(_DTYPE, samples))
    except AttributeError:  # Python's numbers fit several dtypes
        dtypes = {
            sample.dtype: None for sample in samples if hasattr(sample, "dtype")
        }
    if len(dtypes) < 2:
        return
    kinds = [getattr(dtype, "kind", "of Paddle") for dtype in dtypes]
    if not any(kind in _NOT_NUMBERS for kind in kinds):
        names = _some(str(dtype).rpartition(".")[2] for dtype in dtypes)
        raise ValueError(
            f"samples differ in their dtype{_at_field(path)}: {names}. Give all samples, of all sources, one dtype, in "
            "the data set or in a collate_fn."
        )


def stack(samples: Sequence[Any], path: str) -> Any:
    """Stack arrays and numbers, whose dtypes were checked."""
    first = samples[0]
    try:
        # `np.array` is like `np.stack`, in a quarter of the time, but it looks into the objects of an array of objects.
        rows = (
            np.stack(samples)
            if np.asarray(first).dtype.hasobject
            else np.array(samples)
        )
    except (ValueError, TypeError, OverflowError):
        rows = None
    if rows is None or rows.shape != (
        len(samples),
        *getattr(first, "shape", ()),
    ):
        if len(set(map(np.shape, samples))) == 1:
            raise cannot_stack(samples, path)
        raise ValueError(
            f"samples of different shapes cannot be stacked{_at_field(path)}: {_some(map(np.shape, samples))}. "
            "Pad them to one shape, in the data set or in a collate_fn."
        )
    # arrays may hold texts or objects, if all do
    if rows.dtype.kind in _NOT_NUMBERS:
        kinds = {
            sample.dtype.kind if isinstance(sample, np.ndarray) else "number"
            for sample in samples
        }
        if kinds != {rows.dtype.kind}:
            raise cannot_stack(samples, path)
    return rows


def _at_field(path: str) -> str:
    return f" at field {path}" if path else ""


def _some(values: Any) -> str:
    return listed(list(dict.fromkeys(map(str, values))), 6)
