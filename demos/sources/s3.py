"""Read text and Parquet files from an S3 bucket, by 2 workers in each process; the server is a mock on loopback.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/sources/s3.py

Needs `pip install 'paddle_shard[s3,parquet]' 'moto[s3]' flask flask-cors`. With a real bucket leave the server out:
s3fs takes keys and endpoint from the environment, as AWS's own tools do. Every rank asserts that each row is delivered
exactly once.
"""

import io
import itertools
import os
import socket
import subprocess
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pyarrow as pa
import pyarrow.parquet as pq

import paddle_shard
from paddle_shard import Stream

BATCH_SIZE, WORKERS, FILES, ROWS = 16, 2, 8, 25


def use_server(port):
    keys = {
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(
        {
            **keys,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "no_proxy": "127.0.0.1",
        }
    )


def start_server():
    """Start the mock server with files in a bucket; return its process and port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "moto.server",
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, port
        assert time.monotonic() < deadline, "the mock server did not start"
        time.sleep(0.1)


def upload():
    import s3fs

    system = s3fs.S3FileSystem(skip_instance_cache=True)
    system.mkdir("bucket")
    for number in range(FILES):
        ids = list(range(number * ROWS, (number + 1) * ROWS))
        system.pipe_file(
            f"bucket/{number}.txt", "\n".join(map(str, ids)).encode()
        )
        pq.write_table(
            pa.table({"id": ids}), buffer := io.BytesIO(), row_group_size=10
        )
        system.pipe_file(f"bucket/{number}.parquet", buffer.getvalue())


def urls(ending):
    return [f"s3://bucket/{number}.{ending}" for number in range(FILES)]


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    server, port = start_server() if dist.get_rank() == 0 else (None, 0)
    try:
        shared = paddle.to_tensor([port])
        dist.broadcast(shared, 0)
        use_server(shared.item())
        if server is not None:
            upload()
        dist.barrier()
        streams = {
            "lines": Stream.lines(urls("txt")).map(
                lambda line: {"id": int(line)}
            ),
            "parquet": Stream.parquet(urls("parquet")),
        }
        for name, stream in streams.items():
            given = paddle.io.DataLoader(
                stream.shuffle(16), batch_size=BATCH_SIZE, num_workers=WORKERS
            )
            batches = iter(
                paddle_shard.shard_dataloader(
                    given, mesh, shard_dims="dp", seed=5
                )
            )
            found = [
                paddle_shard.gather_valid(batch["id"], batches.valid).tolist()
                for batch in batches
            ]
            assert sorted(itertools.chain(*found)) == list(
                range(FILES * ROWS)
            ), "each row exactly once"
            if dist.get_rank() == 0:
                print(
                    f"{name}: {len(found)} steps from s3://bucket, each of {FILES * ROWS} rows exactly once"
                )
        dist.barrier()
    finally:
        if server is not None:
            server.kill()
            server.wait(10)


if __name__ == "__main__":
    main()
