"""Readers: read and collate the samples of a step, the same bytes in every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.core.collate import (
    cannot_stack,
    check_dtypes,
    collate,
    reject_uint16,
    stack,
)
from paddle_shard.core.randomness import Generator
from paddle_shard.core.trees import leaves, map_leaves
from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.arrays import ArrayDataset
from paddle_shard.data.sample_rng import SampleRng
from paddle_shard.data.stages.stage import Unreadable
from paddle_shard.errors import described
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.digest import WHOLE, digest
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.sample_threads import SampleThreads
from paddle_shard.reading.tensors import as_array, is_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HowToRead:
    """Settings of the loader that a reader needs."""

    generators: Sequence[Generator]
    """Global generators to seed before each call of the user's code."""
    seed: int = 0
    """Seed of the run."""
    skip_errors: bool = False
    """True if a sample that cannot be read becomes an invalid row."""
    items_are_batches: bool = False
    """True if an item of the data set is a whole batch (`batch_size=None`)."""
    of_rank: tuple[int, ...] = ()
    """(data rank,) if what a sample draws is its own on each."""
    num_threads: int = 0
    """Threads that read samples at the same time, in each process that reads; 0: none."""


class DigestRequest(NamedTuple):
    """A request for the digests of some samples."""

    samples: Sequence[Any]


_NEVER_THE_SAME = (
    "samples of %s are not the same each time they are read, so ranks, or a run that is resumed, may hold other data. "
    "Use the global random generators of numpy, Python, Paddle or torch, which are seeded for each sample."
)


