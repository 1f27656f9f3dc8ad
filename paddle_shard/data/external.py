"""`ExternalLoader`: another library's loader as a source, which reads parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from paddle_shard.data.iterable import ROUND
from paddle_shard.data.stages.stage import (
    Opening,
    PartsSource,
    Samples,
    Stated,
)
from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError

VERSION = 1
"""Version of the states that are saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """The part of the data that another library reads. It replaces a rank and a world size.

    Attributes:
        shard: The data rank, which is the same for all ranks of a replica group.
        num_shards: Number of data ranks.
        seed: Seed of the run, the same on every rank.
        epoch: The epoch. If the data is repeated within an epoch, each repetition has another number.
        state: Result of `save` after the last batch that was delivered; None at the beginning.
    """

    shard: int
    num_shards: int
    seed: int
    epoch: int
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class ExternalLoader:
    """Another library's loader. Each process builds one for its share, and uses the loader's batches as its own rows.

    Give it to `shard_dataloader` in place of a DataLoader. The library decides which samples a share holds. So a run is
    bound to its number of data ranks: resuming it on another number is an error that says so.

    Args:
        build: Returns an iterable over the batches of an epoch: arrays, or tensors that support DLPack. All batches
            except the last have the same number of rows. It is called in each process when an iteration begins.
        name: Name of the library, for messages and the saved state.
        save: Called after each batch with the result of `build`. It returns the state, which `build` gets again in
            `ShardOptions.state`: None, numbers, strings, and lists and dicts (by strings) of these. None: the
            loader has no state.
        repeatable: True if `build` gives the same batches in the same order whenever it gets the same share. Then a
            run can be resumed within an epoch without a state: the delivered batches are read again and dropped.
    """

    build: Callable[[ShardOptions], Iterable[Any]]
    _: KW_ONLY
    name: str
    save: Callable[[Any], Any] | None = None
    repeatable: bool = False

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise ArgumentTypeError(
                f"ExternalLoader: build must be a function of ShardOptions that returns a loader, got {self.build!r}."
            )


class ExternalSource(PartsSource):
    """An external loader as a source. Part p of P is what the library reads as shard p of P."""

    def __init__(self, loader: ExternalLoader) -> None:
        self._loader = loader

    def check_resume(self, *, repeats: bool) -> None:
        """Refuse to resume within an epoch if the delivered batches cannot be found again.

        Args:
            repeats: True if the data is read again within an epoch. A library's state is of one reading.

        Raises:
            StateError: There is no state, and another reading may give other batches.
        """
        loader = self._loader
        if loader.repeatable or (loader.save is not None and not repeats):
            return
        why = (
            "is read again within an epoch, which its save= does not cover"
            if loader.save
            else "has no save="
        )
        raise StateError(
            f"state is within an epoch, but the {loader.name} loader {why}. If it gives other batches when it is read "
            "again, some samples would be missing and others come twice. Resume from the end of an epoch; or, if it "
            "is your own and gives the same batches in the same order for the same ShardOptions, say "
            "ExternalLoader(repeatable=True)."
        )

    def fingerprint(self) -> list[Any]:
        """Return the library's name."""
        # the kind as saved states spell it
        return [["foreign", self._loader.name]]

    def part(self, part: int, opening: Opening) -> Samples:
        """Return the batches of a part."""
        name = self._loader.name
        save = self._loader.save
        state: Any = opening.state or {"at": 0, "saved": None}
        options = ShardOptions(
            shard=part,
            num_shards=opening.num_parts,
            seed=opening.seed,
            epoch=opening.epoch + opening.round * ROUND,
            state=state["saved"],
        )
        # Building may use the generators, for instance for the order of a shuffle.
        opening.rng.seed(opening.key(part, "source"))
        loader = self._loader.build(options)
        if not hasattr(loader, "__iter__"):
            raise ArgumentError(
                f"{name}: build returned {type(loader).__name__}, which cannot be iterated."
            )
        batches = opening.seeded(iter(loader), part, state["at"])
        if save is None:
            yield from batches
            return
        for number, batch in enumerate(batches, state["at"] + opening.skip + 1):
            saved = _json_copy(save(loader), name)
            yield Stated(
                batch, {"version": VERSION, "at": number, "saved": saved}
            )


def _json_copy(state: Any, name: str) -> Any:
    """Return a copy of a library's state, which JSON must keep as it is."""
    try:
        copied = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        copied = None
    if copied != state:
        raise ArgumentTypeError(
            f"the save= of the {name} loader returned {state!r:.200}, which JSON does not keep as it is. Return None, "
            "numbers, strings, and lists and dicts (by strings) of these."
        )
    return copied
