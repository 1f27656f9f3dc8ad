"""`SharedList`: a list of Python objects that worker processes share."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

T = TypeVar("T")


class SharedList(Sequence[T]):
    """A list whose items worker processes share: strings, dicts, tuples, arrays, or anything that can be pickled.

    A worker that reads an ordinary list copies it: each look at a Python object changes its reference count, and so the
    page of memory that it is on. The items of a `SharedList` are kept as bytes in one piece of memory, which forked
    processes share. Reading an item makes a new object of them, in about a microsecond.

    Its pickle holds the items: a process that loads it has a copy of its own.

    Examples:
        >>> names = SharedList(f"image-{i}.jpg" for i in range(1000))
        >>> len(names), names[7], names[-2:]
        (1000, 'image-7.jpg', ['image-998.jpg', 'image-999.jpg'])
    """

    def __init__(self, items: Iterable[T]) -> None:
        """Copy the items, one after the other.

        Args:
            items: Any iterable, such as a list or a generator, of objects that can be pickled.
        """
        sizes = [0]
        memory: bytes | mmap.mmap = b""
        with os.fdopen(os.memfd_create("paddle_shard"), "wb") as file:
            for item in items:
                sizes.append(
                    file.write(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
                )
            file.flush()
            if len(sizes) > 1:
                # It keeps the file open.
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._memory = memoryview(memory)
        self._bounds = np.cumsum(sizes)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return a new copy of an item, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start, end = self._bounds[number : number + 2]
        item: T = pickle.loads(self._memory[start:end])
        return item

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items, {len(self._memory)} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)

    def __deepcopy__(self, memo: Any) -> SharedList[T]:
        return self
