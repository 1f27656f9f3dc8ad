"""A mock S3 server on loopback, in a process of its own."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from paddle_shard.data.files import files as files_module

BUCKET = "bucket"


@contextmanager
def _reserved_port():
    """Yield a port that nothing else is given; a server listens on it with SO_REUSEADDR."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def _put(url, content=b""):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {
        "Content-Type": "application/octet-stream",
        "x-amz-acl": "public-read",
    }
    with direct.open(
        urllib.request.Request(url, content, headers, method="PUT"), timeout=10
    ):
        pass


def _wait(process, port, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(
        f"moto's server did not answer within {seconds} s, or ended with {process.poll()}"
    )


@contextmanager
def serving_s3(files):
    """Serve files by key; yields the environment variables that lead there."""
    with _reserved_port() as port:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "moto.server",
                "-H",
                "127.0.0.1",
                "-p",
                str(port),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(process, port)
            url = f"http://127.0.0.1:{port}"
            _put(f"{url}/{BUCKET}")
            for key, content in files.items():
                _put(f"{url}/{BUCKET}/{key}", content)
            yield {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "none",
                "AWS_SECRET_ACCESS_KEY": "none",
                "AWS_DEFAULT_REGION": "us-east-1",
                "NO_PROXY": ",".join(
                    filter(None, ["127.0.0.1", os.environ.get("NO_PROXY", "")])
                ),
                "no_proxy": ",".join(
                    filter(None, ["127.0.0.1", os.environ.get("no_proxy", "")])
                ),
            }
        finally:
            process.kill()
            process.wait(10)
            # clients know the port, and the next server has another
            files_module._file_system.cache_clear()
