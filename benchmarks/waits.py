"""Samples a second where each read waits, and seconds a remote tar.

    python benchmarks/waits.py

Samples of 1 KB from a local HTTP server that answers after 20 ms, as an object store does; batches of 16. One process
without workers, and 2 workers; `paddle.io.DataLoader`, this library with and without `Threads`, and Grain with its
defaults (16 threads in each process), in turns. The first batch and the start of workers are counted.

Then tars of 4 MB from a server that sends 8 MB a second, whose 16 samples take as long to decode, 0.5 s a tar: read
without workers and from an empty cache. One after the other, a tar takes 1 s. The bound overlaps everything but the
first download.

MosaicML Streaming and LitData are not in the table: they read no HTTP server, only object stores and folders.
"""

import asyncio
import http.server
import io
import multiprocessing
import shutil
import statistics
import tarfile
import tempfile
import threading
import time
from http.client import HTTPConnection

import numpy as np
from common import busy, machine, package_version, print_table, print_target

BATCH, DELAY, ROUNDS = 16, 0.02, 3
ROW = bytes(1024)
NUM_TARS, TAR_ROWS, RATE = 12, 16, 8 << 20


def make_tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(TAR_ROWS):
            data = bytes((4 << 20) // TAR_ROWS)
            member = tarfile.TarInfo(f"{number:04}.bin")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


TAR = make_tar()


class SampleServer(asyncio.Protocol):
    """Answers each request of a connection after `DELAY`; it takes little of the processor that readers share."""

    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(ROW), ROW)

    def connection_made(self, transport):
        self.transport = transport
        self.received = b""

    def data_received(self, data):
        self.received += data
        *requests, self.received = self.received.split(b"\r\n\r\n")
        for _ in requests:
            loop = asyncio.get_running_loop()
            loop.call_later(DELAY, self.transport.write, self.reply)


class TarServer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        """Send a tar, or a range of it, at `RATE` bytes a second."""
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
        first, last = asked.split("-")
        first, last = int(first), int(last or len(TAR) - 1)
        last = min(last, len(TAR) - 1)
        body = TAR[first : last + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(TAR)}")
        self.end_headers()
        for start in range(0, len(body), 1 << 16):
            piece = body[start : start + (1 << 16)]
            time.sleep(len(piece) / RATE)
            self.wfile.write(piece)

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(TAR)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, *_):
        pass


def serve_tars(port):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TarServer)
    port.put(server.server_address[1])
    server.serve_forever()


async def serve(port):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(SampleServer, "127.0.0.1", 0, backlog=256)
    port.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def serve_samples(port):
    asyncio.run(serve(port))


def start_server(target):
    """Start a server in a process that ends with this one; return the process and the port."""
    spawn = multiprocessing.get_context("spawn")
    port = spawn.Queue()
    process = spawn.Process(target=target, args=(port,), daemon=True)
    process.start()
    return process, port.get()


class Samples:
    """Samples of the store; a connection for each thread."""

    uses_rng = False  # Grain seeds no global generator either

    def __init__(self, port, length):
        self.port, self.length = port, length
        self.here = None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.here is None:
            self.here = threading.local()
        if not hasattr(self.here, "connection"):
            self.here.connection = HTTPConnection("127.0.0.1", self.port)
        self.here.connection.request("GET", f"/{index}")
        row = self.here.connection.getresponse().read()
        return np.frombuffer(row, "uint8")

    def __getstate__(self):
        return {"port": self.port, "length": self.length, "here": None}


def ours(data, num_workers, num_threads):
    import paddle
    import paddle.distributed as dist

    import paddle_shard

    loader = paddle.io.DataLoader(
        data, batch_size=BATCH, num_workers=num_workers
    )
    readers = paddle_shard.Threads(num_threads) if num_threads else None
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims="dp", readers=readers
    )


def paddles(data, num_workers, _):
    import paddle

    return paddle.io.DataLoader(data, batch_size=BATCH, num_workers=num_workers)


def grains(data, num_workers, _):
    import grain

    dataset = grain.MapDataset.source(data).batch(BATCH).to_iter_dataset()
    if num_workers:
        options = grain.MultiprocessingOptions(num_workers=num_workers)
        dataset = dataset.mp_prefetch(options)
    return dataset


