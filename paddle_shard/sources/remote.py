"""Which of fsspec's file systems has a file?"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from paddle_shard.errors import MissingDependencyError
from paddle_shard.sources.names import shown


def remote_file(url: str, extra: str) -> tuple[Any, str]:
    """Return (file system, path in it) of a file. A process uses one file system for all files of a host or bucket.

    Making a file system takes long: most of a second for S3. fsspec's own cache is not used, since after a fork its
    file systems belong to the parent's threads.

    Args:
        url: URL of the file.
        extra: The extra of paddle_shard that installs fsspec, for the error.

    Raises:
        MissingDependencyError: fsspec, or a package that it needs for such a URL, is not installed.
    """
    try:
        if "::" in url:  # a file inside another file, which is a file system of its own
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
