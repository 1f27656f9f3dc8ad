"""Telemetry: serve the statistics of a loader to Prometheus.

The names and units are those of OpenMetrics: seconds and bytes, and totals for what only grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle.distributed as dist

from paddle_shard.core.checks import check_count
from paddle_shard.data.files.files import needs
from paddle_shard.loader.loader import ShardDataloader

_TOTALS = {
    "batches": "Batches that were delivered to this rank",
    "samples": "Real rows of this rank's slices",
    "padding": "Rows of padding in this rank's slices",
    "skipped": "Rows of samples that could not be read",
    "wait_seconds": "Time for which the training loop waited for data",
    "hidden_seconds": "Time of waits that cost nothing, as the device was busy",
    "step_seconds": "Time of the training loop between two batches",
}


class StatsCollector:
    """Reports the statistics of a loader to a registry of `prometheus_client`, as they are when it collects them."""

    def __init__(self, loader: ShardDataloader) -> None:
        self._loader = loader
        self._rank = str(dist.get_rank())

    def collect(self) -> Iterator[Any]:
        """Yield the totals of this rank."""
        from prometheus_client.core import CounterMetricFamily

        total = self._loader.stats.total
        for name, description in _TOTALS.items():
            counter = CounterMetricFamily(
                f"paddle_shard_{name}", description, labels=["rank"]
            )
            counter.add_metric([self._rank], getattr(total, name))
            yield counter


def serve_metrics(
    loader: ShardDataloader, port: int, address: str = "127.0.0.1"
) -> Any:
    """Serve the statistics of a loader to Prometheus, at `http://<address>:<port>/metrics`.

    Each rank serves its own, so give each rank of a host another port.

    Args:
        loader: The loader.
        port: Port to listen at; 0 picks a free one, which is the `server_port` of what is returned.
        address: Address to listen at. "" is all of this host's: then anyone in the network can read them.

    Returns:
        The HTTP server, which ends with the process or by its `shutdown()`.

    Raises:
        MissingDependencyError: `prometheus_client` is not installed (the extra `metrics`).
        OSError: The port is in use, or the address is none of this host's.

    Examples:
        >>> serve_metrics(loader, 9400)  # doctest: +SKIP
    """
    check_count("port", port, 0)
    with needs("metrics"):
        from prometheus_client import CollectorRegistry, start_http_server
    registry = CollectorRegistry()
    registry.register(StatsCollector(loader))
    server, _ = start_http_server(port, address, registry)
    return server
