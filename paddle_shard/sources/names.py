"""What does the name of a file tell, and how is the same file recognized in another folder?"""

from __future__ import annotations

import glob
import itertools
import os
import re
import urllib.request
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.handlers import raise_if_a_handlers

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def is_remote(name: str) -> bool:
    """True if a name is a URL other than `file:`, or a command (which is refused later, when it is read).

    Examples:
        >>> is_remote("s3://bucket/000.tar"), is_remote("file:///data/000.tar"), is_remote("data/000.tar")
        (True, False, False)
    """
    return name.startswith("pipe:") or ("://" in name and not name.startswith("file:"))


def local_path(name: str) -> str:
    """Return the path of a local file, given its name (a path or a `file:` URL)."""
    if name.startswith("file:"):
        return urllib.request.url2pathname(urlsplit(name).path)
    return os.path.expanduser(name)


def matched(paths: Paths) -> list[str]:
    """Return the given files; each pattern, such as `data/*.csv`, is replaced by the files that match it, sorted.

    Raises:
        ArgumentTypeError: `paths` is neither a path nor a list.
        ArgumentError: A pattern matches no file, or is for remote files.
    """
    given: Sequence[str | os.PathLike[str]] = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, Iterable):
        raise ArgumentTypeError(f"paths must be a path, or a list of them, got {paths!r}.")
    found: list[str] = []
    for name in [os.fspath(path) for path in given]:
        path = "" if is_remote(name) else local_path(name)
        if not path and "://" in name and "*" in name.partition("?")[0]:
            raise ArgumentError(f"{shown(name)}: a pattern is not looked for on a server. Give the list of URLs.")
        if not glob.has_magic(path) or os.path.exists(path):
            found.append(name)
            continue
        files = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        if not files:
            raise ArgumentError(f"{name}: this pattern matches no file (the current folder is {os.getcwd()}).")
        found += files
    return found


def base_name(name: str) -> str:
    """Return the last piece of a path or URL.

    Examples:
        >>> base_name("https://host/train/000.tar?signature=1"), base_name("train/000.tar")
        ('000.tar', '000.tar')
    """
    return os.path.basename(shown(name).rstrip("/"))


def shown(name: str) -> str:
    """Return a name without a URL's user, password and query, which may be secret or differ from day to day.

    Examples:
        >>> shown("https://me:word@host/000.tar?signature=1"), shown("dir/what?.tar")
        ('https://host/000.tar', 'dir/what?.tar')
    """
    if "://" not in name:
        return name
    return re.sub(r"(?<=://)[^/@]*@", "", name.partition("?")[0])


def within_their_folder(names: Sequence[str]) -> list[str]:
    """Return names without the folder that all share, since data may be moved or be elsewhere on another host.

    Examples:
        >>> within_their_folder(["/data/a/0.csv", "/data/b/0.csv"]), within_their_folder(["s3://bucket/0.csv"])
        (['a/0.csv', 'b/0.csv'], ['0.csv'])
    """
    steps = [(shown(name) if is_remote(name) else os.path.abspath(local_path(name))).split("/") for name in names]
    folders = zip(*(path[:-1] for path in steps), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, folders))
    return ["/".join(path[common:]) for path in steps]


def local_size(name: str) -> int | None:
    """Return the size of a local file in bytes; None for a remote file, whose size would cost a request."""
    try:
        return None if is_remote(name) else os.path.getsize(local_path(name))
    except OSError as error:
        raise_if_a_handlers(error)
        return None  # reading it later raises an error that names it
