"""A server on loopback that has files, ranges, and bad days."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.deadlines import HANG


@dataclass
class ShardServer:
    """What is served, how, and what was asked for."""

    files: dict[str, bytes]
    drops: list[int] = field(default_factory=list)
    """For each of the next answers: bytes of the body after which the connection is closed."""
    stalls: list[int] = field(default_factory=list)
    """For each of the next answers: bytes after which nothing more comes, without a close."""
    statuses: list[int] = field(default_factory=list)
    """For each of the next answers: a code to answer with, and nothing else."""
    slow: dict[str, float] = field(default_factory=dict)
    """Seconds that each 8 KiB of a file take."""
    ranges: bool = True
    sized: bool = True
    """Whether it says how long a file is."""
    rewrites: dict[str, bytes] = field(default_factory=dict)
    """Contents that files have after their next answer."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """(name, range) of each request."""
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def describe(self, handler):
        """Answer a HEAD request; these are not counted and do not fail."""
        name = handler.path.lstrip("/").partition("?")[0]
        if name not in self.files:
            handler.send_error(404)
            return
        content = self.files[name]
        handler.send_response(200)
        if self.sized:
            handler.send_header("Content-Length", str(len(content)))
        handler.send_header("Accept-Ranges", "bytes" if self.ranges else "none")
        handler.send_header("ETag", f'"{hash(content)}"')
        handler.end_headers()

    def answer(self, handler):
        name, span = (
            handler.path.lstrip("/").partition("?")[0],
            handler.headers.get("Range"),
        )
        self.asked.append((name, span))
        status = (
            self.statuses.pop(0)
            if self.statuses
            else 404
            if name not in self.files
            else 200
        )
        if status != 200:
            handler.send_error(status)
            return
        content, start = self.files[name], 0
        if span is not None and self.ranges:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, whole = int(first), len(content)
            content = content[: int(last) + 1 if last else None]
            handler.send_response(206)
            handler.send_header(
                "Content-Range", f"bytes {start}-{len(content) - 1}/{whole}"
            )
        else:
            handler.send_response(200)
        if self.sized:
            handler.send_header("Content-Length", str(len(content) - start))
        handler.send_header("ETag", f'"{hash(content)}"')
        handler.end_headers()
        if name in self.rewrites:
            self.files[name] = self.rewrites.pop(name)
        limit = self.drops.pop(0) if self.drops else None
        stall = self.stalls.pop(0) if self.stalls else None
        body = content[start:][: limit if stall is None else stall]
        piece = 1 << 13 if name in self.slow else max(1, len(body))
        for at in range(0, len(body), piece):
            handler.wfile.write(body[at : at + piece])
            time.sleep(self.slow.get(name, 0.0))
        if stall is not None:
            handler.wfile.flush()
            self.released.wait(HANG)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # all may come at once


@contextmanager
def serving(files, **how):
    """Serve files by name; yields the ShardServer."""
    server = ShardServer(files=files, **how)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.answer(self)

        def do_HEAD(self):
            server.describe(self)

        def log_message(self, *args):
            pass

    with _Server(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(
            target=http.serve_forever, kwargs={"poll_interval": 0.02}
        )
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        try:
            yield server
        finally:
            server.released.set()
            http.shutdown()
            thread.join()
