"""How are the samples of a step read and collated, whatever they do?

Each of the two readers finds the samples. What follows is the same for both: seeding, collating, what becomes of
samples that fail, and how a failure travels.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_shard.clock import COLLATING, READING, SLOW, Cause, clock, named
from paddle_shard.collate import DtypesDifferError, check_dtypes, collate, no_rows, stack
from paddle_shard.errors import described
from paddle_shard.plan.mixture import is_sample_id
from paddle_shard.plan.seeding import derive_seed, mix
from paddle_shard.plan.step import MOST_STAND_INS, Content, Step
from paddle_shard.randomness import Generator, Undisturbed, kept, parts, restore, states
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.digest import WHOLE, digest
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.tensors import dtype_of, is_tensor
from paddle_shard.say_once import say_once
from paddle_shard.sources.arrays import ArrayDataset
from paddle_shard.tree import leaves

_COLLATING_DRAWS = (
    "%s draws random numbers. They are the same on all data ranks, and of a stream in all workers: right for what the "
    "whole batch has in common, such as its size. What is drawn for each row, such as a mask, is the same for rows of "
    "several ranks, and other numbers on another mesh: draw it in __getitem__, or in a stream's map()."
)
_TIMES = 3
"""How often a sample is read again, once a pass, if threads were begun that may draw."""


class DrewBesideError(Exception):
    """Another thread than the caller's read, and something drew random numbers or reading failed."""

    def __init__(self, drew: bool) -> None:
        super().__init__()
        self.drew = drew


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
    compared: bool = False
    """True if other ranks read some of the same samples, to compare them."""


