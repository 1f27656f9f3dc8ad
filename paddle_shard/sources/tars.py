"""Which samples does a WebDataset tar hold, and at which byte does each begin?"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from paddle_shard.errors import MissingDependencyError
from paddle_shard.sources.files import BUFFER, decompressed, open_file
from paddle_shard.sources.shards import RECOUNT

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


def read_tar(
    path: str, name: str, *, start: int = 0, select: Callable[[str], bool] | None = None, size: int | None = None
) -> Iterator[Sample]:
    """Yield the samples of a tar, compressed or not, from a given byte to the end.

    Args:
        path: Path or URL to read.
        name: The samples' `__url__`.
        start: A byte where a sample begins; 0 for a compressed tar.
        select: Called with a member's name; True: the member is read. None: all members are read.
        size: Size in bytes that the file must have; None: any size.
    """
    opened, found = open_file(path, start)
    with opened, opened if start else decompressed(opened) as file:
        if size is not None and found is not None and found != size:
            raise tarfile.ReadError(
                f"the file has {found} bytes, the index says {size}: it has changed since, or is another shard of that "
                f"name. If it is the right one, {RECOUNT}"
            )
        yield from TarSamples(file, name, start, select)
