"""A scrape says what the statistics say."""

import urllib.request

import pytest
from paddle.io import DataLoader

from tests.helpers import ONE, Made, sharded

pytest.importorskip("prometheus_client")

from paddle_shard.extras.telemetry import serve_metrics


def test_serve_metrics_says_what_the_statistics_say():
    loader = sharded(
        DataLoader(Made(length=10), batch_size=4), ONE, tail="fill"
    )
    list(loader)
    server = serve_metrics(loader, 0)
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.server_port}/metrics"
        ) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()

    for name, value in (("batches", 3), ("samples", 10), ("padding", 2)):
        assert f'paddle_shard_{name}_total{{rank="0"}} {value}.0' in text
