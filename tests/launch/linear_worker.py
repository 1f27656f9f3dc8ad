"""Each rank's part of a tiny data-parallel training, for `tests/launch`: linear_worker.py <directory>."""

import json
import os
import sys
from pathlib import Path

import numpy as np

STEPS, ROWS, FEATURES, LEARNING_RATE = 5, 8, 3, 0.1


def fixed_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    # (step, row, feature), (step, row, 1)
    features = rng.standard_normal((STEPS, ROWS, FEATURES)).astype("float32")
    return features, features @ np.arange(1, FEATURES + 1, dtype="float32")[
        :, None
    ]


def main(directory: Path) -> None:
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()
    total = paddle.to_tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) / 2

    zeros = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(0.0))
    model = paddle.DataParallel(
        paddle.nn.Linear(FEATURES, 1, weight_attr=zeros)
    )
    optimizer = paddle.optimizer.SGD(
        LEARNING_RATE, parameters=model.parameters()
    )
    losses = []
    for features, labels in zip(*fixed_data(), strict=True):
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        loss = (
            (
                model(paddle.to_tensor(features[mine]))
                - paddle.to_tensor(labels[mine])
            )
            ** 2
        ).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    report = {
        "losses": losses,
        "ip": os.environ["PADDLE_CURRENT_ENDPOINT"].split(":")[0],
    }
    (directory / f"rank-{rank}.json").write_text(json.dumps(report))
    print("rank", rank, "lost", losses, flush=True)
    dist.barrier()  # rank 0 hosts the store


if __name__ == "__main__":
    main(Path(sys.argv[1]))
