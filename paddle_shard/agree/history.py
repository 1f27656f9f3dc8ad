"""Have the ranks read the same data, if each reads all of it and keeps its own rows?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from paddle_shard.errors import DifferentDataError

_STEPS_TOLD = 2000
"""Most steps whose digests a rank reports if ranks differ: a report holds 64 KB."""


class ReadHistory:
    """For each step of a pass, a digest of all that this rank has read up to its end."""

    def __init__(self) -> None:
        """Begin at step 0."""
        self._digests: list[int] = []
        self._first = 0

    def note(self, digest: int) -> None:
        """Store the next step's digest, below 2**62."""
        self._digests.append(digest)

    def before(self, step: int) -> int:
        """Return 1 + the digest of all that was read before a step; 0 if nothing was read, or it is not known."""
        at = step - 1 - self._first
        return 1 + self._digests[at] if 0 <= at < len(self._digests) else 0

    def forget(self, step: int) -> None:
        """Drop the digests of the steps before `step`, which are known to be the same on all ranks."""
        if step > self._first:
            del self._digests[: step - self._first]
            self._first = step

    def report(self) -> bytes:
        """Return the newest digests, for the others to compare."""
        told = self._digests[-_STEPS_TOLD:]
        return json.dumps([self._first + len(self._digests) - len(told), told]).encode()


def first_difference(reports: Sequence[bytes]) -> tuple[int, list[int]] | None:
    """Return the first step at which the ranks have read different data, and each digest; None if there is none.

    Args:
        reports: The result of `ReadHistory.report` on each rank.

    Examples:
        >>> one, two = ReadHistory(), ReadHistory()
        >>> for digest in (5, 7, 9):
        ...     one.note(digest), two.note(digest + (digest > 6))
        (None, None)
        (None, None)
        (None, None)
        >>> first_difference([one.report(), two.report()])
        (1, [7, 8])
    """
    found = []
    for report in reports:
        try:
            first, digests = json.loads(report)
        except ValueError:
            return None  # a report of a failure, which is raised instead
        found.append({first + i: digest for i, digest in enumerate(digests)})
    for step in sorted(set.intersection(*map(set, found))) if found else ():
        digests = [of_rank[step] for of_rank in found]
        if len(set(digests)) > 1:
            return step, digests
    return None


def difference(name: str, where: str, digests: Mapping[int, int]) -> DifferentDataError:
    """Return the error that says which global ranks have read different data.

    Args:
        name: Name of the loader.
        where: The step, as the beginning of a sentence.
        digests: Global rank -> digest of what it has read.
    """
    by_digest: dict[int, list[int]] = {}
    for rank, digest in digests.items():
        by_digest.setdefault(digest, []).append(rank)
    who = " and ".join(f"global rank{'s' * (len(ranks) > 1)} {str(ranks)[1:-1]}" for ranks in by_digest.values())
    return DifferentDataError(
        f"{where} of {name}, {who} have read different data. Each must read the same stream, or draw the same "
        "batches, and keeps its own rows of it; otherwise some rows are delivered twice, and some not at all. Use the "
        "same seed on all ranks for every random generator in it: its own generators, or Paddle's (seed_paddle=True); "
        "and, with balance=, the same costs. "
        "The global generators of numpy and Python are already seeded. If each rank has its own data, set "
        "is_dataset_splitted=True."
    )
