"""Have the ranks read the same, where each reads all and keeps its own rows?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from paddle_shard.errors import DifferentDataError

_STEPS_TOLD = 2000
"""Steps of which a rank tells what it has read, where ranks differ: their reports hold 64 KB."""


class ReadHistory:
    """For each step of a pass, a digest of all that this rank has read up to its end."""

    def __init__(self) -> None:
        """Begin at step 0."""
        self._digests: list[int] = []
        self._first = 0

    def note(self, digest: int) -> None:
        """Take the next step's digest, below 2**62."""
        self._digests.append(digest)

    def before(self, step: int) -> int:
        """Return what stands for all that was read before a step, at least 1; 0 where nothing was, or is known."""
        at = step - 1 - self._first
        return 1 + self._digests[at] if 0 <= at < len(self._digests) else 0

    def forget(self, step: int) -> None:
        """Drop the steps before one, which were seen to be the same on all ranks."""
        if step > self._first:
            del self._digests[: step - self._first]
            self._first = step

    def report(self) -> bytes:
        """Return the newest digests, for the others to compare."""
        told = self._digests[-_STEPS_TOLD:]
        return json.dumps([self._first + len(self._digests) - len(told), told]).encode()


def first_difference(reports: Sequence[bytes]) -> tuple[int, list[int]] | None:
    """Return the first step of which the ranks have not read the same, and each one's digest; None: there is none.

    Args:
        reports: What `ReadHistory.report` returned on each rank.

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
            return None  # of a failure, which is told instead
        found.append({first + i: digest for i, digest in enumerate(digests)})
    for step in sorted(set.intersection(*map(set, found))) if found else ():
        digests = [of_rank[step] for of_rank in found]
        if len(set(digests)) > 1:
            return step, digests
    return None


def difference(name: str, where: str, digests: Mapping[int, int]) -> DifferentDataError:
    """Return the error that says which global ranks have read which data.

    Args:
        name: Of the loader.
        where: Since when.
        digests: Global rank -> what stands for what it has read.
    """
    by_digest: dict[int, list[int]] = {}
    for rank, digest in digests.items():
        by_digest.setdefault(digest, []).append(rank)
    who = " and ".join(f"global rank{'s' * (len(ranks) > 1)} {str(ranks)[1:-1]}" for ranks in by_digest.values())
    return DifferentDataError(
        f"{where} of {name}, {who} have read different data. Each reads the same stream, or draws the same batches, "
        "and keeps its own rows; so some rows would be delivered twice, and some not at all. Seed what draws random "
        "numbers in it alike on all ranks: a generator of its own, or Paddle's (seed_paddle=True); numpy's and "
        "Python's global ones are seeded already. If each rank reads data of its own, say so: is_dataset_splitted=True."
    )
