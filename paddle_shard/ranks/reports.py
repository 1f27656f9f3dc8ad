"""Texts of the agreement: what ranks agree on, failures as reports, and the errors and warnings that come of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from paddle_shard import errors
from paddle_shard.ranks.decision import (
    CLOSED,
    END,
    FAIL,
    OTHER,
    RankProgress,
)

T = TypeVar("T")
Loss: TypeAlias = tuple[str, Collection[int], float | None]
"""Arguments of `PeerLostError.of`."""
Ranks: TypeAlias = Mapping[int, RankProgress]
"""Global rank -> its progress."""

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
class AgreementConfig:
    """Settings of the agreement in one epoch iterator."""

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

    def place(self, step: int) -> str:
        """Return the name of a step, which is counted from the beginning of the iteration."""
        return (
            self.name
            if self.is_call
            else f"step {self.first_step + step} of {self.name}"
        )


def late_text(text: str, late: Mapping[int, str]) -> str:
    """Return which ranks a rank waits for, and what to do.

    Args:
        text: For how long it has waited, and for which step.
        late: Global rank -> how far it is.
    """
    groups = _ranks_by_value(late)
    who = "; ".join(
        f"{_named(ranks)} {progress}" for progress, ranks in groups.items()
    )
    return (
        f"{text}: {who}. All ranks of a loader's meshes must make the same calls, and iterate in the same way. If an "
        "iterator is open on one rank only, close() it. For a loop on one rank alone, make a loader on a mesh of this "
        "rank. If a step may take longer than timeout= (evaluation, saving), use a longer one."
    )


def loss_of(
    ranks: Sequence[int], what: str, timeout: float | None = None
) -> Loss:
    """Return the loss of ranks that have ended or do not respond."""
    return (
        f"{_named(ranks).capitalize()} {what}; its own log may say why.",
        ranks,
        timeout,
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
    for name in dict.fromkeys(
        name for label in labels.values() for name in label
    ):
        lines = {
            rank: label.get(name, "nothing").split("\n")
            for rank, label in labels.items()
        }
        common = set.intersection(*map(set, lines.values()))
        first_differences = {
            rank: next(
                (line for line in of_rank if line not in common), "no more"
            )
            for rank, of_rank in lines.items()
        }
        groups = _ranks_by_value(first_differences)
        if len(groups) > 1:
            values = [
                f"{line} on {_named(ranks)}" for line, ranks in groups.items()
            ]
            texts.append(f"{name}: {', '.join(values)}")
    return "; ".join(texts) or "A list is in another order"


def _ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return the ranks that have each value, in the order in which the values first occur."""
    groups: dict[T, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _named(ranks: Sequence[int]) -> str:
    more = (
        f" and {len(ranks) - _MAX_RANKS} more"
        if len(ranks) > _MAX_RANKS
        else ""
    )
    return f"global rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_RANKS]))}{more}"


def _other(step: int, ranks: Ranks, terms: AgreementConfig) -> Exception:
    if step >= 0:
        return _other_data(step, ranks, terms)
    labels = {rank: progress.report for rank, progress in ranks.items()}
    for rank, label in labels.items():
        if "failed" in label:
            return error_of_report(rank, label["failed"])
    text = differences(labels)
    if text.startswith("sample "):
        return errors.DifferentDataError(
            f"the ranks hold different data. {text}. Each rank must hold the whole data set, and the same one: this "
            "loader splits it. Likely causes: each rank has a part of its own (a Subset, .shard(), "
            "split_dataset_by_node, a stream that asks for its rank): pass the whole data set, or "
            "is_dataset_splitted=True with a sampler that does not split again; one host has other files; samples use "
            "random numbers from a generator that is seeded differently on each rank, or keep earlier ones. "
            "(verify=None turns this check off, and samples may be lost.)"
        )
    return errors.ArgumentError(
        f"The ranks differ in a loop over a loader, but must be the same. {text}. Give all ranks the same arguments, "
        "data and saved state, and start every loop on all of them, in the same order. A rank that was given a part of "
        "its own (Subset, .shard()) needs is_dataset_splitted=True."
    )


def _other_data(step: int, ranks: Ranks, terms: AgreementConfig) -> Exception:
    digests = {rank: progress.report for rank, progress in ranks.items()}
    groups = _ranks_by_value(digests)
    who = " and ".join(map(_named, groups.values()))
    return errors.DifferentDataError(
        f"At {terms.place(step)}, {who} have read different data. Each must read the same "
        "stream, or draw the same batches, and keeps its own rows of it; otherwise some rows are delivered twice, and "
        "some not at all. Use the same seed on all ranks for every random generator of its own; and, with balance=, "
        f"the same costs. (The global generators of numpy, Python, Paddle and torch are seeded.) {IF_SPLIT}"
    )


def _failed(step: int, ranks: Ranks, _terms: AgreementConfig) -> Exception:
    rank, progress = next(iter(_at(step, FAIL, ranks).items()))
    return error_of_report(rank, progress.report)


def _unequal_ends(
    step: int, ranks: Ranks, terms: AgreementConfig
) -> Exception | None:
    ended = tuple(_at(step, END, ranks))
    # A rank that has left its loop, and had announced all steps before the end, keeps the others from nothing.
    went_on = tuple(
        rank
        for rank, progress in ranks.items()
        if progress.kind != CLOSED and rank not in ended
    )
    if not (terms.ends_must_agree and ended and went_on):
        return None
    error = errors.UnequalEndsError(
        f"at {terms.place(step)} the data of {_named(ended)} has ended and that of {_named(went_on)} has not, but all "
        "must end there. Make the data of equal length; seed a sampler of your own alike on all ranks; with "
        "is_dataset_splitted=True, give every data rank as many rows. For a stream, choose tail='drop', 'pad' or "
        "'repeat', or num_batches=."
    )
    error.step = terms.first_step + step
    error.ended = ended
    error.went_on = went_on
    return error


def _left(step: int, ranks: Ranks, terms: AgreementConfig) -> Exception:
    left = _at(step, CLOSED, ranks)
    text = " and ".join(
        f"global rank {rank} after {progress.delivered} steps"
        for rank, progress in left.items()
    )
    return errors.PeerLostError.of(
        f"The loop was left by {text}, while this rank asks for {terms.place(step)}. Leave it at the same step on all "
        "ranks, or iterate to the end on all of them.",
        left,
    )


def _at(step: int, kind: int, ranks: Ranks) -> Ranks:
    """Return the ranks that have reported this kind of a step."""
    return {
        rank: progress
        for rank, progress in ranks.items()
        if (progress.step, progress.kind) == (step, kind)
    }


ERRORS: dict[int, Callable[[int, Ranks, AgreementConfig], Exception | None]] = {
    OTHER: _other,
    FAIL: _failed,
    END: _unequal_ends,
    CLOSED: _left,
}
"""Kind of a decision -> the error for it, given its step; None if the iteration has ended as it should."""


def known_to_all(error: Exception) -> Exception:
    """Mark an error as raised on all ranks, so that none reports it to the others."""
    error.__dict__["known_to_all"] = True
    return error


def report_of(failure: BaseException, call: str = "") -> str:
    """Return the report of a failure that is sent to the other ranks; `call`: which call of the user's has failed."""
    text = errors.text_of(failure)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} ... [cut]"
    if call:
        text = f"{call}: {text}"
    attributes = {name: getattr(failure, name, None) for name in _ATTRIBUTES}
    report = {"kind": type(failure).__name__, "text": text, **attributes}
    return json.dumps(report, default=repr)


def error_of_report(rank: int, report: str) -> Exception:
    """Return the error of another rank from its report."""
    fields = json.loads(report)
    text = f"global rank {rank}: {fields['text']}"
    kind = getattr(errors, fields["kind"], None)
    if kind is None:
        kind = errors.DataReadError
        text = f"{fields['kind']}: {text}"
    error: Exception = kind(text)
    for name in _ATTRIBUTES:
        value = fields[name]
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
