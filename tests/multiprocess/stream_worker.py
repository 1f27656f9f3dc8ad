import sys
from pathlib import Path

import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from stream_cases import RESUMED, cases, make, resumed, resumes, steps_of

from paddle_shard.testing import report

dist.init_parallel_env()
num_ranks, found = dist.get_world_size(), {}
for name, *case in cases(num_ranks):
    loader = make(*case)
    found[name] = [steps_of(loader, collective=True), steps_of(loader)]
for name, source, step, workers, other in resumes(num_ranks):
    found[name] = resumed(
        source, *RESUMED[num_ranks], workers, "pad", step, other
    )
report(found)
if num_ranks > 1:
    dist.barrier()
