import sys
from pathlib import Path

import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from loader_cases import cases, summary

from paddle_shard.testing import report

dist.init_parallel_env()
report({name: summary(make()) for name, make in cases(dist.get_world_size()).items()})
dist.barrier()
