"""`SharedList`: a list of Python objects that worker processes share."""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

import numpy as np

from paddle_shard.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")


class SharedList(Sequence[T]):
    """A list whose items worker processes share: strings, dicts, tuples, arrays, or anything that can be pickled.

    A worker that reads an ordinary list copies it: each look at a Python object changes its reference count, and so the
    page of memory that it is on. The items of a `SharedList` are kept as bytes in one piece of memory that all
    processes of a host map, forked or spawned. Reading an item makes a new object of them, in about a microsecond.

    Its pickle is small and refers to the memory of this process: it can be loaded as long as this process keeps the
    list, on this host.

    Examples:
        >>> names = SharedList(f"image-{i}.jpg" for i in range(1000))
        >>> len(names), names[7], names[-2:]
        (1000, 'image-7.jpg', ['image-998.jpg', 'image-999.jpg'])
    """

    def __init__(self, items: Iterable[T]) -> None:
        """Copy the items, one after the other.

        Args:
            items: Any iterable, such as a list or a generator.

        Raises:
            ArgumentTypeError: `items` cannot be iterated, or an item cannot be pickled.
        """
        if not isinstance(items, Iterable):
            raise ArgumentTypeError(
                f"SharedList: items must be iterable, got {type(items).__name__}: {items!r}."
            )
        ends = array("q")
        size = 0
        self._keep_file(os.memfd_create("paddle_shard"))
        with os.fdopen(os.dup(self._file), "wb") as writer:
            for index, item in enumerate(items):
                try:
                    data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
                except Exception as error:
                    raise ArgumentTypeError(
                        f"SharedList: item {index} is a {type(item).__name__}, which cannot be pickled ({error})."
                    ) from error
                writer.write(data)
                size += len(data)
                ends.append(size)
            writer.write(ends.tobytes())
        self._map(len(ends))

    def _keep_file(self, file: int) -> None:
        """Keep the file of the items until this list is dropped."""
        self._file = file
        weakref.finalize(self, os.close, file)

    def _map(self, length: int) -> None:
        """Map the items, and where each ends."""
        self._length = length
        memory: bytes | mmap.mmap = b""
        if length:
            memory = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self._memory = memoryview(memory)
        self._ends = np.frombuffer(memory, np.int64, length, len(memory) - 8 * length)

    def _inode(self) -> int:
        """Return the inode, which distinguishes the file from a later one with the same descriptor."""
        return os.fstat(self._file).st_ino

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return a new copy of an item, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._length))]
        number = range(self._length)[index]
        start = self._ends[number - 1] if number else 0
        item: T = pickle.loads(self._memory[start : self._ends[number]])
        return item

    def __iter__(self) -> Iterator[T]:
        return (self[number] for number in range(self._length))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._length} items, {len(self._memory)} bytes)"

    def __getstate__(self) -> tuple[str, int, int]:
        return f"/proc/{os.getpid()}/fd/{self._file}", self._inode(), self._length

    def __setstate__(self, state: tuple[str, int, int]) -> None:
        path, inode, length = state
        try:
            # Without O_NONBLOCK, it waits if a pipe has the number now.
            self._keep_file(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            is_there = self._inode() == inode
        except OSError:
            is_there = False
        if not is_there:
            raise ArgumentError(
                f"SharedList: {path} is not the memory of this list of {length} items. Keep the list in the process "
                "that pickles it, until all processes have loaded it."
            )
        self._map(length)
