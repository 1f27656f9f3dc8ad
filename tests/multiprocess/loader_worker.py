import logging
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


def left():
    """What is said at the first step of each of three loops that are left; the first is the first of this process."""
    said, found = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("paddle_shard").addHandler(handler)
    loader = next(iter(cases(dist.get_world_size()).values()))()
    for _ in range(3):
        for _ in loader:
            found.append(
                sum("begins the same epoch again" in text for text in said)
            )
            break
    logging.getLogger("paddle_shard").removeHandler(handler)
    return found


CASES = {
    "left": left,
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
