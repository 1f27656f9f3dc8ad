"""Checks of the arguments of `shard_dataloader` that need no data."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.reading.sample_threads import Threads


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _are_pairs(value: Any, is_allowed: Callable[[int, int], bool]) -> bool:
    """Return whether an argument is None, or a sequence of allowed pairs of ints."""
    if value is None:
        return True
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(
        isinstance(pair, Sequence)
        and len(pair) == 2
        and all(map(_is_int, pair))
        and is_allowed(*pair)
        for pair in value
    )


_FLAG: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, bool),
    "True or False",
)
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (_is_int, "an int"),
    "timeout": (
        lambda value: (
            isinstance(value, int | float) and value is not True and value > 0
        ),
        "a number of seconds > 0",
    ),
    "verify": (
        lambda value: (
            value in (None, "first") or (_is_int(value) and value >= 1)
        ),
        "'first', an int >= 1 (every so many steps), or None",
    ),
    "prefetch": (
        lambda value: value is None or (_is_int(value) and value >= 0),
        "None or an int >= 0",
    ),
    "replicas": (("each", "leader").__contains__, "'each' or 'leader'"),
    "on_error": (("raise", "skip").__contains__, "'raise' or 'skip'"),
    "on_lost": (("raise", "exit").__contains__, "'raise' or 'exit'"),
    "readers": (
        lambda value: (
            value is None
            or isinstance(value, Threads)
            or callable(getattr(value, "pool", None))
        ),
        "a paddle_shard.Threads, a paddle_shard.RayReaders, or None",
    ),
    "local": _FLAG,
    "is_dataset_splitted": _FLAG,
    "dense_tensor_idx": (
        lambda value: (
            value is None
            or (
                _is_list(value)
                and all(
                    _is_list(items) and all(map(_is_int, items))
                    for items in value
                )
            )
        ),
        "a list with a list of item numbers for each field, such as [[], [0]]",
    ),
    "batch_size": (
        lambda value: _are_pairs(
            value, lambda first, rows: first >= 0 and rows >= 1
        ),
        "a list of (first sample of the run, rows of the global batch), such as "
        "[(0, 256), (500_000, 512)]; one size for the whole run belongs in "
        "paddle.io.DataLoader(batch_size=...)",
    ),
    "skip_steps": (
        lambda value: _are_pairs(value, lambda first, end: 0 <= first < end),
        "a list of (first step, step after the last) of the run, such as "
        "[(1200, 1230)]",
    ),
}
"""Argument -> (whether a value is allowed, what is allowed in words)."""


def check_arguments(**arguments: Any) -> None:
    """Check the given arguments that have a rule, and those that exclude others.

    Raises:
        ArgumentError: A value is not allowed.
    """
    for name, (is_allowed, expected) in RULES.items():
        if name in arguments and not is_allowed(arguments[name]):
            raise ArgumentError(
                f"{name} must be {expected}, got {arguments[name]!r}."
            )
    if arguments.get("local"):
        not_local = {
            name: arguments.get(name) for name in ("pad_to", "placements")
        }
        reject("with local=True no tensor is distributed.", **not_local)


def is_already_split(
    is_dataset_splitted: bool, dataset: Any, shard_dims: Any
) -> bool:
    """Return whether the user says, by the argument or on the data set, that each data rank has rows of its own.

    Raises:
        ArgumentError: It is split, and `shard_dims` is missing.
    """
    is_split = is_dataset_splitted or getattr(
        dataset, "is_dataset_splitted", False
    )
    if is_split and shard_dims is None:
        raise ArgumentError(
            "is_dataset_splitted=True needs shard_dims: name the mesh axes that the data is split over."
        )
    return bool(is_split)


def reject(reason: str, **arguments: Any) -> None:
    """Reject arguments that this data cannot have.

    Raises:
        ArgumentError: One of them is given.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ArgumentError(
                f"{name}={value!r:.60}: {reason} Leave {name} out."
            )
