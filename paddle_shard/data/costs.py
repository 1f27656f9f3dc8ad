"""The cost of each sample, as the user gives it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.core.checks import length_or_none
from paddle_shard.data.mixture import Mixture
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.balance import Costs


def costs_of(balance: Any, dataset: Any) -> SampleCosts:
    """Return the costs that a user gives, checked.

    Args:
        balance: An array of costs by sample, or a function of ids.
        dataset: The data set.

    Raises:
        ArgumentError: It is neither, or a cost is missing, negative or not a number.
    """
    if callable(balance):
        return SampleCosts(balance)
    if isinstance(dataset, Mixture):
        raise ArgumentError(
            "balance: for a Mixture, it must be a function of ids; mixture.sample_name(id) returns (source, index)."
        )
    length = length_or_none(dataset)
    if length is None:
        length = length_or_none(balance) or 0
    return SampleCosts(_checked(balance, range(length)))


@dataclass(frozen=True)
class SampleCosts:
    """The cost of each sample of a data set."""

    costs: Callable[[Any], Any] | npt.NDArray[Any]
    """An array of costs by index, or a function of ids."""

    def __call__(self, ids: Any) -> Costs:
        """Return the costs of some samples.

        Args:
            ids: Indices into the data set.

        Returns:
            float64[samples]

        Raises:
            ArgumentError: The user's function returns something else, or an id is not an index of the array.
        """
        if isinstance(self.costs, np.ndarray):
            if np.asarray(ids).dtype.kind not in "iu":
                raise ArgumentError(
                    f"balance is an array, but the samples' ids are {ids[:4]}. Give a function of ids."
                )
            return np.asarray(self.costs[ids], np.float64)
        # The function may change its argument.
        checked = _checked(self.costs(copy.copy(ids)), ids)
        return np.asarray(checked, np.float64)


def _checked(costs: Any, ids: Any) -> npt.NDArray[Any]:
    """Return the costs of some samples as an array.

    Raises:
        ArgumentError: They are not one number >= 0 for each sample.
    """
    costs = np.asarray(costs)
    if costs.dtype.kind not in "iuf" or costs.shape != (len(ids),):
        raise ArgumentError(
            f"balance must be a function of ids, or one number for each sample ({len(ids)} here), got "
            f"{costs.dtype} of shape {costs.shape}."
        )
    bad = ~(np.isfinite(costs) & (costs >= 0))
    if bad.any():
        row = int(bad.argmax())
        raise ArgumentError(
            f"balance: a cost must be a number >= 0, got {costs[row]} for sample {ids[row]!r}."
        )
    return np.asarray(costs)
