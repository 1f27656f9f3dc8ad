"""How are the samples of a request read and collated, whatever they do?"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddle_shard.collate import collate
from paddle_shard.plan.handlers import raise_if_a_handlers, raised_by_a_handler
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.local_batch import arrays_of
from paddle_shard.reading.parcel import is_tensor
from paddle_shard.reading.request import ReadRequest
from paddle_shard.reading.skipping import Patched, Usual, read_skipping, spread_over, usual_of
from paddle_shard.samplers.randomness import Generator, Snapshot, kept, restore, snapshot
from paddle_shard.sources.arrays import ArrayDataset
from paddle_shard.tree import TEXT, leaves

AGAIN = object()
"""Returned instead of a batch that the caller must read once more."""
_ALARMS = 3
_UNKNOWN = object()


class BatchReader:
    """Reads a request's samples from a data set: the same bytes in every process that is asked.

    A data set with `__getitems__` is asked for all of them at once: a list is one sample for each index, as in
    torch, and is collated; anything else is the batch already.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        generators: Sequence[Generator],
        *,
        skip_errors: bool = False,
        items_are_batches: bool = False,
    ) -> None:
        """Set up the reader.

        Args:
            dataset: Has `__getitem__`.
            collate_fn: The user's, or None to stack the samples with `collate`.
            generators: Global generators to seed before each sample.
            skip_errors: True if a sample that cannot be read is no failure. Its row then holds another sample, and
                the result is a `Patched`.
            items_are_batches: True if every item of the data set is a whole batch.
        """
        self.dataset, self._skip_errors = dataset, skip_errors
        self._collate_fn = collate_fn
        self._generators = generators
        self._read_many = getattr(dataset, "__getitems__", None)
        self._named: Callable[[Any], Any] = getattr(dataset, "sample_name", _itself)
        self.draws: bool | None = None
        """True if reading is known to draw from the generators, False if not; None: the next batch is watched."""
        self._alarms = 0
        self._drawn_beside: tuple[ReadRequest, Snapshot, list[Any]] | None = None
        """The request that another thread has read and drawn for, the generators before, and their marks after."""
        self._usual: Any = _UNKNOWN
        stacks = self._read_many is None or (type(dataset) is ArrayDataset and dataset.gathers)
        self.makes_arrays = collate_fn is None and stacks and not items_are_batches
        """True if nothing else refers to the arrays of a batch: they were stacked or gathered here."""

    def read(self, request: ReadRequest, worker: int | None) -> Any | ReadFailure:
        """Return the batch of a request, or its failure.

        This changes the global generators. Callers in a user's process restore them.
        """
        at: dict[str, Any] = {"what": "reading", "index": None}
        try:
            if self.draws is False:
                # Seeding costs more than many a sample. Should something draw after all, the batch is read again.
                before = self.marks()
                batch = self._batch(request, at, _seed_nothing)
                if self.marks() == before:
                    return batch
                self.draws = True
            if self.draws:
                return self._batch(request, at, lambda index: self._seed(request, index))
            watch = _Watch(self.marks)
            batch = self._batch(request, at, lambda index: watch.around(self._seed, request, index))
            self.draws = watch.changed()
            return batch
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, which would end a worker without a word
            if worker is None and raised_by_a_handler(error):
                raise
            indices = () if self._named is _itself else tuple(map(self._named, request.indices))
            return ReadFailure.of(error, worker=worker, indices=indices, **at)

    def read_freely(self, request: ReadRequest) -> Any:
        """Read a request in another thread than the caller's, if reading is known to draw nothing.

        Nothing is seeded. The result is `AGAIN`, and the caller must read the request, if anything was drawn, perhaps
        by the caller; or if reading failed, perhaps because of the thread (SQLite's connections belong to one thread).
        """
        at: dict[str, Any] = {"what": "reading", "index": None}
        before = snapshot(self._generators)
        marks = [mark for _, _, mark in before]
        try:
            batch = self._batch(request, at, _seed_nothing)
            if self.marks() == marks:
                return batch
        except BaseException as error:
            raise_if_a_handlers(error)
            logging.getLogger(__name__).debug("a batch is read again, by the caller", exc_info=True)
        if self.marks() != marks:
            self._drawn_beside = request, before, self.marks()
        self._alarms += 1  # or a training loop that draws at every step would have every batch read twice
        self.draws = True if self._alarms > _ALARMS else None
        return AGAIN

    def undo_draws(self, request: ReadRequest) -> None:
        """Restore the user's generators after another thread has drawn from them, if nothing but the data set did.

        Reading the request once more tells: it leaves the generators where the other thread has left them.
        """
        if self._drawn_beside is None:
            return
        (drawn_for, before, after), self._drawn_beside = self._drawn_beside, None
        if drawn_for is not request or self.marks() != after:
            return  # the user has drawn since
        now = snapshot(self._generators)
        alone = False
        try:
            restore(before)
            self._batch(request, {}, _seed_nothing)
        except Exception as error:
            raise_if_a_handlers(error)
        finally:
            alone = self.marks() == after
            restore(before if alone else now)

    def read_several(self, requests: Sequence[ReadRequest], take: Callable[[Any], bool]) -> int:
        """Read several requests, if reading is known to draw nothing; return how many batches are good.

        The requests after these must be read again. If anything was drawn after all, no batch is good.

        Args:
            requests: The requests; a failure ends the reading.
            take: Is given each batch before the next one is read, and returns True to continue.
        """
        num_good, at, before = 0, dict[str, Any](), self.marks()
        try:
            for request in requests:
                if not take(self._batch(request, at, _seed_nothing)):
                    break
                num_good += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or raised_by_a_handler(error):
                raise
        if self.marks() == before:
            return num_good
        self.draws = True
        return 0

    def _seed(self, request: ReadRequest, index: Any) -> None:
        self._seed_all(request.sample_seed(index))

    def _seed_all(self, seed: int) -> None:
        for generator in self._generators:
            generator.seed(seed)

    def marks(self) -> list[Any]:
        """Return a value that every draw from the generators changes."""
        return [generator.mark() for generator in self._generators]

    def _batch(self, request: ReadRequest, at: dict[str, Any], seed: Callable[[Any], None]) -> Any:
        """Read and collate; `at` tells what is being done, for messages."""
        if not self._skip_errors:
            return self._whole_batch(request, at, seed)
        if request.item_is_batch:
            return Patched(self._whole_batch(request, at, seed), [])
        usual = self._usual_of(request)
        try:
            if self._read_many is not None:
                return Patched(self._whole_batch(request, at, seed, usual), [])
        except Exception as error:
            raise_if_a_handlers(error)
            if not hasattr(self.dataset, "__getitem__"):
                raise

        def read(index: Any) -> Any:
            seed(index)
            return self.dataset[index]

        at.update(what=f"reading any of {len(request.indices)} samples", index=None)
        indices = request.indices.tolist() if isinstance(request.indices, np.ndarray) else request.indices
        return read_skipping(indices, read, self._collate_of(request), usual, self._named)

    def _collate_of(self, request: ReadRequest) -> Callable[[list[Any]], Any]:
        return lambda samples: collate_rows(samples, self._collate_fn, rows_are_split=request.rows_are_split)

    def _usual_of(self, request: ReadRequest) -> Usual | None:
        """Return what most samples are like, from some that are spread evenly over the data set."""
        if self._usual is _UNKNOWN:
            with kept(self._generators):
                samples = spread_over(self.dataset, self._seed_all)
                self._usual = usual_of(samples, self._collate_of(request), self._collate_fn, request)
        found: Usual | None = self._usual
        return found

    def _whole_batch(
        self, request: ReadRequest, at: dict[str, Any], seed: Callable[[Any], None], usual: Usual | None = None
    ) -> Any:
        indices = request.indices
        if self._read_many is not None and not request.item_is_batch:
            at.update(what=f"reading {len(indices)} samples at once", index=None)
            if isinstance(indices, np.ndarray):
                indices = indices if isinstance(self.dataset, ArrayDataset) else indices.tolist()
            seed(int(indices[0]) if isinstance(indices, np.ndarray) else indices[0])
            samples = self._read_many(indices)
            if not isinstance(samples, list):
                return samples if self._collate_fn is None else self._collate_fn(samples)
            if len(samples) != len(indices):
                raise ValueError(
                    f"__getitems__ returned {len(samples)} samples for {len(indices)} indices; return one for each, or "
                    "a batch that is no list."
                )
        else:
            if isinstance(indices, np.ndarray):
                indices = indices.tolist()
            samples = []
            add, dataset = samples.append, self.dataset
            try:
                if seed is _seed_nothing:
                    for index in indices:
                        add(dataset[index])
                else:
                    for index in indices:
                        seed(index)
                        add(dataset[index])
            except BaseException:
                if len(samples) < len(indices):  # otherwise a signal handler has raised after the last sample
                    index = indices[len(samples)]
                    named = self._named(index)
                    at.update(what=f"reading sample {named!r}", index=named)
                raise
        at.update(what=f"collating {len(samples)} samples", index=None)
        if request.item_is_batch:
            return samples[0] if self._collate_fn is None else self._collate_fn(samples[0])
        batch = self._collate_of(request)(samples)
        if usual is not None and not usual.allows(batch):
            raise ValueError("a row is not like those of most samples")
        return batch


def _itself(index: Any) -> Any:
    """Return the index, the name of a sample of most data sets."""
    return index


def _seed_nothing(index: Any) -> None:
    """Leave the generators as they are."""


class _Watch:
    """Finds out if anything is drawn between two seeds."""

    def __init__(self, marks: Callable[[], list[Any]]) -> None:
        self._marks = marks
        self._seeded: list[Any] | None = None
        self._changed = False

    def around(self, seed: Callable[..., None], *args: Any) -> None:
        self._changed = self.changed()
        seed(*args)
        self._seeded = self._marks()

    def changed(self) -> bool:
        """Return True if something was drawn so far, or if that is not known."""
        if self._seeded is None:
            return self._changed
        return self._changed or None in self._seeded or self._marks() != self._seeded


RAGGED = (
    "Give shard_dataloader pad_to='longest' and pad_values={field: value}: rows are padded to the longest of all "
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
