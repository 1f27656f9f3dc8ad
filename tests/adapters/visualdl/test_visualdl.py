"""What a `LogWriter` is given is what VisualDL reads back and its page is served."""

import json
import os
import socket
import time
import urllib.parse
import urllib.request

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from visualdl import LogReader, LogWriter
from visualdl.server import app

import paddle_shard
from tests.deadlines import HANG


class Ids(paddle.io.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return np.array(index)


@pytest.fixture
def logged(tmp_path):
    """The folder of the log of three epochs, and what was logged of each."""
    given, expected = paddle.io.DataLoader(Ids(), batch_size=4), []
    with LogWriter(logdir=str(tmp_path)) as writer:
        loader = paddle_shard.shard_dataloader(
            given, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp"
        )
        for epoch in range(3):
            list(loader)
            expected.append(loader.stats.scalars())
            for name, value in expected[-1].items():
                writer.add_scalar(name, value, 10 * epoch)
    return tmp_path, expected


def test_visualdl_log_is_read_back(logged):
    folder, expected = logged
    reader = LogReader(file_path=str(next(folder.glob("vdlrecords*"))))
    assert sorted(reader.get_tags()["scalar"]) == sorted(expected[0])
    for name in expected[0]:
        found = [
            (record.id, record.value)
            for record in reader.get_data("scalar", name)
        ]
        assert [step for step, _ in found] == [0, 10, 20]
        assert [value for _, value in found] == pytest.approx(
            [scalars[name] for scalars in expected], rel=1e-6
        )


def answer_of(url):
    """What a server says that may just be starting."""
    deadline = time.monotonic() + HANG
    while True:
        try:
            with urllib.request.urlopen(url, timeout=HANG) as answer:
                return answer.read()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_visualdl_page_shows_the_curves(logged):
    folder, expected = logged
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = app.run(str(folder), host="127.0.0.1", port=port, cache_timeout=1)
    try:
        base = f"http://127.0.0.1:{port}/app/api"
        [run] = json.loads(answer_of(f"{base}/runs"))["data"]
        for name in ("data/starved", "data/wait_seconds"):
            asked = urllib.parse.urlencode({"run": run, "tag": name})
            points = json.loads(answer_of(f"{base}/scalar/list?{asked}"))[
                "data"
            ]
            assert [value for _, _, value in points] == pytest.approx(
                [scalars[name] for scalars in expected], rel=1e-6
            )
    finally:
        os.kill(process, 9)
