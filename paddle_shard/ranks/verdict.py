"""Why has a pass ended, which error reports it, and what is told of a wait?"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_shard import errors
from paddle_shard.errors import (
    AgreedFailure,
    ArgumentError,
    DataReadError,
    DifferentDataError,
    PaddleShardError,
    PeerLostError,
    UnequalEndsError,
)
from paddle_shard.ranks.outlook import CLOSED, END, FAIL, NEVER, Decision, Outlook, Terms

_MOST_RANKS = 8
_LONGEST = 10_000
"""Most characters of an error text that are sent to the other ranks."""
_TOLD = ("index", "worker", "step", "epoch", "cause_type")


def described(facts: Mapping[str, Any]) -> str:
    """Return facts (name -> value, each a short text) as a text for `differences`."""
    return json.dumps({name: str(value) for name, value in facts.items()})


def differences(said: Mapping[int, str]) -> str:
    """Return what differs, with every value and the global ranks that have it.

    Args:
        said: Global rank -> the result of `described` on that rank.

    Examples:
        >>> print(differences({0: described({"seed": 0, "rows": 8}), 1: described({"seed": 1, "rows": 8})}))
        seed: 0 on global rank 0, 1 on global rank 1
    """
    facts: dict[int, dict[str, str]] = {}
    for rank, text in said.items():
        try:
            facts[rank] = dict(json.loads(text))
        except ValueError:  # no facts, or cut off because they were too long
            facts[rank] = {"loader": text}
    found = []
    for name in dict.fromkeys(name for of_rank in facts.values() for name in of_rank):
        holders = _holders({rank: of_rank.get(name, "nothing") for rank, of_rank in facts.items()})
        if len(holders) > 1:
            found.append(f"{name}: " + ", ".join(f"{value} on {ranks}" for value, ranks in holders.items()))
    return "; ".join(found)


def _holders(values: Mapping[int, Any]) -> dict[Any, str]:
    """Return, for each value, which global ranks have it, in words."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return {value: _named(ranks) for value, ranks in found.items()}


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"global rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_RANKS]))}{more}"


def _difference(name: str, where: str, digests: Mapping[int, int]) -> DifferentDataError:
    """Return the error that says which global ranks have read different data.

    Args:
        name: Name of the loader.
        where: The step, as the beginning of a sentence.
        digests: Global rank -> digest of what it has read.
    """
    return DifferentDataError(
        f"{where} of {name}, {' and '.join(_holders(digests).values())} have read different data. Each must read the "
        "same stream, or draw the same "
        "batches, and keeps its own rows of it; otherwise some rows are delivered twice, and some not at all. Use the "
        "same seed on all ranks for every random generator in it: its own generators, or Paddle's "
        "(dataset.seed_paddle = True); and, with balance=, the same costs. "
        "The global generators of numpy and Python are already seeded. If each rank has its own data, set "
        "is_dataset_splitted=True."
    )


def data_differs(outlooks: Sequence[Outlook], ends_apart: int | None) -> tuple[int, list[int]] | None:
    """Return the first step at which the ranks have read different data, and each digest; None if there is none.

    Args:
        outlooks: The outlooks of all ranks, with `ReadHistory.report` as the report.
        ends_apart: By how many steps the ends of one stream may differ; None: by any number.

    Examples:
        >>> one, two = Outlook(report=b"[0, [5, 7, 9]]"), Outlook(report=b"[0, [5, 8, 10]]")
        >>> data_differs([one, two], None)
        (1, [7, 8])
    """
    found: list[dict[int, int]] = []
    for outlook in outlooks:
        try:
            first, digests = json.loads(outlook.report)
        except ValueError:  # the report of a failure, which is raised instead
            found.clear()
            break
        found.append({first + i: digest for i, digest in enumerate(digests)})
    for step in sorted(set.intersection(*map(set, found))) if found else ():
        digests = [of_rank[step] for of_rank in found]
        if len(set(digests)) > 1:
            return step, digests
    if ends_apart is None:
        return None
    ends = [outlook.exhausted for outlook in outlooks]
    if max(ends) == NEVER:
        ends = [outlook.step for outlook in outlooks]
    first = min(ends)
    return (first, [int(end > first) for end in ends]) if max(ends) - first > ends_apart else None