class Reader:
    """Reads the samples of a step: the same bytes in every process."""

    makes_tensors: bool | None = None
    """True if the first sample held Paddle's tensors in host memory; None: it is not known."""
    uses_paddle: bool | None = None
    """True if the first sample or batch held Paddle's tensors; None: it is not known."""
    owns_arrays = False
    """True if nothing else refers to the arrays of a batch, so that tensors may share their memory."""
    num_threads = 0
    """Number of threads that read samples; 0: the caller reads them."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        how: HowToRead,
    ) -> None:
        """Set up the reader.

        Args:
            dataset: The data set that the user's functions see.
            collate_fn: The user's function, or None to stack the samples with `collate`.
            how: What it must know of its loader.
        """
        self.dataset = dataset
        self._how = how
        self._collate_fn = collate_fn
        self._collate = partial(collate, stack_other=_stack_tensors)
        if collate_fn is not None:
            self._collate = partial(_call_and_check, collate_fn)
        self.rng = SampleRng(how.generators, getattr(dataset, "uses_rng", None))
        self._action = ""
        """The present action, such as "reading sample 7", for messages."""
        self._index: Any = None
        """The sample to which it is done; None if it is no single one."""
        self._placeholder: Any = None
        """The sample that was read last, for rows of which no sample can be read (`on_error="skip"`)."""

    def read(
        self, request: Any, worker: int | None, *, is_first: bool = False
    ) -> Any:
        """Return what was requested, or its failure.

        Args:
            request: A `Step`, or one of its parts; or a `DigestRequest`.
            worker: Number of the worker process; None: the main process, whose generators stay as they are.
            is_first: True for the first batch of an epoch iterator, which shows whether reading uses the global
                generators.
        """
        if isinstance(request, DigestRequest):
            return self.digests(request.samples)
        looks = self.rng.looks and (
            is_first or len(self.rng.unread_sources) > 0
        )
        if not (self.rng.seeds or looks):
            return self._read(request, worker)
        with self.rng.reading(look=looks, keep=worker is None):
            return self._read(request, worker)

    def _read(self, request: Any, worker: int | None) -> Chunk | ReadFailure:
        self._action = "reading"
        self._index = None
        # SystemExit would end a worker silently.
        errors = Exception if worker is None else BaseException
        try:
            answer = self._rows(request)
            if self.uses_paddle is None:
                self.uses_paddle = self.makes_tensors or any(
                    isinstance(leaf, paddle.Tensor)
                    for leaf in leaves(answer.value)
                )
            return answer
        except KeyboardInterrupt:
            raise
        except errors as error:
            self._explain(error, request)
            return ReadFailure.of(
                error, worker=worker, what=self._action, index=self._index
            )

    def begin(self, request: Any) -> None:
        """Begin to read a request whose turn comes later, if threads read and nothing has to be seeded."""

    def digests(self, samples: Sequence[Any]) -> list[int]:
        """Return a digest of each of some samples, by which ranks and later runs know that they have the same data.

        Two reads of a sample with the same seed must agree; else its digest is 0: it is not known.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Drop what is open."""

    def _rows(self, request: Any) -> Chunk:
        """Read and collate."""
        raise NotImplementedError

    def _explain(self, error: BaseException, request: Any) -> None:
        """Add to the action which sample of the request has failed."""

    def _collated(
        self, samples: Sequence[Any], name_of: Callable[[int], str]
    ) -> tuple[Any, list[tuple[int, str]]]:
        """Return the batch of some samples, and (row, reason) of those that another one replaces (`on_error="skip"`).

        Args:
            samples: One for each row; an `Unreadable` if it could not be read.
            name_of: Returns the name of a row's sample, for messages.

        Raises:
            ValueError: No sample can be read; or samples that can each be collated alone do not fit together, which is
                an error of the data or of the collate function that skipping would hide.
        """
        rows = self._filled(samples)
        try:
            value = self._collate(rows)
        except Exception as error:
            # The error is not kept: its frames hold the iterator, which would not end.
            reason = described(error).removeprefix("ValueError: ").rstrip(".")
        else:
            self._placeholder = rows[0]
            return value, [
                (row, f"{name_of(row)}: {sample.why}")
                for row, sample in enumerate(samples)
                if isinstance(sample, Unreadable)
            ]
        collatable = list(map(self._collated_alone, samples))
        if all(map(is_, collatable, samples)):
            raise ValueError(
                f"{reason}. Each sample can be collated alone, but they do not fit together. on_error='skip' skips "
                "samples that raise; rows that differ in shape or fields are an error. Mend them in the data set or in "
                "the collate_fn."
            )
        return self._collated(collatable, name_of)

    def _filled(self, samples: Sequence[Any]) -> list[Any]:
        """Return samples of which a readable one, or else the placeholder, replaces those that are not."""
        readable = [x for x in samples if not isinstance(x, Unreadable)]
        if not readable:
            if self._placeholder is None:
                raise ValueError(
                    f"{samples[0].why}; and no sample was read yet that could replace it"
                )
            readable = [_zeros_like(self._placeholder)]
        return [
            readable[0] if isinstance(x, Unreadable) else x for x in samples
        ]

    def _collated_alone(self, sample: Any) -> Any:
        """Return a sample, or an `Unreadable` if it cannot be collated alone."""
        if not isinstance(sample, Unreadable):
            try:
                self._collate([sample])
            except Exception as error:
                return Unreadable(described(error))
        return sample

    def _whole_batch(self, item: Any) -> Any:
        """Return the batch of an item that is a whole batch."""
        return _call_and_check(self._collate_fn or _itself, item)


class IdReader(Reader):
    """Reads the samples of a step from a data set with an index."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        how: HowToRead,
    ) -> None:
        """See `Reader`."""
        super().__init__(dataset, collate_fn, how)
        in_memory = type(dataset) is ArrayDataset and dataset.gathers
        if in_memory and collate_fn is None:
            # Arrays in memory use no generator, so nothing has to be looked at.
            self.rng = SampleRng(())
        self._read_many = getattr(dataset, "__getitems__", None)
        if how.items_are_batches:
            self._read_many = None
        elif isinstance(dataset, ArrayDataset) and collate_fn is not None:
            # A user's function gets a list of samples, as Paddle gives it.
            self._read_many = dataset.samples
        self._name_of: Callable[[Any], Any] = getattr(
            dataset, "sample_name", _itself
        )
        if self._read_many is None:
            self.num_threads = how.num_threads
        self._threads = SampleThreads(self.num_threads)
        self._begun: dict[int, list[Future[Any]]] = {}
        """Step of the epoch iterator -> the samples that threads read for it."""
        stacks = self._read_many is None or in_memory
        self.owns_arrays = (
            collate_fn is None and stacks and not how.items_are_batches
        )

    def begin(self, request: Step) -> None:
        """See `Reader`."""
        number = request.number
        is_begun = number in self._begun
        if self.num_threads and not (self.rng.seeds or is_begun):
            ids = request.ids
            if isinstance(ids, np.ndarray):
                ids = ids.tolist()
            self._begun[number] = self._threads.read(
                self.dataset.__getitem__, ids
            )

    def close(self) -> None:
        """See `Reader`."""
        self._begun.clear()
        self._threads.close()

    def digests(self, samples: Sequence[Any]) -> list[int]:
        """See `Reader`."""
        return list(map(self._digest, samples))

    def _digest(self, sample: Any) -> int:
        digests = []
        for _ in range(2):
            with self.rng.reading(look=False, keep=True):
                self.rng.seed(_key_of("sample", self._how.seed, 0), sample)
                try:
                    digests.append(digest(self.dataset[sample], 0, WHOLE))
                except Exception:  # it is raised when it is its turn
                    return 0
        if digests[0] == digests[1]:
            return digests[0]
        warn_once(_NEVER_THE_SAME, type(self.dataset).__name__)
        return 0

    def _rows(self, request: Step) -> Chunk:
        ids = request.ids
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        key = _key_of(
            "sample", self._how.seed, request.epoch, *self._how.of_rank
        )
        if self._read_many is None:
            return self._one_by_one(request, ids, key)
        try:
            return self._at_once(request, ids, key)
        except Exception:
            if not self._how.skip_errors or not hasattr(
                self.dataset, "__getitem__"
            ):
                raise
            return self._one_by_one(request, ids, key)

    def _at_once(self, step: Step, ids: Sequence[Any], key: int) -> Chunk:
        """Read with the `__getitems__` of the data set, and collate."""
        assert self._read_many is not None
        self._action = f"reading {len(ids)} samples at once"
        self.rng.seed(key, ids[0])
        takes_arrays = isinstance(self.dataset, ArrayDataset)
        samples = self._read_many(step.ids if takes_arrays else ids)
        is_list = isinstance(samples, list)
        if is_list and len(samples) != len(ids):
            raise ValueError(
                f"__getitems__ returned {len(samples)} samples for {len(ids)} indices; return one for each, or "
                "a batch that is no list."
            )
        self._begin_collating(step, len(ids))
        if is_list or self._collate_fn is not None:
            return Chunk(self._collate(samples))
        return Chunk(self._whole_batch(samples))

    def _begin_collating(self, step: Step, num_samples: int) -> None:
        """Seed what the user's function draws while it collates a step: the same on all data ranks."""
        self._action = f"collating {num_samples} samples"
        if self.rng.seeds and self._collate_fn is not None:
            key = _key_of("sample", self._how.seed, step.epoch)
            self.rng.seed(derive_seed(key, "collate", step.number))

    def _one_by_one(self, step: Step, ids: Sequence[Any], key: int) -> Chunk:
        """Read sample after sample, and collate."""
        samples: list[Any] = []
        get_sample = self.dataset.__getitem__
        seeds = self.rng.seeds
        if self.num_threads and not seeds:
            self.begin(step)
            begun = self._begun.pop(step.number)
            results = map(Future.result, begun)
            get_sample = lambda _: next(results)  # noqa: E731
        skipped_errors: Any = Exception if self._how.skip_errors else ()
        for index in ids:
            if seeds:
                self.rng.seed(key, index)
            try:
                samples.append(get_sample(index))
            except skipped_errors as error:
                samples.append(Unreadable(described(error)))
            except BaseException:
                self._index = self._name_of(index)
                self._action = f"reading sample {self._index!r}"
                raise
        if self.makes_tensors is None:
            self.makes_tensors = any(
                isinstance(leaf, paddle.Tensor) and leaf.place.is_cpu_place()
                for leaf in leaves(samples[0])
            )
        self._begin_collating(step, len(samples))
        if self._how.items_are_batches:
            return Chunk(self._whole_batch(samples[0]))
        if not self._how.skip_errors:
            return Chunk(self._collate(samples))
        value, skipped = self._collated(
            samples, lambda row: f"sample {self._name_of(ids[row])!r}"
        )
        return Chunk(value, skipped=skipped)


