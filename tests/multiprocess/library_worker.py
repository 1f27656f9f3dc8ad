import json
import sys
from pathlib import Path

import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from paddle_shard.testing import report
from tests.sources.laws import make, resumed, steps_of

dist.init_parallel_env()
num_ranks, found = dist.get_world_size(), {}
for source, folder, stops in json.loads(sys.argv[1]):
    name, mesh = f"{source} {folder}", range(num_ranks)
    loader = make(source, folder, 2, mesh)
    found[f"{name} workers=2"] = [steps_of(loader, collective=True)]
    if "://" in folder:  # each process would connect anew
        continue
    found[f"{name} workers=2"].append(steps_of(loader))
    again = make(source, folder, 0, mesh)
    again.set_epoch(1)
    found[f"{name} again"] = steps_of(again)
    for stop in stops:
        workers = stop % 2 * 2
        found[f"{name} resumed at {stop}"] = resumed(stop, 2 - workers, source, folder, workers, mesh)
report(found)
if num_ranks > 1:
    dist.barrier()
