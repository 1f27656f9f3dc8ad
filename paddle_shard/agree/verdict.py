"""Why has a pass ended, and which error reports it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddle_shard.agree.facts import differences
from paddle_shard.agree.history import difference, first_difference
from paddle_shard.agree.outlook import CLOSED, END, FAIL, NEVER, Decision, Outlook
from paddle_shard.errors import AgreedFailure, ArgumentError, PaddleShardError, PeerLostError, UnequalEndsError


def data_differs(outlooks: Sequence[Outlook], ends_apart: int | None) -> tuple[int, list[int]] | None:
    """Return the first step at which the ranks have read different data, and each digest; None if there is none.

    Args:
        outlooks: The outlooks of all ranks, with the digests of what each has read in the report.
        ends_apart: By how many steps the ends of one stream may differ; None: by any number.
    """
    found = first_difference([outlook.report for outlook in outlooks])
    if found is not None or ends_apart is None:
        return found
    ends = [outlook.exhausted for outlook in outlooks]
    if max(ends) == NEVER:
        ends = [outlook.step for outlook in outlooks]
    first = min(ends)
    return (first, [int(end > first) for end in ends]) if max(ends) - first > ends_apart else None


def ended_unequally(verdict: Decision, outlooks: Sequence[Outlook]) -> bool:
    """Return whether the data of some ranks has ended while that of others has not.

    A rank that has left its loop, and had announced all steps before the end, keeps the others from nothing.
    """
    return len({_ended_at(verdict.step, outlook) for outlook in outlooks if outlook.kind != CLOSED}) > 1


def _ended_at(step: int, outlook: Outlook) -> bool:
    return outlook.kind == END and outlook.step == step


def error_of(
    verdict: Decision,
    ranks: Mapping[int, Outlook],
    number: int,
    name: str,
    first_step: int,
    differing: tuple[int, Sequence[int]] | None,
) -> PaddleShardError:
    """Return the error for a pass that did not end normally.

    Args:
        verdict: How it ended.
        ranks: Global rank -> its outlook.
        number: Number of the pass, for messages.
        name: Name of the data, for messages.
        first_step: The epoch's step with which the pass began.
        differing: The result of `data_differs`.
    """
    step, at = verdict.step, first_step + verdict.step
    if not verdict.matches:
        differ = differences({rank: o.report.decode(errors="replace") for rank, o in ranks.items()})
        return ArgumentError(
            f"The ranks differ in pass {number} over a loader, but must be the same. {differ}. Give all ranks the same "
            "arguments and data, and start every loop on all of them, in the same order."
        )
    if not verdict.same:
        if differing is None:  # so long ago that no rank keeps the digests
            return difference(name, f"Before step {at}", dict.fromkeys(ranks, 0))
        first, digests = differing
        return difference(name, f"At step {first_step + first}", dict(zip(ranks, digests, strict=True)))
    if verdict.kind == FAIL:
        failed = [(rank, o.report) for rank, o in ranks.items() if o.kind == FAIL and o.step == step]
        failure = AgreedFailure(f"Reading step {step} failed on global ranks {[rank for rank, _ in failed]}.")
        failure.step, failure.reports = step, tuple(failed)
        return failure
    if verdict.kind == END:
        unequal = UnequalEndsError("")
        unequal.step = at
        unequal.ended = tuple(rank for rank, o in ranks.items() if _ended_at(step, o))
        unequal.went_on = tuple(rank for rank, o in ranks.items() if o.kind != CLOSED and not _ended_at(step, o))
        unequal.args = (
            f"tail='error', but at step {at} the data of global ranks {list(unequal.ended)} has ended and that of "
            f"{list(unequal.went_on)} has not. Make the data of equal length, or choose tail='drop', 'pad' or "
            "'repeat', or num_batches=.",
        )
        return unequal
    left = {rank: o.delivered for rank, o in ranks.items() if o.kind == CLOSED and o.step == step}
    told = " and ".join(f"global rank {rank} after {count} steps" for rank, count in left.items())
    return PeerLostError.of(
        f"The loop was left by {told}, while this rank asks for step {at}. Leave it at the same step on all ranks, or "
        "iterate to the end on all of them.",
        left,
    )
