"""How does a job save all that it needs to resume, so that whatever is killed when, a whole checkpoint is there?

A checkpoint is a directory of the folder, `<generation>-<step>-<number>`. Its manifest, which has the size and the
checksum of each file, is written last: what has none, or another file than it says, is no checkpoint. A generation is
a start of the job. It is claimed by a file that only one process can make, so a process that was frozen while the job
was started anew finds a later generation before it writes, and ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_shard.checks import check_count, listed
from paddle_shard.errors import (
    ArgumentError,
    CheckpointError,
    PaddleShardError,
    StateError,
    TakenOverError,
    described,
)
from paddle_shard.extras.checkpoint_folder import folder_of, written_by
from paddle_shard.extras.checkpoint_parts import fill, is_dist, is_split, kind_of
from paddle_shard.position.run import Run
from paddle_shard.ranks.agreeing import gather_of
from paddle_shard.ranks.rendezvous import num_ranks

VERSION = 1
"""Version of the manifest and of the files of this library beside it."""

_MANIFEST, _HALF = "manifest.json", "it is half-written"
_TIMEOUT = 1800.0
"""Seconds for which a rank may write or read while the others wait."""
_CHUNK = 1 << 20
_log = logging.getLogger("paddle_shard")


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
        """Nothing is made or read yet.

        Args:
            folder: A folder that all hosts see under this path, or a URL that fsspec opens (`s3://...`), whose server
                can make a file only if it does not exist. It is made if it is missing.
            keep: How many good checkpoints to leave; at least 2, since a job that is started anew may be reading the
                last but one.

        Raises:
            ArgumentError: `keep` is less than 2.
        """
        self._folder, self._keep = folder_of(os.fspath(folder)), check_count("keep", keep, 2)
        self._generation: int | None = None
        self._damaged: set[str] = set()
        """Names of checkpoints that were read, and are none. After a save nothing is read."""
        self._rank, self._ranks = dist.get_rank(), tuple(range(num_ranks()))

    # Saving

    def save(self, step: int, **what: Any) -> str:
        """Save a checkpoint, and delete those that are too old.

        Args:
            step: Steps of the run so far.
            what: What to save, by name: objects with a `state_dict` (model, optimizer, scheduler, loader), or what
                `paddle.save` takes. Of distributed tensors that are split, each rank saves its part, by
                `dist.save_state_dict`; of a loader of data that is split already, its own state. All else is saved by
                the first rank, so it must be the same on all. The state of a loader knows what all ranks have
                delivered, so that its certificate continues.

        Returns:
            The path or URL of the checkpoint.

        Raises:
            TakenOverError: The job was started anew while this process was held up. Nothing was saved. The process
                must end.
            CheckpointError: A rank could not write, on all ranks. The checkpoints before are as they were.
            ArgumentError: The ranks save different steps or things.
        """
        notes = list[Callable[..., None]]()
        try:
            saved = self._save(step, what, notes)
        except TakenOverError:
            for note in notes:
                note(kind="taken over")
            raise
        for note in notes:
            note()
        return saved

    def _save(self, step: int, what: Mapping[str, Any], notes: list[Callable[..., None]]) -> str:
        """Save; `notes` gets what notes in the records of loaders what has become of it."""
        self._claim()
        leaves: dict[str, Any] = {}
        own: dict[str, Any] = {}
        """What each rank saves for itself: the states of loaders of data that is split already."""

        def state_of(one: Any) -> Any:
            run, save = getattr(one, "_run", None), getattr(one, "state_dict", None)
            # Of a loader, unless its state is made by a class of the user's, the record is told when all is saved.
            if not isinstance(run, Run) or not str(getattr(save, "__module__", "")).startswith("paddle_shard."):
                return one if save is None else save()
            state = run.state()
            notes.append(partial(run.note_saved, state, step))
            return state.to_dict()

        def begin() -> list[Any]:
            check_count("step", step, 0)
            if not what:
                raise ArgumentError("save(): there is nothing to save. Name it: save(step, model=model, data=loader).")
            counted = [name for name, value in what.items() if _is_counted(value)]
            states = {name: state_of(one) for name, one in what.items()}
            own.update({name: states.pop(name) for name, one in what.items() if _is_split_data(one)})
            leaves.update(_leaves(states) if states else ())
            alike = [path for path, leaf in leaves.items() if not is_dist(leaf)]
            told = [
                [step, *sorted(what), len(alike), _checksum_of(alike)],
                any(map(is_split, leaves.values())),
                counted,
            ]
            if self._rank:
                return told
            self._check_fence()
            newest = next(iter(self._names()), "0-0").split("-")
            if int(newest[0]) == self._generation and int(newest[1]) > step:
                self._generation = self._next_generation()  # the run went back: this is newer than what it saved before
            name = f"{self._generation:06d}-{step:010d}-"
            return [*told, f"{name}{sum(one.startswith(name) for one in self._folder.sizes())}"]

        begun = self._on_all(begin, "save()")
        _check_same(
            "save",
            [one[0] for one in begun],
            " (step, names, number of values that are no distributed tensors, checksum of their names). Tensors of "
            "some ranks only must be distributed tensors, on the mesh of these ranks",
        )
        splits = any(one[1] for one in begun)
        # Of a loader, the first rank may be on none of its meshes.
        savers = {known: rank for rank in reversed(self._ranks) for known in begun[rank][2]}
        name: str = begun[0][-1]
        self._generation = int(name.partition("-")[0])
        try:
            with self._folder.filled(name) as directory:
                self._on_all(lambda: self._write(directory, leaves, own, savers, splits), "save()")
                # Only now, since any rank may have written Paddle's metadata.
                written = self._on_all(lambda: self._kept(name, directory), "save()")
            self._on_all(lambda: self._finish(name, written), "save()")
        finally:
            if self._rank == 0:
                self._clean()
        return f"{self._folder.name}/{name}"

    def _write(
        self,
        directory: Path,
        leaves: Mapping[str, Any],
        own: Mapping[str, Any],
        savers: Mapping[str, int],
        splits: bool,
    ) -> None:
        """Write this rank's files. `savers`: the ranks that save what the first rank does not, by its name."""
        whole, split, shapes = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for path, leaf in leaves.items():
            members = leaf.process_mesh.process_ids if is_dist(leaf) else [savers.get(json.loads(path)[0], 0)]
            if self._rank not in members:  # its own ranks save it
                continue
            first = self._rank == members[0]
            if is_split(leaf):
                split[path] = leaf
                shapes |= {path: kind_of(leaf)} if first else {}
                continue
            if is_dist(leaf):
                whole_here = all(kind.is_replicated() for kind in leaf.placements)
                leaf = leaf._local_value() if whole_here else dist.unshard_dtensor(leaf)  # which is collective
            whole |= {path: leaf} if first else {}
        if splits:
            dist.save_state_dict(split, str(directory), unique_id=0)
        if whole or shapes or own:
            paddle.save({"whole": whole, "split": shapes, "own": own}, str(directory / f"{self._rank}_values.pdparams"))

    def _kept(self, name: str, directory: Path) -> dict[str, list[int]]:
        """Have this rank's files kept; return the size and the checksum of each."""
        files = written_by(directory, self._rank)
        for file in files:
            self._folder.keep(name, file)
        return {file.name: _measured(file) for file in files}

    def _finish(self, name: str, written: Sequence[Mapping[str, list[int]]]) -> None:
        """Write the manifest, if this is the first rank."""
        if self._rank:
            return
        files = {file: measured for one in written for file, measured in one.items()}
        here = self._folder.sizes(name)
        unseen = [file for file, (size, _) in files.items() if here.get(file) != size]
        if unseen:
            raise CheckpointError(
                f"global rank 0 does not see {unseen} as other ranks have written them. All hosts must see the same "
                "folder."
            )
        self._check_fence()
        told = {"version": VERSION, "name": name, "files": files}
        self._folder.write(f"{name}/{_MANIFEST}", json.dumps({**told, "checksum": _checksum_of(told)}).encode())

    def _clean(self) -> None:
        """Delete what is older than the checkpoints to keep, and what is half-written; on the first rank."""
        try:
            self._check_fence()
            good = 0
            for name in self._names():
                if int(name.partition("-")[0]) > (self._generation or 0):  # of one that has claimed it just now
                    continue
                manifest = self._manifest_of(name)
                if good >= self._keep or manifest == _HALF:
                    self._folder.remove(name)
                good += isinstance(manifest, dict) and name not in self._damaged
        except TakenOverError:
            return  # its checkpoints are the other's now
        except OSError as error:
            _log.warning("%s: old checkpoints could not be deleted: %s", self._folder.name, described(error))

    # Generations

    def _claim(self) -> None:
        """Claim a generation for all ranks, once."""
        if self._generation is None:
            self._generation = self._on_all(lambda: 0 if self._rank else self._next_generation(), "save or load")[0]

    def _next_generation(self) -> int:
        """Claim the next generation, and return its number."""
        me = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} by process {os.getpid()} on host {socket.gethostname()}"
        while True:
            number = self._newest_generation() + 1
            with contextlib.suppress(FileExistsError):  # another process was faster
                self._folder.create(f"generation-{number:06d}", me.encode())
                return number

    def _newest_generation(self) -> int:
        found = [name for name in self._folder.sizes() if re.fullmatch("generation-[0-9]+", name)]
        return max((int(name.partition("-")[2]) for name in found), default=0)

    def _check_fence(self) -> None:
        newest = self._newest_generation()
        if self._generation is None or newest <= self._generation:
            return
        told = self._folder.read(f"generation-{newest:06d}").decode(errors="replace") or "just now"
        raise TakenOverError(
            f"generation {newest} of this job has taken over {self._folder.name} (claimed {told}). Generation "
            f"{self._generation}, of host {socket.gethostname()}, was held up: nothing was saved, and it must end."
        )

    # Loading

    def newest(self) -> str | None:
        """Return the path or URL of the newest checkpoint that is good; None if there is none.

        Checkpoints that are damaged or half-written are passed over, each with a line in the log that says why.
        """
        with closing(self._good("newest()")) as found:
            return next((f"{self._folder.name}/{name}" for name, _ in found), None)

    def load(self, **what: Any) -> int | None:
        """Load the newest checkpoint that is good into objects. From then on the folder is this job's.

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
        had = self._generation
        self._claim()
        try:
            _check_same("load", self._on_all(lambda: sorted(what), "load()"))
            with closing(self._good("load()")) as found:
                for name, directory in found:
                    self._on_all(partial(self._fill, what, directory, name), "load()")
                    return int(name.split("-")[1])
        except BaseException:
            if had is None and self._rank == 0:  # what could not be loaded goes on nowhere: a job that runs may save
                with contextlib.suppress(Exception):
                    self._folder.remove(f"generation-{self._generation:06d}")
            self._generation = had
            raise
        return None

    def _good(self, call: str) -> Generator[tuple[str, Path], None, None]:
        """Yield (name, local directory) of the good checkpoints, the newest first; collective."""

        for name in self._on_all(self._names, call)[0]:
            with self._folder.opened(name) as directory:
                told = self._on_all(partial(self._damage, name, directory), call)
                why = next(filter(None, told), None)
                if why is None:
                    yield name, directory
                    continue
                self._damaged.add(name)
                if self._rank == 0:
                    _log.warning("%s/%s is passed over: %s", self._folder.name, name, why)

    def _damage(self, name: str, directory: Path) -> str | None:
        """Return why a checkpoint is none, as far as this rank looks; None if it is good."""
        manifest = self._manifest_of(name)
        if isinstance(manifest, str):
            return manifest
        files = manifest["files"]
        mine = sorted(files)[self._rank :: len(self._ranks)] if self._folder.shared else files
        other = [file for file in mine if _measured(directory / file) != files[file]]
        return f"{other} are not what was saved: their checksums differ" if other else None

    def _fill(self, what: Mapping[str, Any], directory: Path, name: str) -> None:
        """Load a checkpoint into objects."""
        # All are asked first: a distributed optimizer makes its moments then, by a step that moves the weights.
        targets = {
            key: value.state_dict()
            for key, value in what.items()
            if hasattr(value, "state_dict") and not hasattr(value, "certificate")
        }
        known = dict(_leaves(targets))
        states: dict[str, Any] = {}
        whole: dict[str, Any] = {}
        filled: dict[str, Any] = {}  # what is filled in place, from parts or with a part
        savers = Counter[str]()
        """How many ranks have saved a state of their own, by its name."""
        for file in sorted(directory.glob("*_values.pdparams")):
            saved = paddle.load(str(file))
            savers.update(saved["own"].keys())
            if file.name == f"{self._rank}_values.pdparams":
                states |= saved["own"]
            whole |= saved["whole"]
            kinds = saved["split"] | {path: kind_of(leaf) for path, leaf in whole.items() if is_dist(known.get(path))}
            for path, kind in kinds.items():
                if json.loads(path)[0] in what:
                    filled[path] = known[path] if path in known else paddle.zeros(*kind)
                    if kind_of(filled[path]) != kind:
                        raise StateError(f"{name} holds {kind} for {path}, and not {kind_of(filled[path])}.")
        for path, leaf in {**whole, **filled}.items():
            _put(states, path, leaf)
        self._check_fits(what, states, targets, savers, name)
        setters: dict[str, Callable[[Any], Any]] = {}
        for key, value in what.items():
            setter = getattr(value, "set_state_dict", None) or getattr(value, "load_state_dict", None)
            if setter is None and not isinstance(value, dict):
                kind = type(value).__name__
                raise ArgumentError(f"load({key}=): give an object with a state_dict, or a dict, not {kind}.")
            setters[key] = setter or value.update
        loaders = [key for key, value in what.items() if hasattr(value, "certificate")]
        for key in loaders:  # before anything else is filled: it may refuse the state
            try:
                setters.pop(key)(states[key])
            except StateError as error:
                text = (
                    f" With Checkpoints that is: found = {{}}; checkpoints.load(..., {key}=found); "
                    "loader.load_state_dict(found, override=[...])."
                )
                raise StateError(f"{key}: {error}{text * ('state, override=' in str(error))}") from None
        fill(filled, whole, directory)
        for key, setter in setters.items():
            setter(states[key])

    def _check_fits(
        self,
        what: Mapping[str, Any],
        states: Mapping[str, Any],
        targets: Mapping[str, Any],
        savers: Mapping[str, int],
        name: str,
    ) -> None:
        """Refuse states that are not those of these objects.

        Args:
            what: The objects, by name.
            states: The states that were loaded, by name.
            targets: The states that the objects have now; of loaders none.
            savers: How many ranks have saved a state of their own, by its name.
            name: Of the checkpoint.
        """
        for key in savers.keys() & what.keys():
            if savers[key] != len(self._ranks):
                raise StateError(
                    f"{key}: the data is split already, so {name} holds a state of each of {savers[key]} ranks, and "
                    f"there are {len(self._ranks)} now. Resume on as many ranks."
                )
        lacking = sorted(what.keys() - states.keys())
        if lacking:
            raise StateError(f"{name} holds {sorted(states)}, and not {lacking}. Load what was saved, by its names.")
        for key, value in what.items():
            if isinstance(value, paddle.nn.Layer):  # Paddle would leave out what does not fit
                there, here = ({(path, *one.shape) for path, one in _leaves(state[key])} for state in (states, targets))
                if here != there:
                    raise StateError(f"{key}: {name} holds {there - here}, and this model {here - there}.")
        for key, value in what.items():
            if isinstance(value, paddle.optimizer.Optimizer):  # its first step would fail, in Paddle's words
                saved_for = [name for name in states[key] if not isinstance(states[key][name], Mapping)]
                names = [one.name for one in _parameters_of(value)]
                if saved_for and names and not any(one.startswith(f"{name}_") for one in saved_for for name in names):
                    raise StateError(
                        f"{key}: {listed(saved_for, 2)} are in {name}, and this optimizer has the parameters "
                        f"{listed(names, 2)}. Make the model as it was when it was saved: Paddle numbers its layers, "
                        "and names a parameter that is a distributed tensor with '.dist', also on one rank."
                    )

    # What both need

    def _names(self) -> list[str]:
        """Return the names of all checkpoints, whole or not, the newest first."""
        named = re.compile("[0-9]+-[0-9]+-[0-9]+").fullmatch
        found = [name for name, size in self._folder.sizes().items() if size is None and named(name)]  # directories
        return sorted(found, key=lambda name: [int(part) for part in name.split("-")], reverse=True)

    def _manifest_of(self, name: str) -> dict[str, Any] | str:
        """Return the manifest of a checkpoint whose files have the right sizes, or else why it is none."""
        here = self._folder.sizes(name)
        if not here.get(_MANIFEST):
            return _HALF
        try:
            told: dict[str, Any] = json.loads(self._folder.read(f"{name}/{_MANIFEST}"))
            known = told.pop("checksum") == _checksum_of(told) and told["name"] == name
        except (ValueError, KeyError, TypeError, AttributeError):  # also JSON that is no object
            known = False
        if not known or told["version"] != VERSION:
            return "its manifest is damaged, of another version, or that of another checkpoint"
        other = [file for file, (size, _) in told["files"].items() if here.get(file) != size]
        return f"{other} are missing, or have another size than when they were saved" if other else told

    def _on_all(self, work: Callable[[], Any], call: str) -> list[Any]:
        """Return what `work` returns on each rank, as JSON values. If it raises on any, all ranks raise."""
        mine: Exception | None = None
        try:
            said = {"done": work()}
        except Exception as error:
            mine = error
            try:  # who has taken over may have deleted what was being written
                self._check_fence()
            except (OSError, TakenOverError) as over:
                mine = over if isinstance(over, TakenOverError) else error
            said = {"failed": described(mine), "over": str(mine) if isinstance(mine, TakenOverError) else ""}
        found = [json.loads(one) for one in gather_of(self._ranks, json.dumps(said), _TIMEOUT, f"Checkpoints.{call}")]
        rank, failed = next(((rank, one) for rank, one in enumerate(found) if "failed" in one), (0, None))
        if failed is None:
            return [one["done"] for one in found]
        if isinstance(mine, PaddleShardError):
            raise mine
        if failed["over"]:
            raise TakenOverError(failed["over"])
        text = f"Checkpoints.{call} in {self._folder.name} failed on global rank {rank}: {failed['failed']}"
        raise CheckpointError(text) from mine


def _check_same(call: str, told: Sequence[Any], meaning: str = "") -> None:
    """Refuse a call for which the ranks have told different things."""
    for rank, one in enumerate(told):
        if one != told[0]:
            raise ArgumentError(
                f"{call}(): all ranks {call} the same, but global rank 0 has {told[0]} and rank {rank} {one}{meaning}."
            )


def _is_split_data(value: Any) -> bool:
    """Return whether a value is a loader of data that is split already, of which each rank has a state of its own."""
    return hasattr(value, "certificate") and getattr(value, "is_dataset_splitted", False) is True


def _is_counted(value: Any) -> bool:
    """Return whether a value is a loader whose state knows what all ranks have delivered; from now on, if it can."""
    if hasattr(value, "certificate"):
        with contextlib.suppress(ArgumentError):  # a stream has none, nor has a rank that is on none of the meshes
            value.certificate()
            return True
    return False


def _parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, which may be in groups."""
    found: list[Any] = []
    for one in optimizer._parameter_list or ():
        found += one["params"] if isinstance(one, dict) else [one]
    return found


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path as JSON, leaf) of nested dicts; an empty one is a leaf, and one with keys that JSON has not."""
    if isinstance(value, Mapping) and value and all(isinstance(key, str | int) for key in value):
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


def _measured(file: Path) -> list[int]:
    """Return the size and the checksum of a file."""
    size, checksum = 0, 0
    with open(file, "rb") as opened:
        while chunk := opened.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _checksum_of(told: Any) -> int:
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())
