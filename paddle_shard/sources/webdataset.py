"""How are WebDataset tars used as a source: their samples, their index, and where each sample begins?"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

from paddle_shard.errors import ArgumentError, MissingDependencyError, ShardReadError, StateError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.counts import EVERY, MOST, ShardEntry, count_files, entry_of
from paddle_shard.sources.files import (
    BUFFER,
    Paths,
    base_name,
    cached,
    decompressed,
    is_remote,
    local_path,
    matched,
    open_file,
    replacing,
    shown,
)
from paddle_shard.sources.shards import RECOUNT, ShardSource

_META = re.compile(r"__[^/]*__($|/)")
"""Matches the names of members that are not samples: WebDataset's `skip_meta`."""

Sample = dict[str, Any]
"""A dict with `__key__`, `__url__`, and the bytes of each file; its key is the rest of the file's name."""


def import_webdataset() -> Any:
    """Return the package `webdataset`, with the modules that are used here.

    Raises:
        MissingDependencyError: webdataset is not installed.
    """
    try:
        import webdataset  # type: ignore[import-untyped]
        import webdataset.autodecode  # type: ignore[import-untyped]
        import webdataset.shardlists  # type: ignore[import-untyped]
        import webdataset.tariterators  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError(
            f"reading WebDataset tars needs the webdataset package ({error}): pip install 'paddle_shard[webdataset]'"
        ) from error
    return webdataset


