"""How are the samples of a step read and collated, whatever they do?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paddle_shard.collate import collate
from paddle_shard.errors import described
from paddle_shard.plan.handlers import raise_if_a_handlers, raised_by_a_handler
from paddle_shard.plan.seeding import derive_seed, mix
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.local_batch import arrays_of
from paddle_shard.reading.parcel import is_tensor
from paddle_shard.reading.skipping import TRIED, collate_skipping
from paddle_shard.samplers.randomness import Generator, kept, restore, states
from paddle_shard.say_once import say_once
from paddle_shard.sources.arrays import ArrayDataset
from paddle_shard.tree import TEXT, leaves


class Reader(Protocol):
    """Reads what a step asks for, in a worker or in the main process."""

    dataset: Any
    """The data set that the user's functions see."""

    generators: Sequence[Generator]
    """Global generators to seed before each call of the user's code."""

    @property
    def draws(self) -> bool | None:
        """True if reading is known to draw random numbers, False if not; None: not known."""

    @property
    def owns_arrays(self) -> bool:
        """True if nothing else refers to the arrays of a batch, so that tensors may share their memory."""

    def read(self, asked: Any, worker: int | None) -> Chunk | ReadFailure:
        """Return what was asked for: of a `Step`, or of one of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HowToRead:
    """What a reader of data with an index must know of its loader."""

    generators: Sequence[Generator]
    """Global generators to seed before each call of the user's code."""
    seed: int = 0
    """Seed of the run."""
    skip_errors: bool = False
    """True if a sample that cannot be read becomes an invalid row."""
    items_are_batches: bool = False
    """True if an item of the data set is a whole batch (`batch_size=None`)."""
    several: bool = False
    """True if other data ranks read other rows, so that a row may not depend on its neighbours."""
    split: bool = False
    """True if the loader of every data rank has rows of its own."""


class DrewBesideError(Exception):
    """Another thread than the caller's read, and something drew random numbers or reading failed."""

    def __init__(self, drew: bool) -> None:
        super().__init__()
        self.drew = drew


