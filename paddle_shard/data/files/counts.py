"""Sample counts of files, the bytes where samples begin, and reading a file from one of them on.

A format yields the samples of an open file, each with the byte where it begins, so that counting a file and reading it
from a sample on are the same code for all formats.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from paddle_shard.core.checks import check_count, check_flag
from paddle_shard.core.warn_once import caller_level
from paddle_shard.data.files import files
from paddle_shard.data.files.ahead import LEAST, FileAhead, OpenFile
from paddle_shard.data.files.host_cache import check_cache_dir, open_cached
from paddle_shard.data.files.locks import file_lock
from paddle_shard.data.files.shards import RECOUNT, ShardSource
from paddle_shard.data.stages.stage import Samples
from paddle_shard.plan.seeding import derive_key

EVERY = 64
"""Number of samples for which one byte offset is kept."""
MOST = 128
"""Most byte offsets that are kept for a file, an even number. Longer files have sparser offsets."""

_INT64_MAX = (1 << 63) - 1
_COUNTING = "counting its samples"
_VERSION = 4
"""Version of the kept counts."""
DAMAGE = (AttributeError, KeyError, TypeError, ValueError)
"""Errors that reading a damaged entry raises."""

Placed = Iterator[tuple[int, Any]]
"""Samples, each with the byte where it begins. An exception replaces one that cannot be read, if the next one can."""
ReadSamples = Callable[[BinaryIO, str, int], Placed]
"""Called with (open file, its name, a byte where a sample begins, at which the file stands)."""


class Format(NamedTuple):
    """A kind of files."""

    kind: str
    """Name of what is counted in the files; kept counts belong to it."""
    samples: ReadSamples
    """Yields the samples of a file."""
    starts: ReadSamples
    """Finds where samples begin, which may be cheaper than reading them."""
    needs_begin: bool = False
    """True if the beginning of a file says how its samples are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """Counts of a file; as a dict, its entry in an index file and in the kept counts."""

    samples: int
    bytes: int
    """Size of the file."""
    starts: Sequence[int] = ()
    """Bytes at which samples 0, `every`, 2 * `every`, ... begin; empty if the file is compressed as a whole."""
    every: int = EVERY

    def __post_init__(self) -> None:
        check_count("every", self.every)
        for number in (self.samples, self.bytes, *self.starts):
            check_count("a number", number, 0, _INT64_MAX)

    def before(self, sample: int) -> tuple[int, int]:
        """Return the last known byte where a sample at or before `sample` begins, and how many samples lie between."""
        if not self.starts:
            return 0, sample
        number = min(sample // self.every, len(self.starts) - 1)
        return self.starts[number], sample - number * self.every


Entries = Mapping[str, ShardEntry]
"""The entry of each file, by its name."""


def count_file(
    name: str, samples: ReadSamples, cache_dir: str | None = None
) -> ShardEntry:
    """Count the samples of a file.

    Args:
        name: Path or URL of the file.
        samples: The format, or a function that finds where samples begin in less time.
        cache_dir: Where a copy of a remote file is kept; None: nowhere.

    Raises:
        Exception: Whatever reading raises, if the file cannot be read to its end.
    """
    opened, size = open_cached(cache_dir, name)
    starts: list[int] = []
    num_samples = 0
    every = EVERY
    with opened, files.decompressed(opened, name) as file:
        for number, (start, _) in enumerate(samples(file, name, 0)):
            if number % every == 0:
                if len(starts) == MOST:
                    starts = starts[::2]
                    every *= 2
                starts.append(start)
            num_samples = number + 1
        return ShardEntry(
            samples=num_samples,
            bytes=size,
            # In a compressed file, no sample can be found by its byte.
            starts=starts if file is opened else (),
            every=every,
        )


def count_files(
    names: Sequence[str],
    form: Format,
    counts: bool | None,
    cache_dir: str | None,
) -> Entries | None:
    """Count the samples of files. The counts of local ones are kept in the user's cache directory.

    Args:
        names: Names of the files.
        form: The format of the files.
        counts: True: count all files; False: count none. None: count all if counting is cheap compared to reading: all
            files are local and, by their names, none is compressed.
        cache_dir: Where copies of remote files are kept; None: nowhere.

    Returns:
        The index entry of each file; None if files are not counted.

    Raises:
        ShardReadError: A file cannot be read.
    """
    any_remote = any(map(files.is_remote, names))
    is_costly = any_remote or any(map(files.is_compressed, names))
    if counts is False or (counts is None and is_costly):
        return None
    if any_remote:
        return _count_each(names, form.starts, cache_dir)
    # Before counting: a file that grows meanwhile has another version the next time.
    versions = [_version(name) for name in names]
    key = derive_key(_VERSION, form.kind, versions, size=16).hex()
    path = _folder() / f"{key}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    # One process counts; the others wait and read what it has written.
    with file_lock(f"{path}.lock"):
        with contextlib.suppress(OSError, *DAMAGE):
            entries = [
                ShardEntry(**entry) for entry in json.loads(path.read_bytes())
            ]
            return dict(zip(names, entries, strict=True))
        counted_files = _count_each(names, form.starts, cache_dir)
        text = json.dumps([asdict(entry) for entry in counted_files.values()])
        with contextlib.suppress(OSError), files.replacing(path) as target:
            target.write(text.encode())
    return counted_files


def _version(name: str) -> tuple[str, int, int, int]:
    path = os.path.abspath(files.local_path(name))
    with files.FileErrorContext(name, _COUNTING):
        status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _count_each(
    names: Sequence[str], samples: ReadSamples, cache_dir: str | None
) -> Entries:
    entries = {}
    for name in names:
        logging.getLogger("paddle_shard").info(
            "counting the samples of %s",
            files.redacted(name),
            stacklevel=caller_level(),
        )
        with files.FileErrorContext(name, _COUNTING):
            entries[name] = count_file(name, samples, cache_dir)
    return entries


def _folder() -> Path:
    """Return the folder of kept counts, in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "paddle_shard" / "counts"


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads files of a format, from a sample on."""

    form: Format
    """The format."""
    entries: Entries | None
    """The index entry of each file, by name; None: files are not counted."""
    cache_dir: str | None
    """Where copies of remote files are kept; None: nowhere."""

    def __call__(self, name: str, skip: int, limit: int) -> Samples:
        """Return the samples of a file after the first `skip`.

        A remote file is opened at once, and `limit` bytes of it are read ahead.
        """
        start = 0
        if self.entries is not None:
            start, skip = self.entries[name].before(skip)
        open_file: OpenFile = partial(open_cached, self.cache_dir, name, start)
        is_ahead = files.is_remote(name) and limit >= LEAST
        if is_ahead and not (start and self.form.needs_begin):
            open_file = FileAhead(open_file, limit).open
        return self._samples(name, open_file, start, skip)

    def _samples(
        self,
        name: str,
        open_file: OpenFile,
        start: int,
        skip: int,
    ) -> Samples:
        opened, size = open_file()
        with (
            opened,
            opened if start else files.decompressed(opened, name) as file,
        ):
            if self.entries is not None:
                counted_size = self.entries[name].bytes
                if size != counted_size:
                    raise ValueError(
                        f"the file has {size} bytes, and had {counted_size} when it was counted. It has changed since, "
                        f"or is another file of that name: {RECOUNT}"
                    )
            rest = islice(self.form.samples(file, name, start), skip, None)
            yield from map(itemgetter(1), rest)


def file_source(
    paths: files.Paths,
    form: Format,
    *,
    counts: bool | None = None,
    entries: Entries | None = None,
    shuffle_shards: bool = True,
    cache_dir: files.Path | None = None,
) -> ShardSource:
    """Return the source of files of a format.

    Args:
        paths: One or more files: paths, patterns such as `data/*.csv`, whose files are sorted, or URLs that fsspec
            opens.
        form: The format.
        counts: If True, count the samples now, which reads the files once. Then parts are equal and their lengths
            known. None: count if all files are local, none is compressed, and the stream has an end. The counts of
            local files are kept in the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`) for other ranks and
            later runs.
        entries: The index entries of the files, if there is an index.
        shuffle_shards: If True, permute the files, in another order each epoch.
        cache_dir: A folder in which copies of remote files are kept, for all processes of the host; None: none is kept.

    Raises:
        ArgumentTypeError: `paths` is neither a path nor a list of paths.
        ArgumentError: There is no file, or none that matches a pattern.
        ShardReadError: A file cannot be read to count it.
    """
    names = files.matched(paths)
    folder = check_cache_dir(cache_dir)
    if counts is not None:
        check_flag("counts, if it is not None,", counts)
    if entries is None:
        entries = count_files(names, form, counts, folder)
    lengths = (
        None if entries is None else [entries[name].samples for name in names]
    )
    return ShardSource(
        names,
        FileReader(form, entries, folder),
        counts=lengths,
        shuffle_shards=shuffle_shards,
    )