_key_of = lru_cache(maxsize=64)(derive_seed)
"""Returns the key of the seeds of an epoch's samples, given "sample", the run's seed, the epoch and perhaps the data
rank."""


def _zeros_like(sample: Any) -> Any:
    """Return a sample of the same structure whose arrays and tensors hold zeros."""

    def zeros(leaf: Any, _: str) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            return np.zeros_like(leaf)
        return (
            paddle.zeros_like(leaf) if isinstance(leaf, paddle.Tensor) else leaf
        )

    return map_leaves(sample, zeros)


def _itself(index: Any) -> Any:
    """Return the index: the name of a sample of most data sets. Not a lambda, which could not be sent to a worker."""
    return index


def _call_and_check(function: Callable[[Any], Any], samples: Any) -> Any:
    """Return what a function of the user's makes of samples, whose arrays must be what Paddle takes them for."""
    batch = function(samples)
    arrays = [leaf for leaf in leaves(batch) if isinstance(leaf, np.ndarray)]
    if any(array.dtype == np.uint16 for array in arrays):
        map_leaves(batch, reject_uint16)
    return batch


def _stack_tensors(samples: Sequence[Any], path: str) -> Any:
    """Stack tensors as arrays: the framework's own operators are not safe in a forked worker.

    Tensors on a device are stacked there. No forked worker has any.
    """
    if not all(is_tensor(sample) for sample in samples):
        raise cannot_stack(samples, path)
    # before they are arrays: those of bfloat16 are uint16
    check_dtypes(samples, path)
    if all(
        isinstance(sample, paddle.Tensor) and not sample.place.is_cpu_place()
        for sample in samples
    ):
        return paddle.stack(list(samples))
    return stack([as_array(sample) for sample in samples], path)
