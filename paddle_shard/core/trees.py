"""Trees: walk and rebuild the nested mappings and sequences of a sample or a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

TEXT = (str, bytes, bytearray, memoryview)
"""Sequences that are leaves."""


_PLAIN = frozenset((np.ndarray, str, bytes, int, float, bool, type(None)))
"""Types of leaves that are common in a batch. Checking them first takes a tenth of the time of an abstract class."""


def is_sequence(value: Any) -> bool:
    """Return whether a value is a list, a tuple or another sequence that is not a leaf."""
    kind = type(value)
    # the abstract class does not remember them
    if kind is tuple or kind is list:
        return True
    is_other = kind not in _PLAIN and isinstance(value, Sequence)
    return is_other and not isinstance(value, TEXT)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves in order: values that are neither mappings nor sequences.

    Examples:
        >>> list(leaves({"a": [1, "text"], "b": (2.0, None)}))
        [1, 'text', 2.0, None]
    """
    if type(value) in _PLAIN:
        yield value
    elif is_sequence(value):
        for child in value:
            yield from leaves(child)
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from leaves(child)
    else:
        yield value


def map_leaves(
    value: Any,
    function: Callable[[Any, str], Any],
    path: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Return the same structure with a function applied to each leaf and its path.

    Args:
        value: The tree. It is not changed.
        function: A function of (leaf, path). An example of a path is "['a'][0]".
        path: Path of the tree itself.
        is_leaf: Returns True for mappings and sequences to be treated as leaves.

    Examples:
        >>> map_leaves({"a": [1, 2]}, lambda leaf, path: path)
        {'a': ["['a'][0]", "['a'][1]"]}
    """
    if type(value) in _PLAIN or (is_leaf is not None and is_leaf(value)):
        return function(value, path)
    if isinstance(value, Mapping):
        fields = {
            key: map_leaves(child, function, f"{path}[{key!r}]", is_leaf)
            for key, child in value.items()
        }
        return rebuild(value, fields)
    if is_sequence(value):
        children = [
            map_leaves(child, function, f"{path}[{number}]", is_leaf)
            for number, child in enumerate(value)
        ]
        return rebuild(value, children)
    return function(value, path)


def named_leaves(
    value: Any, path: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Return (path, leaf) of each leaf, in order; see `map_leaves`.

    Examples:
        >>> named_leaves({"a": [1, 2]})
        [("['a'][0]", 1), ("['a'][1]", 2)]
    """
    pairs: list[tuple[str, Any]] = []
    map_leaves(
        value, lambda leaf, name: pairs.append((name, leaf)), path, is_leaf
    )
    return pairs


def rebuild(like: Any, children: Any) -> Any:
    """Return children in a dict, a namedtuple of the type of `like`, or a list for another sequence.

    Args:
        like: A mapping or a sequence.
        children: A dict for a mapping, a list for a sequence.
    """
    if isinstance(children, dict):
        return dict(children)
    if isinstance(like, tuple) and hasattr(like, "_make"):
        return like._make(children)
    return list(children)