class Reader:
    """Reads what a step asks for: the same bytes in every process that is asked."""

    draws: bool | None = True
    """False if reading is known to draw no random numbers, so that nothing is seeded; None: not known."""
    makes_tensors = False
    """True if samples were seen to hold Paddle's tensors in host memory."""
    num_samples = 0
    """Samples of the step that was read last."""
    owns_arrays = False
    """True if nothing else refers to the arrays of a batch, so that tensors may share their memory."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None, how: HowToRead) -> None:
        """Set up the reader.

        Args:
            dataset: The data set that the user's functions see.
            collate_fn: The user's function, or None to stack the samples with `collate`.
            how: What it must know of its loader.
        """
        self.dataset, self.generators = dataset, how.generators
        self._collate_fn, self._how = collate_fn, how
        self._seeded = 0
        """What the generators were last seeded with."""
        self._collated_before = collate_fn is None
        """False until the user's function has shown whether it draws."""
        self._collate = partial(collate, stack_other=_stack_tensors) if collate_fn is None else collate_fn
        self._reading: Cause = READING, named(type(dataset))
        self._collating: Cause = COLLATING, "stacking samples" if collate_fn is None else named(collate_fn)

    @property
    def runs_free(self) -> bool:
        """True if another thread than the caller's may read: nothing here draws random numbers, as far as is known."""
        return False

    def read(self, asked: Any, worker: int | None) -> Chunk | ReadFailure:
        """Return what was asked for, or its failure.

        Args:
            asked: A `Step`, or one of its parts.
            worker: Number of the worker process; None: the main process, whose generators stay as they are.
        """
        at: dict[str, Any] = {"what": "reading", "index": None}
        mine, began = clock(), time.perf_counter()
        computed = time.thread_time() if mine.fine else 0.0
        before, held, users = mine.to(self._reading), None, None
        try:
            # A worker's generators are nobody's; and what is not seeded must not be restored: it would hide what drew.
            if worker is None and self.draws is not False:
                held = Undisturbed()
                users = states(self.generators)
            return self._rows(asked, at)
        except Exception if worker is None else BaseException as error:  # SystemExit would end a worker silently
            if isinstance(error, KeyboardInterrupt):
                raise
            self._explain(error, asked, at)
            return ReadFailure.of(error, worker=worker, **at)
        finally:
            try:
                parts.seed = None  # else a sample that is read by hand in this thread would be seeded by its parts
                mine.to(before)
                took = time.perf_counter() - began
                # Who is quick has not waited.
                mine.read(took, time.thread_time() - computed if mine.fine else took, self.num_samples)
                if users is not None:
                    restore(self.generators, users)
            finally:  # also if a handler has raised meanwhile: not only when a collector finds what it has cut off
                if held is not None:
                    held.release()

    def read_beside(self, asked: Any) -> Chunk:
        """Read in another thread than the caller's, which may not touch the generators: without seeds.

        Raises:
            DrewBesideError: Something drew random numbers, or reading failed: the caller's thread must read it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Drop what is open."""

    def _rows(self, asked: Any, at: dict[str, Any]) -> Chunk:
        """Read and collate. `at` tells what is being done, for messages."""
        raise NotImplementedError

    def _explain(self, error: BaseException, asked: Any, at: dict[str, Any]) -> None:
        """Say in `at` what was asked for (`indices`), and which sample has failed if that is not said yet."""
        raise NotImplementedError

    def _seed(self, seed: int) -> None:
        self._seeded = seed
        for generator in self.generators:
            generator.seed(seed)

    def _drew_since(self) -> bool:
        """Return whether something was drawn since the generators were seeded, and leave them as they are."""
        now = states(self.generators)
        self._seed(self._seeded)
        fresh = states(self.generators)
        restore(self.generators, now)
        return fresh != now

    def _say_if_collating_draws(self) -> None:
        """Log, after the first batch that the user's function makes of a seed, if it has drawn."""
        before, self._collated_before = self._collated_before, True
        if before or not self._drew_since():
            return
        worker = paddle.io.get_worker_info()
        if (worker is None or worker.id == 0) and (worker is not None or dist.get_world_size() > 1):
            say_once(_COLLATING_DRAWS, self._collating[1])

    def _check_own_memory(self, before: int | None, first: Any) -> None:
        """Refuse samples of one memory: the first of a batch was changed while the others were read."""
        if before is not None and digest(first) != before:
            raise ValueError(
                f"the {type(self.dataset).__name__} makes each sample in the memory of the one before, so that all "
                "samples of a batch would be the last one. Return a copy of what is used again."
            )

    def _collated(
        self,
        samples: Sequence[Any],
        failed: dict[int, str],
        *,
        whole: bool,
        stand_in: Callable[[], Any],
        name_of: Callable[[int], str],
    ) -> tuple[Any, list[tuple[int, str]]]:
        """Return the batch of some samples, and (row, why) of the rows that hold another sample.

        Args:
            samples: One for each row.
            failed: Row -> why its sample could not be read.
            whole: True if a sample is a whole batch.
            stand_in: Returns a sample that can be read; it raises `LookupError` if there is none.
            name_of: Returns the name of a row's sample, for messages.
        """
        clock().to(self._collating)  # the last thing that a reader does for a step
        if whole:
            return samples[0] if self._collate_fn is None else self._collate_fn(samples[0]), []
        if not self._how.skip_errors:
            try:
                return self._collate(samples), []
            except DtypesDifferError as error:
                error.args = (f"{error} They begin with {' and '.join(map(name_of, error.rows))}.",)
                raise
        value = collate_skipping(samples, failed, self._collate, stand_in, name_of)
        return value, [(row, f"{name_of(row)}: {why}") for row, why in sorted(failed.items())]


