"""How is a user's own batch sampler read by all ranks alike, and cut evenly?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.errors import ArgumentError, ArgumentTypeError, PaddleShardError, StateError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.partition import Rows, check_batch_size
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.state import LoaderState
from paddle_shard.samplers.randomness import Generator, PrivateRandomness


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatch:
    """A global batch as a user's sampler named it."""

    indices: list[Any]
    """Whatever the data set is indexed with; padding at the end."""
    micro_size: int
    padding: int = 0
    sampler_state: Mapping[str, Any] | None = None
    last: bool = False
    """Whether the sampler was seen to end behind it. False also where nobody has looked yet."""

    @property
    def drawn(self) -> list[Any]:
        """The samples that the sampler drew: all rows but the padding."""
        return self.indices[: self.num_real] if self.padding else self.indices

    @property
    def num_rows(self) -> int:
        """Rows of the global batch, padding included."""
        return len(self.indices)

    @property
    def num_real(self) -> int:
        """Rows that are not padding."""
        return len(self.indices) - self.padding

    @property
    def all_real(self) -> bool:
        """Whether no row is padding."""
        return self.padding == 0

    def take(self, rows: Rows | range) -> list[Any]:
        """Return the data set's indices at some rows."""
        return [self.indices[row] for row in (rows if isinstance(rows, range) else rows.tolist())]

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""
        return rows < self.num_real


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatches:
    """The batches of a user's batch sampler, which stays in charge of the order.

    Every rank iterates over the whole sampler, under random generators that all ranks seed alike, and takes
    its slice of each batch. A batch may differ in size from the others, as bucketing samplers make them, as
    long as it can be cut evenly; only the last one gets the tail.

    A sampler with `state_dict` and `load_state_dict` of its own is resumed by them; any other is replayed up
    to the saved position, without reading a sample.
    """

    batch_sampler: Iterable[Any]
    """Yields lists of indices; each is a global batch."""
    num_data_ranks: int
    tail: str
    """One of `plan.shard_plan.TAILS`."""
    nominal_size: int | None = None
    """Rows of a full batch, where the sampler says so."""
    num_steps: int | None = None
    """Steps of an epoch where the caller can compute them; else the sampler's own length counts."""
    accumulation: int = 1
    seed: int = 0
    generators: Sequence[Generator] = ()
    """The global generators that the sampler may draw from."""
    takes_epoch: bool = False
    """The order depends on the sampler's attribute `epoch`, as that of Paddle's `DistributedBatchSampler`."""
    consecutive: bool = False
    """Its batches are stretches of one order of samples, which may be cut anew into batches of another size."""

    @property
    def knows_length(self) -> bool:
        """Whether it need not be counted."""
        return self.num_steps is not None or (self._says_length and hasattr(self.batch_sampler, "__len__"))

    @property
    def _drops_itself(self) -> bool:
        """Whether what the sampler yields is what it wants to be served, smaller batches too."""
        return bool(getattr(self.batch_sampler, "drop_last", False)) and not self.consecutive

    @property
    def _says_length(self) -> bool:
        """Whether the sampler's own length is that of its batches here: its last is not dropped by the tail."""
        return self.tail != "drop" or bool(getattr(self.batch_sampler, "drop_last", False))

    def untouched(self) -> UserBatches:
        """Return the same over a copy of the sampler; over itself where it cannot be copied."""
        try:
            return replace(self, batch_sampler=copy.deepcopy(self.batch_sampler))
        except Exception as error:  # such as a generator
            raise_if_a_handlers(error)
            return self

    def __len__(self) -> int:
        if self.num_steps is not None:
            return self.num_steps
        if not isinstance(self.batch_sampler, Sized):
            raise ArgumentTypeError(
                f"len(): the batch_sampler {type(self.batch_sampler).__name__} has no __len__. "
                "Give it one, or count the steps yourself."
            )
        if self._says_length:
            try:
                return len(self.batch_sampler)
            except Exception as error:  # Paddle's WeightedRandomSampler given a list has a __len__ that raises
                raise_if_a_handlers(error)
                reason: Exception | None = error
        else:  # whether the last batch is short shows only at the end
            reason = None
        other = self.untouched()
        if other is self:
            raise ArgumentTypeError(
                f"len(): the batch_sampler {type(self.batch_sampler).__name__} does not say how many batches "
                f"it makes with tail={self.tail!r}, and cannot be copied to count them."
            ) from reason
        return sum(1 for _ in other.epoch(0))

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on, as far as it can be seen from here."""
        sampler = type(self.batch_sampler).__name__
        return {"sampler": sampler, "tail": self.tail, "seed": self.seed}

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[UserBatch]:
        """Iterate over the global batches of an epoch.

        Raises:
            BatchSizeError: A batch that is not the last cannot be cut evenly.
            ArgumentError: The tail is "error" and the last batch is short.
            StateError: The saved position is none that this sampler comes to.
        """
        if resumed is not None and resumed.ended:
            return iter(())
        sampler: Any = self.batch_sampler
        if hasattr(sampler, "set_epoch") and not _has_state(sampler):
            sampler = copy.copy(sampler)  # now, so that this pass keeps its epoch whatever is set meanwhile
            if self.takes_epoch:
                sampler.epoch = epoch
        if self.consecutive and sampler.drop_last:  # by the tail, as the batches are when they are cut anew
            sampler = copy.copy(sampler)
            sampler.drop_last = False
        drawn = self._draw(sampler, epoch, resumed.sampler if resumed is not None else None)
        return self._seen_to_end(self._batches(drawn, resumed), resumed or LoaderState())

    def _seen_to_end(self, batches: Iterator[UserBatch], resumed: LoaderState) -> Iterator[UserBatch]:
        """Mark the last batch, where its length says that it could be the last.

        That is where a look further is worth its while: a sampler that follows the loss draws as late as it can.
        An end that no length has announced is seen by whoever asks for the batch behind it.
        """
        expected, step = self._steps_of_length(resumed), resumed.steps
        found = next(batches, None)
        while found is not None:
            step += 1
            if expected is None or step < expected:
                yield found
                found = next(batches, None)
                continue
            failure = following = None
            try:
                following = next(batches, None)
            except PaddleShardError as error:  # raised at its own step
                failure = error
            yield replace(found, last=following is None and failure is None)
            if failure is not None:
                raise failure
            found = following

    def _steps_of_length(self, resumed: LoaderState) -> int | None:
        """Return how many steps an epoch has at least, as far as lengths tell, which may be estimates."""
        try:
            steps = len(self) if self.knows_length else None
        except Exception as error:  # a __len__ of the user's that raises
            raise_if_a_handlers(error)
            return None
        if steps is None or not (resumed.samples and self.consecutive and self.nominal_size):
            return steps
        return resumed.steps + steps - -(-resumed.samples // self.nominal_size)  # perhaps in another size from here on

    def _batches(self, drawn: Iterator[Drawn], resumed: LoaderState | None) -> Iterator[UserBatch]:
        head: list[Any] = []  # the first samples of the order, to pad with
        step = 0
        if resumed is not None and resumed.samples:
            step = resumed.steps
            if resumed.sampler is None:
                drawn = self._replay(drawn, resumed.samples, head)
        found = next(drawn, None)
        while found is not None:
            batch, state = found
            following = None
            if self._is_short(batch):
                following = next(drawn, None)
                if following is None:
                    yield from self._last(batch, head, step, state)
                    return
                self._check_size(batch, step)
            yield UserBatch(indices=batch, micro_size=len(batch) // self.accumulation, sampler_state=state)
            found = next(drawn, None) if following is None else following
            if len(head) < self._head_size:
                head += batch
            step += 1

    def _draw(self, sampler: Any, epoch: int, state: Mapping[str, Any] | None) -> Iterator[Drawn]:
        """Yield each batch of the sampler and the sampler's own state after it, if it has one."""
        randomness = PrivateRandomness(self.generators, derive_seed("sampler", self.seed, epoch))
        owner = next((s for s in (sampler, getattr(sampler, "sampler", None)) if _has_state(s)), None)
        with randomness:
            if state is not None:
                if owner is None:
                    raise StateError(
                        f"state has the state of a sampler, but the loader's {type(sampler).__name__} has no "
                        "load_state_dict. Give it the one that it had."
                    )
                owner.load_state_dict(state)
            source = iter(sampler)
        step = 0
        while True:
            with randomness:
                found = next(source, _END)
                after = owner.state_dict() if owner is not None and found is not _END else None
            if found is _END:
                return
            yield _indices(found, step), after
            step += 1

    def _replay(self, drawn: Iterator[Drawn], samples: int, head: list[Any]) -> Iterator[Drawn]:
        """Draw up to a position without reading; go on from there, cutting anew if batches may be."""
        passed, rest = 0, []
        while passed < samples:
            found = next(drawn, None)
            if found is None:
                raise StateError(
                    f"state stands at sample {samples}, but the batch_sampler {type(self.batch_sampler).__name__} "
                    f"ends after {passed}: it draws another order than the one that was saved."
                )
            batch, _ = found
            if len(head) < self._head_size:
                head += batch
            passed += len(batch)
            rest = batch[len(batch) - (passed - samples) :] if passed > samples else []
        if rest and not (self.consecutive and self.nominal_size):
            raise StateError(
                f"state stands at sample {samples}, inside a batch of the batch_sampler "
                f"{type(self.batch_sampler).__name__}: give it the batch size that it had."
            )
        if not rest:
            return drawn
        return self._cut_anew(rest, drawn)

    def _cut_anew(self, rest: list[Any], drawn: Iterator[Drawn]) -> Iterator[Drawn]:
        size = self.nominal_size or 1
        for batch, _ in drawn:
            rest = rest + batch
            if len(rest) >= size:
                yield rest[:size], None
                rest = rest[size:]
        while rest:
            yield rest[:size], None
            rest = rest[size:]

    @property
    def _unit(self) -> int:
        return self.num_data_ranks * self.accumulation

    @property
    def _head_size(self) -> int:
        return self.nominal_size or self._unit

    def _is_short(self, batch: list[Any]) -> bool:
        return len(batch) % self._unit != 0 or (self.nominal_size is not None and len(batch) < self.nominal_size)

    def _check_size(self, batch: list[Any], step: int) -> None:
        try:
            check_batch_size(len(batch), self.num_data_ranks, self.accumulation)
        except ValueError as error:
            text = f"step {step} of the batch_sampler {type(self.batch_sampler).__name__}: {error}"
            raise type(error)(text) from None

    def _last(
        self, batch: list[Any], head: list[Any], step: int, state: Mapping[str, Any] | None
    ) -> Iterator[UserBatch]:
        if self.tail == "drop":
            if not self._drops_itself:
                return
            self._check_size(batch, step)
        if self.tail == "error":
            raise ArgumentError(
                f"tail='error': the last batch of the batch_sampler (step {step}) is short with {len(batch)} "
                f"samples. Choose tail='pad', 'fill' or 'drop', or a sampler that ends on a full batch."
            )
        padding = -len(batch) % self._unit
        if self.tail == "fill" and self.nominal_size is not None:
            padding = max(padding, self.nominal_size - len(batch))
        order = head + batch
        indices = batch + [order[i % len(order)] for i in range(padding)]
        yield UserBatch(
            indices=indices, micro_size=len(indices) // self.accumulation, padding=padding, sampler_state=state
        )


_END = object()
Drawn = tuple[list[Any], Mapping[str, Any] | None]


def _has_state(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


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
