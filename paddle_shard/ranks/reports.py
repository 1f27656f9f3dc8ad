"""Texts of the agreement: what ranks agree on, failures as reports, and the errors and warnings that come of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paddle_shard import errors
from paddle_shard.ranks.decision import (
    CLOSED,
    END,
    FAIL,
    OTHER_DATA,
    OTHER_LABEL,
    Decision,
    RankProgress,
)

Loss: TypeAlias = tuple[str, Collection[int], float | None]
"""Arguments of `PeerLostError.of`."""
Ranks: TypeAlias = Mapping[int, RankProgress]
"""Global rank -> its progress."""

ABSENT, NOT_OPENED = -2, -1
"""In place of a step: the rank does not answer, or has not begun the iteration."""
MAX_TEXT = 10_000
"""Most characters of an error text that are sent to the other ranks."""
_MAX_RANKS = 8
_ATTRIBUTES = ("index", "worker", "step", "epoch", "cause_type")
IF_SPLIT = (
    "If each rank has its own data, set is_dataset_splitted=True; where a trainer makes the loader, set an attribute "
    "of the data set: `is_dataset_splitted = True`."
)
"""The fix for errors that come of data that ranks have split already, and did not say so."""

log = logging.getLogger("paddle_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the ranks agree on in one epoch iterator."""

    label: Mapping[str, Any] = field(default_factory=dict)
    """Arguments and data, name -> value. Must be equal on all ranks; errors name differences."""
    name: str = "the data"
    """Name of the loader, or of the user's call, for messages."""
    is_call: bool = False
    """True if the ranks exchange something in a call of the user's, and make no steps."""
    timeout: float = 1800.0
    """Seconds for which a rank may be silent while another waits for it."""
    ends_must_agree: bool = False
    """True if ends at different steps are an error."""
    same_data: bool = False
    """True if all ranks read the same data, and give a digest with each step."""
    exit_when_lost: bool = False
    """True if the process ends when a rank is lost while the iteration is open."""
    first_step: int = 0
    """The epoch's step with which the iteration begins, for messages."""

    def late(self, step: int, steps: Mapping[int, int]) -> str:
        """Return which ranks keep a step from being delivered.

        Args:
            step: The step, counted from the beginning of the iteration.
            steps: Global rank -> number of steps that it has announced, `NOT_OPENED` or `ABSENT`.
        """
        place = self.name
        if not self.is_call:
            place = f"step {self.first_step + step} of {self.name}"
        texts = {
            ABSENT: "has not answered: it has made no loader over these meshes yet, has ended, or is held in a call that "
            "keeps its threads from running, such as a gather_valid() that this rank does not make (see its log)",
            NOT_OPENED: f"has not {'made this call' if self.is_call else 'started this loop'}",
        }
        ranks = [
            f"global rank {rank} "
            + texts.get(count, f"has read up to step {self.first_step + count}")
            for rank, count in steps.items()
        ]
        return f"for the other ranks to reach {place}: {'; '.join(ranks)}"


def warn_waits(
    terms: Terms, rank: int, step: int, waited: float, late: Mapping[int, int]
) -> None:
    """Log which ranks this one waits for, long before the timeout."""
    log.warning(
        f"global rank {rank} has waited {waited:.0f} s {terms.late(step, late)}. All ranks of a loader's meshes must make "
        "the same calls, and iterate in the same way, so that they end or fail at the same step. If an iterator is open "
        "on one rank only, close() it. For a loop on this rank alone, make a loader on a mesh of this rank, "
        f"ProcessMesh([{rank}]). This rank keeps waiting, up to timeout={terms.timeout:g} s."
    )


def timed_out(terms: Terms, rank: int, step: int, late: Mapping[int, int]) -> Loss:
    """Return the loss of ranks that this one has waited for until the timeout expired."""
    text = (
        f"global rank {rank} has waited {terms.timeout:g} s {terms.late(step, late)}. If a step may take longer than "
        "that (evaluation, saving), use a longer timeout; for a loop on this rank alone, make a loader on a mesh of this "
        "rank."
    )
    return text, list(late), terms.timeout


