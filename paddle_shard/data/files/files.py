"""Names of local and remote files, opening them (remote ones by fsspec, with retries), and errors that name them."""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import io
import lzma
import os
import re
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from paddle_shard.core.forks import no_fork
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingDependencyError,
    PaddleShardError,
    ShardReadError,
    described,
)

T = TypeVar("T")
Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]
FileAndSize = tuple[BinaryIO, int]
"""(file, size of the whole file in bytes)."""
FileVersion = tuple[str, int, str]
"""(name, size in bytes, version tag) of a file."""


def is_remote(name: str) -> bool:
    """True if a name is a URL other than `file:`.

    Examples:
        >>> is_remote("s3://bucket/000.tar"), is_remote("file:///data/000.tar"), is_remote("data/000.tar")
        (True, False, False)
    """
    return "://" in name and not name.startswith("file:")


def local_path(name: str) -> str:
    """Return the path of a local file, given its name (a path or a `file:` URL)."""
    if name.startswith("file:"):
        return urllib.request.url2pathname(urlsplit(name).path)
    return os.path.expanduser(name)


def matched(
    paths: Paths, expand: Callable[[str], Iterable[str]] = lambda path: [path]
) -> list[str]:
    """Return the given files; each pattern, such as `data/*.csv`, is replaced by the files that match it, sorted.

    Args:
        paths: One path or more.
        expand: Called with each path, before patterns are matched; returns the paths that it stands for.

    Raises:
        ArgumentTypeError: `paths` is neither a path nor a list.
        ArgumentError: A pattern matches no file, or is for remote files.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Iterable):
        raise ArgumentTypeError(
            f"paths must be a path, or a list of them, got {paths!r}."
        )
    names = [name for path in paths for name in expand(os.fspath(path))]
    return [file for name in names for file in _expand(name)]


def _expand(name: str) -> list[str]:
    if is_remote(name):
        if "*" in name.partition("?")[0]:
            raise ArgumentError(
                f"{redacted(name)}: patterns of remote files are not supported. Give the list of URLs."
            )
        return [name]
    path = local_path(name)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ArgumentError(
            f"{name} is not a file. Give files, such as {os.path.join(name, '*')}; for a pipe, which can be read once, "
            "Stream.of(open(...))."
        )
    if not glob.has_magic(path) or os.path.exists(path):
        return [name]
    matches = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not matches:
        raise ArgumentError(
            f"{name}: this pattern matches no file (the current folder is {os.getcwd()})."
        )
    return matches


def base_name(name: str) -> str:
    """Return the last piece of a path or URL.

    Examples:
        >>> base_name("https://host/train/000.tar?signature=1"), base_name("train/000.tar")
        ('000.tar', '000.tar')
    """
    return os.path.basename(redacted(name).rstrip("/"))


def redacted(name: str) -> str:
    """Return a name without a URL's user, password and query, which may be secret or differ from day to day.

    Examples:
        >>> redacted("https://me:word@host/000.tar?signature=1"), redacted("dir/what?.tar")
        ('https://host/000.tar', 'dir/what?.tar')
    """
    if "://" not in name:
        return name
    return re.sub(r"(?<=://)[^/@]*@", "", name.partition("?")[0])


def _without_queries(text: str) -> str:
    """Return an error's text with all its URLs redacted."""
    return re.sub(r"\w+://[^\s'\"]+", lambda url: redacted(url[0]), text)


def within_their_folder(names: Sequence[str]) -> list[str]:
    """Return names without the folder that all share, since data may be moved or be elsewhere on another host.

    Examples:
        >>> within_their_folder(["/data/a/0.csv", "/data/b/0.csv"]), within_their_folder(["s3://bucket/0.csv"])
        (['a/0.csv', 'b/0.csv'], ['0.csv'])
    """
    paths = [
        (
            redacted(name)
            if is_remote(name)
            else os.path.abspath(local_path(name))
        ).split("/")
        for name in names
    ]
    folders = [path[:-1] for path in paths]
    depth = len(os.path.commonprefix(folders))  # noqa: RUF071  # of lists
    return ["/".join(path[depth:]) for path in paths]


