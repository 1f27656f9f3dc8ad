"""What ranks report about an epoch iterator, the decision that follows from all reports, and the errors it leads to."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddle_shard import errors

FAIL, END, CLOSED, OK = range(4)
"""A rank reports one of these about the first step that it has not promised; at the same step, the least wins."""
OTHER_PASS, OTHER_DATA = 4, 5
"""Kinds of a decision only: the ranks do not refer to the same pass, or have read different data."""

_FAILED = '{"failed": '
"""Beginning of the report of a call of the user's that has failed on one rank, and not of reading a step."""
NEVER = 2**60
REPORT_LIMIT = 64 * 1024
_MOST_RANKS = 8
_LONGEST = 10_000
"""Most characters of an error text that are sent to the other ranks."""
_TOLD = ("index", "worker", "step", "epoch", "cause_type")
_CUT = "\n[cut: a report holds 64 KB]"
IF_SPLIT = (
    "If each rank has its own data, set is_dataset_splitted=True; where a trainer makes the loader, set an attribute "
    "of the data set: `is_dataset_splitted = True`."
)
"""The way out of errors that come of data that ranks have split already, and did not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the ranks agree on in a pass."""

    label: str = ""
    """Text of `described` about the data. It must be equal on all ranks; errors name differences."""
    name: str = "the data"
    """Name of the loader, or of the user's call, for messages."""
    is_call: bool = False
    """True if the ranks exchange something in a call of the user's, and make no steps."""
    timeout: float | None = None
    """Seconds for which a rank may be silent while another waits for it; None: the coordinator's."""
    ends_must_agree: bool = False
    """True if ends at different steps are an error."""
    same_data: bool = False
    """True if all ranks read the same data, and give a digest with each step (`PassState.note_read`)."""
    ends_apart: int | None = None
    """With `same_data`, by how many steps their ends may differ; None: by any number."""
    exit_when_lost: bool = False
    """True if the process ends when a rank is lost while the pass is open."""
    first_step: int = 0
    """The epoch's step with which the pass begins, for messages."""

    def _at(self, step: int) -> str:
        return (
            self.name
            if self.is_call
            else f"step {self.first_step + step} of {self.name}"
        )

    def log_left(self, rank: int, count: int, seconds: float) -> None:
        """Log that this rank has left its loop and others have not: it may be what they wait for, in a collective.

        Args:
            rank: Global rank of this process.
            count: Steps that it has delivered.
            seconds: How long ago it has left.
        """
        logging.getLogger("paddle_shard").warning(
            f"global rank {rank} has left its loop before {self._at(count)}, {seconds:.0f} s ago, and not all ranks "
            "have: they may wait for this one in a collective of theirs. Leave it at the same step on all ranks, or "
            "iterate to the end on all of them."
        )

    def log_parted(self, left: Mapping[int, int]) -> None:
        """Log that ranks have left their loop at different steps, though none has asked for a step in vain.

        Args:
            left: Global rank -> steps that it has delivered, as far as it is known.
        """
        told = _listed(
            {rank: f"after {count} steps" for rank, count in sorted(left.items())}
        )
        logging.getLogger("paddle_shard").warning(
            f"The ranks have left their loop at different steps of {self.name}: {told}. What they have delivered "
            "differs, and so do their saved states. Leave it at the same step on all ranks."
        )

    def log_wait(
        self, rank: int, step: int, waited: float, behind: Mapping[int, str]
    ) -> None:
        """Log which ranks this one waits for, long before the timeout.

        Args:
            rank: Global rank of this process.
            step: The step that is asked for, counted from the beginning of the pass.
            waited: Seconds so far.
            behind: Global rank -> how far it is.
        """
        must = "Every rank of the meshes must make this call, at the same step."
        if not self.is_call:
            must = (
                "All ranks of a loader's meshes must iterate over it in the same way, so that they end or fail at the "
                "same step. If an iterator is open on one rank only, close() it. For a loop on this rank alone, make a "
                f"loader on a mesh of this rank, ProcessMesh([{rank}])."
            )
        logging.getLogger("paddle_shard").warning(
            f"global rank {rank} has waited {waited:.0f} s for the other ranks at {self._at(step)}: {_listed(behind)}. "
            f"{must} This rank keeps waiting, up to timeout={self.timeout:g} s."
        )

    def silence(self, step: int, behind: Mapping[int, str]) -> errors.PeerLostError:
        """Return the error for ranks that did not respond before the timeout expired."""
        return errors.PeerLostError.of(
            f"Waited {self.timeout:g} s for the other ranks to reach {self._at(step)}: "
            f"{_listed(behind) or 'no rank answers'}. If a step may take longer than that (evaluation, saving), use a "
            "longer timeout; for a loop on this rank alone, make a loader on a mesh of this rank.",
            behind,
            self.timeout,
        )


