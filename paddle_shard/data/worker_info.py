"""Worker info: what `paddle.io.get_worker_info()` returns in the user's stream."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from paddle.io.dataloader import worker as paddle_worker
from paddle.io.dataloader.worker import WorkerInfo

from paddle_shard.data.external import (
    IterableOrFunction,
    copy_for_reading,
    iterate,
    set_epoch_of,
)
from paddle_shard.data.stages.stage import Opening, PartsSource, Samples
from paddle_shard.errors import ArgumentTypeError, SplitError

_END: Any = object()
_OF_TORCH = "torch.utils.data._utils.worker"


def _modules() -> list[Any]:
    torch_worker = sys.modules.get(_OF_TORCH)
    return (
        [paddle_worker]
        if torch_worker is None
        else [paddle_worker, torch_worker]
    )


@contextmanager
def visible_worker_info(info: WorkerInfo | None) -> Iterator[None]:
    """Let `paddle.io.get_worker_info()`, and torch's if that is loaded, return `info` inside the `with` block."""
    outside = [(module, module._worker_info) for module in _modules()]
    for module, _ in outside:
        module._worker_info = info
    try:
        yield
    finally:
        for module, known in outside:
            module._worker_info = known


def iterate_with(
    info: WorkerInfo | None, dataset: IterableOrFunction
) -> Samples:
    """Iterate over the user's stream, which sees `info` instead of its worker.

    With None, it does not know of the workers, and does not split itself among them: every reader reads the whole
    stream, which is cut later.
    """
    with visible_worker_info(info):
        items = iterate(dataset)
    outside = [(module, module._worker_info) for module in _modules()]
    if all(known is info for _, known in outside):
        yield from items  # where no workers read, there is nothing to hide
        return
    while True:
        # Not by `visible_worker_info`, which takes as long as a small sample.
        for module, _ in outside:
            module._worker_info = info
        try:
            item = next(items, _END)
        finally:
            for module, known in outside:
                module._worker_info = known
        if item is _END:
            return
        yield item


class _Part(WorkerInfo):
    """Tells "worker p of P" to a stream that splits itself, and whether the stream has read it."""

    is_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            self.__dict__["is_read"] = (
                True  # a `WorkerInfo` cannot be changed otherwise
            )
        return super().__getattribute__(name)


class SelfSplit(PartsSource):
    """A user's stream that splits itself by `paddle.io.get_worker_info()` or torch's: it sees "worker p of P".

    So each sample is read once, whatever the number of readers. The stream must yield different samples for each p,
    and the same samples each time it is opened for an epoch.
    """

    def __init__(self, dataset: IterableOrFunction) -> None:
        can_repeat = isinstance(dataset, Iterable) or callable(dataset)
        if isinstance(dataset, Iterator) or not can_repeat:
            raise ArgumentTypeError(
                "splits_itself=True needs a data set that can be iterated for each part, or a function that returns "
                f"one, got {type(dataset).__name__}: {dataset!r}."
            )
        self._dataset = dataset

    def part(self, part: int, opening: Opening) -> Samples:
        """See `PartsSource`."""
        key = opening.key(part, "source")
        opening.rng.seed(key)
        dataset = copy_for_reading(self._dataset)
        set_epoch_of(dataset, opening)
        info = _Part(
            id=part,
            num_workers=opening.num_parts,
            dataset=dataset,
            seed=key & 0x7FFFFFFF,
        )
        items = opening.seeded(iterate_with(info, dataset), part)
        for number, item in enumerate(islice(items, 2)):
            # It may read its info after its first sample.
            if number and opening.num_parts > 1 and not info.is_read:
                raise SplitError(
                    f"splits_itself=True, but the {type(self._dataset).__name__} asks neither "
                    "paddle.io.get_worker_info() nor torch's (imported before) which part to read, so each part would "
                    "be all of it. Leave splits_itself out."
                )
            yield item
        yield from items
