"""Simulated ranks: what each rank of a mesh would get, in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from paddle_shard.errors import ArgumentError


@contextmanager
def simulated_rank(
    global_rank: int, world_size: int | None = None
) -> Iterator[None]:
    """Make this process another rank, for code that only reads its rank: loaders, samplers, placing.

    Collectives do not work inside. Paddle's core reads the rank from the environment whenever it places a
    tensor, and Python code calls `paddle.distributed.get_rank`; both return `global_rank` here.

    Args:
        global_rank: The rank that this process is inside.
        world_size: What `paddle.distributed.get_world_size` answers; None for `global_rank + 1`.

    Raises:
        ArgumentError: This process is a rank of a real job.
    """
    import paddle.distributed as dist

    from paddle_shard.ranks.rendezvous import num_ranks

    if num_ranks() > 1:
        raise ArgumentError(
            f"this process is one of a job of {num_ranks()} ranks, which would wait for the others: ranks are "
            "simulated in a single process. Run it without paddle.distributed.launch, or test real ranks by run_ranks."
        )
    size = global_rank + 1 if world_size is None else world_size
    with (
        mock.patch.dict(os.environ, {"PADDLE_TRAINER_ID": str(global_rank)}),
        mock.patch.object(dist, "get_rank", lambda group=None: global_rank),
        mock.patch.object(dist, "get_world_size", lambda group=None: size),
    ):
        yield


def on_each_rank(
    global_ranks: Any, function: Callable[[], Any]
) -> dict[int, Any]:
    """Return what a function returns as each of some ranks.

    Args:
        global_ranks: The ranks.
        function: Is called as each of them.
    """
    results = {}
    for rank in global_ranks:
        with simulated_rank(rank, max(global_ranks) + 1):
            results[rank] = function()
    return results
