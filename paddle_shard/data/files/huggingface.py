"""A streamed data set of Hugging Face `datasets` as a source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from paddle_shard.data.files.files import (
    FileVersion,
    needs,
    within_their_folder,
)
from paddle_shard.data.iterable import set_epoch_of
from paddle_shard.data.stages.stage import (
    Opening,
    PartsSource,
    Samples,
)
from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError
from paddle_shard.plan.seeding import derive_key

_SEEDS = 1 << 64
"""Seeds of this size and above come from the operating system and differ between processes."""


class HuggingFaceSource(PartsSource):
    """A `datasets.IterableDataset`: part p of P is its `.shard(num_shards=P, index=p)`.

    The epoch is set on each part, so that the data set's own `shuffle` gives another order in each epoch. This order
    depends on the library's version and on the data set's own seed, not on the loader's seed. A resumed run reads the
    delivered samples again and drops them, since the library's own state leaves out what its shuffle buffer held.

    With `with_format("numpy")`, lists become arrays. Without a format, a list is a structure of single numbers.

    The library's own `shuffle` reads in threads, so put a random `map` after it. On Parquet files, it also sleeps 5 s
    when it ends, to avoid a bug of Arrow; for several parts of a reader, these times add up. A stream's own
    `shuffle(window)` has neither problem, and depends on the loader's seed.
    """

    def __init__(self, dataset: Any) -> None:
        """Set up the source.

        Args:
            dataset: A streamed data set (`load_dataset(..., split=, streaming=True)` or
                `to_iterable_dataset(num_shards=)`). It may be mapped, filtered and shuffled. A `shuffle` needs a seed.
                The data set is not changed.

        Raises:
            MissingDependencyError: datasets is not installed.
            ArgumentTypeError: `dataset` is not a `datasets.IterableDataset`.
            SplitError: The data set was split by node already.
            ArgumentError: The data set is shuffled without a seed, or has a state.
        """
        with needs("huggingface"):
            import datasets  # type: ignore[import-untyped]
        if not isinstance(dataset, datasets.IterableDataset):
            raise ArgumentTypeError(
                f"dataset must be a datasets.IterableDataset, got {type(dataset).__name__}. Choose a split: "
                "load_dataset(..., split='train', streaming=True); or give data with an index to paddle.io.DataLoader."
            )
        split = dataset._distributed
        if split is not None:
            raise SplitError(
                f"dataset was split by split_dataset_by_node (rank {split.rank} of {split.world_size}) already, so "
                "most of it would be missing. Give it unsplit: it is cut into parts here."
            )
        if dataset._starting_state_dict is not None:
            raise ArgumentError(
                "dataset has a state (load_state_dict), which would be lost. Give a fresh one; the loader's own "
                "state_dict says where the run resumes."
            )
        self._generators = list(_generators(dataset._ex_iterable))
        self._dataset = dataset
        self.num_shards = int(dataset.num_shards)

    def fingerprint(self) -> list[Any]:
        """Return the number of shards, and a digest of the library's own shuffles, takes and skips."""
        digest = derive_key(self._generators, size=16).hex()
        return [["huggingface", self.num_shards, digest]]

    def files_identity(self) -> list[FileVersion]:
        """Return the names of the shards of its generators: files or numbers."""
        names = [
            str(shard)
            for step in _steps(self._dataset._ex_iterable)
            for argument in getattr(step, "kwargs", {}).values()
            if isinstance(argument, list)
            for shard in argument
            if isinstance(shard, str | int)
        ]
        return [(name, 0, "") for name in within_their_folder(names)]

    def part(self, part: int, opening: Opening) -> Samples:
        """See `PartsSource`."""
        opening.rng.seed(opening.key(part, "source"))
        # A copy, so that its epoch can be set.
        dataset = self._dataset.shard(num_shards=opening.num_parts, index=part)
        set_epoch_of(dataset, opening)
        yield from opening.seeded(iter(dataset), part)


def _steps(step: Any) -> Iterator[Any]:
    """Yield a step of a data set and what it holds; the last step first."""
    yield step
    for value in vars(step).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if type(item).__module__.startswith("datasets.iterable_dataset"):
                yield from _steps(item)
            else:
                yield item


def _generators(step: Any) -> Iterator[str]:
    """Yield the states of the generators of a data set's steps, and what is taken or skipped; the last step first."""
    for item in _steps(step):
        number = getattr(item, "n", None)
        if hasattr(item, "ex_iterable") and isinstance(number, int):
            # take() or skip(): ranks must not cut by these.
            yield f"{type(item).__name__} {number}"
        if isinstance(item, np.random.Generator):
            entropy = getattr(item.bit_generator.seed_seq, "entropy", None)
            if entropy is None or (
                isinstance(entropy, int) and entropy >= _SEEDS
            ):
                raise ArgumentError(
                    "dataset is shuffled without a seed, so each rank would have another order, with samples twice "
                    "and samples missing. Give one below 2**64: dataset.shuffle(seed=0)."
                )
            yield repr(item.bit_generator.state)
