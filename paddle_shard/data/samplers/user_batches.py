"""How do all ranks read the same batches from a user's own batch sampler, and cut them evenly?"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any, TypeVar

import numpy as np

from paddle_shard.core.checks import length_or_none
from paddle_shard.core.randomness import Generator, PrivateRandomness
from paddle_shard.data.samplers.plan_batches import IndexBatches
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    PaddleShardError,
    StateError,
)
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Deal, GlobalBatch, as_ids
from paddle_shard.plan.tails import Tail

Value = TypeVar("Value")
Drawn = tuple[list[Any], Any]
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

    batch_sampler: Iterable[Any]
    """Yields lists of indices; each is a global batch."""
    num_data_ranks: int
    tail: Tail
    """Tail of the last batch, if it is short."""
    nominal_size: int | None = None
    """Rows of a full batch, if the sampler tells."""
    num_steps: int | None = None
    """Steps of an epoch, if the caller can compute them; None: the sampler's own length is used."""
    accumulation: int = 1
    seed: int = 0
    generators: Sequence[Generator] = ()
    """The global generators that the sampler may draw from."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered while the sampler draws."""
    takes_epoch: bool = False
    """True if the order depends on the sampler's attribute `epoch`, as in Paddle's `DistributedBatchSampler`."""
    consecutive: bool = False
    """True if its batches are stretches of one order of samples, which may be cut again into another batch size."""
    dataset: Any = None
    """The data set, which copies of the sampler share, as they do the one that the sampler was made of."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Lengths of the data and of the samplers when the run was set up."""
    deal: Deal | None = None
    """Deals rows to the data ranks by cost; None: they stay in their order."""
    draws_for: list[tuple[int, ...]] = field(default_factory=list, compare=False)
    """Of data that is split already: [(data rank,)] if the sampler draws for this data rank alone, [()] if all ranks
    must draw alike; empty before that is known."""
    _ends: dict[int, Any] = field(default_factory=dict, compare=False)
    """Epoch -> the sampler's own state after a pass has seen its end."""

    @property
    def on_training_thread(self) -> bool:
        """See `Batches`: the sampler is user code."""
        return True

    def known_steps(self, start: LoaderState) -> int | None:
        """See `Batches`: as far as lengths tell, which may be estimates."""
        if self.num_steps is not None:
            return self.num_steps
        if self.tail.drops and not getattr(self.batch_sampler, "drop_last", False):
            return None  # whether the last batch is short, and dropped, shows only at the end
        return length_or_none(self.batch_sampler)

    @property
    def _name(self) -> str:
        return type(self.batch_sampler).__name__

    def _copy(self) -> Any:
        held = [
            getattr(s, name, None)
            for s in samplers(self.batch_sampler)
            for name in ("dataset", "data_source")
        ]
        return copy.deepcopy(
            self.batch_sampler, {id(data): data for data in (self.dataset, *held)}
        )

    def snapshot(self) -> dict[str, Any] | None:
        """See `Batches`."""
        owner = owner_of(self.batch_sampler)
        if owner is None:
            return None
        state = copy.deepcopy(owner.state_dict())
        return {"now": state, "began": state}

    def finished(self, epoch: int) -> None:
        """Set the user's sampler to the state that the pass's copy has at its end.

        If it would yield nothing then, it stays as it was: torchdata's keep in it how many samples were drawn, which
        they begin behind when it is loaded.
        """
        if epoch in self._ends:
            owner = owner_of(self.batch_sampler)
            before = copy.deepcopy(owner.state_dict())
            owner.load_state_dict(self._ends.pop(epoch))
            if not self._yields(epoch + 1):
                owner.load_state_dict(before)

    def _yields(self, epoch: int) -> bool:
        """Return whether a copy of the sampler yields a batch; True if that cannot be seen."""
        with contextlib.suppress(Exception):
            return next(iter(Draw(self._copy(), epoch, self)), None) is not None
        return True

    def __len__(self) -> int:
        if (known := self.known_steps(LoaderState())) is not None:
            return known
        if not isinstance(self.batch_sampler, Sized):
            raise ArgumentTypeError(
                f"len(): the batch_sampler {self._name} has no __len__. Give it one, or count the steps yourself."
            )
        return sum(
            1
            for _ in replace(self, batch_sampler=self._copy(), _ends={}).batches(
                LoaderState()
            )
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on, as far as it is known here."""
        names = {"batch_sampler": self._name}
        inner = getattr(self.batch_sampler, "sampler", None)
        if inner is not None:
            names["sampler"] = type(inner).__name__
        return {**names, **self.lengths, "tail": str(self.tail), "seed": self.seed}

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
        return self._to_end(Draw(self._own(start.epoch), start.epoch, self), start)

    def _own(self, epoch: int) -> Any:
        """Return the sampler for a pass."""
        sampler: Any = self.batch_sampler
        if any(isinstance(s, Iterator) for s in samplers(sampler)):
            raise ArgumentError(
                f"the batch_sampler {self._name} can be iterated only once. Give one whose __iter__ starts again."
            )
        if owner_of(sampler) is not None:
            try:
                sampler = self._copy()
            except Exception as error:
                raise ArgumentError(
                    f"the batch_sampler {self._name} has a state_dict, and copy.deepcopy cannot copy it ({error}). "
                    "Give it a __deepcopy__."
                ) from error
        elif hasattr(sampler, "set_epoch"):
            # One that draws for its rank may order its own lists as it draws, so that later passes would differ.
            sampler = self._copy() if any(self.draws_for) else copy.copy(sampler)
            if self.takes_epoch:
                sampler.epoch = epoch
        if (
            self.consecutive and sampler.drop_last
        ):  # the tail drops instead, since batches may be cut again
            sampler = (
                sampler if sampler is not self.batch_sampler else copy.copy(sampler)
            )
            sampler.drop_last = False
        return sampler

    def first_draw(self, epoch: int) -> str:
        """Return a digest of the first batch of an epoch if all ranks draw alike; "" if the sampler has no copy."""
        try:
            sampler = self._copy()
            if self.takes_epoch:
                sampler.epoch = epoch
            for one in samplers(sampler):
                getattr(one, "set_epoch", int)(epoch)
            batch, _ = next(iter(Draw(sampler, epoch, self)))
        except Exception:  # the epoch iterator itself raises it
            return ""
        return hashlib.blake2b(as_ids(batch).tobytes(), digest_size=8).hexdigest()

    def _to_end(self, draw: Draw, start: LoaderState) -> Iterator[GlobalBatch]:
        """Yield the batches of a pass; the last one is marked if the length says that it may be the last.

        If the length does not tell the end, the end is seen when the next batch is asked for.
        """
        steps = self.known_steps(start)
        if (
            steps is not None
            and start.samples
            and self.consecutive
            and self.nominal_size
        ):
            # Perhaps in another size from here on.
            steps += start.steps - -(-start.samples // self.nominal_size)
        batches = self._batches(draw, start)
        for found, last in seen_ahead(
            batches, lambda one: steps is not None and one.number + 1 >= steps
        ):
            if not last:
                yield found
                continue
            state = found.sampler_state
            if (
                draw.epoch in self._ends
            ):  # a state that is saved here knows where the next epoch begins
                state = {**state, "end": self._ends[draw.epoch]}
            yield found._replace(last=True, sampler_state=state)

    def _batches(self, draw: Draw, start: LoaderState) -> Iterator[GlobalBatch]:
        """Yield the batches of a pass, the last one with the tail; none is marked as the last."""
        saved, drawn = start.sampler or {}, iter(draw)
        own_state = "now" in saved
        if own_state:
            draw.load(saved["now"], saved["began"])
        elif start.samples:
            drawn = self._replay(drawn, start, draw)
        number = start.steps
        least = self.nominal_size or 0
        for (batch, state), last in seen_ahead(
            drawn, lambda one: len(one[0]) % self._unit or len(one[0]) < least
        ):
            padding: list[Any] | None = []
            if last:
                # A sampler that was resumed with its own state has not drawn the first samples again.
                head = self._head(draw) if own_state and start.samples else draw.head
                padding = self._padding(batch, head, number)
            else:
                self._check_size(batch, number)
            if padding is None:
                break
            yield self._global(number, batch, padding, draw.noted(batch, state))
            number += 1
        if not start.samples and not draw.head:
            raise ArgumentError(
                f"the batch_sampler {self._name} has yielded no batch in epoch {draw.epoch}. "
                "If it can be iterated only once, give one whose __iter__ starts again each time."
            )
        if draw.owner is not None:
            self._ends[draw.epoch] = copy.deepcopy(draw.owner.state_dict())

    def _head(self, draw: Draw) -> list[Any]:
        """Return the first samples of an epoch that was resumed with the sampler's own state."""
        again = Draw(self._copy(), draw.epoch, self)
        again.load(draw.began, draw.began)
        for _ in again:
            if len(again.head) >= again.head_size:
                break
        return again.head

    def _replay(
        self, drawn: Iterator[Any], start: LoaderState, draw: Draw
    ) -> Iterator[Drawn]:
        """Draw up to a position without reading samples, and return the rest; cut batches again if that is allowed."""
        passed, rest, samples, name = 0, list[Any](), start.samples, self._name
        while passed < samples:
            found = next(drawn, None)
            if found is None:
                raise StateError(
                    f"state is at sample {samples}, but the batch_sampler {name} "
                    f"ends after {passed}: its order differs from the saved one. {_REPLAYED}"
                )
            batch, _ = found
            passed += len(batch)
            rest = batch[len(batch) - (passed - samples) :] if passed > samples else []
            draw.noted(batch[: len(batch) - len(rest)], None)
        if rest and not (self.consecutive and self.nominal_size):
            raise StateError(
                f"state is at sample {samples}, inside a batch of the batch_sampler {name}: give it the batch size "
                "that it had."
            )
        if (start.sampler or {}).get("drawn", draw.digest) != draw.digest:
            raise StateError(
                f"state is at sample {samples} of epoch {draw.epoch}, but the first {samples} samples that the "
                f"batch_sampler {name} draws now are not those that were delivered. {_REPLAYED}"
            )
        if not rest:
            return drawn
        samples_left = chain(rest, chain.from_iterable(batch for batch, _ in drawn))
        return (
            (batch, None)
            for batch in iter(lambda: list(islice(samples_left, self.nominal_size)), [])
        )

    @property
    def _unit(self) -> int:
        return self.num_data_ranks * self.accumulation

    def _check_size(self, batch: list[Any], step: int) -> None:
        try:
            check_batch_size(len(batch), self.num_data_ranks, self.accumulation)
        except ValueError as error:
            raise type(error)(
                f"step {step} of the batch_sampler {self._name}: {error}"
            ) from None

    def _padding(
        self, batch: list[Any], head: list[Any], step: int
    ) -> list[Any] | None:
        """Return what fills a short last batch up, of the first samples of the epoch; None if it is dropped."""
        num_rows = self.tail.num_rows(len(batch), self.nominal_size or 0, self._unit)
        if num_rows == 0:
            # A sampler that drops short batches itself: all that it yields is served, smaller batches too.
            if self.consecutive or not getattr(self.batch_sampler, "drop_last", False):
                return None
            self._check_size(batch, step)
        if self.tail.refuses:
            raise ArgumentError(
                f"tail='error': the last batch of the batch_sampler (step {step}) is short with {len(batch)} "
                f"samples. Choose tail='pad', 'fill' or 'drop', or a sampler that ends on a full batch."
            )
        return [head[i % len(head)] for i in range(num_rows - len(batch))]

    def _global(
        self, number: int, batch: list[Any], padding: list[Any], noted: dict[str, Any]
    ) -> GlobalBatch:
        indices, num_real = batch + padding, len(batch)
        size, micro_size = len(indices), len(indices) // self.accumulation
        return GlobalBatch(
            number=number,
            num_rows=size,
            micro_size=micro_size,
            num_real=num_real,
            take=lambda rows: [
                indices[row]
                for row in (rows if isinstance(rows, range) else rows.tolist())
            ],
            valid=(lambda rows: rows < num_real) if padding else None,
            last=False,
            **noted,
        )


def seen_ahead(
    values: Iterator[Value], may_be_last: Callable[[Value], Any]
) -> Iterator[tuple[Value, bool]]:
    """Yield each value, and whether it is the last one; False, too, where `may_be_last` does not ask for it.

    The next value is drawn ahead only where it is asked for: a sampler that follows the loss must draw as late as it
    can. An error of this library that comes instead of the next value is raised at its own step.
    """
    found = next(values, None)
    while found is not None:
        ahead, following, failure = bool(may_be_last(found)), None, None
        if ahead:
            try:
                following = next(values, None)
            except PaddleShardError as error:
                failure = error
        yield found, ahead and following is None and failure is None
        if failure is not None:
            raise failure
        found = following if ahead else next(values, None)


_REPLAYED = (
    "Make its order depend on the epoch only, through set_epoch or the global generators of numpy, Python and Paddle, "
    "which are seeded for it; or give it a state_dict and a load_state_dict."
)


# What a sampler draws


class Draw:
    """The batches of a sampler in one pass, drawn with private random generators, and a digest of the draws so far."""

    def __init__(self, sampler: Any, epoch: int, of: UserBatches) -> None:
        self._sampler, self.epoch = sampler, epoch
        seed = derive_seed(
            "sampler", of.seed, epoch, *(of.draws_for[0] if of.draws_for else ())
        )
        self._randomness = PrivateRandomness(of.generators, seed, of.around)
        self.head: list[Any] = []
        """The first samples that were drawn, to pad with: at least `head_size`, if there are as many."""
        self.head_size = of.nominal_size or of.num_data_ranks * of.accumulation
        self.owner = owner_of(sampler)
        """The object that holds the sampler's state, or None."""
        self._hash = hashlib.blake2b(digest_size=8)
        with self._randomness():
            self.began = self._state()
            """The owner's state at the beginning of the epoch."""

    def _state(self) -> Any:
        # Copy, since the sampler may go on to change the object that it returns.
        return None if self.owner is None else copy.deepcopy(self.owner.state_dict())

    def load(self, now: Any, began: Any) -> None:
        """Resume the sampler from its own state."""
        if self.owner is None:
            raise StateError(
                f"state has the state of a sampler, but the loader's {type(self._sampler).__name__} has no "
                "load_state_dict. Give the loader the sampler that it had."
            )
        with self._randomness():
            self.owner.load_state_dict(
                copy.deepcopy(now)
            )  # which the sampler may keep and change
        self.began = began

    def __iter__(self) -> Iterator[Drawn]:
        with (
            self._randomness()
        ):  # some samplers draw the whole order here, others in each `next`
            source = iter(self._sampler)
        for step in count():
            with self._randomness():
                found = next(source, _END)
                if found is _END:
                    return
                after = self._state()
            batch = _indices(found, step)
            if len(self.head) < self.head_size:
                self.head += batch
            yield batch, after

    @property
    def digest(self) -> str:
        """Digest of the samples that were noted, in their order."""
        return self._hash.hexdigest()

    def noted(self, batch: list[Any], state: Any) -> dict[str, Any]:
        """Record that a batch is served; return its samples and the state that resumes the sampler after it."""
        ids = as_ids(batch)
        self._hash.update(ids.tobytes())
        saved = (
            {"drawn": self.digest}
            if self.owner is None
            else {"now": state, "began": self.began}
        )
        return {"drawn": ids, "sampler_state": saved}


_END = object()


def samplers(sampler: Any) -> list[Any]:
    """Return a batch sampler and the sampler that it draws from, or None."""
    return [sampler, getattr(sampler, "sampler", None)]


def owner_of(sampler: Any) -> Any:
    """Return the batch sampler or its sampler, whichever has a state; None if neither has one."""
    wanted = ("state_dict", "load_state_dict")
    return next(
        (
            s
            for s in samplers(sampler)
            if all(callable(getattr(s, name, None)) for name in wanted)
        ),
        None,
    )


def _indices(found: Any, step: int) -> list[Any]:
    if isinstance(found, np.ndarray):
        found = found.tolist()
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise ArgumentTypeError(
            f"batch_sampler must yield lists of indices, got {type(found).__name__} at step {step}: "
            f"{found!r}. A sampler of single indices goes into paddle.io.BatchSampler(sampler=...)."
        )
    if len(found) == 0:
        raise ArgumentError(f"batch_sampler yielded an empty batch at step {step}.")
    return [index.item() if isinstance(index, np.integer) else index for index in found]