CASES = {
    ("paddle.io.DataLoader", 0): (paddles, 0, 160),
    ("paddle_shard", 0): (ours, 0, 160),
    ("paddle_shard, Threads(16)", 0): (ours, 16, 4800),
    ("paddle_shard, Threads(64)", 0): (ours, 64, 4800),
    ("grain", 0): (grains, 0, 4800),
    ("paddle.io.DataLoader", 2): (paddles, 0, 320),
    ("paddle_shard", 2): (ours, 0, 320),
    ("paddle_shard, Threads(16)", 2): (ours, 16, 9600),
    ("grain", 2): (grains, 0, 9600),
}


def decode(sample):
    end = time.process_time() + 0.5 / TAR_ROWS
    while time.process_time() < end:
        pass
    return np.frombuffer(sample["bin"][:1024], "uint8")


def tars_of_ours(urls, cache_dir):
    import paddle
    import paddle.distributed as dist

    import paddle_shard

    stream = paddle_shard.Stream.webdataset(
        urls, index=False, shuffle_shards=False, cache_dir=cache_dir
    )
    loader = paddle.io.DataLoader(
        stream.map(decode).in_parts(1), batch_size=TAR_ROWS, num_workers=0
    )
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    return paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp")


def tars_of_webdataset(urls, cache_dir):
    import webdataset

    dataset = webdataset.WebDataset(
        urls, shardshuffle=False, cache_dir=cache_dir, empty_check=False
    )
    return dataset.map(decode).batched(TAR_ROWS)


TARS = {
    "paddle_shard": (tars_of_ours, False),
    "paddle_shard, cache_dir": (tars_of_ours, True),
    "webdataset": (tars_of_webdataset, False),
    "webdataset, cache_dir": (tars_of_webdataset, True),
}


def measure_tars(port):
    """Seconds a tar, of each way to read them."""
    urls = [
        f"http://127.0.0.1:{port}/{number}.tar" for number in range(NUM_TARS)
    ]
    seconds = {}
    for make in (tars_of_ours, tars_of_webdataset):  # imports what it needs
        for _ in make(urls[:1], None):
            pass
    for name, (make, is_cached) in TARS.items():
        folder = tempfile.mkdtemp() if is_cached else None
        start = time.perf_counter()
        try:
            num_batches = sum(1 for _ in make(urls, folder))
        except Exception as error:
            print(f"{name}: {error}")
            continue
        finally:
            if folder is not None:
                shutil.rmtree(folder)
        assert num_batches == NUM_TARS
        seconds[name] = (time.perf_counter() - start) / NUM_TARS
    return seconds


def main():
    print(f"{machine()}; {busy()}\n")
    server, port = start_server(serve_samples)
    speeds = {}
    for _ in range(ROUNDS):
        for case, (make, num_threads, length) in CASES.items():
            if case[0] == "grain" and package_version("grain") is None:
                continue
            loader = make(Samples(port, length), case[1], num_threads)
            start = time.perf_counter()
            num_rows = sum(BATCH for _ in loader)
            seconds = time.perf_counter() - start
            assert num_rows == length
            speeds.setdefault(case, []).append(length / seconds)
    server.terminate()
    server, port = start_server(serve_tars)
    tars = measure_tars(port)
    server.terminate()
    rows = [[name, f"{seconds:.2f}"] for name, seconds in tars.items()]
    print_table("Seconds a tar", ["loader", "seconds"], rows)
    for name in ("paddle_shard", "paddle_shard, cache_dir"):
        bound = 0.5 * (NUM_TARS + 1) / NUM_TARS
        share = bound / tars[name]
        print_target(
            f"{name}: at least 0.9 of the overlapped bound",
            f"{share:.2f}",
            share >= 0.9,
        )
    medians = {
        case: statistics.median(values) for case, values in speeds.items()
    }
    rows = [
        [name, str(num_workers), f"{speed:,.0f}"]
        for (name, num_workers), speed in medians.items()
    ]
    print_table(
        f"Samples a second, each waits {1e3 * DELAY:.0f} ms",
        ["loader", "workers", "samples"],
        rows,
    )
    peer = medians.get(("grain", 0))
    if peer is None:
        return
    for num_workers, wanted in ((0, 1.0), (2, 1.8)):
        ratio = medians["paddle_shard, Threads(16)", num_workers] / peer
        print_target(
            f"{num_workers} workers: at least {wanted} x grain without workers",
            f"{ratio:.2f}",
            round(ratio, 2) >= wanted,
        )


if __name__ == "__main__":
    main()
