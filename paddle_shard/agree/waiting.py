"""What does a rank log or raise when it waits for others?"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from paddle_shard.agree.agreement import Agreement
from paddle_shard.errors import PeerLostError


def say_who_is_waited_for(rank: int, agreement: Agreement, step: int, waited: float, behind: Mapping[int, str]) -> None:
    """Log which ranks this one waits for, long before the timeout; nothing if no rank is late.

    Args:
        rank: Global rank of this process.
        agreement: The agreement of the pass.
        step: The step that is asked for, counted from the beginning of the pass.
        waited: Seconds so far.
        behind: Global rank -> how far it is.
    """
    if not behind:
        return
    logging.getLogger("paddle_shard").warning(
        "global rank %s has waited %.0f s for the other ranks at step %d of %s: %s. All ranks of a loader's meshes "
        "must iterate over it in the same way, so that they end or fail at the same step. If an iterator is open on "
        "one rank only, close() it. This rank keeps waiting, up to timeout=%g s. For a loop on this rank alone, use "
        "shard_dataloader(..., agree=False).",
        rank,
        waited,
        agreement.first_step + step,
        agreement.name,
        _listed(behind),
        agreement.timeout,
    )


def silence(agreement: Agreement, step: int, behind: Mapping[int, str]) -> PeerLostError:
    """Return the error for ranks that did not respond before the timeout expired."""
    return PeerLostError.of(
        f"Waited {agreement.timeout:g} s for the other ranks to reach step {agreement.first_step + step} of "
        f"{agreement.name}: {_listed(behind) or 'no rank answers'}. If a step may take longer than that (evaluation, "
        "saving), use a longer timeout; for a loop on this rank alone, use agree=False.",
        behind,
        agreement.timeout,
    )


def _listed(behind: Mapping[int, str]) -> str:
    return "; ".join(f"global rank {rank} {text}" for rank, text in behind.items())
