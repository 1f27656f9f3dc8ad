"""The device of the tests that run on a real GPU, too: there it is the GPU, elsewhere the stand-in."""

import time

import paddle
import pytest
from paddle.framework import core

ON_GPU = paddle.is_compiled_with_cuda()
NAME = "gpu" if ON_GPU else "standin"
DEVICE, OTHER = f"{NAME}:0", f"{NAME}:1"
COUNT = (
    core.get_cuda_device_count()
    if ON_GPU
    else core.get_custom_device_count(NAME)
)
needs_two = pytest.mark.skipif(
    COUNT < 2, reason=f"needs two devices, and {COUNT} is there"
)


def place(number=0):
    return (
        paddle.CUDAPlace(number) if ON_GPU else paddle.CustomPlace(NAME, number)
    )


def generator():
    return (
        core.default_cuda_generator(0)
        if ON_GPU
        else core.default_custom_device_generator(place())
    )


class Work:
    """Queues work on the device that takes so many seconds, as a model's kernels do. Nobody waits for it."""

    def __init__(self):
        if ON_GPU:
            self._matrix = paddle.ones([4096, 4096], "float32") / 4096
            self.queue_kernels(10)  # libraries are loaded
            self.wait()
            began = time.perf_counter()
            self.queue_kernels(20)
            self.wait()
            self._seconds = (time.perf_counter() - began) / 20
        else:
            from tests.device import on_standin

            self._plugin, self._stream = on_standin.plugin, on_standin.stream()

    def __call__(self, seconds):
        if ON_GPU:
            self.queue_kernels(max(1, round(seconds / self._seconds)))
        else:
            self._plugin.standin_work(self._stream, int(seconds * 1e6))

    def queue_kernels(self, count):
        for _ in range(count):
            paddle.matmul(self._matrix, self._matrix)

    def wait(self):
        if ON_GPU:
            paddle.device.synchronize()
        else:
            self._plugin.standin_wait(self._stream)
