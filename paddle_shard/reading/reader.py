"""Readers: read and collate the samples of a step, the same bytes in every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import paddle

from paddle_shard.core.collate import (
    cannot_stack,
    check_dtypes,
    collate,
    refuse_uint16,
    stack,
)
from paddle_shard.core.randomness import Generator
from paddle_shard.core.trees import leaves, mapped, named_leaves
from paddle_shard.core.warn_once import say_once as warn_once
from paddle_shard.data.arrays import ArrayDataset
from paddle_shard.errors import described
from paddle_shard.plan.seeding import derive_seed, mix
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.digest import WHOLE, digest
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.sample_rng import SampleRng
from paddle_shard.reading.tensors import as_array, is_tensor

Look = Literal["", "first", "last"]
"""Whether a batch shows if its reading uses the global generators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HowToRead:
    """What a reader must know of its loader."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestRequest:
    """A request for the digests of some samples."""

    samples: Sequence[Any]


_NEVER_THE_SAME = (
    "samples of %s are not the same each time they are read, so ranks, or a run that is resumed, may hold other data. "
    "Use the global random generators of numpy, Python, Paddle or torch, which are seeded for each sample."
)


class Reader:
    """Reads what a step asks for: the same bytes in every process that is asked."""

    makes_tensors = False
    """True if samples were seen to hold Paddle's tensors in host memory."""
    owns_arrays = False
    """True if nothing else refers to the arrays of a batch, so that tensors may share their memory."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any] | None, how: HowToRead
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
        declared = getattr(dataset, "uses_rng", None)
        self.rng = SampleRng(
            how.generators, declared if isinstance(declared, bool) else None
        )
        self._placeholder: Any = None
        """The sample that was read last, for rows of which no sample can be read (`on_error="skip"`)."""

    def read(self, asked: Any, worker: int | None, look: Look = "") -> Any:
        """Return what was asked for, or its failure.

        Args:
            asked: A `Step`, or one of its parts; or a `DigestRequest`.
            worker: Number of the worker process; None: the main process, whose generators stay as they are.
            look: "first" or "last": the batch is that of its pass, and shows whether the global generators are used.
        """
        if isinstance(asked, DigestRequest):
            return self.digests(asked.samples)
        at: dict[str, Any] = {"what": "reading", "index": None}
        catches = (
            Exception if worker is None else BaseException
        )  # SystemExit would end a worker silently
        used_rng = self.rng.seeds
        with self.rng.reading(look=bool(look), keep=worker is None):
            try:
                answer = self._rows(asked, at, look=bool(look))
            except KeyboardInterrupt:
                raise
            except catches as error:
                self._explain(error, asked, at)
                return ReadFailure.of(error, worker=worker, **at)
        began_late = look == "last" and self.rng.seeds and not used_rng
        return answer._replace(used_rng_late=True) if began_late else answer

    def digests(self, samples: Sequence[Any]) -> list[int]:
        """Return a digest of each of some samples, by which ranks and later runs know that they have the same data.

        Two reads of a sample with the same seed must agree; else its digest is 0, which says that it is not known.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Drop what is open."""

    def _rows(self, asked: Any, at: dict[str, Any], *, look: bool) -> Chunk:
        """Read and collate. `at` tells what is being done, for messages."""
        raise NotImplementedError

    def _explain(self, error: BaseException, asked: Any, at: dict[str, Any]) -> None:
        """Say in `at` what was asked for (`indices`), and which sample has failed if that is not said yet."""
        raise NotImplementedError

    def _collated(
        self,
        samples: Sequence[Any],
        failed: dict[int, str],
        *,
        whole: bool,
        name_of: Callable[[int], str],
    ) -> tuple[Any, list[tuple[int, str]]]:
        """Return the batch of some samples, and (row, why) of the rows that hold another sample.

        Args:
            samples: One for each row.
            failed: Row -> why its sample could not be read.
            whole: True if a sample is a whole batch.
            name_of: Returns the name of a row's sample, for messages.
        """
        if whole:
            return _call_and_check(
                _itself if self._collate_fn is None else self._collate_fn, samples[0]
            ), []
        if not self._how.skip_errors:
            return self._collate(samples), []
        value = collate_skipping(
            samples, failed, self._collate, _zeros_like(self._placeholder)
        )
        readable = next(
            (sample for row, sample in enumerate(samples) if row not in failed), None
        )
        if readable is not None:
            self._placeholder = readable
        return value, [
            (row, f"{name_of(row)}: {why}") for row, why in sorted(failed.items())
        ]


class IdReader(Reader):
    """Reads the samples of a step from a data set with an index."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any] | None, how: HowToRead
    ) -> None:
        """See `Reader`."""
        # Arrays in memory use no generator, so nothing has to be looked at.
        in_memory = type(dataset) is ArrayDataset and dataset.gathers
        how = replace(how, generators=()) if in_memory and collate_fn is None else how
        super().__init__(dataset, collate_fn, how)
        self._read_many = (
            None if how.items_are_batches else getattr(dataset, "__getitems__", None)
        )
        if (
            self._read_many is not None
            and isinstance(dataset, ArrayDataset)
            and collate_fn is not None
        ):
            self._read_many = (
                dataset.samples
            )  # a user's function gets a list of samples, as Paddle gives it
        self._name_of: Callable[[Any], Any] = getattr(dataset, "sample_name", _itself)
        stacks = self._read_many is None or in_memory
        self.owns_arrays = collate_fn is None and stacks and not how.items_are_batches

    def digests(self, samples: Sequence[Any]) -> list[int]:
        """See `Reader`."""
        found = []
        for sample in samples:
            try:
                read = [digest(self._read_alone(sample), 0, WHOLE) for _ in range(2)]
            except Exception:  # it is raised when it is its turn
                found.append(0)
                continue
            if read[0] != read[1]:
                warn_once(_NEVER_THE_SAME, type(self.dataset).__name__)
            found.append(read[0] if read[0] == read[1] else 0)
        return found

    def _read_alone(self, sample: Any) -> Any:
        with self.rng.reading(look=False, keep=True):
            self.rng.seed(_seed_of(_key_of("sample", self._how.seed, 0), sample))
            return self.dataset[sample]

    def _explain(self, error: BaseException, asked: Step, at: dict[str, Any]) -> None:
        at["indices"] = tuple(map(self._name_of, asked.ids))

    def _rows(self, asked: Step, at: dict[str, Any], *, look: bool) -> Chunk:
        key = _key_of("sample", self._how.seed, asked.epoch, *self._how.of_rank)
        ids = asked.ids.tolist() if isinstance(asked.ids, np.ndarray) else asked.ids
        if self._read_many is None:
            return self._one_by_one(asked, ids, at, key, look=look)
        try:
            return self._at_once(asked, ids, at, _seed_of(key, ids[0]))
        except Exception:
            if not self._how.skip_errors or not hasattr(self.dataset, "__getitem__"):
                raise
            return self._one_by_one(asked, ids, at, key, look=look)

    def _at_once(
        self, step: Step, ids: Sequence[Any], at: dict[str, Any], seed: int
    ) -> Chunk:
        """Read with the `__getitems__` of the data set, and collate."""
        assert self._read_many is not None
        at.update(what=f"reading {len(ids)} samples at once", index=None)
        self.rng.seed(seed)
        samples = self._read_many(
            step.ids if isinstance(self.dataset, ArrayDataset) else ids
        )
        is_list = isinstance(samples, list)
        if is_list and len(samples) != len(ids):
            raise ValueError(
                f"__getitems__ returned {len(samples)} samples for {len(ids)} indices; return one for each, or "
                "a batch that is no list."
            )
        at.update(
            what=f"collating {len(samples) if is_list else 'the'} samples", index=None
        )
        self._seed_collating(step)
        collates = is_list or self._collate_fn is not None
        return Chunk(
            self._collate(samples) if collates else _call_and_check(_itself, samples)
        )

    def _seed_collating(self, step: Step) -> None:
        """Seed what the user's function draws while it collates a step: the same on all data ranks."""
        if self.rng.seeds and self._collate_fn is not None:
            self.rng.seed(
                derive_seed(
                    _key_of("sample", self._how.seed, step.epoch),
                    "collate",
                    step.number,
                )
            )

    def _one_by_one(
        self,
        step: Step,
        ids: Sequence[Any],
        at: dict[str, Any],
        key: int,
        *,
        look: bool,
    ) -> Chunk:
        """Read sample after sample, and collate."""
        samples: list[Any] = []
        failed: dict[int, str] = {}
        get_sample = self.dataset.__getitem__
        seeds = self.rng.seeds
        skipped_errors: Any = Exception if self._how.skip_errors else ()
        for index in ids:
            if seeds:
                self.rng.seed(_seed_of(key, index))
            try:
                samples.append(get_sample(index))
            except skipped_errors as error:
                failed[len(samples)] = described(error)
                samples.append(None)
            except BaseException:
                at["index"] = self._name_of(index)
                at["what"] = f"reading sample {at['index']!r}"
                raise
        if look:
            tensors = (
                leaf for leaf in leaves(samples[0]) if isinstance(leaf, paddle.Tensor)
            )
            self.makes_tensors = any(tensor.place.is_cpu_place() for tensor in tensors)
        at["what"] = f"collating {len(samples)} samples"
        self._seed_collating(step)
        value, skipped = self._collated(
            samples,
            failed,
            whole=self._how.items_are_batches,
            name_of=lambda row: f"sample {self._name_of(ids[row])!r}",
        )
        return Chunk(value, skipped=skipped)


