"""Did the user give another library's stream, which Paddle or this library would misread?"""

from __future__ import annotations

from typing import Any

import paddle.io

from paddle_shard.errors import ArgumentTypeError

_LIBRARIES = {"torch.utils.data": "torch", "webdataset": "webdataset", "grain": "Grain", "streaming": "MosaicML"}
_STREAMS = {"DataLoader", "WebLoader", "IterableDataset", "IterDataset", "StreamingDataset", "StreamingDataLoader"}


def check_is_paddles(given: Any, loader: paddle.io.DataLoader | None = None) -> None:
    """Refuse another library's loader or stream.

    Args:
        given: A data set, or what the user gave in place of a loader.
        loader: The data set's loader; None if `given` is not a data set.

    Raises:
        ArgumentTypeError: Paddle would read it as data with an index, or this library as whole batches; the text names
            the way that works.
    """
    bases = [(base.__module__, base.__name__) for base in type(given).__mro__]
    of = {name for module, _ in bases for start, name in _LIBRARIES.items() if f"{module}.".startswith(f"{start}.")}
    kind = {name for _, name in bases} & _STREAMS
    if not of or not kind or isinstance(given, paddle.io.DataLoader | paddle.io.IterableDataset):
        return
    if "IterableDataset" in kind:
        size = "..." if loader is None else loader.batch_size
        way = f"Give paddle.io.DataLoader(paddle_shard.Stream.of(dataset), batch_size={size})"
        if size is not None:
            way += ", or batch_size=None if its items are whole global batches"
    else:
        way = (
            "Give its data set to Paddle's: paddle.io.DataLoader(dataset, batch_size=...), with "
            "paddle_shard.Stream.of(dataset) if it has no index; or, if its batches are global ones and the same on "
            "all ranks, a function: lambda: loader"
        )
    if "IterDataset" in kind:
        way = (
            "Give shard_dataloader, in place of a DataLoader, paddle_shard.sources.grain.grain_loader(build): a "
            "function that builds it for a data rank. A MapDataset can go into the DataLoader as it is"
        )
    if "MosaicML" in of and kind & {"StreamingDataset", "StreamingDataLoader"}:
        of = {"MosaicML"}
        way = (
            "It reads the part of the rank that the environment names, whatever the mesh. Give shard_dataloader what "
            "mds_stream makes of its files, which is a recipe in demos/adapters"
        )
    if "webdataset" in of:
        of_tars = "Make it of the tars: paddle_shard.Stream.webdataset(urls), of which each is read by one reader only"
        way = f"{of_tars}. Or: {way}"
    where = "dataloader is" if loader is None else "the DataLoader's data set is"
    raise ArgumentTypeError(f"{where} a {type(given).__name__}, which is {' and '.join(sorted(of))}'s. {way}.")