def error_of(verdict: Decision, ranks: Mapping[int, Outlook], number: int, terms: Terms) -> PaddleShardError | None:
    """Return the error for a pass that has ended; None if it has ended as it should.

    Args:
        verdict: How it ended.
        ranks: Global rank -> its outlook.
        number: Number of the pass, for messages.
        terms: Its terms.
    """
    step, at, name = verdict.step, terms.first_step + verdict.step, terms.name
    if not verdict.matches:
        differ = differences({rank: o.report.decode(errors="replace") for rank, o in ranks.items()})
        return ArgumentError(
            f"The ranks differ in pass {number} over a loader, but must be the same. {differ}. Give all ranks the same "
            "arguments and data, and start every loop on all of them, in the same order."
        )
    if not verdict.same:
        differing = data_differs(list(ranks.values()), terms.ends_apart)
        if differing is None:  # so long ago that no rank keeps the digests
            return _difference(name, f"Before step {at}", dict.fromkeys(ranks, 0))
        first, digests = differing
        return _difference(name, f"At step {terms.first_step + first}", dict(zip(ranks, digests, strict=True)))
    if verdict.kind == FAIL:
        failed = [(rank, o.report) for rank, o in ranks.items() if o.kind == FAIL and o.step == step]
        failure = AgreedFailure(f"Reading step {step} failed on global ranks {[rank for rank, _ in failed]}.")
        failure.step, failure.reports = step, tuple(failed)
        return failure
    if verdict.kind == END:
        ended = [rank for rank, o in ranks.items() if o.kind == END and o.step == step]
        # A rank that has left its loop, and had announced all steps before the end, keeps the others from nothing.
        went_on = [rank for rank, o in ranks.items() if o.kind != CLOSED and rank not in ended]
        if not (terms.ends_must_agree and ended and went_on):
            return None
        unequal = UnequalEndsError(
            f"tail='error', but at step {at} the data of global ranks {ended} has ended and that of {went_on} has not. "
            "Make the data of equal length, or choose tail='drop', 'pad' or 'repeat', or num_batches=."
        )
        unequal.step, unequal.ended, unequal.went_on = at, tuple(ended), tuple(went_on)
        return unequal
    left = {rank: o.delivered for rank, o in ranks.items() if o.kind == CLOSED and o.step == step}
    told = " and ".join(f"global rank {rank} after {count} steps" for rank, count in left.items())
    return PeerLostError.of(
        f"The loop was left by {told}, while this rank asks for step {at}. Leave it at the same step on all ranks, or "
        "iterate to the end on all of them.",
        left,
    )


def log_wait(rank: int, terms: Terms, step: int, waited: float, behind: Mapping[int, str]) -> None:
    """Log which ranks this one waits for, long before the timeout; nothing if no rank is late.

    Args:
        rank: Global rank of this process.
        terms: Those of the pass.
        step: The step that is asked for, counted from the beginning of the pass.
        waited: Seconds so far.
        behind: Global rank -> how far it is.
    """
    if not behind:
        return
    logging.getLogger("paddle_shard").warning(
        "global rank %s has waited %.0f s for the other ranks at step %d of %s: %s. All ranks of a loader's meshes "
        "must iterate over it in the same way, so that they end or fail at the same step. If an iterator is open on "
        "one rank only, close() it. This rank keeps waiting, up to timeout=%g s. For a loop on this rank alone, "
        "make a loader on a mesh of this rank, ProcessMesh([%s]).",
        rank,
        waited,
        terms.first_step + step,
        terms.name,
        "; ".join(f"global rank {one} {text}" for one, text in behind.items()),
        terms.timeout,
        rank,
    )


def silence(terms: Terms, step: int, behind: Mapping[int, str]) -> PeerLostError:
    """Return the error for ranks that did not respond before the timeout expired."""
    listed = "; ".join(f"global rank {one} {text}" for one, text in behind.items())
    return PeerLostError.of(
        f"Waited {terms.timeout:g} s for the other ranks to reach step {terms.first_step + step} of "
        f"{terms.name}: {listed or 'no rank answers'}. If a step may take longer than that (evaluation, "
        "saving), use a longer timeout; for a loop on this rank alone, make a loader on a mesh of this rank.",
        behind,
        terms.timeout,
    )


def report_of(failure: Any) -> bytes:
    """Return the report of a failure that is sent to the other ranks."""
    told = {name: getattr(failure, name, None) for name in _TOLD}
    text = errors.text_of(failure)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... [cut]"
    return json.dumps({"kind": type(failure).__name__, "text": text, **told}, default=repr).encode()


def failure_of_another(failure: AgreedFailure) -> Exception:
    """Return the error of the rank that failed, as every other rank raises it."""
    rank, report = failure.reports[0]
    try:
        told = json.loads(report)
    except ValueError:  # cut off because it was too long
        told = {"kind": "DataReadError", "text": report.decode(errors="replace")}
    text = f"global rank {rank}: {told['text']}"
    kind = getattr(errors, told["kind"], None)
    if kind is not None and kind is not DataReadError:
        found: Exception = kind(text)
        return found
    error = DataReadError(text if kind is DataReadError else f"{told['kind']}: {text}")
    for name in _TOLD:
        value = told.get(name)
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
