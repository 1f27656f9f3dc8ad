"""What can a user ask of a loader?

`shard_dataloader` names, types and documents the options. Here they are a value, checked as far as no data is needed.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.orders import Shuffle
from paddle_shard.plan.skips import Ranges, union
from paddle_shard.reading.reading import Readers

CHOICES = {
    "on_lost": ("raise", "exit"),
    "on_error": ("raise", "skip"),
    "replicas": ("each", "leader"),
}
"""Options that are one of a few words."""
COMPARED = (
    "seed",
    "input_keys",
    "timeout",
    "on_error",
    "batch_size",
    "skip_steps",
    "num_batches",
    "verify",
    "replicas",
    "dense_tensor_idx",
)
"""Options that must be the same on all ranks, as they are. Of most others, `loader/assembly.py` compares what is made
of them. `prefetch`, `on_lost` and `record` may differ."""

# Why some data refuses an option, behind what the data is.
DEALS = "balance= deals the rows of global batches to data ranks by the costs of their samples."
DECIDES = (
    "which decides the size of its batches. A schedule of sizes is for a DataLoader of data with an index, without a "
    "sampler of its own."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The arguments of `shard_dataloader`, whose docstring describes them. Checks that need no data are done here.

    Raises:
        ArgumentError: The value of an argument is not allowed.
    """

    dataloader: Any
    meshes: Any
    input_keys: Sequence[str] | None
    shard_dims: Any
    is_dataset_splitted: bool
    dense_tensor_idx: Sequence[Sequence[int]] | None
    shuffle: Shuffle | None
    seed: int
    tail: str | None
    batch_size: Sequence[tuple[int, int]] | None
    skip_steps: Sequence[tuple[int, int]] | None
    balance: Any
    num_batches: int | None
    placements: Any
    pad_to: Mapping[Any, tuple[str | int | Sequence[int], float]] | None
    verify: str | int | None
    replicas: str
    timeout: float
    prefetch: int | None
    readers: Readers | None
    on_error: str
    on_lost: str
    record: Any

    def __post_init__(self) -> None:
        if self.is_dataset_splitted and self.shard_dims is None:
            raise ArgumentError(
                "is_dataset_splitted=True needs shard_dims: over which axes of the mesh is the data split?"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ArgumentError(f"seed must be an int, got {self.seed!r}.")
        timeout = self.timeout
        if (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not timeout > 0
        ):
            raise ArgumentError(
                f"timeout must be a number of seconds > 0, got {timeout!r}."
            )
        verify = self.verify
        if verify not in (None, "first") and (
            not isinstance(verify, numbers.Integral) or verify is True or verify < 1
        ):
            raise ArgumentError(
                f"verify must be 'first', an int >= 1 (every so many steps), or None, got {verify!r}."
            )
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ArgumentError(
                    f"{name} must be {' or '.join(map(repr, known))}, got {getattr(self, name)!r}."
                )
        if self.readers is not None and not callable(
            getattr(self.readers, "pool", None)
        ):
            raise ArgumentTypeError(
                f"readers must be a paddle_shard.RayReaders, or None, got {self.readers!r}."
            )
        items = self.dense_tensor_idx
        if items is not None and not (
            isinstance(items, list | tuple)
            and all(
                isinstance(one, list | tuple) and all(isinstance(i, int) for i in one)
                for one in items
            )
        ):
            raise ArgumentError(
                "dense_tensor_idx must be a list with a list of item numbers for each field, such as [[], [0]], "
                f"got {items!r}."
            )
        sizes = self.batch_size
        if sizes is not None and not (
            _are_int_pairs(sizes)
            and all(first >= 0 and rows >= 1 for first, rows in sizes)
        ):
            raise ArgumentError(
                "batch_size must be a list of (first sample of the run, rows of the global batch) such as [(0, 256), "
                f"(500_000, 512)], got {sizes!r}. One size for the whole run is the DataLoader's own batch_size."
            )
        ranges = self.skip_steps
        if ranges is not None and not (
            _are_int_pairs(ranges) and all(0 <= first < end for first, end in ranges)
        ):
            raise ArgumentError(
                "skip_steps must be a list of (first step, step after the last) of the run, such as [(1200, 1230)], "
                f"got {ranges!r}."
            )

    @property
    def skip_ranges(self) -> Ranges:
        """The skipped steps of the run."""
        return union((int(first), int(end)) for first, end in self.skip_steps or ())

    def refuse(self, **reasons: str) -> None:
        """Refuse options that this data cannot have.

        Args:
            reasons: For each of the options by name, a sentence for the error.

        Raises:
            ArgumentError: One of them is given.
        """
        for name, why in reasons.items():
            value = getattr(self, name)
            if value is not None:
                raise ArgumentError(f"{name}={value!r:.60}: {why} Leave {name} out.")


def _are_int_pairs(value: Any) -> bool:
    """Return whether an argument is a sequence of pairs of ints."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(entry, Sequence) and len(entry) == 2 for entry in value)
        and all(
            isinstance(n, numbers.Integral) and not isinstance(n, bool)
            for entry in value
            for n in entry
        )
    )


def checked_prefetch(options: LoaderOptions) -> int:
    """Return how many batches a thread keeps ready: as Paddle's reader, two if `use_buffer_reader` is set.

    Raises:
        ArgumentError: `prefetch` is not an int >= 0.
    """
    prefetch = options.prefetch
    if prefetch is None:
        return 2 if options.dataloader.use_buffer_reader else 0
    if (
        isinstance(prefetch, bool)
        or not isinstance(prefetch, numbers.Integral)
        or prefetch < 0
    ):
        raise ArgumentError(f"prefetch must be None or an int >= 0, got {prefetch!r}.")
    return int(prefetch)
