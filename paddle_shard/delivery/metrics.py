"""How does Prometheus get a loader's statistics?

The names and units are those of OpenMetrics: seconds and bytes, and totals for what only grows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paddle_shard.delivery.advice import Summary
from paddle_shard.delivery.memory import UNTOLD, memory
from paddle_shard.sources.files import needs

Told = tuple[Any, Mapping[int, Summary]]
"""The totals of this rank, and the newest steps of each rank."""

_TOTALS = {
    "batches": "Batches that were delivered to this rank",
    "samples": "Real rows of this rank's slices",
    "padding": "Rows of padding in this rank's slices",
    "skipped": "Rows of samples that could not be read, or are left out",
    "bytes": "Size of the rows that this rank reads",
    "step_seconds": "Time of the training loop between two batches",
    "hidden_seconds": "Time in the loader that cost nothing, as the device was busy",
}
_OF_STEPS = {
    "step": "Time of the training loop between two batches, or of the device if it takes longer",
    "wait": "Wait for data that the rank makes itself",
    "others": "Wait for other ranks",
}


class StatsCollector:
    """Tells a registry of `prometheus_client` the statistics of a loader, as they are when it asks."""

    def __init__(self, tell: Callable[[], Told], rank: int) -> None:
        self._tell, self._rank = tell, str(rank)

    def collect(self) -> Iterator[Any]:
        """Yield the totals and memory of this rank, and what each rank's steps take, as the ranks have last told."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        (total, of_ranks), rank = self._tell(), self._rank
        for name, what in _TOTALS.items():
            counter = CounterMetricFamily(f"paddle_shard_{name}", what, labels=["rank"])
            counter.add_metric([rank], getattr(total, name))
            yield counter
        waits = CounterMetricFamily(
            "paddle_shard_wait_seconds", "Time in the loader, by cause", labels=["rank", "cause"]
        )
        for cause, seconds in list(total.waits.items()):
            waits.add_metric([rank, cause], seconds)
        yield waits
        for name, what in _OF_STEPS.items():
            text = f"{what}, in the newest steps; the ranks tell each other every few seconds"
            gauge = GaugeMetricFamily(f"paddle_shard_recent_{name}_seconds", text, labels=["rank", "host"])
            for of, one in sorted(of_ranks.items()):
                gauge.add_metric([str(of), one.host], getattr(one, name))
            yield gauge
        with contextlib.suppress(*UNTOLD):
            found = memory()
            held = GaugeMetricFamily("paddle_shard_memory_bytes", "Memory of this rank", labels=["rank", "whose"])
            for whose, size in (("rank", found.own), ("workers", sum(found.workers)), ("shared", found.shared)):
                held.add_metric([rank, whose], size)
            yield held


def serve(tell: Callable[[], Told], rank: int, port: int, address: str) -> Any:
    """Serve the statistics over HTTP, in a thread that ends with the process; return the server.

    Raises:
        MissingDependencyError: `prometheus_client` is not installed.
        OSError: The port is in use, or the address is none of this host's.
    """
    with needs("metrics"):
        from prometheus_client import CollectorRegistry, start_http_server
    registry = CollectorRegistry()
    registry.register(StatsCollector(tell, rank))
    server, _ = start_http_server(port, address, registry)
    return server
