import sys
from pathlib import Path

import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import sequence_worker
import split_worker
from loader_cases import cases, summary

from paddle_shard.testing import report

dist.init_parallel_env()
num_ranks, found = dist.get_world_size(), {}
for name, make in cases(num_ranks).items():
    print("case:", name, flush=True)
    found[name] = summary(make())
if num_ranks == 2:
    print("case: sequence", flush=True)
    found["sequence"] = sequence_worker.both()
if num_ranks == 4:
    print("case: split", flush=True)
    found["split"] = split_worker.outcomes()
report(found)
dist.barrier()
