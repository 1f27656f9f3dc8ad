"""WebDataset tars as a source: their samples, their index, and where each sample begins."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from paddle_shard.core.checks import listed
from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.files.counts import (
    DAMAGE,
    Entries,
    Format,
    ShardEntry,
    file_source,
)
from paddle_shard.data.files.files import (
    BUFFER,
    Path,
    Paths,
    base_name,
    matched,
    needs,
    open_file,
    redacted,
    replacing,
)
from paddle_shard.data.files.shards import RECOUNT, FileOptions, ShardSource
from paddle_shard.errors import ArgumentError, StateError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PICKLED = (".pkl", ".pickle", ".pyd", ".pth")
"""Endings of files that WebDataset's decoders unpickle, which runs what the file says."""
_META = re.compile(r"__[^/]*__($|/)")
"""Matches the names of members that are not samples: WebDataset's `skip_meta`."""

_APART = (
    "the key %r comes twice in %s, with other samples between: WebDataset takes its files for two samples. If they are "
    "one, pack them one after the other, as by tar --sort=name."
)

Sample = dict[str, Any]
"""A dict with `__key__`, `__url__`, and the bytes of each file; its key is the rest of the file's name."""


def tar_samples(
    file: BinaryIO,
    name: str,
    start: int = 0,
    *,
    contents: bool = True,
) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of one open tar, from a given byte to the end, each with the byte where it begins.

    WebDataset groups them. Its own loop over the members treats a damaged header, or a file that was cut between two
    members, as the end of the tar. It also ignores data after the end marker. Here, each of these is an error.

    Args:
        file: The open tar, at position `start`.
        name: The samples' `__url__`.
        start: A byte where a sample begins.
        contents: If False, seek over the contents of the tar's files. `start` must be 0.
    """
    from webdataset.tariterators import group_by_keys  # type: ignore[import-untyped]

    begin = following = start

    def members() -> Iterator[dict[str, Any]]:
        nonlocal following
        mode: Any = "r|" if contents else "r:"
        with tarfile.open(
            fileobj=file, mode=mode, tarinfo=_StrictInfo
        ) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps all of them
                is_link = member.islnk() or member.issym()
                if not (member.isreg() or is_link) or _META.match(member.name):
                    continue
                # what it stands for may lie before `start`, or outside
                if is_link:
                    raise tarfile.ReadError(
                        f"the member {member.name!r} is a link to {member.linkname!r}, and not a file. Pack the files "
                        "themselves: tar --dereference --hard-dereference"
                    )
                content = b""
                if contents:
                    content = archive.extractfile(member).read()  # type: ignore[union-attr]
                following = start + member.offset
                yield {"fname": member.name, "data": content, "__url__": name}
            rest = archive.fileobj
            while block := rest.read(BUFFER):
                if block.count(0) != len(block):
                    raise tarfile.ReadError(
                        "there is data behind the end of the tar. Was it joined from several (cat)? They need "
                        "`tar --concatenate`"
                    )

    keys: set[str] = set()
    for sample in group_by_keys(members(), handler=_raised):
        key = sample["__key__"]
        if key in keys:
            warn_once(_APART, key, base_name(name))
        keys.add(key)
        yield begin, sample
        # when a sample is yielded, the first member of the next one has been read, but no more
        begin = following


def tar_starts(
    file: BinaryIO, name: str, start: int
) -> Iterator[tuple[int, Sample]]:
    """Find where the samples of a tar begin, by its headers."""
    raw: Any = cast(io.BufferedReader, file).raw
    raw.seek(start)  # with the buffer, each header would fill it
    return tar_samples(raw, name, start, contents=False)


def _raised(error: Exception) -> None:
    error.args = error.args[:1]  # WebDataset appends to them
    raise error


class _StrictInfo(tarfile.TarInfo):
    """A tar header. Anything other than a header or the end marker is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _StrictInfo:
        try:
            header = super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(
                f"it is no tar, or is damaged or cut off: {error} at byte {archive.offset}, where a file or the "
                "end of the tar should be"
            ) from error
        # the next header would be looked for before this one, without an end (CVE-2025-8194)
        if header.size < 0:
            raise tarfile.ReadError(
                f"it is damaged: the member {header.name!r} has a negative size"
            )
        return header


VERSION = 1


def write_index(path: str, entries: Entries) -> None:
    """Write an index; an existing file of that name is replaced atomically."""
    shards = {name: asdict(entry) for name, entry in entries.items()}
    text = json.dumps(
        {"version": VERSION, "shards": shards}, separators=(",", ":")
    )
    with replacing(path, 0o644) as file:
        file.write(f"{text}\n".encode())


