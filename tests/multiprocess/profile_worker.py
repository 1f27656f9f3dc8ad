"""Two ranks, of which rank 1 reads slowly: what does the profiler of each rank say?"""

import time

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.reading.profile import Profiler
from paddle_shard.testing import report
from tests.reading.test_profile import (
    DEADLINE,
    NUM_SAMPLES,
    Digits,
    watch_reading_ahead,
)

PAUSE = 0.01

dist.init_parallel_env()
RANK = dist.get_rank()
digits = Digits(PAUSE * RANK)
mesh = dist.ProcessMesh(np.arange(2), dim_names=["dp"])
loader = paddle_shard.shard_dataloader(
    paddle.io.DataLoader(digits, batch_size=8), mesh, shard_dims="dp"
)
batches = iter(loader)
for _ in range(3):  # the ranks meet and exchange what they hold
    next(batches)
profiler = Profiler()
profiler.start()
deadline = time.monotonic() + DEADLINE
is_done = False
while not is_done:
    next(batches)
    time.sleep(0.001)
    watch_reading_ahead(profiler)
    has_enough = (
        sum(profiler.counts().values()) >= NUM_SAMPLES
        or time.monotonic() > deadline
    )
    num_done = paddle.to_tensor([int(has_enough)])
    dist.all_reduce(num_done)
    is_done = num_done.item() == 2
batches.close()
profiler.stop()
report(dict(profiler.counts()))
dist.barrier()
