"""Which of fsspec's file systems has a file?"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from paddle_shard.errors import MissingDependencyError
from paddle_shard.sources.names import shown


def remote_file(url: str, extra: str) -> tuple[Any, str]:
    """Return (file system, path in it) of a file; one file system serves all that a process reads of a host or bucket.

    Making one takes long: of S3 most of a second. Those that fsspec keeps from before a fork belong to the parent's
    threads.

    Args:
        url: Of the file.
        extra: That of the package which has fsspec, for the error.

    Raises:
        MissingDependencyError: fsspec is not installed, or what it needs for such a URL.
    """
    try:
        if "::" in url:  # a file inside a file is a file system of its own
            return _made(url)
        return _kept("/".join(url.split("/", 3)[:3]), os.getpid()), url
    except ImportError as error:
        extra = "s3" if url.startswith(("s3://", "s3a://")) else extra
        raise MissingDependencyError(f"reading {shown(url)}: {error}: pip install 'paddle_shard[{extra}]'") from error


def _made(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    system, path = url_to_fs(url, skip_instance_cache=True)
    return system, path


@cache
def _kept(host: str, process: int) -> Any:
    return _made(host)[0]