def loss_of(ranks: Sequence[int], what: str, timeout: float | None = None) -> Loss:
    """Return the loss of ranks that have ended or do not respond."""
    return (
        f"{_named(ranks).capitalize()} {what}; its own log may say why.",
        ranks,
        timeout,
    )


def warn_unequal_exits(name: str, steps: Mapping[int, int]) -> None:
    """Log that ranks have left their loop after different numbers of steps, and none has waited for the others."""
    log.warning(
        f"The ranks have left their loop at different steps of {name}: {_by_value(steps)} (numbers of steps). What they "
        "have delivered differs, and so do their saved states. Leave it at the same step on all ranks."
    )


def differences(labels: Mapping[int, Mapping[str, str]]) -> str:
    """Return what differs, with every value and the global ranks that have it; of a list, a line each, the first line.

    Args:
        labels: Global rank -> name -> value.

    Examples:
        >>> print(differences({0: {"seed": "0", "rows": "8"}, 1: {"seed": "1", "rows": "8"}}))
        seed: 0 on global rank 0, 1 on global rank 1
    """
    texts = []
    for name in dict.fromkeys(name for label in labels.values() for name in label):
        values = {rank: label.get(name, "nothing") for rank, label in labels.items()}
        distinct = set(values.values())
        if len(distinct) == 1:
            continue
        shown = _by_value(values)
        if "\n" in "".join(distinct):
            shown = _first_line(
                {rank: value.split("\n") for rank, value in values.items()}
            )
        texts.append(f"{name}: {shown}")
    return "; ".join(texts)


def _first_line(lists: Mapping[int, Sequence[str]]) -> str:
    """Return the first line that not all ranks have, and which have it."""
    for line in (line for lines in lists.values() for line in lines):
        lacking = [rank for rank, lines in lists.items() if line not in lines]
        if lacking:
            having = [rank for rank in lists if rank not in lacking]
            return f"{line!r} is on {_named(having)}, and not on {_named(lacking)}"
    return "in another order"


