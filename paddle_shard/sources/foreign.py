"""How is another library's loader a source?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.seeding import mix
from paddle_shard.stages.opening import Opening, Stated
from paddle_shard.stages.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of the data that another library reads, in place of a rank and a world size."""

    shard: int
    """The data rank: replicas have the same."""
    num_shards: int
    """Number of data ranks."""
    seed: int
    """Seed of the run, the same on every rank."""
    epoch: int
    """The epoch; with "repeat", a further one for each time that the data is read again."""
    state: Any = None
    """Result of `save` after the last batch that was delivered; None to begin at the beginning."""


class Foreign:
    """Another library's loader: each process builds one, told its share, and takes its batches as its own rows.

    It is given to `shard_dataloader` in place of a DataLoader. The library fixes which samples a share holds,
    so a run is bound to its number of data ranks, and says so when it is resumed on another.
    """

    def __init__(
        self,
        build: Callable[[Share], Iterable[Any]],
        *,
        name: str,
        save: Callable[[Any], Any] | None = None,
    ) -> None:
        """Describe the loader.

        Args:
            build: Returns what yields the batches of an epoch: arrays, or tensors that speak DLPack, with the
                same number of rows in each but the last. Called in each process, when a pass begins.
            name: Of the library, for messages and the saved state.
            save: Returns the state of what `build` returned, which `build` can be given again: a value for JSON.
                Called after each batch. None: a resumed pass reads delivered batches again and throws them away.
        """
        self.build, self.name, self.save = build, name, save


class ForeignSource(Stage):
    """A foreign loader as a source: part p of P is what the library reads as shard p of P."""

    def __init__(self, foreign: Foreign) -> None:
        self._foreign = foreign

    @property
    def cuts(self) -> bool:
        """The library does."""
        return True

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the batches of the shares."""
        return [self._batches(part, opening) for part in opening.parts]

    def fingerprint(self) -> list[Any]:
        """Return the library's name."""
        return [["foreign", self._foreign.name]]

    def _batches(self, part: int, opening: Opening) -> Iterator[Any]:
        foreign, key = self._foreign, opening.key(part, "source")
        state = opening.state
        if state is not None and not (isinstance(state, dict) and set(state) == {"at", "saved"}):
            raise StateError(
                f"state is no state of the {foreign.name} loader: {state!r}. Load what its state_dict() returned."
            )
        share = Share(
            shard=part,
            num_shards=opening.num_parts,
            seed=opening.seed,
            epoch=opening.epoch + opening.round * (1 << 20),
            state=None if state is None else state["saved"],
        )
        opening.seed_generators(key)
        loader = foreign.build(share)
        if not hasattr(loader, "__iter__"):
            raise ArgumentError(f"{foreign.name}: build returned {type(loader).__name__}, which cannot be iterated.")
        batches = iter(loader)
        begun = 0 if state is None else state["at"]
        for number in count(begun):
            opening.seed_generators(mix(key, number))
            try:
                batch = next(batches)
            except StopIteration:
                return
            if number < begun + opening.skip:
                continue
            if foreign.save is None:
                yield batch
            else:
                yield Stated(batch, {"at": number + 1, "saved": foreign.save(loader)})
