"""Parts of a stream: the part that each row of a global batch comes from, and the parts that a data rank holds.

A stream has no index, so it cannot be split sample by sample. It is cut into P canonical parts, each a function
of (seed, epoch, part); data ranks and workers only *hold* parts. Row r of every micro-batch comes from part
r // (rows / P), so the global batches do not depend on who holds which part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddle_shard.core.checks import check_count, listed
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.partition import Rows, check_batch_size
from paddle_shard.plan.tails import PAD, Tail

MAX_PARTS = 64
"""Most parts that are chosen by default."""


@dataclass(frozen=True, kw_only=True)
class PartsPlan:
    """Division of the global batches of a stream into its parts.

    Examples:
        >>> plan = PartsPlan(batch_size=8, num_parts=4, num_data_ranks=2)
        >>> plan.parts_of(1, 2), plan.rows_of((2, 3)).tolist()
        ((2, 3), [4, 5, 6, 7])
        >>> plan.num_steps([6, 5, 6, 6])
        3
    """

    batch_size: int
    """The global batch: samples that one step consumes over all data ranks, micro-batches included."""
    num_parts: int
    """P: divides the rows of a micro-batch; a multiple of the data ranks."""
    num_data_ranks: int
    """Product of the sizes of the data axes; the least common multiple if meshes differ."""
    accumulation: int = 1
    """Micro-batches in a global batch."""
    tail: Tail = PAD
    """What to do if the parts end at different times. "pad": continue to the end of the longest part; missing rows
    are invalid copies of the part's first sample (if the part is empty, of the first sample of the lowest part that
    has one). "drop": stop before the first batch that is not whole. "repeat": reopen a part that has ended, until the
    longest has ended. "error": refuse, unless all parts end together with a whole batch."""
    num_batches: int | None = None
    """Exact number of steps, for any lengths: parts that end are reopened. None: the tail decides."""

    def __post_init__(self) -> None:
        check_count("accumulation", self.accumulation)
        if self.num_batches is not None:
            check_count("num_batches", self.num_batches)
        check_batch_size(
            self.batch_size, self.num_data_ranks, self.accumulation
        )
        multiples = range(
            self.num_data_ranks, self.micro_rows + 1, self.num_data_ranks
        )
        works = [
            number for number in multiples if self.micro_rows % number == 0
        ]
        if self.num_parts not in works:
            raise ArgumentError(
                f"in_parts({self.num_parts}): the number of parts must divide the {self.micro_rows} rows of a "
                f"micro-batch, and be a multiple of the {self.num_data_ranks} data ranks. Without in_parts(), files "
                "and shards that are not counted make at most as many parts: count them (counts=True), or have more. "
                f"Values that work: {listed(works)}."
            )

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch."""
        return self.batch_size // self.accumulation

    @property
    def stripe(self) -> int:
        """Rows of a micro-batch that come from one part, one after the other."""
        return self.micro_rows // self.num_parts

    @property
    def samples_per_part(self) -> int:
        """Samples of each part that one step consumes."""
        return self.stripe * self.accumulation

    @property
    def repeats(self) -> bool:
        """True if a part that ends is reopened."""
        return self.tail.repeats or self.num_batches is not None

    def parts_of(self, data_rank: int, num_data_ranks: int) -> tuple[int, ...]:
        """Return the parts that a data rank holds.

        Args:
            data_rank: The data rank, in `range(num_data_ranks)`.
            num_data_ranks: Data ranks of the field that is read: the plan's, or fewer.
        """
        count = self.num_parts // num_data_ranks
        return tuple(range(data_rank * count, (data_rank + 1) * count))

    def rows_of(self, parts: Sequence[int]) -> Rows:
        """Return the rows of the global batch that come from some parts, ascending: int64[len(parts) * ...].

        Args:
            parts: The parts, ascending.
        """
        # [micro-batch, part, row of its stripe]
        rows = np.arange(self.batch_size).reshape(
            self.accumulation, self.num_parts, self.stripe
        )
        return rows[:, list(parts)].reshape(-1)

    def num_steps(self, lengths: Sequence[int]) -> int:
        """Return the number of steps of an epoch whose parts have these lengths; the tail decides.

        Raises:
            ArgumentError: The tail is "error" and the parts do not end together; or the tail is "repeat" or
                `num_batches` is given, and a part is empty.
        """
        if self.repeats and 0 in lengths:
            raise nothing_to_repeat(lengths.index(0), self.num_parts)
        if self.num_batches is not None:
            return self.num_batches
        size = self.samples_per_part
        end_together = min(lengths) == max(lengths) and lengths[0] % size == 0
        if self.tail.refuses and not end_together:
            raise ArgumentError(
                f"tail='error': the stream's {self.num_parts} parts have {listed(lengths)} samples, so they do not "
                f"end together with a whole batch ({size} of each part). Choose tail='pad', 'drop' or 'repeat', or "
                "num_batches=."
            )
        return self.tail.num_steps(lengths, size)


def nothing_to_repeat(
    part: int, num_parts: int, source: str = ""
) -> ArgumentError:
    """Return the error for a part, perhaps of a source of a mixture, that is to be read again and has no sample."""
    what = f"Stream.mixture: source {source!r}, part" if source else "part"
    return ArgumentError(
        f"{what} {part} of {num_parts} has no sample to repeat. Use fewer parts (in_parts()), leave an empty source "
        "out, or use tail='pad' or 'drop' without num_batches=."
    )


def chunks_of(parts: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Return the parts of each worker of a data rank; workers that would get no part are left out.

    Examples:
        >>> chunks_of((4, 5, 6), 2), chunks_of((4, 5), 0), chunks_of((4,), 3)
        ([(4, 6), (5,)], [(4, 5)], [(4,)])
    """
    count = max(1, min(num_workers, len(parts)))
    return [tuple(parts[worker::count]) for worker in range(count)]


def choose_num_parts(micro_rows: int, num_shards: int | None = None) -> int:
    """Return the default number of parts, which does not depend on the mesh.

    Args:
        micro_rows: Rows of a micro-batch.
        num_shards: Number of files of the stream; None if it is not made of files.

    Returns:
        The largest divisor of the rows that is at most the number of shards and at most 64.

    Examples:
        >>> choose_num_parts(256), choose_num_parts(96), choose_num_parts(64, num_shards=10)
        (64, 48, 8)
    """
    most = min(MAX_PARTS, micro_rows)
    if num_shards is not None:
        most = min(most, max(1, num_shards))
    return max(
        number for number in range(1, most + 1) if micro_rows % number == 0
    )
