import sys
from pathlib import Path

import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import sequence_worker
import split_worker
from loader_cases import cases, summary

from paddle_shard.testing import report


def loaders():
    return {
        name: summary(make())
        for name, make in cases(dist.get_world_size()).items()
    }


CASES = {
    "loaders": loaders,
    "sequence": sequence_worker.both,
    "split": split_worker.outcomes,
}

dist.init_parallel_env()
found = {}
for name in sys.argv[1:]:
    print("case:", name, flush=True)
    found[name] = CASES[name]()
report(found)
dist.barrier()
