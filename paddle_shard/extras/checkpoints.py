"""Checkpoints of a job: each is complete on all ranks, or not there, whatever process is killed when.

A process that was frozen while the job was started again finds a later generation before it writes, and raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_shard.core.checks import check_count
from paddle_shard.errors import (
    ArgumentError,
    CheckpointError,
    PaddleShardError,
    StateError,
    TakenOverError,
    text_of,
)
from paddle_shard.extras.checkpoint_folder import (
    MANIFEST,
    PARTS,
    VALUES,
    CheckpointFolder,
    read_file,
    save_files,
)
from paddle_shard.extras.checkpoint_parts import (
    SavedPart,
    fill,
    is_dist,
    kind_of,
    part_of,
    without_sums,
)
from paddle_shard.ranks.rendezvous import num_ranks
from paddle_shard.run.run import gathered

Values = dict[str, Any]
"""Values by name or path."""
_HINT_OF_SAVE = " (step, names, number of values). Tensors of some ranks only must be distributed tensors."
_TIMEOUT = 1800.0
"""Seconds for which a rank may write or read while the others wait."""


@dataclass(slots=True)
class _RankState:
    """The states of the objects that this rank saves."""

    leaves: Values = field(default_factory=dict)
    """Values by path."""
    split_states: Values = field(default_factory=dict)
    """States of loaders of data that is split already, by name."""

    def collect(self, step: int, what: Values) -> list[Any]:
        """Collect the states of objects; return what must be the same on all ranks."""
        check_count("step", step, 0)
        if not what:
            raise ArgumentError(
                "save(): there is nothing to save. Name it: save(step, model=model, data=loader)."
            )
        for name, value in what.items():
            if _is_loader(value):
                with contextlib.suppress(ArgumentError):  # streams have none
                    value.certificate()
            state = (
                value.state_dict() if hasattr(value, "state_dict") else value
            )
            if not isinstance(state, Mapping):
                raise ArgumentError(
                    f"Checkpoints.save({name}=): the value must be an object with a state_dict, or a dict, got "
                    f"{type(value).__name__}: {value!r:.100}. Put it into a dict: {name}={{...}}."
                )
            if _is_loader(value) and value.is_dataset_splitted:
                self.split_states[name] = state
            else:
                self.leaves.update(_leaves(state, (name,)))
        num_whole = sum(not is_dist(leaf) for leaf in self.leaves.values())
        return [step, sorted(what), num_whole]

    def write(self, rank: int, directory: Path) -> dict[str, int]:
        """Write the files of a rank; return the size of each."""
        others: Values = {}
        parts = {}
        index: Values = {}
        for path, leaf in self.leaves.items():
            if not isinstance(leaf, paddle.Tensor):
                others[path] = leaf
                continue
            tensor = without_sums(leaf)
            part = part_of(tensor)
            if part is not None and part.is_first:
                parts[path] = (
                    tensor._local_value() if is_dist(tensor) else tensor
                )
                index[path] = [kind_of(tensor), part.start, part.shape]
        values = {
            "whole": {} if rank else others,
            "own": self.split_states,
            "index": index,
        }
        contents = {f"{rank}_{VALUES}": values}
        if parts:
            contents[f"{rank}_{PARTS}"] = parts
        return save_files(directory, contents)


class Checkpoints:
    """Checkpoints of a job in a folder: each is complete on all ranks, or not there.

    All methods are collective: every rank of the job calls them, at the same step. With one process, no group is
    needed. What is saved by one number of ranks can be loaded by another.

    Examples:
        >>> checkpoints = paddle_shard.Checkpoints("checkpoints")  # doctest: +SKIP
        >>> step = checkpoints.load(model=model, optimizer=optimizer, data=loader) or 0  # doctest: +SKIP
        >>> for inputs, labels in loader:  # doctest: +SKIP
        ...     step += 1
        ...     if step % 1000 == 0:
        ...         checkpoints.save(step, model=model, optimizer=optimizer, data=loader)
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        """Choose the folder; nothing is created or read yet.

        Args:
            folder: A folder that all hosts see under this path. It is created if it is missing.
            keep: How many checkpoints to keep; at least 2, since a job that is started again may be reading the
                last but one. Damaged ones, and those of another version, are kept beside them.

        Raises:
            ArgumentError: `keep` is less than 2, or `folder` is a URL.
        """
        if "://" in os.fspath(folder):
            raise ArgumentError(
                f"folder is a URL ({os.fspath(folder).partition(':')[0]}): give a folder that all hosts see, such as a "
                "mounted one."
            )
        self._folder = CheckpointFolder(Path(folder).absolute())
        self._keep = check_count("keep", keep, 2)
        self._rank = dist.get_rank()
        self._ranks = tuple(range(num_ranks()))

    def save(self, step: int, **what: Any) -> str:
        """Save a checkpoint, and delete those that are too old.

        Args:
            step: Steps of the run so far.
            what: What to save, by name: objects with a `state_dict` (model, optimizer, scheduler, loader), or dicts of
                what `paddle.save` takes. Each rank saves its part of distributed tensors, and its own state of a loader
                of data that is split already. All else is saved by the first rank, so it must be the same on all. The
                state of a loader knows what all ranks have delivered, so that its certificate continues.

        Returns:
            The path of the checkpoint.

        Raises:
            TakenOverError: The job was started again while this process was held up. Nothing was saved. The process
                must end.
            CheckpointError: A rank could not write, on all ranks. The checkpoints before are as they were.
            ArgumentError: The ranks save different steps or things, or a value is neither such an object nor a dict.
        """
        self._claim("save")
        state = _RankState()
        _check_same("save", self._on_all("save", state.collect, step, what))
        name = self._on_first("save", self._folder.next_name, step)
        directory = self._folder.path / name
        keep = sys.maxsize  # what a failed save has left may look complete
        try:
            sizes = self._on_all("save", state.write, self._rank, directory)
            self._on_first("save", self._folder.complete, directory, sizes)
            keep = self._keep
        finally:
            if self._rank == 0:
                self._folder.clean(keep)
        return str(directory)

    def newest(self) -> str | None:
        """Return the path of the newest complete checkpoint; None if there is none.

        Checkpoints that are damaged, half-written or of another version are skipped, each with a line in the log that
        says why.
        """
        name = self._on_first("newest", self._folder.newest)
        return None if name is None else str(self._folder.path / name)

    def load(self, **what: Any) -> int | None:
        """Load the newest complete checkpoint into objects. From then on the folder is this job's.

        Args:
            what: Objects by the names that they were saved with, or some of them. An object gets its state by
                `set_state_dict` or `load_state_dict`, a dict is updated.

        Returns:
            The step of the checkpoint; None if there is none, and nothing was loaded.

        Raises:
            StateError: The checkpoint does not hold these things, or does not fit them.
            CheckpointError: A rank could not read, on all ranks.
            ArgumentError: The ranks load different things.
        """
        _check_same("load", self._on_all("load", sorted, what))
        name = self._on_first("load", self._folder.newest)
        if name is not None:
            self._on_all("load", self._fill, what, self._folder.path / name)
        self._claim("load")
        return None if name is None else int(name.partition("-step")[2])

    def _claim(self, call: str) -> None:
        """Claim the next generation for all ranks, once."""
        if self._folder.generation is None:
            self._folder.generation = self._on_first(call, self._folder.claim)

    def _fill(self, what: Values, directory: Path) -> None:
        """Load a checkpoint into objects."""
        name = directory.name
        setters = {key: _setter_of(key, value) for key, value in what.items()}
        loaders = [key for key, value in what.items() if _is_loader(value)]
        others = [key for key in what if key not in loaders]
        # Before anything is loaded: a distributed optimizer makes its moments now, by a step that moves the weights.
        targets = {
            key: what[key].state_dict()
            for key in others
            if hasattr(what[key], "state_dict")
        }
        target_leaves = dict(_leaves(targets))

        others_saved, parts, split_states = _read(directory)
        tensors = {
            part.path: _tensor_of(part, target_leaves.get(part.path), name)
            for part in parts
            if json.loads(part.path)[0] in what
        }
        states = dict(split_states.get(self._rank, {}))
        for path, leaf in others_saved.items():
            _put(states, path, leaf)
        for part in parts:
            _put(states, part.path, tensors.get(part.path))

        for key in what:
            num_saved = sum(key in of_rank for of_rank in split_states.values())
            if num_saved not in (0, len(self._ranks)):
                raise StateError(
                    f"{key}: the data is split already, so {name} holds a state of each of {num_saved} ranks, and "
                    f"there are {len(self._ranks)} now. Resume on as many ranks."
                )
        _check_fits(what, states, targets, name)
        for key in loaders:  # first: a loader may reject its state
            setters[key](states[key])
        fill(tensors, parts)
        for key in others:
            setters[key](states[key])

    def _on_first(self, call: str, work: Callable[..., Any], *args: Any) -> Any:
        """Return the JSON value that `work` returns on the first rank, on all ranks."""
        if self._rank:
            work = lambda *_: None  # noqa: E731
        return self._on_all(call, work, *args)[0]

    def _on_all(
        self, call: str, work: Callable[..., Any], *args: Any
    ) -> list[Any]:
        """Return the JSON value that `work` returns on each rank. If it raises on any, all ranks raise."""
        error = None
        kind = ""
        try:
            result = work(*args)
        except Exception as raised:
            error = raised
            kind = type(error).__name__
            result = text_of(error)
        label = f"Checkpoints.{call}()"
        reports = gathered([kind, result], self._ranks, _TIMEOUT, label)
        if isinstance(error, PaddleShardError):
            raise error
        for rank, (kind, text) in enumerate(reports):
            if kind == TakenOverError.__name__:
                raise TakenOverError(text)
            if kind:
                raise CheckpointError(
                    f"{label} in {self._folder.path} failed on global rank {rank}: {kind}: {text}"
                ) from error
        return [result for _, result in reports]


