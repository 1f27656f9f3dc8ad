"""How many samples a second are read if each of them waits?

    python benchmarks/waits.py

Samples of 1 KB from a local HTTP server that answers after 20 ms, as an object store does; batches of 16. One process
without workers, and 2 workers; `paddle.io.DataLoader`, this library with and without `Threads`, and Grain with its
defaults (16 threads in each process), in turns. The first batch and the start of workers are counted.
"""

import http.server
import multiprocessing
import statistics
import threading
import time
from http.client import HTTPConnection

import numpy as np
from common import busy, machine, package_version, print_table, print_target

BATCH, DELAY, ROUNDS = 16, 0.02, 3
ROW = bytes(1024)


class Store(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        time.sleep(DELAY)
        self.send_response(200)
        self.send_header("Content-Length", str(len(ROW)))
        self.end_headers()
        self.wfile.write(ROW)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # 5 would let connections wait a second


def serve(port):
    server = Server(("127.0.0.1", 0), Store)
    port.put(server.server_address[1])
    server.serve_forever()


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

    loader = paddle.io.DataLoader(data, batch_size=BATCH, num_workers=num_workers)
    readers = paddle_shard.Threads(num_threads) if num_threads else None
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    return paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp", readers=readers)


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


def main():
    print(f"{machine()}; {busy()}\n")
    spawn = multiprocessing.get_context("spawn")
    ports = spawn.Queue()
    server = spawn.Process(target=serve, args=(ports,), daemon=True)
    server.start()
    port = ports.get()
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
    medians = {case: statistics.median(values) for case, values in speeds.items()}
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
            ratio >= wanted,
        )


if __name__ == "__main__":
    main()