class IdReader(Reader):
    """Reads the samples of a step from a data set with an index.

    The generators are seeded for every sample. Most data sets draw nothing, and seeding costs more than reading small
    samples: if the first batch drew nothing, later ones are read without seeds. Then the generators are looked at after
    each batch. If they are not as they were after the one before, the training loop has drawn, or the data set has. A
    batch that drew is read once more, with seeds, as are all from there on.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None, how: HowToRead) -> None:
        """See `Reader`."""
        # Arrays in memory draw nothing, so that nothing has to be looked at.
        in_memory = type(dataset) is ArrayDataset and dataset.gathers
        how = replace(how, generators=()) if in_memory and collate_fn is None else how
        super().__init__(dataset, collate_fn, how)
        self._read_many = None if how.items_are_batches else getattr(dataset, "__getitems__", None)
        self._name_of: Callable[[Any], Any] = getattr(dataset, "sample_name", _itself)
        self.draws = None
        self._stand_in: tuple[int, Any] | None = None
        self._sample_seed = self._part_key = 0
        """What the generators were seeded with for a sample, and what the seeds of its parts depend on."""
        self._part_drew = False
        """True if reading a part of a sample drew."""
        self._left: Any = None
        """The generators after the last batch; None: they must be looked at before the next one, too."""
        self._loop_draws = False
        """True if the training loop has drawn between two batches of this pass."""
        stacks = self._read_many is None or in_memory
        self._collated_before |= how.items_are_batches  # such a batch is the same on all ranks
        self.owns_arrays = collate_fn is None and stacks and not how.items_are_batches

    @property
    def runs_free(self) -> bool:
        """See `Reader`."""
        return self.draws is False and not self._loop_draws

    def read(self, asked: Step, worker: int | None) -> Chunk | ReadFailure:
        """See `Reader`."""
        if self.draws is False:
            generators, left = self.generators, self._left
            before = states(generators) if left is None else left
            found = super().read(asked, worker)
            after = states(generators)
            if after == before:
                self._left = None if self._loop_draws else after
                return found  # if something was drawn, it may also have failed because of that
            if worker is None and left is not None:
                # The loop may be the one that has drawn, and its numbers must stay. Reading once more tells. (If both
                # begin to draw between the same two batches, the loop's numbers begin again from before them.)
                found = super().read(asked, worker)
                if states(generators) == after:
                    self._loop_draws, self._left = True, None
                    return found
            self.draws = True
            say_once(
                "%s draws random numbers for some samples, and did not for the first ones. From now on it is seeded "
                "for each sample and, if there are no workers, read on the thread of the training loop.",
                type(self.dataset).__name__,
            )
            if worker is None:  # from here on, reading keeps them itself
                restore(generators, before)
        self._left = None
        return super().read(asked, worker)

    def read_beside(self, asked: Step) -> Chunk:
        """See `Reader`."""
        if self.draws is not False:  # another pass has found that something draws
            raise DrewBesideError(False)
        held = Undisturbed()
        try:
            if not held.alone:  # another loader's samples are read, and wait for this one
                raise DrewBesideError(False)
            before = states(self.generators)
            if self._left not in (None, before):
                self._loop_draws, self._left = True, None
                raise DrewBesideError(True)
            self._left = before
            found = super().read(asked, None)
            drew = states(self.generators) != before
        finally:
            held.release()
        if drew or not isinstance(found, Chunk):  # it may have failed because of the thread
            raise DrewBesideError(drew)
        return found

    def close(self) -> None:
        """See `Reader`. Between two passes anything may be drawn."""
        self._left, self._loop_draws = None, False

    def _explain(self, error: BaseException, asked: Step, at: dict[str, Any]) -> None:
        at["indices"] = tuple(map(self._name_of, asked.ids))

    def _rows(self, asked: Step, at: dict[str, Any]) -> Chunk:
        """See `Reader`. The first batch, which is seeded, shows whether reading draws."""
        key = _key_of("sample", self._how.seed, asked.epoch, *self._how.of_rank)
        ids = asked.ids.tolist() if isinstance(asked.ids, np.ndarray) else asked.ids
        self.num_samples = len(ids)
        if self._read_many is None:
            return self._one_by_one(asked, ids, at, key)
        try:
            return self._at_once(asked, ids, at, _seed_of(key, ids[0]))
        except Exception:
            if not self._how.skip_errors or not hasattr(self.dataset, "__getitem__"):
                raise
            return self._one_by_one(asked, ids, at, key)

    def _at_once(self, step: Step, ids: Sequence[Any], at: dict[str, Any], seed: int) -> Chunk:
        """Read with the `__getitems__` of the data set, and collate."""
        assert self._read_many is not None
        contents = self.contents(step)  # before: the data set may read each time into the same memory
        at.update(what=f"reading {len(ids)} samples at once", index=None)
        if self.draws is not False:
            self._seed(seed)
        samples = self._read_many(step.ids if isinstance(self.dataset, ArrayDataset) else ids)
        watched, drew = self.draws is None, self.draws is None and (self._part_drew or self._drew_since())
        listed = isinstance(samples, list)
        if listed and len(samples) != len(ids):
            raise ValueError(
                f"__getitems__ returned {len(samples)} samples for {len(ids)} indices; return one for each, or "
                "a batch that is no list."
            )
        at.update(what=f"collating {len(samples) if listed else 'the'} samples", index=None)
        clock().to(self._collating)
        self._seed_collating(step)
        value = self._collate(samples) if listed or self._collate_fn is not None else samples
        if watched:
            self._say_if_collating_draws()
            self.draws = drew or self._part_drew or self._drew_since()
        return Chunk(value, contents=contents)

    def _seed_collating(self, step: Step) -> None:
        """Seed what the user's function draws while it collates a step: the same on all data ranks."""
        if self.draws is not False and self._collate_fn is not None:
            self._seed(derive_seed(_key_of("sample", self._how.seed, step.epoch), "collate", step.number))

    def _one_by_one(self, step: Step, ids: Sequence[Any], at: dict[str, Any], key: int) -> Chunk:
        """Read sample after sample, and collate."""
        samples, failed = list[Any](), dict[int, str]()
        threads = threading.enumerate() if step.contents else None
        read, catches, mine = self.dataset.__getitem__, Exception if self._how.skip_errors else (), clock()
        seeds, of_source = self.draws is not False, mine.fine > 0 and self._name_of is not _itself
        now, before = time.perf_counter, None
        marks = [now()]
        """When reading of each sample begins."""
        for index in ids:
            if of_source and isinstance(name := self._name_of(index), tuple):  # of a mixture
                mine.to((READING, f"source {name[0]!r}"))
            if seeds:
                self._seed_sample(key, index)
            try:
                samples.append(read(index))
            except catches as error:
                failed[len(samples)] = described(error)
                samples.append(None)
            except BaseException:
                at["index"] = self._name_of(index)
                at["what"] = f"reading sample {at['index']!r}"
                raise
            marks.append(now())
            if self.draws is None and len(samples) == 1:  # of the first batch
                before = digest_or_none(samples[0])
        self._check_own_memory(before, samples[0])
        if marks[-1] - marks[0] > SLOW:
            took = np.diff(marks)
            slow = int(took.argmax())
            mine.note(float(took[slow]), f"sample {self._name_of(ids[slow])!r}")
        at.update(what=f"collating {len(samples)} samples", index=None)
        # Looking costs more than reading most samples: the last one must tell whether they draw.
        watched, drew = self.draws is None, self.draws is None and (self._part_drew or self._drew_since())
        known = _known(step, ids, samples)  # before collating may change them
        self._seed_collating(step)
        value, skipped = self._collated(
            samples,
            failed,
            whole=self._how.items_are_batches,
            stand_in=lambda: self._readable(key),
            name_of=lambda row: f"sample {self._name_of(ids[row])!r}",
        )
        if watched:
            self._say_if_collating_draws()
            self.draws = drew or self._part_drew or self._drew_since()
            tensors = (leaf for leaf in leaves(samples[0]) if isinstance(leaf, paddle.Tensor))
            self.makes_tensors = any(tensor.place.is_cpu_place() for tensor in tensors)
        # After collating: the data set may read each time into memory that the batch's samples have.
        contents = self.contents(step, known, drew=drew, threads=threads)
        return Chunk(value, skipped=skipped, contents=contents)

    def contents(
        self, step: Step, known: Mapping[int, tuple[int, str]] | None = None, *, drew: bool = False, threads: Any = None
    ) -> tuple[Content, ...]:
        """Return what a step's `contents` hold, of which some may be among the samples that were just read: `known`.

        What cannot be read has no digest. Neither has any if one differs when it is read again with the same seed: the
        first is read again if other ranks read it, too, or samples draw, and each if its digest is not the expected
        one. Where reading has begun threads of the data set's own, which may draw now and then, it is several times.
        """
        found, same, times = list[Content](), True, int(self._how.compared or drew or bool(self.draws))
        begun = {*threading.enumerate()} - {*threads} if threads else ()
        if any(not thread.name.startswith("paddle_shard") for thread in begun):
            times = _TIMES
        for asked in step.contents:
            one = asked._replace(name=f"sample {self._name_of(asked.sample)!r}")
            try:
                told, shown = (known or {}).get(len(found)) or _told(self._again(one))
                again = times * (not found) if one.digest is None else int(one.digest != told)
                same = same and all(digest(self._again(one), 0, WHOLE) == told for _ in range(again))
                found.append(one._replace(digest=told if same else None, shown=shown))
            except Exception as error:
                found.append(one._replace(digest=None, shown=described(error)))
        return tuple(found)

    def _again(self, one: Content) -> Any:
        """Read a sample with its seed, and leave the generators as they are."""
        with self._apart():
            self._seed_sample(_key_of("sample", self._how.seed, one.epoch), one.sample)
            return self.dataset[one.sample]

    def _seed_sample(self, key: int, index: Any) -> None:
        """Seed for a sample, and for the parts that it seeds for itself (`seed_part`)."""
        of_mixture = isinstance(index, int) and is_sample_id(index)
        # A source's epoch may go on in the next epoch of its mixture, and a document of it, too.
        self._part_key = _key_of("part", self._how.seed, index >> 40) if of_mixture else _key_of("part", key)
        self._sample_seed, parts.seed = _seed_of(key, index), self._seed_part
        self._seed(self._sample_seed)

    def _seed_part(self, number: int | None) -> None:
        if self.draws is None:  # the first batch shows whether reading draws
            self._part_drew = self._part_drew or self._drew_since()
        self._seed(mix(self._sample_seed, 0) if number is None else mix(self._part_key, number))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Seed and read samples in between, and leave all as it is."""
        seed, seeded, held = parts.seed, (self._seeded, self._sample_seed, self._part_key), Undisturbed()
        try:
            with kept(self.generators):
                yield
        finally:
            try:  # else it would look as if what is read here had drawn
                parts.seed, (self._seeded, self._sample_seed, self._part_key) = seed, seeded
            finally:
                held.release()

    def _readable(self, key: int) -> Any:
        """Return the first sample of the data set that can be read: the same one on every rank."""
        if self._stand_in is None:
            with self._apart():  # seeding is not drawing
                for index in range(min(MOST_STAND_INS, len(self.dataset))):
                    self._seed_sample(key, index)
                    with contextlib.suppress(Exception):
                        self._stand_in = index, self.dataset[index]
                        return self._stand_in[1]
            raise LookupError
        return self._stand_in[1]


_key_of = lru_cache(maxsize=64)(derive_seed)
"""Returns the key of the seeds of an epoch's samples, given "sample", the run's seed, the epoch and perhaps the data
rank; or of parts of samples, given "part" and an epoch's key, or the seed and an epoch of a source of a mixture."""