def _read(
    directory: Path,
) -> tuple[Values, list[SavedPart], dict[int, Values]]:
    """Return the values of a checkpoint that are no tensors, by path, the parts of tensors, and states by rank."""
    others: Values = {}
    parts = []
    split_states: dict[int, Values] = {}
    # Not a listing: another job may be deleting them.
    files = json.loads(read_file(directory / MANIFEST))["files"]
    for name in sorted(file for file in files if file.endswith(VALUES)):
        values = paddle.load(str(directory / name))
        others |= values["whole"]
        split_states[int(name.partition("_")[0])] = values["own"]
        file = directory / name.replace(VALUES, PARTS)
        parts += [
            SavedPart(path, file, *at) for path, at in values["index"].items()
        ]
    return others, parts, split_states


def _check_same(call: str, reports: Sequence[Any]) -> None:
    """Raise if the ranks call with different things."""
    hint = _HINT_OF_SAVE if call == "save" else ""
    for rank, report in enumerate(reports):
        if report != reports[0]:
            raise ArgumentError(
                f"{call}(): all ranks {call} the same, but global rank 0 has {reports[0]} and rank {rank} {report}."
                f"{hint}"
            )


def _check_fits(
    what: Values,
    states: Values,
    targets: Values,
    name: str,
) -> None:
    """Check that states were loaded for all objects, and that those of models have the same names.

    Args:
        what: The objects, by name.
        states: The states that were loaded, by name.
        targets: The states that the objects have now; without loaders.
        name: Name of the checkpoint.
    """
    missing = sorted(what.keys() - states.keys())
    if missing:
        raise StateError(
            f"{name} holds {sorted(states)}, and not {missing}. Load what was saved, by its names."
        )
    for key, value in what.items():
        # Paddle would ignore what does not fit
        if isinstance(value, paddle.nn.Layer):
            saved = dict(_leaves(states[key])).keys()
            expected = dict(_leaves(targets[key])).keys()
            if saved != expected:
                raise StateError(
                    f"{key}: {name} holds {saved - expected}, and this model {expected - saved}."
                )


