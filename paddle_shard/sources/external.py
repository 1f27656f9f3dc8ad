"""How is another library's loader a source?"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    MissingDependencyError,
    SplitError,
    StateError,
)
from paddle_shard.plan.partition import nearest_multiples
from paddle_shard.plan.seeding import derive_seed, mix
from paddle_shard.stages.stage import Opening, Stage, Stated


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
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


class ExternalLoader:
    """Another library's loader. Each process builds one for its share, and uses the loader's batches as its own rows.

    Give it to `shard_dataloader` in place of a DataLoader. The library decides which samples a share holds. So a run is
    bound to its number of data ranks: resuming it on another number is an error that says so.
    """

    def __init__(
        self,
        build: Callable[[ShardOptions], Iterable[Any]],
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
                `build` gets again in `ShardOptions.state`. None: a resumed pass reads the delivered batches again
                and drops them.
        """
        self.build, self.name, self.save = build, name, save


class ExternalSource(Stage):
    """An external loader as a source. Part p of P is what the library reads as shard p of P."""

    def __init__(self, loader: ExternalLoader) -> None:
        self._loader = loader

    cuts = True
    """The library reads a part without reading the others."""

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return an iterator over the batches of each part."""
        return [self._batches(part, opening) for part in opening.parts]

    def fingerprint(self) -> list[Any]:
        """Return the library's name."""
        return [["foreign", self._loader.name]]  # the kind as saved states spell it

    def _batches(self, part: int, opening: Opening) -> Iterator[Any]:
        external, key = self._loader, opening.key(part, "source")
        state = opening.state
        if state is not None and not (isinstance(state, dict) and set(state) == {"at", "saved"}):
            raise StateError(
                f"state is no state of the {external.name} loader: {state!r}. Load what its state_dict() returned."
            )
        share = ShardOptions(
            shard=part,
            num_shards=opening.num_parts,
            seed=opening.seed,
            epoch=opening.epoch + opening.round * (1 << 20),
            state=None if state is None else state["saved"],
        )
        opening.seed_generators(key)
        loader = external.build(share)
        if not hasattr(loader, "__iter__"):
            raise ArgumentError(f"{external.name}: build returned {type(loader).__name__}, which cannot be iterated.")
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
            if external.save is None:
                yield batch
            else:
                yield Stated(batch, {"at": number + 1, "saved": external.save(loader)})


VERSION = 1
"""Version of the states that adapters save."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra to install.

    Raises:
        MissingDependencyError: A package that is imported in the `with` block is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name or error} cannot be imported ({error}). Install it with: pip install 'paddle_shard[{extra}]'."
        ) from error


def refuse_options(function: str, options: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse options of a library that its adapter sets itself.

    Args:
        function: Name of the user's function, for the message.
        options: What the user gives.
        reasons: Option -> why it is not the user's to choose.

    Raises:
        ArgumentError: One of them is given.
    """
    for name, reason in reasons.items():
        if name in options:
            raise ArgumentError(f"{function}: leave {name} out: {reason}.")


