"""How does a run change the weights of its mixture, and what has it drawn of each source?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mixture import Drawn, Mixing, drawn_of
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.weights import integer_weights
from paddle_shard.position.account import gathered
from paddle_shard.samplers import PlanBatches


def mixing_of(plan: ShardPlan | None, what: str) -> Mixing:
    """Return the order of a mixture.

    Raises:
        ArgumentError: The data set is no mixture.
    """
    if plan is None or not isinstance(plan.ordering, Mixing):
        raise ArgumentError(f"{what} is for a loader over a paddle_shard.Mixture, with its own order.")
    return plan.ordering


def agree_on_weights(batches: PlanBatches, weights: Any, own: int, ranks: tuple[int, ...], timeout: float) -> int:
    """Switch to other weights, at the first position of the run that no rank has requested; collective.

    Args:
        batches: The batches of this rank.
        weights: Name -> weight of each source, the same on all ranks.
        own: Global rank of this process.
        ranks: Global ranks of the meshes.
        timeout: Seconds to wait for them.

    Returns:
        The position.

    Raises:
        ArgumentError: The weights do not fit the sources, or are not the same on all ranks; on all ranks.
    """
    mixing = mixing_of(batches.plan_of(0), "set_weights()")
    if own not in ranks:
        raise ArgumentError(
            f"set_weights(): global rank {own} is on none of the loader's meshes. Call it on the ranks of the meshes, "
            "all of them."
        )
    try:
        said: dict[str, Any] = {"parts": list(integer_weights(mixing.names, weights).parts), "drawn": batches.drawn}
    except ArgumentError as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    found = gathered(said, ranks, timeout, "set_weights()")
    for rank, one in zip(ranks, found, strict=True):
        if "error" in one:
            raise ArgumentError(f"set_weights() on global rank {rank}: {one['error']}")
        if one["parts"] != found[0]["parts"]:
            raise ArgumentError(
                f"set_weights(): the weights must be the same on all ranks, got {found[0]['parts']} (in parts of the "
                f"sum) on global rank {ranks[0]} and {one['parts']} on global rank {rank}."
            )
    at = max(int(one["drawn"]) for one in found)
    batches.set_weights(at, tuple(found[0]["parts"]))
    return at


def drawn_at(plan: ShardPlan | None, epoch: int, samples: int) -> Mapping[str, Drawn]:
    """Return what was drawn of each source up to a position of an epoch, by name.

    Raises:
        ArgumentError: The data set is no mixture.
    """
    mixing = mixing_of(plan, "sources()")
    assert plan is not None
    return drawn_of(mixing, mixing.first_position(epoch, plan.num_samples) + samples)
