import sys
from pathlib import Path

import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from stream_cases import RESUMED, SOURCES, cases, make, resumed, steps_of

from paddle_shard.testing import report

dist.init_parallel_env()
num_ranks, found = dist.get_world_size(), {}
for name, *case in cases(num_ranks):
    loader = make(*case)
    found[name] = [steps_of(loader, collective=True), steps_of(loader)]
for source in SOURCES:
    pairs = [(0, 2), (2, 0), (3, 2), (2, 3), (0, 0), (2, 2)]
    for step, (workers, other) in enumerate(pairs if num_ranks == 2 else pairs[:3], start=1):
        ids, names = RESUMED[num_ranks]
        found[f"{source} resumed at {step}"] = resumed(source, ids, names, workers, "pad", step, other)
report(found)
if num_ranks > 1:
    dist.barrier()