_key_of = lru_cache(maxsize=64)(derive_seed)
"""Returns the key of the seeds of an epoch's samples, given "sample", the run's seed, the epoch and perhaps the data
rank."""


def _seed_of(key: int, index: Any) -> int:
    """Return the seed of a sample."""
    return mix(key, index) if isinstance(index, int) else derive_seed(key, index)


def _zeros_like(sample: Any) -> Any:
    """Return a sample of the same structure whose arrays and tensors hold zeros; None for None."""

    def zeros(leaf: Any, _: str) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            return np.zeros_like(leaf)
        if isinstance(leaf, paddle.Tensor):
            return paddle.zeros_like(leaf)
        return leaf

    return None if sample is None else mapped(sample, zeros)


def _itself(index: Any) -> Any:
    """Return the index: the name of a sample of most data sets. Not a lambda, which could not be sent to a worker."""
    return index


def _call_and_check(function: Callable[[Any], Any], samples: Any) -> Any:
    """Return what a function of the user's makes of samples, whose arrays must be what Paddle takes them for."""
    found = function(samples)
    for path, leaf in named_leaves(found):
        if isinstance(leaf, np.ndarray):
            refuse_uint16(leaf, path)
    return found


def _stack_tensors(samples: Sequence[Any], path: str) -> Any:
    """Stack tensors as arrays: the framework's own operators are not safe in a forked worker.

    Tensors on a device are stacked there. No forked worker has any.
    """
    if not all(is_tensor(sample) for sample in samples):
        raise cannot_stack(samples, path)
    check_dtypes(samples, path)  # before they are arrays: those of bfloat16 are uint16
    if all(
        isinstance(sample, paddle.Tensor) and not sample.place.is_cpu_place()
        for sample in samples
    ):
        return paddle.stack(list(samples))
    return stack([as_array(sample) for sample in samples], path)


