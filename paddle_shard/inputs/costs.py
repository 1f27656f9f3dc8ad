"""How much work is a sample, by the user's own account?"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from paddle_shard.checks import length_or_none
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.balance import Costs
from paddle_shard.sources.mixture import Mixture

_PROBES = 64

Given = Callable[[Any], Any] | np.ndarray[Any, Any]


def costs_of(given: Any, dataset: Any) -> SampleCosts:
    """Return the costs that a user gives, checked.

    Args:
        given: An array of costs by sample, or a function of ids; of a mixture, a dict of them by source.
        dataset: The data set.

    Raises:
        ArgumentTypeError: It is none of these.
        ArgumentError: A cost is missing, negative or not a number.
    """
    if not isinstance(dataset, Mixture):
        return SampleCosts({"balance": _checked("balance", given, dataset)})
    live = [name for name, source in dataset.sources.items() if source is not None]
    if not isinstance(given, Mapping) or not set(live) <= set(given) <= set(dataset.sources):
        raise ArgumentError(
            f"balance: for a Mixture, it must be a dict with the costs of each source {live}, got "
            f"{sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__}."
        )
    found: dict[str, Given] = {}
    for name, source in dataset.sources.items():
        what = f"balance[{name!r}]"
        found[what] = np.zeros(0) if source is None else _checked(what, given[name], source)
    return SampleCosts(found, dataset)


@dataclass(frozen=True)
class SampleCosts:
    """The cost of each sample of a data set."""

    of: Mapping[str, Given]
    """An array of costs by index, or a function of ids, by the name that errors give it: one for each source of a
    mixture."""
    mixture: Mixture | None = None

    def __call__(self, ids: Any) -> Costs:
        """Return the costs of some samples.

        Args:
            ids: Indices into the data set.

        Returns:
            float64[samples, columns]

        Raises:
            ArgumentError: The user's function returns something else, or an id is out of range.
        """
        given = list(self.of.items())
        if self.mixture is None:
            return _looked_up(*given[0], ids)
        sources, indices = np.array([self.mixture.locate(sample) for sample in ids], np.int64).reshape(-1, 2).T
        parts = {of: _looked_up(*given[of], indices[sources == of]) for of in map(int, np.unique(sources))}
        columns = {part.shape[1] for part in parts.values()}
        if len(columns) > 1:
            raise ArgumentError(f"balance: the sources have costs of {sorted(columns)} columns; give all as many.")
        costs = np.empty((len(sources), columns.pop()))
        for source, part in parts.items():
            costs[sources == source] = part
        return costs

    def fact(self) -> str:
        """Return a short text that differs if the costs do, which the ranks compare."""
        found = []
        for given in self.of.values():
            if isinstance(given, np.ndarray):  # some of the costs are enough to tell most arrays apart
                some = np.ascontiguousarray(given[:: max(1, len(given) // _PROBES)], np.float64)
                found.append(f"{list(given.shape)} {zlib.crc32(some.tobytes()):08x}")
            else:
                found.append(getattr(given, "__qualname__", type(given).__qualname__))
        return " ".join(found)


def _checked(what: str, given: Any, dataset: Any) -> Given:
    if callable(given):
        return cast(Given, given)
    is_array = isinstance(given, Sequence) or hasattr(given, "__array__")
    if not is_array or isinstance(given, str | bytes):
        raise ArgumentTypeError(
            f"{what} must be an array with the cost of each sample, or a function of their ids, got "
            f"{type(given).__name__}: {given!r}."
        )
    try:
        costs = given if isinstance(given, np.ndarray) else np.asarray(given)
    except ValueError as error:  # rows of different lengths
        raise ArgumentTypeError(f"{what} must be an array with the cost of each sample: {error}.") from None
    if costs.dtype.kind not in "iuf" or costs.ndim not in (1, 2) or 0 in costs.shape:
        raise ArgumentError(
            f"{what} must be numbers, [samples] or [samples, columns], got {costs.dtype} of shape {costs.shape}."
        )
    length = length_or_none(dataset)
    if length is not None and len(costs) != length:
        raise ArgumentError(f"{what} has {len(costs)} costs, but the {type(dataset).__name__} {length} samples.")
    _check(costs, range(len(costs)), what)
    return costs


def _looked_up(what: str, given: Given, ids: Any) -> Costs:
    if not isinstance(given, np.ndarray):
        found = np.asarray(given(ids.copy() if isinstance(ids, np.ndarray) else list(ids)))  # it may change them
        if found.dtype.kind not in "iuf" or found.ndim not in (1, 2) or len(found) != len(ids):
            raise ArgumentError(
                f"{what} must return {len(ids)} numbers for {len(ids)} ids, one or a row of them for each; it returned "
                f"{found.dtype} of shape {found.shape}."
            )
        _check(found, ids, what)
    else:
        at = np.asarray(ids)
        if at.dtype.kind not in "iu" or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(given)):
            raise ArgumentError(
                f"{what} is an array of {len(given)} costs, but the samples' ids are {list(ids[:4])}, ... Give a "
                "function of ids."
            )
        found = np.asarray(given[at])
    return found.reshape(len(ids), -1).astype(np.float64)


def _check(costs: Any, ids: Any, what: str) -> None:
    bad = ~(np.isfinite(costs) & (costs >= 0))
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        raise ArgumentError(f"{what}: a cost must be a number >= 0, got {costs[row]} for sample {ids[row]!r}.")
