"""Worker info: what `paddle.io.get_worker_info()` returns in the user's stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paddle.io.dataloader import worker as paddle_worker
from paddle.io.dataloader.worker import WorkerInfo

from paddle_shard.data.external import OwnCopy, iterate, tell_epoch
from paddle_shard.data.stages.stage import Opening, Stage
from paddle_shard.errors import ArgumentTypeError, SplitError

_END: Any = object()
_OF_TORCH = "torch.utils.data._utils.worker"


class shown:
    """Let `paddle.io.get_worker_info()`, and torch's if that is loaded, return `info` inside the `with` block."""

    def __init__(
        self, info: WorkerInfo | None
    ) -> None:  # not by `contextmanager`: it is entered for each sample
        self._info = info
        self._own: list[tuple[Any, WorkerInfo | None]] = []

    def __enter__(self) -> None:
        of_torch: Any = sys.modules.get(_OF_TORCH)
        modules = [paddle_worker] if of_torch is None else [paddle_worker, of_torch]
        self._own = [(module, module._worker_info) for module in modules]
        for module in modules:
            module._worker_info = self._info

    def __exit__(self, *_: object) -> None:
        for module, info in self._own:
            module._worker_info = info


def told(
    info: WorkerInfo | None, dataset: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Iterator[Any]:
    """Iterate over the user's stream, which sees `info` instead of its worker all the time.

    With None, it is not told of the workers, since it would give each only some of its samples. Every reader reads the
    whole stream, which is cut later. If it split itself, it would be cut twice.
    """
    with shown(info):
        items = iterate(dataset)
    while True:
        if (
            info is paddle_worker._worker_info and _OF_TORCH not in sys.modules
        ):  # as where no workers read
            item = next(items, _END)
        else:
            with shown(info):
                item = next(items, _END)
        if item is _END:
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
        if isinstance(dataset, Iterator) or not (
            isinstance(dataset, Iterable) or callable(dataset)
        ):
            raise ArgumentTypeError(
                "splits_itself=True needs a data set that can be iterated for each part, or a function that returns "
                f"one, got {type(dataset).__name__}: {dataset!r}."
            )
        self._dataset = dataset

    cuts = True
    """The stream opens each part by itself."""

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the samples of each part."""
        return [self._items(part, opening) for part in opening.parts]

    def _items(self, part: int, opening: Opening) -> Iterator[Any]:
        key = opening.key(part, "source")
        opening.seed_generators(key)
        dataset = OwnCopy(self._dataset).dataset
        tell_epoch(dataset, opening)
        info = _Part(
            id=part,
            num_workers=opening.num_parts,
            dataset=dataset,
            seed=key & 0x7FFFFFFF,
        )
        items = opening.drawn(told(info, dataset), part)
        for number, item in enumerate(items):
            if (
                number == 1 and opening.num_parts > 1 and not info.looked
            ):  # it may ask after its first sample
                raise SplitError(
                    f"splits_itself=True, but the {type(self._dataset).__name__} asks neither "
                    "paddle.io.get_worker_info() nor torch's (imported before) which part to read, so each part would "
                    "be all of it. Leave splits_itself out."
                )
            yield item