def _by_value(values: Mapping[int, Any]) -> str:
    """Return each value, and which global ranks have it."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_named(having)}" for value, having in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"global rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_RANKS]))}{more}"


# Errors


def error_of_decision(
    decision: Decision, ranks: Ranks, terms: Terms
) -> Exception | None:
    """Return the error for an iteration that has ended; None if it has ended as it should."""
    return _ERRORS[decision.kind](decision.step, ranks, terms)


def _other_label(step: int, ranks: Ranks, terms: Terms) -> Exception:
    labels = {rank: progress.report for rank, progress in ranks.items()}
    for rank, label in labels.items():
        if "failed" in label:
            return error_of_another(rank, label["failed"])
    text = differences(labels)
    if text.startswith("sample "):
        return errors.DifferentDataError(
            f"the ranks hold different data. {text}. Each rank must be given the whole data set, and the same one: this "
            "loader splits it. Likely reasons: each rank was given a part of its own (a Subset, .shard(), "
            "split_dataset_by_node, a stream that asks for its rank): give it the whole, or is_dataset_splitted=True and "
            "a sampler that does not split it again; one machine has other files; or samples draw random numbers from a "
            "generator that each rank seeds in its own way, or keep what they drew. With verify=None nobody looks, and "
            "then samples may be lost."
        )
    return errors.ArgumentError(
        f"The ranks differ in a loop over a loader, but must be the same. {text}. Give all ranks the same arguments and "
        "data, and start every loop on all of them, in the same order. A rank that was given a part of its own (Subset, "
        ".shard()) needs is_dataset_splitted=True."
    )


def _other_data(step: int, ranks: Ranks, terms: Terms) -> Exception:
    groups: dict[int, list[int]] = {}
    for rank, progress in ranks.items():
        groups.setdefault(progress.report, []).append(rank)
    who = " and ".join(map(_named, groups.values()))
    return errors.DifferentDataError(
        f"At step {terms.first_step + step} of {terms.name}, {who} have read different data. Each must read the same "
        "stream, or draw the same batches, and keeps its own rows of it; otherwise some rows are delivered twice, and "
        "some not at all. Use the same seed on all ranks for every random generator of its own; and, with balance=, the "
        f"same costs. (The global generators of numpy, Python, Paddle and torch are seeded.) {IF_SPLIT}"
    )


def _failed(step: int, ranks: Ranks, terms: Terms) -> Exception:
    reports = {
        rank: progress.report
        for rank, progress in ranks.items()
        if (progress.step, progress.kind) == (step, FAIL)
    }
    failure = errors.AgreedFailure(
        f"Reading step {step} failed on {_named([*reports])}."
    )
    failure.step = step
    failure.reports = tuple(reports.items())
    return failure


def _unequal_ends(step: int, ranks: Ranks, terms: Terms) -> Exception | None:
    ended = [
        rank
        for rank, progress in ranks.items()
        if (progress.step, progress.kind) == (step, END)
    ]
    # A rank that has left its loop, and had announced all steps before the end, keeps the others from nothing.
    went_on = [
        rank
        for rank, progress in ranks.items()
        if progress.kind != CLOSED and rank not in ended
    ]
    if not (terms.ends_must_agree and ended and went_on):
        return None
    step += terms.first_step
    error = errors.UnequalEndsError(
        f"at step {step} the data of global ranks {ended} has ended and that of {went_on} has not, but all must end there "
        "(tail='error', or items that are whole batches). Make the data of equal length, or choose tail='drop', 'pad' or 'repeat', or num_batches=."
    )
    error.step = step
    error.ended = tuple(ended)
    error.went_on = tuple(went_on)
    return error


def _left(step: int, ranks: Ranks, terms: Terms) -> Exception:
    steps = {
        rank: progress.delivered
        for rank, progress in ranks.items()
        if (progress.step, progress.kind) == (step, CLOSED)
    }
    text = " and ".join(
        f"global rank {rank} after {count} steps" for rank, count in steps.items()
    )
    return errors.PeerLostError.of(
        f"The loop was left by {text}, while this rank asks for step {terms.first_step + step}. Leave it at the same "
        "step on all ranks, or iterate to the end on all of them.",
        steps,
    )


_ERRORS: dict[int, Callable[[int, Ranks, Terms], Exception | None]] = {
    OTHER_LABEL: _other_label,
    OTHER_DATA: _other_data,
    FAIL: _failed,
    END: _unequal_ends,
    CLOSED: _left,
}


def known_to_all(error: Exception) -> Exception:
    """Mark an error as raised on all ranks, so that none reports it to the others."""
    error.__dict__["known_to_all"] = True
    return error


def report_of(failure: BaseException, call: str = "") -> str:
    """Return the report of a failure that is sent to the other ranks; `call`: which call of the user's has failed."""
    text = errors.text_of(failure)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} ... [cut]"
    attributes = {name: getattr(failure, name, None) for name in _ATTRIBUTES}
    report = {"kind": type(failure).__name__, "text": text, "call": call, **attributes}
    return json.dumps(report, default=repr)


def error_of_another(rank: int, report: str) -> Exception:
    """Return the error of another rank from its report."""
    fields = json.loads(report)
    call = f"{fields['call']}: " if fields["call"] else ""
    text = f"global rank {rank}: {call}{fields['text']}"
    kind = getattr(errors, fields["kind"], None)
    if kind is None:
        kind = errors.DataReadError
        text = f"{fields['kind']}: {text}"
    error: Exception = kind(text)
    for name in _ATTRIBUTES if kind is errors.DataReadError else ():
        value = fields[name]
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