class TarSamples:
    """The samples of one open tar, from a given byte to the end, grouped by WebDataset; iterate it once.

    WebDataset's own loop over the members treats a damaged header, or a file that was cut between two members, as the
    end of the tar. It also ignores data after the end marker. Here, each of these is an error.
    """

    _mode: Any = "r|"

    def __init__(self, file: BinaryIO, name: str, start: int = 0, select: Callable[[str], bool] | None = None) -> None:
        """Set up the reading.

        Args:
            file: The open tar, at position `start`.
            name: The samples' `__url__`.
            start: A byte where a sample begins.
            select: Called with a member's name; True: the member is read. None: all members are read.
        """
        self._file, self._name, self._start, self._select = file, name, start, select
        self.next_start = start
        """The byte where the sample after the last yielded one begins; not valid after the tar's last sample."""

    def __iter__(self) -> Iterator[Sample]:
        # When the grouping yields a sample, it has read the first member of the next sample, but no more.
        yield from import_webdataset().tariterators.group_by_keys(self._members(), handler=_raised)

    def _members(self) -> Iterator[dict[str, Any]]:
        with tarfile.open(fileobj=self._file, mode=self._mode, tarinfo=_StrictInfo) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps all of them
                if not member.isreg() or _META.match(member.name):
                    continue
                if self._select is not None and not self._select(member.name):
                    continue
                content = self._content(archive, member)
                self.next_start = self._start + member.offset
                yield {"fname": member.name, "data": content, "__url__": self._name}
            rest: Any = archive.fileobj
            while block := rest.read(BUFFER):
                if block.count(0) != len(block):
                    raise tarfile.ReadError(
                        "there is data behind the end of the tar. Was it joined from several (cat)? They need "
                        "`tar --concatenate`"
                    )

    def _content(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        file = archive.extractfile(member)
        assert file is not None
        return file.read()


class TarHeaders(TarSamples):
    """The samples of an uncompressed tar, from its beginning. The contents of their files are not read."""

    _mode = "r:"

    def _content(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        return b""


def _raised(error: Exception) -> None:
    error.args = error.args[:1]  # WebDataset appends to them
    raise error


class _StrictInfo(tarfile.TarInfo):
    """A tar header. Anything other than a header or the end marker is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _StrictInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(
                f"the tar is damaged or cut off: {error} at byte {archive.offset}, where a file or the end of the tar "
                "should be"
            ) from error


VERSION = 1


def index_shard(name: str, most: int | None = None) -> ShardEntry:
    """Count the samples of a tar. A local, uncompressed tar is counted by its headers, any other is read to its end.

    Args:
        name: Path or URL of the tar.
        most: See `entry_of`.

    Raises:
        Exception: Whatever reading raises, if the tar cannot be read to its end.
    """
    opened, size = open_file(name)
    with opened, decompressed(opened) as file:
        packed = file is not opened
        if not packed and not is_remote(name):
            with open(local_path(name), "rb", buffering=0) as headers:  # with a buffer, each header would fill it
                return entry_of(_starts(TarHeaders(headers, name)), lambda: size or 0, packed=False, most=most)
        samples = TarSamples(file, name, 0, None)
        return entry_of(_starts(samples), lambda: opened.tell() if size is None else size, packed=packed, most=most)


def _starts(samples: TarSamples) -> Iterator[int]:
    start = 0
    for _ in samples:
        yield start
        start = samples.next_start


def write_index(path: str, entries: Mapping[str, ShardEntry]) -> None:
    """Write an index; an existing file of that name is replaced atomically."""
    shards = {
        name: {"samples": entry.samples, "bytes": entry.size, "starts": list(entry.starts)}
        for name, entry in entries.items()
    }
    text = json.dumps({"version": VERSION, "every": EVERY, "shards": shards}, separators=(",", ":"))
    with replacing(path, 0o644) as file:
        file.write(f"{text}\n".encode())


def read_index(path: str, names: Sequence[str]) -> dict[str, ShardEntry]:
    """Return the entries of some shards, by name.

    Args:
        path: Path or URL of the index.
        names: Paths or URLs of the shards. The index contains only the last pieces of such names.

    Raises:
        StateError: The file is not an index, or has another version.
        ArgumentError: The index cannot be opened or lacks a shard, or two shards have the same last piece.
    """
    try:
        file, _ = open_file(path)
    except OSError as error:
        raise_if_a_handlers(error)
        raise ArgumentError(f"index={path!r} cannot be read: {error}. Make it: {RECOUNT}.") from error
    with file:
        shards = _parsed(file.read(), path)
    check_base_names(names)
    unknown = [name for name in names if base_name(name) not in shards]
    if unknown:
        listed = ", ".join(base_name(name) for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise ArgumentError(f"index={path!r} does not know {len(unknown)} of the shards: {listed}. Make it: {RECOUNT}.")
    return {name: shards[base_name(name)] for name in names}


def check_base_names(names: Sequence[str]) -> None:
    """Refuse shards that an index could not distinguish."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(base_name(name), name)
        if other != name:
            raise ArgumentError(
                f"an index knows shards by the last piece of their names, which {shown(other)} and {shown(name)} "
                "share. Rename one."
            )


def _parsed(text: bytes, path: str) -> dict[str, ShardEntry]:
    try:
        found: Any = json.loads(text)
        version = found["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"index={path!r} is not an index of shards ({error!r}). Make it: {RECOUNT}.") from error
    if version != VERSION:
        raise StateError(f"index={path!r} is of version {version!r}, this library reads {VERSION}: {RECOUNT}.")
    try:
        usable = found.get("every") == EVERY
        return {
            name: ShardEntry(
                samples=int(entry["samples"]),
                size=int(entry["bytes"]),
                starts=tuple(int(start) for start in entry.get("starts", ())) if usable else (),
            )
            for name, entry in found["shards"].items()
        }
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        raise StateError(f"index={path!r} is damaged ({error!r}): {RECOUNT}.") from error


def webdataset_source(
    urls: Paths,
    *,
    shuffle_shards: bool = True,
    resample: bool = False,
    index: str | os.PathLike[str] | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    select: Callable[[str], bool] | None = None,
) -> ShardSource:
    """Return the source of raw samples: dicts of bytes by file ending, with `__key__` and `__url__`.

    A tar that is cut off or damaged is an error, never an early end. If an HTTP connection drops, reading continues at
    the same byte. A permanent failure raises a `ShardReadError` that names the shard and the sample.

    Args:
        urls: Paths, `http(s)://` URLs, or URLs that fsspec opens (`s3://`, ...), of tars that are compressed or not.
            Braces are expanded as by WebDataset (`{000..009}`), also in each string of a list. Patterns of local files
            (`data/*.tar`) are expanded and sorted.
        shuffle_shards: If True, permute the shards, in another order each epoch. Samples keep their order within a
            shard: add a `Shuffle` to permute them, too.
        resample: If True, each part is an endless stream of shards, sampled with replacement.
        index: An index file (path or URL), which `python -m paddle_shard.cli.index_shards` makes; True: `index.json`
            beside the first shard. With an index, parts are equal, their lengths are known, and a resume is cheap.
            None: count the shards now by their headers, if all are local, none is compressed, and neither `select` nor
            `resample` is given. The counts are kept in the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`) for
            other ranks and later runs. False: count nothing.
        cache_dir: Directory where each remote shard is kept after one download. Nothing is ever removed from it.
        select: Called with a member's name; True: the member is read. None: all members are read. An index does not fit
            if whole samples are left out.

    Raises:
        MissingDependencyError: webdataset is not installed.
        ArgumentTypeError: `urls` is neither a path or URL nor a list of them.
        ArgumentError: There is no shard, or the index lacks a shard.
        StateError: The index file is not an index of this version.
        ShardReadError: A shard cannot be read to count it.

    Examples:
        >>> source = webdataset_source("https://host/train-{000..099}.tar", cache_dir="/data/cache")  # doctest: +SKIP
        >>> Map(source, decode("rgb8"))  # doctest: +SKIP
    """
    names = expand(urls)
    entries = None
    if index is None and select is None and not resample:
        entries = count_files(names, "samples of tars", lambda name: index_shard(name, MOST), None)
    elif index is not None and index is not False:
        entries = read_index(_beside(names[0]) if index is True else os.fspath(index), names)
    folder = None if cache_dir is None else os.path.expanduser(os.fspath(cache_dir))
    return ShardSource(
        names,
        partial(_read, entries=entries, cache_dir=folder, select=select),
        counts=None if entries is None else [entries[name].samples for name in names],
        shuffle_shards=shuffle_shards,
        resample=resample,
    )


def decode(*handlers: str | Callable[[str, bytes], Any], only: str | Sequence[str] | None = None) -> Decode:
    """Return a function that decodes a raw sample, for `Map`: WebDataset's own `decode`.

    Args:
        handlers: Names of WebDataset's image decoders ("pil", "rgb8", "l", ...), or functions of (file ending with
            a leading dot, bytes) that return None to leave a value to the next handler. After them, WebDataset's
            decoders for txt, cls, json, npy, ... are tried. A value that no handler takes stays bytes.
        only: File endings that are decoded; None: all.

    Raises:
        MissingDependencyError: webdataset is not installed.
        ArgumentError: A handler is neither a function nor a name that WebDataset knows.
    """
    return Decode(handlers, only)


class Decode:
    """A function of a raw sample; see `decode`."""

    def __init__(self, handlers: Sequence[str | Callable[[str, bytes], Any]], only: str | Sequence[str] | None) -> None:
        autodecode = import_webdataset().autodecode
        for handler in handlers:
            known = handler in autodecode.imagespecs if isinstance(handler, str) else callable(handler)
            if not known:
                raise ArgumentError(
                    f"decode: {handler!r} is neither a function nor one of {', '.join(autodecode.imagespecs)}."
                )
        found = [autodecode.imagehandler(handler) if isinstance(handler, str) else handler for handler in handlers]
        self._decoder = autodecode.Decoder(found, only=only)

    def __call__(self, sample: Sample) -> Sample:
        """Return the decoded sample.

        Raises:
            ShardReadError: A file of the sample cannot be decoded.
        """
        try:
            return dict(self._decoder(sample))
        except Exception as error:
            raise_if_a_handlers(error)
            # Since 0.2.111, WebDataset wraps the error in one that names the file but has no text.
            file = getattr(error, "k", None)
            cause = error if file is None else error.__cause__
            shard = shown(str(sample.get("__url__", "")))
            raise ShardReadError.of(
                f"{shard}: {'a file' if file is None else f'file {file!r}'} of sample {sample.get('__key__')!r} cannot "
                f"be decoded: {described(cause or error)}",
                shard,
            ) from cause


def expand(urls: Paths) -> list[str]:
    """Return the shards that a path or URL, or a list of them, names. Braces are expanded first, then patterns.

    Raises:
        MissingDependencyError: webdataset is not installed.
        ArgumentTypeError: `urls` is neither a path or URL nor a list of them.
        ArgumentError: There is no shard, or a pattern matches no file.
    """
    expand_urls = import_webdataset().shardlists.expand_urls
    if isinstance(urls, str | os.PathLike):
        urls = [urls]
    braces = isinstance(urls, Iterable)
    found = matched([name for url in urls for name in expand_urls(os.fspath(url))] if braces else urls)
    if not found:
        raise ArgumentError(f"urls={urls!r} names no shard. Give at least one.")
    return found


def _beside(name: str) -> str:
    path, mark, query = name.partition("?") if is_remote(name) else (name, "", "")
    folder = path.rpartition("/")[0]
    return f"{folder}/index.json{mark}{query}" if folder else "index.json"


def _read(
    name: str,
    skip: int,
    *,
    entries: Mapping[str, ShardEntry] | None,
    cache_dir: str | None,
    select: Callable[[str], bool] | None,
) -> Iterator[Sample]:
    """Read a tar, starting at a given sample."""
    path = name if cache_dir is None or not is_remote(name) else cached(name, cache_dir)
    start = 0
    if entries is not None:
        start, skip = entries[name].before(skip)
    opened, size = open_file(path, start)
    with opened, opened if start else decompressed(opened) as file:
        if entries is not None and size not in (None, entries[name].size):
            raise tarfile.ReadError(
                f"the file has {size} bytes, the index says {entries[name].size}: it has changed since, or is another "
                f"shard of that name. If it is the right one, {RECOUNT}"
            )
        yield from islice(TarSamples(file, name, start, select), skip, None)
