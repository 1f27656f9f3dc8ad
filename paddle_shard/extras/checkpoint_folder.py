"""The folder of checkpoints: their names, which of them are complete, and which start of the job may write.

A checkpoint is a directory `<generation>-<number>-step<step>`. Its manifest, which holds the size of each file, comes
last: a directory without one is half-written. A generation is a start of the job, claimed by a file that only one
process can create. Only complete checkpoints that are too old and half-written ones are deleted: what is damaged, or of
another version, is kept and named in the log once.

All that `Checkpoints` does with a disk, but for `paddle.load`, is here, so that a simulated disk can take its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import CheckpointError, TakenOverError, described
from paddle_shard.run.record_lines import sync

VERSION = 2
"""Version of the manifest, of the names of checkpoints and of the files of this library."""
MANIFEST = "manifest.json"
VALUES = "values.pdparams"
"""File of a rank: values that are no tensors (of the first rank), its own states, and the index of its parts."""
PARTS = "parts.pdparams"
"""File of a rank: its parts of tensors, by path; the first rank saves those that are not distributed."""
HALF_WRITTEN = "it is half-written"
_NAME = re.compile(r"\d{6}-\d{6}-step\d+", re.ASCII)
"""Name of a checkpoint, `<generation>-<number>-step<step>`: the newest one is the greatest."""
_CLAIM = re.compile(r"generation-\d{6}", re.ASCII)
_OF_HALF_WRITTEN = re.compile(
    rf"\d+_({VALUES}|{PARTS})|{MANIFEST}\.new", re.ASCII
)
"""Names of the files in a half-written checkpoint."""


@dataclass
class CheckpointFolder:
    """A folder of checkpoints, and the generation of this job in it."""

    path: Path
    generation: int | None = None
    """The generation that this job has claimed."""

    def names(self) -> list[str]:
        """Return the names of all checkpoints, complete or not, the newest first."""
        entries = sizes_in(self.path).items()
        directories = [name for name, size in entries if size is None]
        return sorted(filter(_NAME.fullmatch, directories), reverse=True)

    def problems(self) -> dict[str, str | None]:
        """Return why each checkpoint is not complete, or None, the newest first; log each problem once."""
        while True:
            problems = {name: self._problem(name) for name in self.names()}
            if list(problems) == self.names():
                break  # else another job has saved and deleted meanwhile
        for name, problem in problems.items():
            if problem is not None:
                warn_once("%s is skipped: %s", str(self.path / name), problem)
        return problems

    def newest(self) -> str | None:
        """Return the name of the newest complete checkpoint; None if there is none."""
        problems = self.problems()
        return next((name for name in problems if problems[name] is None), None)

    def _problem(self, name: str) -> str | None:
        """Return why a checkpoint is not complete; None if it is."""
        sizes = sizes_in(self.path / name)
        if MANIFEST not in sizes:
            others = [
                file for file in sizes if not _OF_HALF_WRITTEN.fullmatch(file)
            ]
            return (
                f"it has no manifest, and holds {others}"
                if others
                else HALF_WRITTEN
            )
        try:
            manifest = json.loads(read_file(self.path / name / MANIFEST))
            version = manifest["version"]
            changed = sorted(manifest["files"].items() - sizes.items())
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            FileNotFoundError,
        ):
            return "its manifest is damaged"
        if version != VERSION:
            return f"its version is {version}, and this paddle_shard reads {VERSION}"
        if changed:
            return f"{changed} are missing, or have another size than when they were saved"
        return None

    # Generations

    def claim(self) -> int:
        """Claim the next generation."""
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"{now} by process {os.getpid()} on host {socket.gethostname()}"
        while True:
            generation = int(self._newest_claim()[-6:]) + 1
            path = self.path / f"generation-{generation:06d}"
            # another process was faster
            with contextlib.suppress(FileExistsError):
                create_file(path, text.encode())
                return generation

    def _newest_claim(self) -> str:
        """Return the name of the file by which the newest generation was claimed."""
        claims = filter(_CLAIM.fullmatch, sizes_in(self.path))
        return max(claims, default="generation-000000")

    def check_fence(self) -> None:
        """Raise TakenOverError if a later generation was claimed."""
        newest = self._newest_claim()
        if newest > f"generation-{self.generation or 0:06d}":
            claim = read_file(self.path / newest).decode(errors="replace")
            raise TakenOverError(
                f"generation {int(newest[-6:])} of this job has taken over {self.path} (claimed "
                f"{claim or 'just now'}). Generation {self.generation}, of host {socket.gethostname()}, was held up: "
                "nothing was saved, and it must end."
            )

    # Writing

    def next_name(self, step: int) -> str:
        """Return the name of a new checkpoint of this generation."""
        self.check_fence()
        prefix = f"{self.generation:06d}-"
        names = [name for name in self.names() if name.startswith(prefix)]
        number = int(names[0].split("-")[1]) + 1 if names else 1
        return f"{prefix}{number:06d}-step{step}"

    def complete(
        self, directory: Path, sizes: Sequence[Mapping[str, int]]
    ) -> None:
        """Write the manifest of a checkpoint, for the sizes of each rank's files."""
        files = {
            file: size for of_rank in sizes for file, size in of_rank.items()
        }
        unseen = files.items() - sizes_in(directory).items()
        if unseen:
            raise CheckpointError(
                f"global rank 0 does not see in {directory} what other ranks have written: {sorted(unseen)}. All ranks "
                "must give the same folder, on a file system that their hosts share."
            )
        self.check_fence()
        # Under another name first: a crash leaves a whole manifest or none.
        new = directory / f"{MANIFEST}.new"
        create_file(
            new, json.dumps({"version": VERSION, "files": files}).encode()
        )
        os.replace(new, directory / MANIFEST)
        sync(directory)

    def clean(self, keep: int) -> None:
        """Delete half-written checkpoints, and complete ones but for the `keep` newest."""
        next_generation = f"{(self.generation or 0) + 1:06d}"
        try:
            self.check_fence()
            problems = self.problems()
            complete = [name for name in problems if problems[name] is None]
            for name, problem in problems.items():
                is_old = name in complete[keep:] or problem == HALF_WRITTEN
                # A job that has just taken over may be writing.
                if is_old and name < next_generation:
                    remove_checkpoint(self.path / name)
        except TakenOverError:
            return
        except OSError as error:
            text = "%s: old checkpoints could not be deleted: %s"
            warn_once(text, str(self.path), described(error))


