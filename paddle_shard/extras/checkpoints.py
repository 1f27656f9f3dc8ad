"""Checkpoints of a job: each is complete on all ranks, or not there, whatever process is killed when.

A checkpoint is a directory `<generation>-<number>-step<step>` of the folder. Its manifest, which holds the size of each
file, is written last: a directory without one, or with a file of another size, is no checkpoint. A generation is a
start of the job, claimed by a file that only one process can create. A process that was frozen while the job was
started again finds a later generation before it writes, and raises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_shard.core.checks import check_count
from paddle_shard.data.files.files import is_remote, local_path
from paddle_shard.errors import (
    ArgumentError,
    CheckpointError,
    PaddleShardError,
    StateError,
    TakenOverError,
    described,
)
from paddle_shard.extras.checkpoint_folder import (
    create_file,
    read_file,
    remove_directory,
    save_files,
    sizes_in,
)
from paddle_shard.extras.checkpoint_parts import (
    SavedPart,
    fill,
    is_dist,
    kind_of,
    part_of,
    without_sums,
)
from paddle_shard.ranks.agreeing import gather_of
from paddle_shard.ranks.rendezvous import num_ranks

VERSION = 2
"""Version of the manifest, of the names of checkpoints and of the files of this library."""

_MANIFEST = "manifest.json"
_VALUES = "values.pdparams"
"""File of a rank: the values that it saves whole, its own states, and the index of its parts."""
_PARTS = "parts.pdparams"
"""File of a rank: its parts of distributed tensors, by path."""
_ONLY_SOME = " (step, names, number of values). Tensors of some ranks only must be distributed tensors."
_NAME = re.compile(r"(\d+)-(\d+)-step(\d+)", re.ASCII)
"""Generation, number in the generation, and step of a checkpoint."""
_TIMEOUT = 1800.0
"""Seconds for which a rank may write or read while the others wait."""
_log = logging.getLogger("paddle_shard")


@dataclass(slots=True)
class _Saved:
    """The contents of a checkpoint."""

    whole: dict[str, Any] = field(default_factory=dict)
    """Values that are no distributed tensors, by path."""
    kinds: dict[str, Any] = field(default_factory=dict)
    """Shapes and dtypes of distributed tensors, by path."""
    parts: list[SavedPart] = field(default_factory=list)
    own: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of each rank, its states of loaders of data that is split already."""


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
                last but one.

        Raises:
            ArgumentError: `keep` is less than 2, or `folder` is a URL.
        """
        if is_remote(os.fspath(folder)):
            raise ArgumentError(
                f"folder={folder!r} is a URL: give a folder that all hosts see, such as a mounted one."
            )
        self._folder = Path(local_path(os.fspath(folder))).absolute()
        self._keep = check_count("keep", keep, 2)
        self._generation: int | None = None
        self._rank = dist.get_rank()
        self._ranks = tuple(range(num_ranks()))

    # Saving

    def save(self, step: int, **what: Any) -> str:
        """Save a checkpoint, and delete those that are too old.

        Args:
            step: Steps of the run so far.
            what: What to save, by name: objects with a `state_dict` (model, optimizer, scheduler, loader), or what
                `paddle.save` takes. Each rank saves its part of distributed tensors, and its own state of a loader of
                data that is split already. All else is saved by the first rank, so it must be the same on all. The
                state of a loader knows what all ranks have delivered, so that its certificate continues.

        Returns:
            The path of the checkpoint.

        Raises:
            TakenOverError: The job was started again while this process was held up. Nothing was saved. The process
                must end.
            CheckpointError: A rank could not write, on all ranks. The checkpoints before are as they were.
            ArgumentError: The ranks save different steps or things.
        """
        self._claim("save()")
        leaves: dict[str, Any] = {}
        own: dict[str, Any] = {}
        reports = self._on_all(lambda: self._collect(step, what, leaves, own), "save()")
        _check_same("save", [report["same"] for report in reports], _ONLY_SOME)
        directory = self._folder / reports[0]["name"]
        keep = (
            sys.maxsize
        )  # what a failed save has left may look complete, and not outlast a crash
        try:
            files = self._on_all(lambda: self._write(directory, leaves, own), "save()")
            self._on_all(lambda: self._finish(directory, files), "save()")
            keep = self._keep
        finally:
            if self._rank == 0:
                self._clean(keep)
        return str(directory)

    def _collect(
        self,
        step: int,
        what: Mapping[str, Any],
        leaves: dict[str, Any],
        own: dict[str, Any],
    ) -> Any:
        """Collect what this rank may save, and return what the ranks compare.

        Args:
            step: Steps of the run so far.
            what: What to save, by name.
            leaves: Gets the values of all states, by path.
            own: Gets the states of loaders of data that is split already.
        """
        check_count("step", step, 0)
        if not what:
            raise ArgumentError(
                "save(): there is nothing to save. Name it: save(step, model=model, data=loader)."
            )
        for name, value in what.items():
            if _is_loader(value):
                with contextlib.suppress(ArgumentError):  # streams have none
                    value.certificate()
            state = value.state_dict() if hasattr(value, "state_dict") else value
            if _is_loader(value) and value.is_dataset_splitted:
                own[name] = state
            else:
                leaves.update(_leaves(state, (name,)))
        names = [path for path, leaf in leaves.items() if not is_dist(leaf)]
        report: dict[str, Any] = {"same": [step, sorted(what), len(names)]}
        if self._rank == 0:
            self._check_fence()
            numbers = [
                number
                for generation, number, _ in map(_parsed, self._names())
                if generation == self._generation
            ]
            report["name"] = (
                f"{self._generation:06d}-{max(numbers, default=0) + 1:06d}-step{step}"
            )
        return report

    def _write(
        self, directory: Path, leaves: Mapping[str, Any], own: Mapping[str, Any]
    ) -> dict[str, int]:
        """Write this rank's files; return the size of each."""
        whole: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        index: dict[str, Any] = {}
        for path, leaf in leaves.items():
            if not is_dist(leaf):
                if self._rank == 0:
                    whole[path] = leaf
            elif self._rank in leaf.process_mesh.process_ids:
                tensor = without_sums(leaf)
                part = part_of(tensor)
                if part is not None and part.is_first:
                    parts[path] = tensor._local_value()
                    index[path] = [kind_of(tensor), part.start, part.shape]
        contents: dict[str, Any] = {
            f"{self._rank}_{_VALUES}": {"whole": whole, "own": own, "index": index}
        }
        if parts:
            contents[f"{self._rank}_{_PARTS}"] = parts
        return save_files(directory, contents)

    def _finish(
        self, directory: Path, sizes_of_ranks: Sequence[Mapping[str, int]]
    ) -> None:
        """Write the manifest, on the first rank."""
        if self._rank:
            return
        files = {file: size for sizes in sizes_of_ranks for file, size in sizes.items()}
        unseen = files.items() - sizes_in(directory).items()
        if unseen:
            raise CheckpointError(
                f"global rank 0 does not see {sorted(unseen)} as other ranks have written them. All hosts must see the "
                "same folder."
            )
        self._check_fence()
        create_file(
            directory / _MANIFEST,
            json.dumps({"version": VERSION, "files": files}).encode(),
        )

    def _clean(self, keep: int) -> None:
        """Delete what is older than the `keep` newest checkpoints, and what is half-written; on the first rank."""
        try:
            self._check_fence()
            num_complete = 0
            for name in self._names():
                if _parsed(name)[0] > (
                    self._generation or 0
                ):  # of a job that has just claimed it
                    continue
                is_complete = self._problem_of(name) is None
                if num_complete >= keep or not is_complete:
                    remove_directory(self._folder / name)
                num_complete += is_complete
        except TakenOverError:
            return
        except OSError as error:
            _log.warning(
                "%s: old checkpoints could not be deleted: %s",
                self._folder,
                described(error),
            )

    # Generations

    def _claim(self, call: str) -> None:
        """Claim the next generation for all ranks, once."""
        if self._generation is None:
            self._generation = self._on_all(
                lambda: None if self._rank else self._create_generation(), call
            )[0]

    def _create_generation(self) -> int:
        claim = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} by process {os.getpid()} on host {socket.gethostname()}"
        while True:
            number = self._newest_generation() + 1
            with contextlib.suppress(FileExistsError):  # another process was faster
                create_file(self._folder / f"generation-{number:06d}", claim.encode())
                return number

    def _newest_generation(self) -> int:
        matches = (
            re.fullmatch("generation-([0-9]+)", name) for name in sizes_in(self._folder)
        )
        return max((int(match[1]) for match in matches if match), default=0)

    def _check_fence(self) -> None:
        """Raise if a later generation was claimed."""
        newest = self._newest_generation()
        if self._generation is None or newest <= self._generation:
            return
        claim = (
            read_file(self._folder / f"generation-{newest:06d}").decode(
                errors="replace"
            )
            or "just now"
        )
        raise TakenOverError(
            f"generation {newest} of this job has taken over {self._folder} (claimed {claim}). Generation "
            f"{self._generation}, of host {socket.gethostname()}, was held up: nothing was saved, and it must end."
        )

    # Loading

    def newest(self) -> str | None:
        """Return the path of the newest complete checkpoint; None if there is none.

        Checkpoints that are damaged or half-written are skipped, each with a line in the log that says why.
        """
        name = self._on_all(self._newest_name, "newest()")[0]
        return None if name is None else str(self._folder / name)

    def _newest_name(self) -> str | None:
        """Return the name of the newest complete checkpoint, on the first rank."""
        names: list[str] = []
        newest = None
        while self._rank == 0 and names != (
            names := self._names()
        ):  # another job may save and delete meanwhile
            newest = None
            for name in names:
                problem = self._problem_of(name)
                if problem is None:
                    newest = name
                    break
                _log.warning("%s is skipped: %s", self._folder / name, problem)
        return newest

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
        _check_same("load", self._on_all(lambda: sorted(what), "load()"))
        name = self._on_all(self._newest_name, "load()")[0]
        if name is not None:
            self._on_all(lambda: self._fill(what, self._folder / name), "load()")
        self._claim("load()")
        return None if name is None else _parsed(name)[2]

    def _fill(self, what: Mapping[str, Any], directory: Path) -> None:
        """Load a checkpoint into objects."""
        name = directory.name
        setters = {key: _setter_of(key, value) for key, value in what.items()}
        # Before anything is loaded: a distributed optimizer makes its moments now, by a step that moves the weights.
        targets = {
            key: value.state_dict()
            for key, value in what.items()
            if hasattr(value, "state_dict") and not _is_loader(value)
        }
        target_leaves = dict(_leaves(targets))

        saved = self._read(directory)
        whole = saved.whole
        kinds = saved.kinds | {
            path: kind_of(leaf)
            for path, leaf in whole.items()
            if is_dist(target_leaves.get(path))
        }
        states = dict(saved.own.get(self._rank, {}))

        # Tensors that were saved in parts, or that are distributed now, are filled in place.
        filled: dict[str, Any] = {}
        for path, kind in kinds.items():
            if json.loads(path)[0] in what:
                filled[path] = (
                    target_leaves[path]
                    if path in target_leaves
                    else paddle.zeros(*kind)
                )
                if kind_of(filled[path]) != kind:
                    raise StateError(
                        f"{name} holds {kind} for {path}, and not {kind_of(filled[path])}."
                    )
        for path, leaf in {**whole, **filled}.items():
            _put(states, path, leaf)

        for key in what:
            num_saved = sum(key in own for own in saved.own.values())
            if num_saved not in (0, len(self._ranks)):
                raise StateError(
                    f"{key}: the data is split already, so {name} holds a state of each of {num_saved} ranks, and "
                    f"there are {len(self._ranks)} now. Resume on as many ranks."
                )
        _check_fits(what, states, targets, name)
        loaders = [key for key, value in what.items() if _is_loader(value)]
        for (
            key
        ) in loaders:  # before anything else is filled: a loader may reject its state
            setters[key](states[key])
        fill(filled, whole, saved.parts)
        for key in what.keys() - loaders:
            setters[key](states[key])

    def _read(self, directory: Path) -> _Saved:
        """Read what all ranks saved, without the parts of tensors."""
        saved = _Saved()
        names = json.loads(read_file(directory / _MANIFEST))[
            "files"
        ]  # another job may be deleting them
        for file in sorted(
            directory / name for name in names if name.endswith(_VALUES)
        ):
            values = paddle.load(str(file))
            saved.whole |= values["whole"]
            saved.own[int(file.name.partition("_")[0])] = values["own"]
            for path, (kind, start, shape) in values["index"].items():
                saved.kinds[path] = kind
                parts_file = file.with_name(file.name.replace(_VALUES, _PARTS))
                saved.parts.append(SavedPart(path, start, shape, parts_file))
        return saved

    # Shared by saving and loading

    def _names(self) -> list[str]:
        """Return the names of all checkpoints, complete or not, the newest first."""
        names = [
            name
            for name, size in sizes_in(self._folder).items()
            if size is None and _NAME.fullmatch(name)
        ]
        return sorted(names, key=_parsed, reverse=True)

    def _problem_of(self, name: str) -> str | None:
        """Return why a checkpoint is not complete; None if it is."""
        sizes = sizes_in(self._folder / name)
        if _MANIFEST not in sizes:
            return "it is half-written"
        try:
            manifest = json.loads(read_file(self._folder / name / _MANIFEST))
            version = manifest["version"]
            changed = sorted(manifest["files"].items() - sizes.items())
        except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
            return "its manifest is damaged"
        if version != VERSION:
            return f"its version is {version}, and this paddle_shard reads {VERSION}"
        return (
            f"{changed} are missing, or have another size than when they were saved"
            if changed
            else None
        )

    def _on_all(self, work: Callable[[], Any], call: str) -> list[Any]:
        """Return the JSON value that `work` returns on each rank. If it raises on any, all ranks raise."""
        error: Exception | None = None
        try:
            report = {"done": work()}
        except Exception as own_error:
            error = own_error
            report = {"failed": described(error)}
        texts = gather_of(
            self._ranks, json.dumps(report), _TIMEOUT, f"Checkpoints.{call}"
        )
        reports = [json.loads(text) for text in texts]
        if isinstance(error, PaddleShardError):
            raise error
        for rank, report in enumerate(reports):
            if "failed" in report:
                kind, _, reason = report["failed"].partition(": ")
                if kind == TakenOverError.__name__:
                    raise TakenOverError(reason)
                text = f"Checkpoints.{call} in {self._folder} failed on global rank {rank}: {report['failed']}"
                raise CheckpointError(text) from error
        return [report["done"] for report in reports]