class IdReader:
    """Reads the samples of a step from a data set with an index: the same bytes in every process that is asked.

    The generators are seeded for every sample. Most data sets draw nothing, and seeding costs more than reading small
    samples: if the first batch drew nothing, later ones are read without seeds, with one look at the generators before
    and after. If one of them draws after all, it is read once more, with seeds, as are all from there on.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None, how: HowToRead) -> None:
        """Set up the reader.

        Args:
            dataset: The data set.
            collate_fn: The user's function, or None to stack the samples with `collate`.
            how: What it must know of its loader.
        """
        self.dataset, self._collate_fn, self._how = dataset, collate_fn, how
        self._read_many = getattr(dataset, "__getitems__", None)
        self._name_of: Callable[[Any], Any] = getattr(dataset, "sample_name", _itself)
        self.draws: bool | None = None
        self.generators = how.generators
        self._stand_in: Any = None
        self._seen: Any = None
        """The generators after the last batch."""
        self._beside: tuple[Any, Any] | None = None
        """The generators before and after another thread's read during which something drew."""
        stacks = self._read_many is None or (type(dataset) is ArrayDataset and dataset.gathers)
        self.owns_arrays = collate_fn is None and stacks and not how.items_are_batches

    def read(self, asked: Step, worker: int | None, *, beside: bool = False) -> Chunk | ReadFailure:
        """Return the rows of a step, or their failure.

        Args:
            asked: The step.
            worker: Number of the worker process; None: the main process, whose generators stay as they are.
            beside: True if another thread than the caller's reads. It may not touch the generators.

        Raises:
            DrewBesideError: `beside`, and something drew: the caller's thread must read this step.
        """
        generators, at = self.generators, dict[str, Any](what="reading", index=None)
        # In a worker, nothing else draws: one look a batch is enough.
        before = states(generators) if worker is None or self._seen is None else self._seen
        touched, failed = True, None
        try:
            if self.draws is False:
                try:
                    found = self._chunk(asked, at, seeded=False)
                except BaseException as error:  # if something drew, it may be because of what was drawn
                    if isinstance(error, KeyboardInterrupt) or (worker is None and raised_by_a_handler(error)):
                        raise
                    failed = error
                after = self._seen = states(generators)
                touched = after != before
                if beside and (touched or failed is not None):  # it may have failed because of the thread
                    self._beside = before, after
                    raise DrewBesideError(touched)
                if not touched:
                    if failed is not None:
                        raise failed
                    return found
                if self._beside is not None and self._beside[1] == before:
                    before = self._beside[0]  # it was this data set that drew beside the loop, and nothing else since
                self.draws = True
                say_once(
                    "%s draws random numbers for some samples, and did not for the first ones. From now on it is "
                    "seeded for each sample and, if there are no workers, read on the thread of the training loop.",
                    type(self.dataset).__name__,
                )
            return self._chunk(asked, at, seeded=True)
        except (KeyboardInterrupt, DrewBesideError):
            raise
        except BaseException as error:  # also SystemExit, which would end a worker without a word
            if worker is None and raised_by_a_handler(error):
                raise
            return ReadFailure.of(error, worker=worker, indices=tuple(map(self._name_of, asked.ids)), **at)
        finally:
            failed = None  # its frames hold this one
            if touched and worker is None and not beside:
                restore(generators, before)

    def _seed(self, *purpose: Any) -> None:
        seed = mix(*purpose) if isinstance(purpose[1], int) else derive_seed(*purpose)
        for generator in self.generators:
            generator.seed(seed)

    def _chunk(self, step: Step, at: dict[str, Any], *, seeded: bool) -> Chunk:
        """Read and collate; `at` tells what is being done, for messages.

        The first batch shows whether reading draws.
        """
        watched, drew, begun = self.draws is None, False, None
        how, key = self._how, derive_seed("sample", self._how.seed, step.epoch)
        ids = step.ids.tolist() if isinstance(step.ids, np.ndarray) else step.ids
        if self._read_many is not None and not how.items_are_batches:
            try:
                if seeded:
                    self._seed(key, ids[0])
                begun = states(self.generators) if watched else None
                found = Chunk(self._read_at_once(step, ids, at))
                if watched:
                    self.draws = states(self.generators) != begun
                return found
            except Exception as error:
                raise_if_a_handlers(error)
                if not how.skip_errors or not hasattr(self.dataset, "__getitem__"):
                    raise
        samples, failed = list[Any](), dict[int, str]()
        read, catches = self.dataset.__getitem__, Exception if how.skip_errors and not how.items_are_batches else ()
        for row, index in enumerate(ids):
            if seeded:
                self._seed(key, index)
            if watched and row + 1 == len(ids):  # looking costs more than reading most samples: the last one must tell
                begun = states(self.generators)
            try:
                samples.append(read(index))
            except catches as error:
                raise_if_a_handlers(error)
                samples.append(None)
                failed[row] = described(error)
            except BaseException:
                named = self._name_of(index)
                at.update(what=f"reading sample {named!r}", index=named)
                raise
        at.update(what=f"collating {len(samples)} samples", index=None)
        if watched:
            drew = states(self.generators) != begun
        if seeded:
            self._seed(key, "collate", step.number)
        begun = states(self.generators) if watched else None
        found = self._collated_rows(samples, failed, ids, step, key)
        if watched:
            self.draws = drew or states(self.generators) != begun
        return found

    def _collated_rows(
        self, samples: list[Any], failed: dict[int, str], ids: Sequence[Any], step: Step, key: int
    ) -> Chunk:
        """Return the rows of samples, with those in `failed` replaced."""
        how = self._how
        if how.items_are_batches:
            return Chunk(samples[0] if self._collate_fn is None else self._collate_fn(samples[0]))
        if not how.skip_errors:
            return Chunk(self._collated(samples, step))

        def name_of(row: int) -> str:
            return f"sample {self._name_of(ids[row])!r}"

        value = collate_skipping(
            samples, failed, lambda rows: self._collated(rows, step), lambda: self._readable(key, failed), name_of
        )
        return Chunk(value, skipped=[(row, f"{name_of(row)}: {why}") for row, why in sorted(failed.items())])

    def _read_at_once(self, step: Step, ids: Sequence[Any], at: dict[str, Any]) -> Any:
        """Return the batch of a data set that reads several samples at once."""
        assert self._read_many is not None
        at.update(what=f"reading {len(ids)} samples at once", index=None)
        samples = self._read_many(step.ids if isinstance(self.dataset, ArrayDataset) else ids)
        if not isinstance(samples, list):
            return samples if self._collate_fn is None else self._collate_fn(samples)
        if len(samples) != len(ids):
            raise ValueError(
                f"__getitems__ returned {len(samples)} samples for {len(ids)} indices; return one for each, or "
                "a batch that is no list."
            )
        at.update(what=f"collating {len(samples)} samples", index=None)
        return self._collated(samples, step)

    def _collated(self, samples: Sequence[Any], step: Step) -> Any:
        how = self._how
        split = how.several and (how.split or len(step.ids) < step.num_rows)
        return collate_rows(samples, self._collate_fn, rows_are_split=split)

    def _readable(self, key: int, failed: dict[int, str]) -> Any:
        """Return the first sample of the data set that can be read: the same one on every rank."""
        if self._stand_in is None:
            with kept(self.generators):  # seeding is not drawing
                for index in range(min(TRIED, len(self.dataset))):
                    self._seed(key, index)
                    try:
                        self._stand_in = self.dataset[index]
                        return self._stand_in
                    except Exception as error:
                        raise_if_a_handlers(error)
            raise ValueError(f"{next(iter(failed.values()))}; and no other sample was read that its row could hold")
        return self._stand_in


