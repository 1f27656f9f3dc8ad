"""Worker info: what `paddle.io.get_worker_info()` returns in the user's stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.io.dataloader import worker as paddle_worker
from paddle.io.dataloader.worker import WorkerInfo

_OF_TORCH = "torch.utils.data._utils.worker"


def worker_modules() -> list[Any]:
    """Return the modules of Paddle, and of torch if it is loaded, that hold the info of a worker."""
    torch_worker = sys.modules.get(_OF_TORCH)
    return (
        [paddle_worker]
        if torch_worker is None
        else [paddle_worker, torch_worker]
    )


@contextmanager
def visible_worker_info(info: WorkerInfo | None) -> Iterator[None]:
    """Let `paddle.io.get_worker_info()`, and torch's if that is loaded, return `info` inside the `with` block."""
    outside = [(module, module._worker_info) for module in worker_modules()]
    for module, _ in outside:
        module._worker_info = info
    try:
        yield
    finally:
        for module, known in outside:
            module._worker_info = known