@contextmanager
def needs(extra: str, what: str = "") -> Iterator[None]:
    """Turn a failed import into an error that names the extra to install.

    Args:
        extra: The extra of paddle_shard.
        what: Begins the error's text, if the import alone does not say what is needed.

    Raises:
        MissingDependencyError: A package that is imported in the `with` block is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"{what}{error.name or error} cannot be imported ({error}). Install it with: pip install "
            f"'paddle_shard[{extra}]'."
        ) from error


@dataclass(frozen=True, slots=True)
class FileErrorContext:
    """Turns what fails in a `with` block into an error that names a file.

    It is no generator: on Python 3.10, leaving one by an exception makes a cycle that keeps the file open.

    Raises:
        ShardReadError: The block failed. The library's own errors are raised as they are.
    """

    name: str
    """The file."""
    what: str
    """What the block does."""
    number: Callable[[], int] | None = None
    """Called after a failure: the number of the sample in the file; None: of no sample."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        """Raise the error of a block that failed."""
        if not isinstance(error, Exception) or isinstance(
            error, PaddleShardError
        ):
            return
        offset = None if self.number is None else self.number()
        place = "" if offset is None else f" {offset}"
        fix = ""
        if isinstance(error, FileNotFoundError):
            fix = ". Check the path, or leave the file out."
        elif isinstance(error, EOFError | tarfile.TarError):
            fix = ". Replace the file, or leave it out."
        name = redacted(self.name)
        raise ShardReadError.of(
            f"{name}: {self.what}{place} failed: {described(error)}{fix}",
            name,
            offset,
        ) from error


def remote_file(url: str) -> tuple[Any, str]:
    """Return (file system, path in it) of a file. A process uses one file system for all files of a host or bucket.

    Making a file system takes long: most of a second for S3. fsspec's own cache is not used, since after a fork its
    file systems belong to the parent's threads.

    Args:
        url: URL of the file.

    Raises:
        MissingDependencyError: fsspec, or a package that it needs for such a URL, is not installed.
    """
    with needs("sources", f"reading {redacted(url)}: "):
        if "::" in url:  # a file inside another file, which is a file system
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            system, path = url_to_fs(url, skip_instance_cache=True)
            return system, path
        host = "/".join(url.split("/", 3)[:3])
        # one thread at a time, so that only one file system is made
        with no_fork:
            return _file_system(host, os.getpid()), url


@cache
def _file_system(host: str, _process: int) -> Any:
    """Return the file system of a host for a process."""
    from fsspec.config import conf  # type: ignore[import-untyped]
    from fsspec.core import url_to_fs

    protocol = host.partition(":")[0]
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        # aiohttp's default, five minutes for a response, is too long for one that stalls and too short for a large one.
        limit = ClientTimeout(
            total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT
        )
        # The default cache, "bytes", requests 5 MB of a large file twice.
        options = {
            "client_kwargs": {"timeout": limit},
            "cache_type": "readahead",
        }
    options |= conf.get(protocol, {})  # the user's own settings count
    return url_to_fs(host, skip_instance_cache=True, **options)[0]


PAUSES = (0.5, 1.0, 2.0)
"""Seconds before each retry of a request; after the last one, reading fails."""
TIMEOUT = 60.0
"""Seconds without a byte after which an HTTP connection counts as dropped."""
BUFFER = 1 << 18
REQUESTS = 16
"""Files of which something is read in parallel."""

_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
)
"""Where fsspec's file systems keep what changes when a file changes; the first that is there counts."""
_FINAL: dict[int, type[Exception]] = {
    401: PermissionError,
    403: PermissionError,
    404: FileNotFoundError,
}
"""HTTP codes of failures that another attempt does not mend -> kind of error."""


def version_of(name: str) -> tuple[int, str]:
    """Return (size in bytes, version tag) of a file; the tag is an ETag or a time of modification, as far as known.

    A remote file costs a request. A local name at which there is no file is that of a reader of the user's own; or the
    file is missing, which an error says when it is read.

    Raises:
        OSError: There is no such remote file, or its server fails.
    """
    if not is_remote(name):
        try:
            status = os.stat(local_path(name))
        except FileNotFoundError:
            return 0, ""
        return status.st_size, str(status.st_mtime_ns)
    system, path = remote_file(name)
    details = retried(lambda: system.info(path))
    tag = next((details[name] for name in _TAGS if details.get(name)), "")
    return int(details.get("size") or 0), str(tag)


def for_each(
    function: Callable[[str], T], names: Sequence[str], what: str
) -> list[T]:
    """Return what a function returns for each file, of which several are read at a time.

    Args:
        function: Called with a name.
        names: Names of the files.
        what: What it does, for the error.

    Raises:
        ShardReadError: It fails for a file.
    """

    def call_with_name(name: str) -> T:
        with FileErrorContext(name, what):
            return function(name)

    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(call_with_name, names))


def identity(names: Sequence[str]) -> list[FileVersion]:
    """Return (name within the files' common folder, size in bytes, version tag) of each file.

    Raises:
        ShardReadError: A file is missing, or its server fails.
    """
    versions = for_each(version_of, names, "reading its version")
    paths = within_their_folder(names)
    return [
        (path, *version_of_file)
        for path, version_of_file in zip(paths, versions, strict=True)
    ]


def open_file(name: str, start: int = 0) -> FileAndSize:
    """Open a local path or a URL at a byte; return the file and the size of the whole file in bytes.

    A range of a remote file that cannot be read is requested again.
    """
    if not is_remote(name):
        file = open(local_path(name), "rb", buffering=BUFFER)  # noqa: SIM115
        if start:
            file.seek(start)
        return file, os.fstat(file.fileno()).st_size
    remote, size = open_remote(name)
    remote.seek(start)
    return io.BufferedReader(remote, BUFFER), size


