"""How do I train a pipeline of two meshes on CPU processes, without a GPU? A recipe to copy; `two_meshes.py` uses it.

On CPU Paddle cannot move a tensor to another mesh (`dist.reshard` to one raises or crashes), nor touch one
whose mesh does not hold the rank. So each rank runs its own stage only, and hands activations and gradients
to the rank at its own position in the other mesh.

Two stages, and no ranks beside them, because gloo numbers the messages of a group in each process: a send is
received, and a later `barrier` is met, only by ranks that have sent and received as often in that group.
"""

from __future__ import annotations

import json
from typing import Any

from paddle_shard.errors import ArgumentError

_HEADER_BYTES = 512


class Stages:
    """Two meshes, the first and the second stage of a model, seen from this rank.

    The meshes have the same shape, so each rank has one peer: the rank at its own position in the other
    mesh. An activation has the same placements on both; it travels with its shape, dtype and placements, so
    the second stage need not know them. Make it after `init_parallel_env`.

    Each stage shards its own parameters only and has its own optimizer over them.

    Args:
        first: The `ProcessMesh` of the first stage.
        second: The `ProcessMesh` of the second stage.

    Raises:
        ArgumentError: If the shapes differ, or the meshes do not hold each rank of the job exactly once.

    Examples:
        >>> stages = Stages(mesh0, mesh1)  # doctest: +SKIP
        >>> if stages.index == 0:
        ...     h = first_layers(x)
        ...     stages.send_forward(h)
        ...     h.backward(stages.recv_backward(h))
        ... else:
        ...     h = stages.recv_forward()
        ...     loss_fn(last_layers(h), label).backward()
        ...     stages.send_backward(h)
    """

    index: int
    """The stage of this rank: 0 or 1."""
    mesh: Any
    """The `ProcessMesh` of this rank's stage."""
    peer: int
    """The global rank at this rank's position in the other mesh."""

    def __init__(self, first: Any, second: Any) -> None:
        import paddle

        if list(first.shape) != list(second.shape):
            raise ArgumentError(
                f"the meshes have shapes {first.shape} and {second.shape}; "
                "they must be equal, so that ranks pair by position"
            )
        ranks = sorted([*first.process_ids, *second.process_ids])
        num_ranks = paddle.distributed.get_world_size()
        if ranks != list(range(num_ranks)):
            raise ArgumentError(
                f"the meshes hold ranks {ranks}; each of the job's {num_ranks} must be on one of them"
            )
        rank = paddle.distributed.get_rank()
        self.index = 0 if rank in first.process_ids else 1
        self.mesh, other = (
            (first, second) if self.index == 0 else (second, first)
        )
        self.peer = int(other.process_ids[self.mesh.process_ids.index(rank)])

    def send_forward(self, activation: Any) -> None:
        """Hand an activation of the first stage to the second, which takes it with `recv_forward`.

        Args:
            activation: A distributed tensor on this stage's mesh; its placements are `Shard` and
                `Replicate`, and it splits evenly.

        Raises:
            ArgumentError: If it is on another mesh, partial or split unevenly.
        """
        import paddle

        self._check_stage(0, "send_forward")
        text = (
            json.dumps(_header(activation, self.mesh))
            .encode()
            .ljust(_HEADER_BYTES)
        )
        paddle.distributed.send(
            paddle.to_tensor(list(text), dtype="uint8"), self.peer
        )
        self._send(activation)

    def recv_forward(self) -> Any:
        """Return the activation of the first stage, on this stage's mesh, with `stop_gradient` False."""
        import paddle
        from paddle.distributed import Replicate, Shard
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        self._check_stage(1, "recv_forward")
        text = paddle.empty([_HEADER_BYTES], dtype="uint8")
        paddle.distributed.recv(text, self.peer)
        header = json.loads(bytes(text.numpy()))
        local = paddle.empty(header["local_shape"], dtype=header["dtype"])
        paddle.distributed.recv(local, self.peer)
        placements = [
            Replicate() if dim is None else Shard(dim)
            for dim in header["shard_dims"]
        ]
        activation = dtensor_from_local(local, self.mesh, placements)
        activation.stop_gradient = False
        return activation

    def send_backward(self, activation: Any) -> None:
        """Hand the gradient of what `recv_forward` gave back to the first stage.

        Raises:
            ArgumentError: If it has no gradient.
        """
        import paddle

        self._check_stage(1, "send_backward")
        grad = activation.grad
        if grad is None:
            raise ArgumentError(
                "the activation has no gradient: call backward() on the loss first"
            )
        if grad.placements != activation.placements:
            grad = paddle.distributed.reshard(
                grad, self.mesh, activation.placements
            )
        self._send(grad)

    def recv_backward(self, activation: Any) -> Any:
        """Return the gradient of what `send_forward` sent, for `activation.backward(gradient)`."""
        import paddle
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        self._check_stage(0, "recv_backward")
        local = paddle.empty_like(activation._local_value())
        paddle.distributed.recv(local, self.peer)
        return dtensor_from_local(local, self.mesh, activation.placements)

    def _check_stage(self, stage: int, call: str) -> None:
        if self.index != stage:
            raise ArgumentError(
                f"{call} is for stage {stage}; this rank is on stage {self.index}"
            )

    def _send(self, tensor: Any) -> None:
        import paddle

        paddle.distributed.send(
            tensor._local_value().detach().contiguous(), self.peer
        )


def _header(activation: Any, mesh: Any) -> dict[str, Any]:
    """Return what the other side needs to rebuild an activation; raise if that would give another tensor."""
    placements = activation.placements
    if activation.process_mesh != mesh:
        raise ArgumentError(
            f"the activation is on {activation.process_mesh}, this stage on {mesh}"
        )
    if any(placement.is_partial() for placement in placements):
        raise ArgumentError(
            f"the activation has placements {placements}: reshard the partial ones first"
        )
    parts = [1] * activation.ndim
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_shard():
            parts[placement.get_dim()] *= size
    if any(dim % n for dim, n in zip(activation.shape, parts, strict=True)):
        raise ArgumentError(
            f"the activation's shape {activation.shape} does not split evenly into {parts} parts"
        )
    return {
        "local_shape": [
            dim // n for dim, n in zip(activation.shape, parts, strict=True)
        ],
        "dtype": str(activation.dtype).removeprefix("paddle."),
        "shard_dims": [
            p.get_dim() if p.is_shard() else None for p in placements
        ],
    }
