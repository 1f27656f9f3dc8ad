"""What does `paddle.io.get_worker_info()` tell the user's stream?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from paddle.io.dataloader import worker as paddle_worker
from paddle.io.dataloader.worker import WorkerInfo

from paddle_shard.errors import ArgumentTypeError, SplitError
from paddle_shard.reading.digest import digest
from paddle_shard.sources.external import OwnCopy, iterate, tell_epoch
from paddle_shard.stages.stage import Opening, Stage

_END = object()
LOOK = "/look"
"""Ends what the sample that all readers look at is known by."""


@contextmanager
def shown(info: WorkerInfo | None) -> Iterator[None]:
    """Let `paddle.io.get_worker_info()`, and torch's if that is loaded, return `info` inside the `with` block."""
    of_torch: Any = sys.modules.get("torch.utils.data._utils.worker")
    modules = [paddle_worker] if of_torch is None else [paddle_worker, of_torch]
    own = [module._worker_info for module in modules]
    for module in modules:
        module._worker_info = info
    try:
        yield
    finally:
        for module, before in zip(modules, own, strict=True):
            module._worker_info = before


def told(info: WorkerInfo | None, dataset: Iterable[Any] | Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Iterate over the user's stream, which sees `info` instead of its worker all the time.

    With None, it is not told of the workers, since it would give each only some of its samples. Every reader reads the
    whole stream, which is cut later. If it split itself, it would be cut twice.
    """
    with shown(info):
        items = iterate(dataset)
    while True:
        with shown(info):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class _Part(WorkerInfo):
    """ "Worker p of P", as it is shown to a stream that splits itself; and whether it has looked."""

    looked = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            self.__dict__["looked"] = True  # a `WorkerInfo` cannot be changed otherwise
        return super().__getattribute__(name)


class SelfSplit(Stage):
    """A user's stream that splits itself by `paddle.io.get_worker_info()` or torch's: it is shown "worker p of P".

    So each sample is read once, whatever the number of readers. The stream must yield different samples for each p,
    and the same samples each time it is opened for an epoch.
    """

    def __init__(self, dataset: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        if isinstance(dataset, Iterator) or not (isinstance(dataset, Iterable) or callable(dataset)):
            raise ArgumentTypeError(
                "splits_itself=True needs a data set that can be iterated for each part, or a function that returns "
                f"one, got {type(dataset).__name__}: {dataset!r}."
            )
        self._dataset = dataset

    cuts = True
    """The stream opens each part by itself."""

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the samples of each part."""
        begun: dict[int, tuple[int, int]] = {}
        return [self._items(part, opening, begun) for part in opening.parts]

    def _begun(self, part: int, opening: Opening) -> tuple[_Part, Iterator[Any]]:
        """Return what the stream is shown for a part, and its samples."""
        key = opening.key(part, "source")
        opening.seed_generators(key)
        dataset = OwnCopy(self._dataset).dataset
        tell_epoch(dataset, opening)
        info = _Part(id=part, num_workers=opening.num_parts, dataset=dataset, seed=key & 0x7FFFFFFF)
        return info, opening.drawn(told(info, dataset), part)

    def _items(self, part: int, opening: Opening, begun: dict[int, tuple[int, int]]) -> Iterator[Any]:
        info, items = self._begun(part, opening)
        first, failure = next(items, _END), None
        if first is _END:
            return
        name = type(self._dataset).__name__
        try:
            second = next(items, _END)
        except Exception as error:  # it is raised below, at its own sample
            second, failure = _END, error
        if opening.num_parts > 1 and not info.looked and failure is None:
            raise SplitError(
                f"splits_itself=True, but the {name} asks neither paddle.io.get_worker_info() nor torch's (imported "
                "before) which part to read, so each part would be all of it. Leave splits_itself out."
            )
        if second is not _END:
            mine = begun[part] = digest(first), digest(second)
            # All parts that are opened here begin with the same two different samples.
            if len(begun) == len(opening.parts) > 1 and len(set(begun.values())) == 1 and len(set(mine)) > 1:
                raise SplitError(
                    f"splits_itself=True, but the parts {str(list(opening.parts))[1:-1]} begin with the same samples: "
                    f"the {name} does not split itself by paddle.io.get_worker_info(), so each "
                    "part would be all of it. Leave splits_itself out."
                )
        yield first
        if failure is not None:
            raise failure
        if second is not _END:
            yield second
            yield from items