@dataclass(slots=True)
class Outlook:
    """What one rank has reported about one epoch iterator."""

    step: int = 0
    """The rank can serve every step before this one."""
    kind: int = OK
    """Kind of `step`. OK: nothing is known yet. Any other value is final, and no step follows."""
    exhausted: int = NEVER
    """From this step on, the rank has no real rows; NEVER while it may have some."""
    delivered: int = 0
    report: str = ""
    """Report of the failure; before that, the user's call if this is not a loop."""
    label: str = ""
    """Text of `described` about the data; must be the same on all ranks."""
    read: int = 0
    """For a decision of kind OTHER_DATA: digest of what the rank has read."""
    reads_on: int = 0
    """Extra steps that the rank reads before the end of another rank is settled, to see whether its data continues."""

    @property
    def is_ending(self) -> bool:
        """True if the rank has no real rows, or will have none."""
        return self.kind != OK or self.exhausted < NEVER

    @property
    def failed_call(self) -> str:
        """Report of a user's call that has failed on this rank, so that it makes no steps; empty: none has."""
        # Such a call opens a pass whose label is the report: it may be known before its failure is.
        texts = (self.report if self.kind == FAIL else "", self.label)
        return next((text for text in texts if text.startswith(_FAILED)), "")

    @property
    def short_report(self) -> str:
        """The report, cut to 64 KB."""
        return (
            self.report
            if len(self.report) <= REPORT_LIMIT
            else self.report[: REPORT_LIMIT - len(_CUT)] + _CUT
        )


