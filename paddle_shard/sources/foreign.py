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
    """The part of the data that another library reads. It replaces a rank and a world size."""

    shard: int
    """The data rank, which is the same for all ranks of a replica group."""
    num_shards: int
    """Number of data ranks."""
    seed: int
    """Seed of the run, the same on every rank."""
    epoch: int
    """The epoch. If the data is repeated within an epoch, each repetition has another number."""
    state: Any = None
    """Result of `save` after the last batch that was delivered; None at the beginning."""


class Foreign:
    """Another library's loader. Each process builds one for its share, and uses the loader's batches as its own rows.

    Give it to `shard_dataloader` in place of a DataLoader. The library decides which samples a share holds. So a run is
    bound to its number of data ranks: resuming it on another number is an error that says so.
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
            build: Returns an iterable over the batches of an epoch: arrays, or tensors that support DLPack. All batches
                except the last have the same number of rows. It is called in each process when a pass begins.
            name: Name of the library, for messages and the saved state.
            save: Called after each batch with the result of `build`. It returns the state as a JSON value, which
                `build` gets again in `Share.state`. None: a resumed pass reads the delivered batches again and drops
                them.
        """
        self.build, self.name, self.save = build, name, save


class ForeignSource(Stage):
    """A foreign loader as a source. Part p of P is what the library reads as shard p of P."""

    def __init__(self, foreign: Foreign) -> None:
        self._foreign = foreign

    @property
    def cuts(self) -> bool:
        """True: the library reads a part without reading the others."""
        return True

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return an iterator over the batches of each part."""
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