def collate_skipping(
    samples: Sequence[Any],
    failed: dict[int, str],
    collate: Callable[[list[Any]], Any],
    placeholder: Any,
) -> Any:
    """Return a batch of samples; another sample replaces each one that cannot be read or collated.

    Args:
        samples: One for each row; those of rows in `failed` are not used.
        failed: Row -> why its sample could not be read. Rows whose samples cannot be collated alone are added.
        collate: Makes a batch of a list of samples.
        placeholder: Replaces the samples if none of the batch can be read; None: there is none.

    Raises:
        ValueError: No sample can be read; or samples that can each be collated alone do not fit together, which is an
            error of the data or of the collate function that skipping would hide.
    """

    def filled() -> list[Any]:
        other = next(
            (sample for row, sample in enumerate(samples) if row not in failed),
            placeholder,
        )
        if other is None:
            why = next(iter(failed.values()))
            raise ValueError(
                f"{why}; and no other sample was read that its row could hold"
            ) from None
        return [
            other if row in failed else sample for row, sample in enumerate(samples)
        ]

    try:
        return collate(filled())
    except (
        Exception
    ) as error:  # it is not kept: its frames hold the iterator, which would not end
        why = described(error)
    num_failed = len(failed)
    for row, sample in enumerate(samples):
        if row not in failed:
            try:
                collate([sample])
            except Exception as error:
                failed[row] = described(error)
    if len(failed) > num_failed:
        return collate(filled())
    raise ValueError(
        f"{why}: each sample can be collated alone, but they do not fit together. on_error='skip' leaves out samples "
        "that raise; rows that differ in shape or fields are an error. Mend them in the data set or in the collate_fn."
    )
