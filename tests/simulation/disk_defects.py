"""Planted defects of checkpoints and of the record: weaker ways to write, each caught by the simulated disk."""

import contextlib
import json

from paddle_shard.extras import checkpoint_folder, checkpoints
from paddle_shard.extras.checkpoint_folder import CheckpointFolder
from paddle_shard.extras.checkpoints import Checkpoints
from paddle_shard.run import record_lines as lines


def is_file(path):
    return "." in str(path).rpartition("/")[2] or "generation-" in str(path)


def syncs_no_files(*paths):
    """Files are not synced, but the directories that they are in."""
    sync(*(path for path in paths if not is_file(path)))


def syncs_no_directories(*paths):
    """Directories are not synced, but the files in them."""
    sync(*(path for path in paths if is_file(path)))


def syncs_only_the_nearest(*paths):
    """The directory in which the folder was made is not synced."""
    sync(
        *(path for path in paths if str(path) not in ("/", "/run", "/run/deep"))
    )


def renames_before_the_data(path, content):
    """The manifest gets its name, and nothing says when what is in it comes to the disk."""
    if "generation-" in path.name:
        create_file(path, content)
        return
    with checkpoint_folder.open(path, "wb") as file:
        file.write(content)


def marks_first(self, rank, directory):
    """The mark of completeness is written before what it stands for."""
    checkpoint_folder.os.makedirs(directory, exist_ok=True)
    if rank == 0:
        create_file(
            directory / checkpoint_folder.MANIFEST,
            json.dumps({"version": 2, "files": {}}).encode(),
        )
    return write(self, rank, directory)


def knows_no_fence(self):
    """A job that was overtaken goes on writing."""


def shares_a_generation(path, content):
    """Two jobs may claim one generation."""
    with contextlib.suppress(FileExistsError):
        create_file(path, content)


def looks_once(self):
    """What another job deletes while a rank looks for the newest checkpoint is thought to be half-written."""
    return {name: self._problem(name) for name in self.names()}


def looks_on_each_rank(self, what, directory):
    """Each rank loads what it takes for the newest checkpoint."""
    fill(self, what, directory.parent / self._folder.newest())


def counts_what_has_failed(self, keep):
    """A checkpoint whose save has failed, and that looks complete, has an older one deleted."""
    clean(self, min(keep, 2))


def cleans_before_the_end(self, directory, sizes):
    """Older checkpoints are deleted before the manifest is written."""
    for name in self.names()[1:]:
        checkpoint_folder.remove_checkpoint(self.path / name)
    complete(self, directory, sizes)


def deletes_the_manifest_last(path):
    """A checkpoint that is deleted may be damaged when the host crashes, and is kept then."""
    names = sorted(checkpoint_folder.os.listdir(path))
    for name in [name for name in names if name != "manifest.json"]:
        checkpoint_folder.os.remove(path / name)
    remove_checkpoint(path)


def takes_errors_for_nothing(directory):
    """What cannot be read is thought not to be there."""
    sizes = {}
    with contextlib.suppress(OSError):
        for name in checkpoint_folder.os.listdir(directory):
            with contextlib.suppress(OSError):
                status = checkpoint_folder.os.stat(directory / name)
                sizes[name] = (
                    None
                    if checkpoint_folder.stat.S_ISDIR(status.st_mode)
                    else status.st_size
                )
    return sizes


def syncs_no_lines(*paths):
    """The record is not synced."""


def keeps_half_lines(file):
    """A line is appended behind half of one."""
    last, _ = last_line(file)
    return last, 0


sync = lines.sync
create_file = checkpoint_folder.create_file
remove_checkpoint = checkpoint_folder.remove_checkpoint
write = checkpoints._RankState.write
complete = CheckpointFolder.complete
clean = CheckpointFolder.clean
fill = Checkpoints._fill
last_line = lines._last_line

DEFECTS = {
    "syncs_no_files": (checkpoint_folder, {"sync": syncs_no_files}),
    "syncs_no_directories": (checkpoint_folder, {"sync": syncs_no_directories}),
    "syncs_only_the_nearest": (
        checkpoint_folder,
        {"sync": syncs_only_the_nearest},
    ),
    "renames_before_the_data": (
        checkpoint_folder,
        {"create_file": renames_before_the_data},
    ),
    "marks_first": (checkpoints._RankState, {"write": marks_first}),
    "knows_no_fence": (CheckpointFolder, {"check_fence": knows_no_fence}),
    "shares_a_generation": (
        checkpoint_folder,
        {"create_file": shares_a_generation},
    ),
    "looks_once": (CheckpointFolder, {"problems": looks_once}),
    "looks_on_each_rank": (Checkpoints, {"_fill": looks_on_each_rank}),
    "counts_what_has_failed": (
        CheckpointFolder,
        {"clean": counts_what_has_failed},
    ),
    "cleans_before_the_end": (
        CheckpointFolder,
        {"complete": cleans_before_the_end},
    ),
    "deletes_the_manifest_last": (
        checkpoint_folder,
        {"remove_checkpoint": deletes_the_manifest_last},
    ),
    "takes_errors_for_nothing": (
        checkpoint_folder,
        {"sizes_in": takes_errors_for_nothing},
    ),
    "syncs_no_lines": (lines, {"sync": syncs_no_lines}),
    "keeps_half_lines": (lines, {"_last_line": keeps_half_lines}),
}
"""Name -> what is replaced where, and by what."""