def _seed_of(key: int, index: Any) -> int:
    """Return the seed of a sample."""
    return mix(key, index) if isinstance(index, int) else derive_seed(key, index)


def _known(step: Step, ids: Sequence[Any], samples: Sequence[Any]) -> dict[int, tuple[int, str]]:
    """Return what is told of those of a step's `contents`, by number, that are among the samples that were read."""
    found = {}
    for number, one in enumerate(step.contents):
        sample = samples[ids.index(one.sample)] if one.epoch == step.epoch and one.sample in ids else None
        if sample is not None:
            with contextlib.suppress(Exception):  # it is read again, and said
                found[number] = _told(sample)
    return found


def digest_or_none(sample: Any) -> int | None:
    """Return a digest of some of a sample; None if it has none."""
    with contextlib.suppress(Exception):
        return digest(sample)
    return None


def _told(sample: Any) -> tuple[int, str]:
    """Return a digest of a sample, and a few words about it."""
    return digest(sample, 0, WHOLE), in_words(sample)


def in_words(sample: Any) -> str:
    """Return a few words about a sample: its keys, and the forms and the first numbers of its leaves."""
    words = []
    keys = f"{{{', '.join(map(repr, sample)):.60}}} " if isinstance(sample, Mapping) else ""
    for leaf in islice(leaves(sample), 3):
        numbers = leaf.astype("float32") if isinstance(leaf, paddle.Tensor) and dtype_of(leaf) == "bfloat16" else leaf
        array = np.asarray(numbers.numpy() if hasattr(numbers, "numpy") else numbers)
        form = f"{dtype_of(leaf if is_tensor(leaf) else array)}{list(array.shape)} " if array.ndim else ""
        words.append(form + ", ".join(str(item)[:20] for item in array.reshape(-1)[:3].tolist()))
    return keys + "; ".join(words)