_UNPACK: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
"""First bytes of each kind of compressed files -> function that opens one."""
_OTHER_COMPRESSIONS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x5d\x00\x00": "lzma",
    b"PK\x03\x04": "zip",
}
"""First bytes of other kinds -> name."""


def is_compressed(name: str) -> bool:
    """Return whether a file is compressed, by its name."""
    return redacted(name).endswith((".gz", ".tgz", ".bz2", ".xz"))


def decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """Return the plain bytes of a file that may be compressed by gzip, bzip2 or xz, as its first bytes tell.

    Unlike `tarfile`'s own streams, these raise if the file ends too soon, and verify the checksums. The file itself is
    returned if it is not compressed; otherwise, the caller closes both.

    Raises:
        EOFError: By its name it is compressed, but it holds nothing, so that it was cut off before its first byte.
        ValueError: It is compressed in another way.
    """
    begin = cast(io.BufferedReader, file).peek(6)
    if not begin and is_compressed(name):
        raise EOFError(
            "the file has 0 bytes, and compressed files have more, even if nothing is in them"
        )
    for first_bytes, unpack in _UNPACK.items():
        if begin.startswith(first_bytes):
            return io.BufferedReader(unpack(file), BUFFER)
    for first_bytes, kind in _OTHER_COMPRESSIONS.items():
        if begin.startswith(first_bytes):
            raise ValueError(
                f"it is compressed by {kind}; compress it by gzip, bzip2 or xz, or not at all"
            )
    return file


def open_remote(url: str, **options: Any) -> tuple[Any, int]:
    """Open a remote file by fsspec; a range of bytes that cannot be read is requested again.

    If the server does not send ranges, or the size, the whole file is read into memory.

    Args:
        url: The URL.
        options: Passed to fsspec's `open`.

    Returns:
        (file, size of the whole file in bytes)

    Raises:
        OSError: A request failed too often in a row; so does reading.
    """
    system, path = remote_file(url)
    details = retried(lambda: system.info(path))
    size = int(details.get("size") or 0)
    if path.startswith("http"):
        options["size"] = size
    whole: list[bytes] = []

    def fetch_again(start: int, end: int) -> bytes:
        def attempt() -> bytes:
            content = whole[0][start:end] if whole else fetch(start, end)
            num = min(end, size) - start
            if len(content) != num:  # a file would seem to end here
                raise OSError(
                    f"the server sent {len(content)} bytes of {num}. Was the file replaced while it is read?"
                )
            return content

        place = f" at byte {start} of {size}"
        try:
            return retried(attempt, place)
        except ValueError:  # fsspec's for a server that ignores ranges
            whole.append(retried(lambda: system.cat_file(path)))
            return retried(attempt, place)

    if size and details.get("partial", True):
        file = system.open(path, "rb", **options)
        if hasattr(file, "cache"):
            fetch: Callable[[int, int], bytes] = file.cache.fetcher
            file.cache.fetcher = fetch_again
            return file, size
    content = retried(lambda: system.cat_file(path))
    return io.BytesIO(content), len(content)


def retried(attempt: Callable[[], T], place: str = "") -> T:
    """Return the result of an attempt; repeat it after a failure, with growing pauses.

    Args:
        attempt: Called at most `len(PAUSES)` + 1 times.
        place: Where it fails, for the error.

    Raises:
        ValueError, FileNotFoundError, PermissionError: An attempt has failed in this way; it is not repeated.
        OSError: All attempts failed.
    """
    for pause in (*PAUSES, None):
        try:
            return attempt()
        except ValueError:
            raise
        except Exception as error:
            # Over HTTP, every failure to open is a FileNotFoundError, whose cause is that of the server.
            cause: Any = error.__cause__
            is_of_http = type(cause).__module__.startswith("aiohttp")
            failure = cause if is_of_http else error
            kind = _FINAL.get(getattr(failure, "status", 0), type(failure))
            # Without the error of fsspec in its traceback: that holds the query of the URL, such as a signature.
            if issubclass(kind, FileNotFoundError | PermissionError):
                raise kind(_without_queries(str(failure))) from None
            if pause is None:
                reason = _without_queries(described(failure))
                raise OSError(
                    f"given up after {len(PAUSES)} retries{place}: {reason}"
                ) from None
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[Any]:
    """Write a file under a temporary name, and give it its name when it is complete, so that no reader sees half of it.

    Args:
        path: The file, which is replaced if it exists. If writing fails, it stays as it is.
        mode: Permissions of the file.
    """
    folder, base = os.path.split(os.path.abspath(path))
    handle, part = tempfile.mkstemp(
        prefix=f".{base}.", suffix=".part", dir=folder
    )
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            # Without this, a crash could leave an empty file with the right name.
            os.fsync(handle)
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