def _tensor_of(part: SavedPart, target: Any, name: str) -> Any:
    """Return the tensor to be filled with parts that checkpoint `name` holds: the target; a new one if that is None."""
    tensor = paddle.zeros(*part.kind) if target is None else target
    if kind_of(tensor) != part.kind:
        raise StateError(
            f"{name} holds {part.kind} for {part.path}, and not {kind_of(tensor)}."
        )
    return tensor


def _setter_of(key: str, value: Any) -> Callable[[Any], Any]:
    """Return the function that gives an object its state."""
    for method in ("set_state_dict", "load_state_dict", "update"):
        if hasattr(value, method):
            setter: Callable[[Any], Any] = getattr(value, method)
            return setter
    raise ArgumentError(
        f"Checkpoints.load({key}=): the value must be an object with a state_dict, or a dict, got "
        f"{type(value).__name__}."
    )


def _is_loader(value: Any) -> bool:
    return hasattr(value, "certificate")


def _leaves(
    value: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield (path as JSON, leaf) of nested dicts; an empty one is a leaf, and one with keys that JSON lacks."""
    is_dict = isinstance(value, Mapping) and bool(value)
    if is_dict and all(isinstance(key, str | int) for key in value):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    else:
        yield json.dumps(path), value


def _put(states: Values, path: str, leaf: Any) -> None:
    """Set the leaf at a path of nested dicts."""
    *outer, last = json.loads(path)
    for key in outer:
        states = states.setdefault(key, {})
    states[last] = leaf
