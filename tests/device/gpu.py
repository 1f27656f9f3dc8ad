"""Runs the tests marked `gpu` on a real GPU, or says why it does not: `make test-gpu`, docs/gpu.md."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
FILES = [
    f"test_{name}.py"
    for name in (
        "gpu",
        "delivery",
        "generators",
        "ranks",
        "drops",
        "checkpoints",
    )
]
WAY_OUT = "Give a Python that has paddlepaddle-gpu, numpy and pytest: make test-gpu GPU_PYTHON=/path/to/python"


def why_not():
    """Return why there is nothing to run; empty if there is a GPU."""
    missing = [
        name
        for name in ("paddle", "numpy", "pytest")
        if find_spec(name) is None
    ]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}"
    import paddle

    if not paddle.is_compiled_with_cuda():
        return f"Paddle {paddle.__version__} of {sys.executable} is a build without CUDA"
    if not paddle.device.cuda.device_count():
        return f"Paddle {paddle.__version__} of {sys.executable} sees no GPU (CUDA_VISIBLE_DEVICES, nvidia-smi)"
    return ""


def main():
    reason = why_not()
    if reason:
        print(f"test-gpu skipped: {reason}. {WAY_OUT}")
        return 0
    import paddle

    gpus = [
        paddle.device.cuda.get_device_name(number)
        for number in range(paddle.device.cuda.device_count())
    ]
    print(
        f"Paddle {paddle.__version__}, CUDA {paddle.version.cuda()}, NCCL {paddle.version.nccl()}, GPUs: {gpus}"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-s",
        "-v",
        "-rs",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    ]
    files = [str(HERE / name) for name in FILES]
    return subprocess.run(
        [*command, *files],
        env=os.environ | {"PADDLE_SHARD_GPU": "1"},
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