def _check_same(call: str, reports: Sequence[Any], hint: str = "") -> None:
    """Raise if the ranks call with different things."""
    for rank, report in enumerate(reports):
        if report != reports[0]:
            what = f"global rank 0 has {reports[0]} and rank {rank} {report}"
            raise ArgumentError(
                f"{call}(): all ranks {call} the same, but {what}.{hint}"
            )


def _check_fits(
    what: Mapping[str, Any],
    states: Mapping[str, Any],
    targets: Mapping[str, Any],
    name: str,
) -> None:
    """Check that states were loaded for all objects, and that those of models have the same tensors.

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
        if isinstance(value, paddle.nn.Layer):  # Paddle would ignore what does not fit
            saved = {(path, *leaf.shape) for path, leaf in _leaves(states[key])}
            expected = {(path, *leaf.shape) for path, leaf in _leaves(targets[key])}
            if saved != expected:
                raise StateError(
                    f"{key}: {name} holds {saved - expected}, and this model {expected - saved}."
                )


def _setter_of(key: str, value: Any) -> Callable[[Any], Any]:
    """Return the function that gives an object its state."""
    for method in ("set_state_dict", "load_state_dict", "update"):
        if hasattr(value, method):
            setter: Callable[[Any], Any] = getattr(value, method)
            return setter
    raise ArgumentError(
        f"load({key}=): give an object with a state_dict, or a dict, not {type(value).__name__}."
    )


def _is_loader(value: Any) -> bool:
    return hasattr(value, "certificate")


def _parsed(name: str) -> tuple[int, int, int]:
    """Return the generation, the number and the step of a checkpoint."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3])


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path as JSON, leaf) of nested dicts; an empty one is a leaf, and one with keys that JSON lacks."""
    if (
        isinstance(value, Mapping)
        and value
        and all(isinstance(key, str | int) for key in value)
    ):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    else:
        yield json.dumps(path), value


def _put(states: dict[str, Any], path: str, leaf: Any) -> None:
    """Set the leaf at a path of nested dicts."""
    *outer, last = json.loads(path)
    for key in outer:
        states = states.setdefault(key, {})
    states[last] = leaf