def _itself(index: Any) -> Any:
    """Return the index: the name of a sample of most data sets. Not a lambda, which could not be sent to a worker."""
    return index


def _stack_tensors(samples: Sequence[Any], path: str) -> Any:
    """Stack tensors as arrays: the framework's own operators are not safe in a forked worker.

    Tensors on a device are stacked there. No forked worker has any.
    """
    if not all(is_tensor(sample) for sample in samples):
        raise no_rows(samples, path)
    check_dtypes(samples, path)  # before they are arrays: those of bfloat16 are uint16
    if all(isinstance(sample, paddle.Tensor) and not sample.place.is_cpu_place() for sample in samples):
        return paddle.stack(list(samples))
    return stack([sample.numpy() for sample in samples], path)


def collate_skipping(
    samples: Sequence[Any],
    failed: dict[int, str],
    collate: Callable[[list[Any]], Any],
    stand_in: Callable[[], Any],
    name_of: Callable[[int], str],
) -> Any:
    """Return a batch of samples; another sample replaces each one that cannot be read or collated.

    Args:
        samples: One for each row; those of rows in `failed` are not used.
        failed: Row -> why its sample could not be read. Rows whose samples cannot be collated alone are added.
        collate: Makes a batch of a list of samples.
        stand_in: Returns a sample of the data set that can be read, if no sample of the batch can; or raises
            `LookupError`.
        name_of: Returns the name of a row's sample, for messages.

    Raises:
        ValueError: No sample can be read; or samples that can each be collated alone do not fit together, which is an
            error of the data or of the collate function that skipping would hide.
    """

    def filled() -> list[Any]:
        good = next((sample for row, sample in enumerate(samples) if row not in failed), None)
        try:
            other = stand_in() if len(failed) == len(samples) else good
        except LookupError:
            why = next(iter(failed.values()))
            raise ValueError(f"{why}; and no other sample was read that its row could hold") from None
        return [other if row in failed else sample for row, sample in enumerate(samples)]

    def fails(rows: list[Any]) -> str:
        """Return why some samples cannot be collated; empty if they can."""
        try:
            collate(rows)
        except Exception as error:  # it is not kept: its frames hold the iterator, which would not end
            return described(error)
        return ""

    rows = filled()
    try:
        return collate(rows)
    except Exception as error:
        why = described(error)
    known = len(failed)
    alone = {row: fails([sample]) for row, sample in enumerate(samples) if row not in failed}
    failed.update({row: reason for row, reason in alone.items() if reason})
    if len(failed) > known:
        return collate(filled())
    good = [row for row in range(len(samples)) if row not in failed]
    # The first row that cannot be collated together with those before it.
    odd = next((row for at, row in enumerate(good) if fails([samples[one] for one in good[: at + 1]])), None)
    where = f"{name_of(odd)} does not fit to the samples before it" if odd is not None else "they do not fit together"
    raise ValueError(
        f"{why}: each sample can be collated alone, but {where}. on_error='skip' leaves out samples that raise; rows "
        "that differ in shape or fields are an error. Mend them in the data set or in the collate_fn."
    )