_SAME_DATA = (
    "Each rank must be given the whole data set, and the same one: this loader splits it. Likely reasons: each rank "
    "was given a part of its own (a Subset, .shard(), split_dataset_by_node, a stream that asks for its rank): give it "
    "the whole, or is_dataset_splitted=True and a sampler that does not split it again; one machine has other files; "
    "or samples draw random numbers from a generator that each rank seeds in its own way, or keep what they drew. With "
    "verify=None nobody looks, and then samples may be lost."
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from the reports of all ranks; it is the same on all of them."""

    step: int
    """Every step before this one may be delivered."""
    kind: int
    """Final event at `step`; OK: it is not decided yet."""
    so_far: int = field(default=OK, repr=False)
    """The event at `step` by what was reported so far: no step from `step` on is delivered, unless it is OK."""
    differs_at: int = field(default=0, repr=False)
    """For OTHER_DATA: first step of which the ranks have read different data."""


def decide(outlooks: Collection[Outlook]) -> Decision:
    """Return the decision that follows from the reports of all ranks.

    It does not depend on when it is computed. The iteration ends at the first step that any rank cannot serve; the
    reason is decided when every rank has reported what it can do there.

    Examples:
        >>> ahead, ends, fails = Outlook(step=9), Outlook(step=5, kind=END), Outlook(step=5, kind=FAIL)
        >>> decide([ahead, ends])
        Decision(step=5, kind=1)
        >>> decide([ahead, ends, fails])
        Decision(step=5, kind=0)
        >>> decide([Outlook(step=5), ends])  # what the first rank will say of step 5 is not known
        Decision(step=5, kind=3)
        >>> decide([Outlook(step=9, exhausted=3), Outlook(step=9, exhausted=6)])
        Decision(step=6, kind=1)
    """
    first = min(4 * o.step + o.kind for o in outlooks)
    exhausted = max(o.exhausted for o in outlooks)
    if exhausted < NEVER:
        first = min(first, 4 * exhausted + END)
    step, kind = divmod(first, 4)
    is_known = all(o.kind != OK or o.step - o.reads_on > step for o in outlooks)
    return Decision(step, kind if is_known else OK, kind)


def described(facts: Mapping[str, Any]) -> str:
    """Return facts (name -> value, each a short text) as a text for `differences`."""
    return json.dumps(
        {name: str(value) for name, value in facts.items()}, ensure_ascii=False
    )


def differences(said: Mapping[int, str]) -> str:
    """Return what differs, with every value and the global ranks that have it; of a list, a line each, the first line.

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
        holders = _holders(
            {rank: of_rank.get(name, "nothing") for rank, of_rank in facts.items()}
        )
        if any("\n" in value for value in holders) and len(holders) > 1:
            found.append(
                f"{name}: {_on_some({rank: of_rank.get(name, '') for rank, of_rank in facts.items()})}"
            )
        elif len(holders) > 1:
            found.append(
                f"{name}: "
                + ", ".join(f"{value} on {ranks}" for value, ranks in holders.items())
            )
    return "; ".join(found)


def _on_some(texts: Mapping[int, str]) -> str:
    """Return the first line that not all ranks have, and who has it."""
    lines = {rank: dict.fromkeys(text.split("\n")) for rank, text in texts.items()}
    for _, _, line in sorted(
        (at, rank, line)
        for rank, own in lines.items()
        for at, line in enumerate(own)
        if line
    ):
        if lacking := [rank for rank, own in lines.items() if line not in own]:
            having = [rank for rank in lines if rank not in lacking]
            return f"{line!r} is on {_named(having)}, and not on {_named(lacking)}"
    return "in another order"


def _holders(values: Mapping[int, Any]) -> dict[Any, str]:
    """Return, for each value, which global ranks have it, in words."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return {value: _named(ranks) for value, ranks in found.items()}


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"global rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_RANKS]))}{more}"


def error_of(
    verdict: Decision, ranks: Mapping[int, Outlook], number: int, terms: Terms
) -> Exception | None:
    """Return the error for a pass that has ended; None if it has ended as it should.

    Args:
        verdict: How it ended.
        ranks: Global rank -> its outlook.
        number: Number of the pass, for messages.
        terms: Its terms.
    """
    step, at, name = verdict.step, terms.first_step + verdict.step, terms.name
    if verdict.kind == OTHER_PASS:
        for rank, o in ranks.items():
            if o.failed_call:
                return error_of_another(rank, o.failed_call)
        differ = differences({rank: o.label for rank, o in ranks.items()})
        own = ""
        if "num_samples" in differ:
            own = " A rank that was given a part of its own (Subset, .shard()) needs is_dataset_splitted=True."
        if differ.startswith("sample "):
            return errors.DifferentDataError(
                f"the ranks hold different data. {differ}. {_SAME_DATA}"
            )
        return errors.ArgumentError(
            f"The ranks differ in pass {number} over a loader, but must be the same. {differ}. Give all ranks the same "
            f"arguments and data, and start every loop on all of them, in the same order.{own}"
        )
    if verdict.kind == OTHER_DATA:
        who = " and ".join(
            _holders({rank: o.read for rank, o in ranks.items()}).values()
        )
        first = terms.first_step + verdict.differs_at
        return errors.DifferentDataError(
            f"At step {first} of {name}, {who} have read different data. Each must read the same stream, or draw the "
            "same batches, and keeps its own rows of it; otherwise some rows are delivered twice, and some not at all. "
            "Use the same seed on all ranks for every random generator of its own; and, with balance=, the same costs. "
            f"(The global generators of numpy, Python, Paddle and torch are seeded.) {IF_SPLIT}"
        )
    if verdict.kind == FAIL:
        failed = [
            (rank, o.report)
            for rank, o in ranks.items()
            if o.kind == FAIL and o.step == step
        ]
        failure = errors.AgreedFailure(
            f"Reading step {step} failed on global ranks {[rank for rank, _ in failed]}."
        )
        failure.step, failure.reports = step, tuple(failed)
        return failure
    if verdict.kind == END:
        ended = [rank for rank, o in ranks.items() if o.kind == END and o.step == step]
        # A rank that has left its loop, and had announced all steps before the end, keeps the others from nothing.
        went_on = [
            rank for rank, o in ranks.items() if o.kind != CLOSED and rank not in ended
        ]
        if not (terms.ends_must_agree and ended and went_on):
            return None
        unequal = errors.UnequalEndsError(
            f"tail='error', but at step {at} the data of global ranks {ended} has ended and that of {went_on} has not. "
            "Make the data of equal length, or choose tail='drop', 'pad' or 'repeat', or num_batches=."
        )
        unequal.step, unequal.ended, unequal.went_on = at, tuple(ended), tuple(went_on)
        return unequal
    left = {
        rank: o.delivered
        for rank, o in ranks.items()
        if o.kind == CLOSED and o.step == step
    }
    told = " and ".join(
        f"global rank {rank} after {count} steps" for rank, count in left.items()
    )
    return errors.PeerLostError.of(
        f"The loop was left by {told}, while this rank asks for step {at}. Leave it at the same step on all ranks, or "
        "iterate to the end on all of them.",
        left,
    )


def known_to_all(error: Exception) -> Exception:
    """Return an error that all ranks know, so that none tells it to the others."""
    error.__dict__["known_to_all"] = True
    return error


def _listed(behind: Mapping[int, str]) -> str:
    return "; ".join(f"global rank {rank} {text}" for rank, text in behind.items())


def report_of(failure: Any, call: str = "") -> str:
    """Return the report of a failure that is sent to the other ranks; `call`: which call of the user's has failed."""
    told = {name: getattr(failure, name, None) for name in _TOLD}
    text = errors.text_of(failure)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... [cut]"
    begin = {"failed": call} if call else {}
    return json.dumps(
        {**begin, "kind": type(failure).__name__, "text": text, **told}, default=repr
    )


def error_of_another(rank: int, report: str) -> Exception:
    """Return the error of another rank from its report."""
    try:
        told = json.loads(report)
    except ValueError:  # cut off because it was too long
        told = {"kind": "DataReadError", "text": report}
    text = (
        f"global rank {rank}: {told['failed']}: "
        if "failed" in told
        else f"global rank {rank}: "
    )
    text += told["text"]
    kind = getattr(errors, told["kind"], None)
    if kind is not None and kind is not errors.DataReadError:
        found: Exception = kind(text)
        return found
    error = errors.DataReadError(
        text if kind is errors.DataReadError else f"{told['kind']}: {text}"
    )
    for name in _TOLD:
        value = told.get(name)
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
