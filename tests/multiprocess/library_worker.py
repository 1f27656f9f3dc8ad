import json
import sys
from pathlib import Path

import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from paddle_shard.testing import report
from tests.data.source_laws import make, resumed, steps_of

dist.init_parallel_env()
num_ranks, found = dist.get_world_size(), {}
for source, folder, stop in json.loads(sys.argv[1]):
    name, mesh = f"{source} {folder}", range(num_ranks)
    remote = "://" in folder  # each worker would connect anew
    found[name] = steps_of(
        make(source, folder, 0 if remote else 2, mesh), collective=True
    )
    if remote:
        continue
    later = make(source, folder, 0, mesh)
    later.set_epoch(1)
    found[f"{name} later"] = steps_of(later)
    workers = stop % 2 * 2
    found[f"{name} resumed"] = resumed(
        stop, 2 - workers, source, folder, workers, mesh
    )
report(found)
if num_ranks > 1:
    dist.barrier()
