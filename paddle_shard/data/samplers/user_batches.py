"""Global batches of a user's own batch sampler, which every rank iterates under the same seeds."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, count, islice, repeat, takewhile
from typing import Any, TypeVar

import numpy as np

from paddle_shard.core.checks import length_or_none
from paddle_shard.core.randomness import Generator, PrivateRandomness
from paddle_shard.data.samplers.plan_batches import IndexBatches
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    StateError,
)
from paddle_shard.plan.order import Fingerprint
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import BalanceRows, GlobalBatch, SamplerStep, as_ids
from paddle_shard.plan.tails import Tail

Value = TypeVar("Value")
Sampled = tuple[list[Any], Any]
"""A batch, and the sampler's own state after drawing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatches(IndexBatches):
    """The batches of a user's batch sampler, which decides the order.

    Every rank iterates over the whole sampler, with random generators that all ranks seed in the same way, and
    takes its slice of each batch. Batches may differ in size, as those of bucketing samplers do, if each can be
    cut evenly; the tail applies only to the last one.

    A sampler with its own `state_dict` and `load_state_dict` is resumed with them. Any other sampler is replayed
    up to the saved position, without reading a sample, and must draw the same batches again.

    Passes do not depend on each other, or on how far each rank prefetches: if the sampler holds its position, each
    pass has its own copy. After a pass has come to its end, the sampler gets that position.
    """

    steps_unknown = (
        "the steps of the batch_sampler show only at its end. "
        "Give it a __len__ (and drop_last, with tail='drop')."
    )

    on_training_thread = True
    """See `Batches`: the sampler is user code."""

    batch_sampler: Iterable[Any]
    """Yields lists of indices; each is a global batch."""
    num_data_ranks: int
    tail: Tail
    """Tail of the last batch, if it is short."""
    nominal_size: int | None
    """Rows of a full batch, if the sampler has it."""
    num_steps: int | None
    """Steps of an epoch, if the caller can compute them; None: the sampler's own length is used."""
    accumulation: int
    seed: int
    generators: Sequence[Generator]
    """The global generators that the sampler may draw from."""
    around: Callable[[], AbstractContextManager[Any]]
    """Entered while the sampler draws."""
    takes_epoch: bool
    """True if the order depends on the sampler's attribute `epoch`, as in Paddle's `DistributedBatchSampler`."""
    consecutive: bool
    """True if its batches are stretches of one order of samples, which may be cut again into another batch size."""
    dataset: Any
    """The data set, which copies of the sampler share, as they do the one that the sampler was made of."""
    lengths: Mapping[str, int]
    """Lengths of the data and of the samplers when the run was set up."""
    balance_rows: BalanceRows | None
    """Assigns rows to data ranks by cost; None: they stay in their order."""
    rank_seed: tuple[int, ...]
    """(data rank,) if the sampler draws for this data rank alone (`draws_for_rank`); () if all ranks draw alike."""
    _ends: dict[int, Any] = field(default_factory=dict, compare=False)
    """Epoch -> the sampler's own state after a pass has seen its end."""

    def known_steps(self, start: LoaderState) -> int | None:
        """See `Batches`: as far as lengths tell, which may be estimates."""
        if self.num_steps is not None:
            return self.num_steps
        if self.tail.drops and not getattr(
            self.batch_sampler, "drop_last", False
        ):
            # whether the last batch is short, and dropped, shows only at the end
            return None
        return length_or_none(self.batch_sampler)

    @property
    def _name(self) -> str:
        return type(self.batch_sampler).__name__

    @property
    def _sampler(self) -> Any:
        """The sampler that is iterated: of plain batches, the sampler of the indices that they are cut from."""
        sampler: Any = self.batch_sampler
        return sampler.sampler if self.consecutive else sampler

    def _copy(self) -> Any:
        """Return a copy of the sampler, which shares the data sets that it holds."""
        shared = [self.dataset]
        for sampler in samplers(self._sampler):
            shared.append(getattr(sampler, "dataset", None))
            shared.append(getattr(sampler, "data_source", None))
        return copy.deepcopy(self._sampler, {id(data): data for data in shared})

    def snapshot(self) -> dict[str, Any] | None:
        """See `Batches`."""
        owner = owner_of(self._sampler)
        if owner is None:
            return None
        return {"now": copy.deepcopy(owner.state_dict())}

    def finished(self, epoch: int) -> None:
        """Set the user's sampler to the state that the copy of the iteration has at its end."""
        if epoch in self._ends:
            owner_of(self._sampler).load_state_dict(self._ends.pop(epoch))

    def fingerprint(self) -> Fingerprint:
        """Return what the order depends on, as far as it is known here."""
        names = {"batch_sampler": self._name}
        inner = getattr(self.batch_sampler, "sampler", None)
        if inner is not None:
            names["sampler"] = type(inner).__name__
        return {
            **names,
            **self.lengths,
            "tail": str(self.tail),
            "seed": self.seed,
        }

    def batches(self, start: LoaderState) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch from a position on.

        Raises:
            BatchSizeError: A batch that is not the last cannot be cut evenly.
            ArgumentError: The tail is "error" and the last batch is short.
            StateError: The sampler does not reach the saved position.
        """
        if start.ended:
            if start.sampler is not None and "end" in start.sampler:
                self._ends[start.epoch] = start.sampler["end"]
            return iter(())
        # The pass has its own sampler from here on, before its first batch: later changes do not affect it.
        return self._to_end(
            SamplerIteration(self._sampler_for(start.epoch), start.epoch, self),
            start,
        )

    def _sampler_for(self, epoch: int) -> Any:
        """Return the sampler for a pass."""
        sampler = self._sampler
        if any(isinstance(each, Iterator) for each in samplers(sampler)):
            raise ArgumentError(
                f"the batch_sampler {self._name} can be iterated only once. Give one whose __iter__ starts again."
            )
        # One that draws for its rank may order its own lists as it draws, so that later passes would differ.
        if owner_of(sampler) is not None or self.rank_seed:
            sampler = self._copy()
        elif hasattr(sampler, "set_epoch"):
            sampler = copy.copy(sampler)
        if self.takes_epoch:
            sampler.epoch = epoch
        return sampler

    def _to_end(
        self, iteration: SamplerIteration, start: LoaderState
    ) -> Iterator[GlobalBatch]:
        """Yield the batches of a pass; the last one is marked if the length says that it may be the last.

        If the length does not determine the end, the end shows when the next batch is requested.
        """
        steps = self.known_steps(start)
        if steps is not None and start.samples and self.consecutive:
            # Perhaps in another size from here on.
            steps += start.steps - -(-start.samples // (self.nominal_size or 1))
        batches = self._batches(iteration, start)
        for batch, is_last in seen_ahead(
            batches,
            lambda batch: steps is not None and batch.number + 1 >= steps,
        ):
            state = batch.sampler.state
            if is_last and start.epoch in self._ends:
                # A state that is saved here knows where the next epoch begins.
                state = {**state, "end": self._ends[start.epoch]}
            yield batch._replace(
                sampler=batch.sampler._replace(is_last=is_last, state=state)
            )

    def _batches(
        self, iteration: SamplerIteration, start: LoaderState
    ) -> Iterator[GlobalBatch]:
        """Yield the batches of a pass, the last one with the tail; none is marked as the last."""
        saved = start.sampler or {}
        if "now" in saved:
            iteration.load(saved["now"])
            drawn = iteration.batches()
        else:
            drawn = self._replayed(iteration, start)
        number = start.steps
        batch: list[Any] | None = None
        least = self.nominal_size or 0
        for (batch, state), is_last in seen_ahead(
            drawn,
            lambda sampled: (
                len(sampled[0]) % self._unit or len(sampled[0]) < least
            ),
        ):
            num_rows = self._num_rows(batch, number, is_last=is_last)
            if num_rows == 0:
                break
            yield self._global(
                number, batch, num_rows, iteration.record(batch, state)
            )
            number += 1
        if not start.samples and batch is None:
            raise ArgumentError(
                f"the batch_sampler {self._name} has yielded no batch in epoch {start.epoch}. "
                "If it can be iterated only once, give one whose __iter__ starts again each time."
            )
        if iteration.owner is not None:
            self._ends[start.epoch] = copy.deepcopy(
                iteration.owner.state_dict()
            )

    def _replayed(
        self, iteration: SamplerIteration, start: LoaderState
    ) -> Iterator[Sampled]:
        """Draw the batches up to a position again, without reading samples, and return those after it."""
        samples = start.samples
        size = self.nominal_size if self.consecutive else None
        drawn = iteration.batches(samples % size if size else 0)
        num_passed = 0
        while num_passed < samples:
            batch, _ = next(drawn, ([], None))
            if not batch:
                raise StateError(
                    f"state is at sample {samples}, but the batch_sampler {self._name} "
                    f"ends after {num_passed}: its order differs from the saved one. {_REPLAYED}"
                )
            num_passed += len(batch)
            iteration.record(batch, None)
        if num_passed > samples:
            raise StateError(
                f"state is at sample {samples}, inside a batch of the batch_sampler {self._name}: give it the batch "
                "size that it had."
            )
        if (
            samples
            and (start.sampler or {}).get("drawn", iteration.digest)
            != iteration.digest
        ):
            raise StateError(
                f"state is at sample {samples} of epoch {start.epoch}, but the first {samples} samples that the "
                f"batch_sampler {self._name} draws now are not those that were delivered. {_REPLAYED} Where each rank "
                "has rows of its own (loader.is_dataset_splitted), load the state that this rank has saved."
            )
        return drawn

    @property
    def _unit(self) -> int:
        return self.num_data_ranks * self.accumulation

    def _num_rows(self, batch: list[Any], step: int, *, is_last: bool) -> int:
        """Return the rows of a batch, padding of a short last one included; 0 if it is dropped."""
        num_samples = len(batch)
        # A sampler that drops short batches itself: all that it yields is served, smaller batches too.
        drops_itself = getattr(self.batch_sampler, "drop_last", False)
        if not is_last or (
            self.tail.drops and drops_itself and not self.consecutive
        ):
            check_batch_size(
                num_samples,
                self.num_data_ranks,
                self.accumulation,
                hint=f"It is step {step} of the batch_sampler {self._name}: only a short last batch is padded or "
                "dropped, and not by a sampler with drop_last.",
            )
            return num_samples
        if self.tail.refuses:
            raise ArgumentError(
                f"tail='error': the last batch of the batch_sampler (step {step}) is short with {num_samples} "
                f"samples. Choose tail='pad', 'fill' or 'drop', or a sampler that ends on a full batch."
            )
        return self.tail.num_rows(
            num_samples, self.nominal_size or 0, self._unit
        )

    def _global(
        self, number: int, batch: list[Any], num_rows: int, noted: SamplerStep
    ) -> GlobalBatch:
        num_positions = len(batch)
        # Padding repeats the batch from its first row on.
        indices = batch * -(-num_rows // num_positions)
        return GlobalBatch(
            number=number,
            num_rows=num_rows,
            micro_size=num_rows // self.accumulation,
            num_positions=num_positions,
            take=lambda rows: [indices[row] for row in rows],
            valid=(lambda rows: rows < num_positions)
            if num_rows > num_positions
            else None,
            sampler=noted,
        )


def seen_ahead(
    values: Iterator[Value], may_be_last: Callable[[Value], Any]
) -> Iterator[tuple[Value, bool]]:
    """Yield each value, and whether it is the last one; False, too, where `may_be_last` does not ask for it.

    The next value is drawn ahead only where it is requested: a sampler that follows the loss must draw as late as it
    can.
    """
    value = next(values, None)
    while value is not None:
        looks_ahead = bool(may_be_last(value))
        following = next(values, None) if looks_ahead else None
        yield value, looks_ahead and following is None
        value = following if looks_ahead else next(values, None)


_REPLAYED = (
    "Make its order depend on the epoch only, through set_epoch or the global generators of numpy, Python and Paddle, "
    "which are seeded for it; or give it a state_dict and a load_state_dict."
)


# What a sampler draws


class SamplerIteration:
    """The batches of a sampler in one pass, drawn with private random generators, and a digest of the draws so far."""

    def __init__(self, sampler: Any, epoch: int, of: UserBatches) -> None:
        self._sampler = sampler
        self._cut_size = of.nominal_size if of.consecutive else None
        """Size of the batches that are cut from single indices; None: the sampler yields batches."""
        seed = derive_seed("sampler", of.seed, epoch, *of.rank_seed)
        self._randomness = PrivateRandomness(of.generators, seed, of.around)
        self.owner = owner_of(sampler)
        """The object that holds the sampler's state, or None."""
        self._hash = hashlib.blake2b(digest_size=8)

    def load(self, state: Any) -> None:
        """Resume the sampler from its own state."""
        if self.owner is None:
            raise StateError(
                f"state has the state of a sampler, but the loader's {type(self._sampler).__name__} has no "
                "load_state_dict. Give the loader the sampler that it had."
            )
        with self._randomness():
            # A copy, since the sampler may keep the object and change it.
            self.owner.load_state_dict(copy.deepcopy(state))

    def batches(self, first_size: int = 0) -> Iterator[Sampled]:
        """Yield batches and states; if batches are cut, the first has `first_size` samples if that is not 0."""
        with self._randomness():
            # Some samplers draw the whole order here, others in each `next`.
            source = self._begin(first_size)
        for step in count():
            with self._randomness():
                batch = next(source, _END)
                if batch is _END and step == 0:
                    # torchdata's samplers yield nothing once after the state at an end was loaded.
                    source = self._begin(first_size)
                    batch = next(source, _END)
                if batch is _END:
                    return
                state = None
                if self.owner is not None:
                    # A copy, since the sampler may go on to change the object that it returns.
                    state = copy.deepcopy(self.owner.state_dict())
            yield _indices(batch, step), state

    def _begin(self, first_size: int) -> Iterator[Any]:
        source: Iterator[Any] = iter(self._sampler)
        size = self._cut_size
        if size is None:
            return source
        sizes = chain([first_size] if first_size else [], repeat(size))
        return takewhile(len, (list(islice(source, size)) for size in sizes))

    @property
    def digest(self) -> str:
        """Digest of the samples that were noted, in their order."""
        return self._hash.hexdigest()

    def record(self, batch: list[Any], state: Any) -> SamplerStep:
        """Record that a batch is served; return its samples and the state that resumes the sampler after it."""
        ids = as_ids(batch)
        self._hash.update(ids.tobytes())
        saved = {"drawn": self.digest} if self.owner is None else {"now": state}
        return SamplerStep(ids, saved, is_last=False)


_END = object()


def samplers(sampler: Any) -> list[Any]:
    """Return a batch sampler and the sampler that it draws from, or None."""
    return [sampler, getattr(sampler, "sampler", None)]


def owner_of(sampler: Any) -> Any:
    """Return the batch sampler or its sampler, whichever has a state; None if neither has one."""
    for owner in samplers(sampler):
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            return owner
    return None


def _indices(batch: Any, step: int) -> list[Any]:
    if isinstance(batch, np.ndarray):
        batch = batch.tolist()
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
        raise ArgumentTypeError(
            f"batch_sampler must yield lists of indices, got {type(batch).__name__} at step {step}: "
            f"{batch!r}. A sampler of single indices goes into paddle.io.BatchSampler(sampler=...)."
        )
    if len(batch) == 0:
        raise ArgumentError(
            f"batch_sampler yielded an empty batch at step {step}."
        )
    return [
        index.item() if isinstance(index, np.integer) else index
        for index in batch
    ]