def read_index(path: str, names: Sequence[str]) -> Entries:
    """Return the entries of some shards, by name.

    Args:
        path: Path or URL of the index.
        names: Paths or URLs of the shards. The index contains only the last pieces of such names.

    Raises:
        StateError: The file is not an index, or has another version.
        ArgumentError: The index cannot be opened or lacks a shard, or two shards have the same last piece.
    """
    try:
        with open_file(path)[0] as file:
            index: Any = json.load(file)
        if index["version"] != VERSION:
            raise ValueError(
                f"version {index['version']}, this library reads {VERSION}"
            )
        shards = {
            name: ShardEntry(**entry) for name, entry in index["shards"].items()
        }
    except OSError as error:
        raise ArgumentError(
            f"index={redacted(path)!r} cannot be read: {error}. Make it: {RECOUNT}."
        ) from error
    except DAMAGE as error:
        raise StateError(
            f"index={path!r} is not an index of shards, or is damaged ({error!r}). Make it: {RECOUNT}."
        ) from error
    check_base_names(names)
    unknown = [name for name in names if base_name(name) not in shards]
    if unknown:
        some = listed(list(map(base_name, unknown)), 5)
        raise ArgumentError(
            f"index={path!r} does not know {len(unknown)} of the shards: {some}. Make it: {RECOUNT}."
        )
    return {name: shards[base_name(name)] for name in names}


def check_base_names(names: Sequence[str]) -> None:
    """Refuse shards that an index could not distinguish."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(base_name(name), name)
        if other != name:
            raise ArgumentError(
                f"an index knows shards by the last piece of their names, which {redacted(other)} and {redacted(name)} "
                "share. Rename one."
            )


TARS = Format("samples of tars", tar_samples, tar_starts)


def webdataset_source(
    urls: Paths,
    *,
    index: Path | Literal[False] | None = None,
    **options: Unpack[FileOptions],
) -> ShardSource:
    """Return the source of raw samples: dicts of bytes by file ending, with `__key__` and `__url__`.

    A tar that is cut off or damaged is an error, never an early end. If an HTTP connection drops, reading continues at
    the same byte. A permanent failure raises a `ShardReadError` that names the shard and the sample.

    Args:
        urls: Paths, `http(s)://` URLs, or URLs that fsspec opens (`s3://`, ...), of tars that are compressed or not.
            Braces are expanded as by WebDataset (`{000..009}`), also in each string of a list. Patterns of local files
            (`data/*.tar`) are expanded and sorted.
        index: An index file (path or URL), which `paddle-shard index` makes. With an index, parts are equal, their
            lengths are known, and a resume is cheap. None: count the shards now by their headers, if all are local and
            none is compressed. The counts are kept in the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`) for
            other ranks and later runs. False: count nothing.
        options: See `file_source`. Samples keep their order within a shard: add a `Shuffle` to permute them, too.

    Raises:
        MissingDependencyError: webdataset is not installed.
        ArgumentTypeError: `urls` is neither a path or URL nor a list of them.
        ArgumentError: There is no shard, or the index lacks a shard.
        StateError: The index file is not an index of this version.
        ShardReadError: A shard cannot be read to count it.

    Examples:
        >>> source = webdataset_source("https://host/train-{000..099}.tar")  # doctest: +SKIP
    """
    names = expand(urls)
    entries = None
    if index is not None and index is not False:
        entries = read_index(os.fspath(index), names)
    counts = None if index is None else False
    return file_source(names, TARS, counts=counts, entries=entries, **options)


def expand(urls: Paths) -> list[str]:
    """Return the shards that a path or URL, or a list of them, names. Braces are expanded first, then patterns.

    Raises:
        MissingDependencyError: webdataset is not installed.
        ArgumentTypeError: `urls` is neither a path or URL nor a list of them.
        ArgumentError: A pattern matches no file.
    """
    with needs("webdataset", "reading WebDataset tars: "):
        import webdataset.shardlists  # type: ignore[import-untyped]
    braces = webdataset.shardlists.expand_urls
    return matched(
        urls, lambda url: [url] if os.path.exists(url) else braces(url)
    )


def decoder(
    *handlers: str | Callable[[str, bytes], Any],
    only: str | Sequence[str] | None,
) -> Callable[[Sample], Sample]:
    """Return a function that decodes a raw sample; see `Stream.decode`."""
    with needs("webdataset", "decoding WebDataset samples: "):
        from webdataset.autodecode import (  # type: ignore[import-untyped]
            Decoder,
            imagehandler,
        )
    decoders = [
        handler if callable(handler) else imagehandler(handler)
        for handler in handlers
    ]
    return partial(
        _decode_sample, Decoder([*decoders, _leave_pickled], only=only)
    )


def _decode_sample(
    decode: Callable[[Sample], Sample], sample: Sample
) -> Sample:
    try:
        return decode(sample)
    except Exception as error:  # WebDataset's error has no text but its cause
        raise error.__cause__ or error from None


def _leave_pickled(ending: str, content: bytes) -> bytes | None:
    """Return what no later decoder should unpickle."""
    return content if ending.endswith(_PICKLED) else None