RAGGED = (
    "Give shard_dataloader pad_to={field: ('longest', value)}: rows are padded to the longest of all "
    "ranks. Or pad to a fixed length in the collate_fn; or make whole global batches, which every rank reads: "
    ".batch(B).map(collate_fn) of a Stream, or items that are batches."
)
"""The ways out for a collate_fn that pads to the longest row."""


def collate_rows(samples: Sequence[Any], collate_fn: Callable[[Any], Any] | None, *, rows_are_split: bool) -> Any:
    """Return samples as rows of one batch.

    Args:
        samples: One or more.
        collate_fn: The user's, or None to stack them with `collate`.
        rows_are_split: True if other rows of the global batch are collated elsewhere.

    Raises:
        ValueError: The rows are split, and a row's shape depends on its neighbours.
    """
    if collate_fn is None:
        return collate(samples, _stack_tensors)
    batch = collate_fn(samples)
    if rows_are_split:
        _refuse_lengths_of_neighbours(samples, batch, collate_fn)
    return batch


def _stack_tensors(samples: Sequence[Any]) -> Any:
    """Stack tensors as arrays: the framework's own operators are not safe in a forked worker."""
    if not all(is_tensor(sample) for sample in samples):
        raise TypeError(f"cannot stack {type(samples[0]).__name__}; give the loader a collate_fn.")
    return np.stack([sample.numpy() for sample in samples])


def _refuse_lengths_of_neighbours(samples: Sequence[Any], batch: Any, collate_fn: Callable[[Any], Any]) -> None:
    """Raise if a row's shape depends on its neighbours, since other data ranks would get another length.

    A collate that pads to its longest row is found by collating the smallest sample alone. Lengths that
    agree within every rank and differ between them cannot be seen from here.
    """
    sizes = [_size(sample) for sample in samples]
    if min(sizes) == max(sizes):
        return
    smallest = samples[sizes.index(min(sizes))]
    try:
        alone = collate_fn([smallest])
    except Exception as error:  # a collate that wants several samples: nothing can be told
        raise_if_a_handlers(error)
        return
    together, single = _row_shapes(batch), _row_shapes(alone)
    if together != single:
        raise ValueError(
            f"the collate_fn pads to the longest row of what it is given: row shapes {together} for this "
            f"slice, but {single} for its smallest sample alone. Other data ranks collate other rows, so the "
            f"global batch would be ragged. {RAGGED}"
        )


def _size(sample: Any) -> int:
    return sum(
        len(leaf) if isinstance(leaf, TEXT) else math.prod(getattr(leaf, "shape", ())) for leaf in leaves(sample)
    )


def _row_shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(array.shape[1:]) for array in arrays_of(batch)]


def _itself(index: Any) -> Any:
    """Return the index: the name of a sample of most data sets. Not a lambda, which could not be sent to a worker."""
    return index
