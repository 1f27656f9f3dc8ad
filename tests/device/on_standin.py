"""A pytest plugin (`-p tests.device.on_standin`) that makes the stand-in device the current place."""

import paddle
import paddle.distributed as dist

paddle.set_device("standin:0")

_numpy = paddle.Tensor.numpy


def numpy(tensor, *args):
    """`Tensor.numpy` without a crash of Paddle 3.3.1: on a custom device it takes a distributed tensor for a dense."""
    if tensor.is_dist() and tensor.place.is_custom_place():
        if any(not placement.is_replicated() for placement in tensor.placements):
            tensor = dist.reshard(
                tensor,
                tensor.process_mesh,
                [dist.Replicate() for _ in tensor.placements],
            )
        tensor = tensor._local_value()
    return _numpy(tensor, *args)


paddle.Tensor.numpy = numpy


def numel(tensor):
    """`Tensor.numel` without a fault of Paddle 3.3.1: on a custom device it is copied late, from a local variable."""
    return paddle.to_tensor(tensor.size)


paddle.Tensor.numel = numel
