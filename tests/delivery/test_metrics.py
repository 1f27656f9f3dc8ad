"""What Prometheus scrapes is what the statistics say, in the format that its own parser reads."""

import socket
import sys
import urllib.request

import numpy as np
import pytest
from paddle.io import DataLoader
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_of_old_servers

from paddle_shard.delivery.stats import LoaderStats
from paddle_shard.errors import ArgumentError, MissingDependencyError
from tests.helpers import ONE, Made, sharded

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.fixture
def served():
    """A loader after two passes, and its server."""
    loader = sharded(DataLoader(Made(lambda i: np.full(256, i), 42), batch_size=4), ONE, tail="fill")
    server = loader.stats.serve(0)
    for _ in range(2):
        for _ in loader:
            pass
    yield loader, server
    server.shutdown()
    server.server_close()


def scraped(server, accept=OPENMETRICS):
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def samples(text, parser=text_string_to_metric_families):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("kind", ["OpenMetrics", "text"])
def test_what_is_scraped_is_what_the_statistics_say(served, kind):
    loader, server = served
    found = samples(scraped(server, "text/plain"), text_of_old_servers) if kind == "text" else samples(scraped(server))
    total, rank = loader.stats.total, ("rank", "0")
    for name in ("batches", "samples", "padding", "skipped", "bytes", "step_seconds"):
        assert found[f"paddle_shard_{name}_total", (rank,)] == pytest.approx(getattr(total, name))
    assert (total.batches, total.padding) == (22, 4)
    waits = {
        dict(labels)["cause"]: value for (name, labels), value in found.items() if name.endswith("wait_seconds_total")
    }
    assert waits == pytest.approx(total.waits)
    assert sum(waits.values()) == pytest.approx(total.wait_seconds)
    at = tuple(sorted({"rank": "0", "host": socket.gethostname()}.items()))
    assert found["paddle_shard_recent_wait_seconds", at] == pytest.approx(loader.stats.summary().wait)
    here = loader.stats.memory.own
    assert found["paddle_shard_memory_bytes", (rank, ("whose", "rank"))] == pytest.approx(here, rel=0.2)


def test_a_scrape_in_the_middle_of_a_loop_disturbs_nothing(served):
    loader, server = served
    numbers = []
    for batch in loader:
        numbers += batch._local_value().numpy()[:, 0].tolist()
        scraped(server)
    assert numbers[:42] == list(range(42))


def test_only_the_first_rank_serves_and_it_listens_where_it_is_told():
    assert LoaderStats(rank=1).serve(0) is None
    server = LoaderStats(rank=0).serve(0)
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(OSError, match="in use"):
        LoaderStats(rank=0).serve(server.server_port)
    server.shutdown()
    server.server_close()
    with pytest.raises(ArgumentError, match="port must be an int >= 0, got -1"):
        LoaderStats().serve(-1)


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'paddle_shard\[metrics\]'"):
        LoaderStats().serve(0)


def test_a_notebook_shows_the_account():
    loader = sharded(DataLoader(Made(lambda i: np.full(256, i), 42), batch_size=4), ONE)
    assert "Nothing is known yet" in loader.stats._repr_html_()
    for _ in loader:
        pass
    shown = loader.stats._repr_html_()
    assert "Data is ready" in shown or "Training waits" in shown
    assert "11 batches, 42 samples" in shown
    biggest = max(loader.stats.epoch.waits, key=loader.stats.epoch.waits.get)
    assert shown.index(f"<td>{biggest}</td>") == shown.index("<td>", shown.index("waits for</th>"))