def local_rows(batch_size: int, share: ShardOptions) -> int:
    """Return the rows that one data rank reads of a global batch.

    Raises:
        BatchSizeError: The batch size is not an int >= 1, or the data ranks do not divide it.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise BatchSizeError(f"batch_size must be an int >= 1, got {batch_size!r}.")
    if batch_size % share.num_shards:
        near = " or ".join(map(str, nearest_multiples(batch_size, share.num_shards)))
        raise BatchSizeError(
            f"batch_size={batch_size} is the global batch, which {share.num_shards} data ranks do not divide. "
            f"Nearest sizes that work: {near}."
        )
    return batch_size // share.num_shards


def seed_of(share: ShardOptions, *purpose: Any, bits: int = 31) -> int:
    """Return a seed of `bits` bits for this epoch, the same on every data rank."""
    return derive_seed("adapter", share.seed, share.epoch, *purpose) >> (64 - bits)


def check_share(found: Mapping[str, Any], share: ShardOptions, what: str, fix: str) -> None:
    """Check that an object of a library has the data rank and the number of data ranks of a share.

    Args:
        found: Exactly two entries, the library's name -> the object's value: first the data rank, then the number of
            data ranks.
        share: The share that the values must agree with.
        what: The object that has the values, for the message.
        fix: What to write instead.

    Raises:
        SplitError: The values differ from the share's.
    """
    (rank, has_rank), (count, has_count) = found.items()
    if (has_rank, has_count) != (share.shard, share.num_shards):
        raise SplitError(
            f"{what} has {rank}={has_rank} and {count}={has_count}, but this process is data rank {share.shard} of "
            f"{share.num_shards} (which is not the global rank, nor the world size). {fix}"
        )


class _WatchedOptions:
    """A `ShardOptions` that records which of its attributes were read."""

    def __init__(self, share: ShardOptions) -> None:
        self._share = share
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._share, name)
        self.asked.add(name)
        return value


def build_watched(build: Callable[[Any], Any], share: ShardOptions, library: str) -> Any:
    """Return what a user's function builds for a share.

    Raises:
        SplitError: The function has not read both `shard` and `num_shards`, so every data rank would read all the data.
    """
    watched = _WatchedOptions(share)
    built = build(watched)
    if share.num_shards > 1 and not {"shard", "num_shards"} <= watched.asked:
        raise SplitError(
            f"{library}: the function that builds the loader has looked at neither share.shard nor share.num_shards, "
            f"or at one only, so that each of the {share.num_shards} data ranks would read all of the data. Split it "
            "there, in the function itself, not later in a worker."
        )
    return built


def opened(state: Any, library: str, **expected: Any) -> Mapping[str, Any]:
    """Check a state that `sealed` made, and return it.

    Raises:
        StateError: The state is of another library, another version, or other data.
    """
    if not isinstance(state, Mapping) or state.get("adapter") != library or state.get("version") != VERSION:
        shown = {key: state.get(key) for key in ("adapter", "version")} if isinstance(state, Mapping) else state
        raise StateError(f"state: {shown!r} is no state of the {library} adapter in version {VERSION}.")
    for name, value in expected.items():
        if state.get(name) != value:
            raise StateError(
                f"state: {name} was {state.get(name)!r} when it was saved, and is {value!r} now. Go on with the same "
                "data and batch size, or begin the epoch anew."
            )
    return state


def sealed(adapter: str, **values: Any) -> dict[str, Any]:
    """Return values as a state that `opened` can check."""
    return {"adapter": adapter, "version": VERSION, **values}


def stacked(samples: Sequence[Any]) -> Any:
    """Return a batch of samples of one structure: arrays and numbers stacked, other leaves as a list."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        return [stacked([sample[i] for sample in samples]) for i in range(len(first))]
    if isinstance(first, np.ndarray | np.generic | bool | int | float):
        return np.stack(samples)
    return list(samples)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, and restore the old ones."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_TAG = "$"
"""The only key of a dict that encodes a value of another kind: {"$": [kind, ...]}."""


def to_json(value: Any, path: str = "state") -> Any:
    """Return a value that JSON can hold and that `from_json` turns back. Nothing is pickled.

    Args:
        value: None, numbers, strings, bytes, numpy arrays, torch tensors, and lists, tuples and dicts of these.
        path: Path of the value in the state, for messages.

    Raises:
        ArgumentTypeError: The value contains another type.

    Examples:
        >>> from_json(to_json({1: (b"ab", 2.5)}))
        {1: (b'ab', 2.5)}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_TAG: ["bytes", _text(value)]}
    if isinstance(value, np.generic):
        return to_json(value.item(), path)
    if isinstance(value, list):
        return [to_json(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: ["tuple", *(to_json(item, f"{path}[{i}]") for i, item in enumerate(value))]}
    if isinstance(value, Mapping):
        pairs = [(key, to_json(item, f"{path}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) and key != _TAG for key, _ in pairs):
            return dict(pairs)
        return {_TAG: ["dict", *([to_json(key, f"a key of {path}"), item] for key, item in pairs)]}
    kind = "array" if isinstance(value, np.ndarray) else "tensor" if type(value).__module__ == "torch" else None
    array = np.ascontiguousarray(value) if kind else None
    if array is None or array.dtype.hasobject:
        raise ArgumentTypeError(f"{path} is a {type(value).__name__}, which cannot be saved as JSON: {value!r:.200}")
    return {_TAG: [kind, array.dtype.str, list(value.shape), _text(array.tobytes())]}


def from_json(value: Any) -> Any:
    """Return the value that `to_json` has encoded.

    Raises:
        StateError: The value has an unknown kind, so `to_json` has not encoded it.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) != {_TAG}:
        return {key: from_json(item) for key, item in value.items()}
    kind, *rest = value[_TAG]
    if kind == "bytes":
        return base64.b64decode(rest[0])
    if kind == "tuple":
        return tuple(from_json(item) for item in rest)
    if kind == "dict":
        return {from_json(key): from_json(item) for key, item in rest}
    if kind not in ("array", "tensor"):
        raise StateError(f"state: {kind!r} is no kind of value that is known.")
    dtype, shape, text = rest
    array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    if kind == "array":
        return array
    import torch

    return torch.from_numpy(array)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
