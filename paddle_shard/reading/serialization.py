"""Serialization: the layout of a message in memory that another process reads.

A message is a pickle and the memory of each of its arrays. They lie one behind the other, after a table of their
lengths.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from paddle_shard.reading.tensors import as_array

_ALIGNMENT = 64


def _as_array(tensor: Any) -> Any:
    # A bfloat16 tensor becomes a uint16 array, and Paddle reads a uint16 array as bfloat16.
    return np.asarray, (as_array(tensor),)


def _as_memory(array: np.ndarray[Any, Any]) -> Any:
    """Reduce an array for pickling as numpy does, in half the time."""
    dtype = array.dtype
    if dtype.kind in "biufc" and dtype.isnative and array.flags.c_contiguous:
        return np.ndarray, (array.shape, dtype.char, pickle.PickleBuffer(array))  # type: ignore[arg-type]
    return array.__reduce_ex__(5)


_REDUCERS = {np.ndarray: _as_memory, paddle.Tensor: _as_array}


def pickled(message: Any, kind: Any = pickle.Pickler) -> list[memoryview]:
    """Return the pickle of a message, then the memory of each array; Paddle's tensors are sent as arrays.

    Args:
        message: Anything that the pickler takes.
        kind: The class of the pickler.

    Raises:
        Exception: Whatever pickling raises.
    """
    text = io.BytesIO()
    arrays: list[pickle.PickleBuffer] = []
    pickler = kind(text, 5, buffer_callback=arrays.append)
    # Users may add to copyreg's table.
    others = (
        copyreg.dispatch_table
        if kind is pickle.Pickler
        else kind.dispatch_table
    )
    pickler.dispatch_table = {**others, **_REDUCERS}
    pickler.dump(message)
    # Not `getbuffer()`: from Python 3.13 on, a buffer that is dropped before its view is reported on stderr.
    return [memoryview(text.getvalue()), *[array.raw() for array in arrays]]


def layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where each piece begins, after a table of their lengths, and where the last piece ends."""
    starts, end = [], 8 * len(lengths)
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end


def write(
    memory: memoryview, pieces: Sequence[memoryview], starts: Sequence[int]
) -> None:
    """Write the pieces of a message, with the starts that `layout` has returned."""
    struct.pack_into(
        f"<{len(pieces)}Q", memory, 0, *[piece.nbytes for piece in pieces]
    )
    for piece, start in zip(pieces, starts, strict=True):
        memory[start : start + piece.nbytes] = piece


def read(memory: memoryview, num_pieces: int) -> Any:
    """Return the message of so many pieces that lies in some memory. Its arrays are copies.

    Raises:
        Exception: Whatever unpickling raises.
    """
    lengths = struct.unpack_from(f"<{num_pieces}Q", memory)
    (start, length), *arrays = zip(layout(lengths)[0], lengths, strict=True)
    copies = [
        np.frombuffer(memory, np.uint8, size, at).copy() for at, size in arrays
    ]
    return pickle.loads(memory[start : start + length], buffers=copies)
