"""How are WebDataset tars used as a source?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from paddle_shard.errors import ArgumentError, ShardReadError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.cache import cached
from paddle_shard.sources.counts import count_files
from paddle_shard.sources.names import Paths, is_remote, matched, shown
from paddle_shard.sources.shard_index import MOST, ShardEntry, index_shard, read_index
from paddle_shard.sources.shards import ShardSource
from paddle_shard.sources.tars import Sample, import_webdataset, read_tar

SPREAD = 0.1
"""Seconds over which readers spread the first opening of remote shards."""


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
        _TarReader(entries, folder, select),
        counts=None if entries is None else [entries[name].samples for name in names],
        shuffle_shards=shuffle_shards,
        resample=resample,
        spread=SPREAD if any(map(is_remote, names)) else 0.0,
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


class _TarReader:
    """Reads a shard, starting at a given sample. It opens nothing before it is called."""

    def __init__(
        self, entries: Mapping[str, ShardEntry] | None, cache_dir: str | None, select: Callable[[str], bool] | None
    ) -> None:
        self._entries, self._cache_dir, self._select = entries, cache_dir, select

    def __call__(self, name: str, skip: int) -> Iterator[Sample]:
        path = name if self._cache_dir is None or not is_remote(name) else cached(name, self._cache_dir)
        start, size = 0, None
        if self._entries is not None:
            size = self._entries[name].size
            start, skip = self._entries[name].before(skip)
        yield from islice(read_tar(path, name, start=start, select=self._select, size=size), skip, None)