def sizes_in(directory: Path) -> dict[str, int | None]:
    """Return the entries of a directory: name -> bytes. There are none if it does not exist.

    It is None for what is no file, for what was deleted in between, and for a link to nowhere.

    Raises:
        OSError: It cannot be read now. What it holds must not be taken for missing.
    """
    sizes: dict[str, int | None] = {}
    with contextlib.suppress(FileNotFoundError):
        sizes = dict.fromkeys(os.listdir(directory))
    for name in sizes:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(directory / name)
            if stat.S_ISREG(status.st_mode):
                sizes[name] = status.st_size
    return sizes


def read_file(path: Path) -> bytes:
    """Return the content of a file."""
    with open(path, "rb") as file:
        return file.read()


def create_file(path: Path, content: bytes) -> None:
    """Create a file, and its directory, unless the file exists.

    Raises:
        FileExistsError: It exists; another process may have been faster.
    """
    os.makedirs(path.parent, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
    sync(path)
    # of a folder that was there before
    with contextlib.suppress(PermissionError):
        sync(*path.parents)


def save_files(directory: Path, contents: Mapping[str, Any]) -> dict[str, int]:
    """Save what `paddle.save` takes, by the names of files, in a directory; return the size of each file."""
    os.makedirs(directory, exist_ok=True)
    for name, content in contents.items():
        paddle.save(content, str(directory / name))
    sync(*(directory / name for name in contents), directory, directory.parent)
    return {name: os.stat(directory / name).st_size for name in contents}


def remove_checkpoint(path: Path) -> None:
    """Delete a directory with its files, the manifest first: half of it is half-written, not damaged."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path / MANIFEST)
        sync(path)
    shutil.rmtree(path)
    sync(path.parent)
