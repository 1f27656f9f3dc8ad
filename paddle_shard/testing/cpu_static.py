"""How do I train a `dist.to_static` model on CPU processes, without a GPU?

Paddle refuses ("No CUDA device found") when a static program's communication groups are made. The CPU kernels
are there and gloo works; what is missing is that an operator finds its group.

On CPU all operators of a process, dynamic and static, share one device context, and that holds *one*
communication group. A dynamic reshard puts its own group there; a static program puts its group there only if
there is none yet, and then ignores the ring ids of its operators. So a static step uses whatever group was
used last, without a word: gradients are summed over the wrong ranks, or not at all. What this file does:

- a program that uses one group has that group made current before each of its steps;
- a program that uses several is refused on every rank before its first step, because no order is right.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

from paddle_shard.errors import PaddleShardError, PeerLostError

_active: list[CpuStatic] = []
_patched = ExitStack()
"""Puts back what is patched while any `CpuStatic` is in use."""


class StaticGroupsError(PaddleShardError, RuntimeError):
    """A static program cannot be trained on CPU: it uses more than one communication group."""


class CpuStatic(ExitStack):
    """The patch that `cpu_static` applied; `undo` takes it back, as does leaving its `with` block."""

    def undo(self) -> None:
        """Put Paddle's methods and `POD_NAME` back once no other `cpu_static` is in use; twice is once.

        Models that were prepared under the patch keep training: their groups stay theirs.
        """
        self.close()


def cpu_static(timeout: float = 60.0) -> CpuStatic:
    """Let `dist.to_static` models train and evaluate on CPU processes, with gloo.

    Call it after `init_parallel_env` and before `dist.to_static`. Where Paddle is compiled for an
    accelerator nothing is changed, so the same script runs there.

    The losses that a static step returns are the local means, as everywhere in Paddle. A mesh may have several
    axes, as long as the program communicates along one of them: data parallel with replicas is right,
    data parallel with tensor parallel is refused.

    Args:
        timeout: Seconds that a rank waits in `train()` or `eval()` for the others to get there. All ranks
            of the job must prepare their models in the same order, those outside the mesh too.

    Returns:
        The patch. It may be applied several times: the first `timeout` and the last `undo` count.

    Raises:
        StaticGroupsError: From `train()` or `eval()`, on all ranks, naming the groups, if on any rank the
            program uses more than one.
        TimeoutError: From there too, if some ranks never came; they are named.

    Examples:
        >>> with cpu_static():  # doctest: +SKIP
        ...     model = dist.to_static(layer, loader, loss_fn, optimizer)
        ...     for inputs, labels in loader:
        ...         loss = model(inputs, labels)
    """
    from paddle.framework import core

    patch = CpuStatic()
    if not (core.is_compiled_with_cuda() or core.is_compiled_with_xpu() or core.get_all_custom_device_type()):
        if not _active:
            _apply(timeout)
        _active.append(patch)
        patch.callback(_leave, patch)
    return patch


def _apply(timeout: float) -> None:
    from paddle.distributed.auto_parallel.static.engine import Engine
    from paddle.distributed.auto_parallel.static.process_group import ProcessGroup

    if "POD_NAME" in os.environ:  # with it, DistModel calls fleet.init: a dozen gloo groups
        _patched.callback(os.environ.setdefault, "POD_NAME", os.environ.pop("POD_NAME"))
    _patched.enter_context(mock.patch.object(Engine, "_init_comm", lambda engine: _prepare(engine, timeout)))
    _patched.enter_context(mock.patch.object(ProcessGroup, "instantiate", lambda group: None))


def _leave(patch: CpuStatic) -> None:
    _active.remove(patch)
    if not _active:
        _patched.close()


def _prepare(engine: Any, timeout: float) -> None:
    """Stand in for `Engine._init_comm`: the programs are built, nothing has run."""
    import paddle

    if engine._nranks < 2:
        return
    if not engine._in_pir_mode:
        raise NotImplementedError("cpu_static() needs PIR programs: unset FLAGS_enable_pir_api=0.")
    try:
        programs = {mode: [program] for mode, program in engine._pir_dense_main_progs.items()}
        if engine._job_plan is not None:  # pipelines and gradient accumulation run parts of it
            parts = [engine._job_plan.ir_program(kind) for kind in engine._job_plan.job_types()]
            programs["train"] = programs.get("train", []) + parts
        groups = {mode: _groups(of_mode, engine._cur_rank) for mode, of_mode in programs.items()}
        _agree(engine, groups, timeout)
        # Where a program communicates in no group, as on a mesh of replicas, Paddle still meets all ranks at its start.
        groups = {mode: used or [tuple(range(engine._nranks))] for mode, used in groups.items()}
    except Exception:
        paddle.disable_static()  # as `train` and `eval` do when they return
        raise
    for ranks in dict.fromkeys(ranks for used in groups.values() for ranks in used):
        _make_current(ranks)  # makes the group, while all ranks are here
    if "run" in vars(engine):
        del engine.run
    run = engine.run

    def run_in_group(*args: Any, **kwargs: Any) -> Any:
        for ranks in groups.get(kwargs.get("mode") or engine._mode, ()):
            _make_current(ranks)
        return run(*args, **kwargs)

    engine.run = run_in_group


def _groups(programs: Iterable[Any], global_rank: int) -> list[tuple[int, ...]]:
    """Return the ranks of each group that a rank's operators communicate in, each once."""
    from paddle.distributed.auto_parallel.static.process_group import get_process_group

    rings = {ring for program in programs for ring in _rings(program.global_block())}
    found = {ring: get_process_group(ring) for ring in sorted(rings)}
    unknown = [ring for ring, group in found.items() if group is None]
    if unknown:
        raise StaticGroupsError(f"the program communicates on rings {unknown} that are no known groups")
    members = [tuple(group.ranks) for group in found.values()]
    return sorted({ranks for ranks in members if len(ranks) > 1 and global_rank in ranks})


def _rings(block: Any) -> Iterator[int]:
    for op in block.ops:
        if op.has_attr("ring_id"):
            yield op.attrs()["ring_id"]
        for inner in op.blocks():
            yield from _rings(inner)


def _agree(engine: Any, groups: dict[str, list[tuple[int, ...]]], timeout: float) -> None:
    """Wait until every rank has looked at its program; raise on all if one of them cannot be trained."""
    from paddle_shard.ranks.agreeing import gather_of

    refused = {mode: used for mode, used in groups.items() if len(used) > 1}
    text = "; ".join(f"{mode} uses {[list(r) for r in used]}" for mode, used in refused.items())
    try:
        told = gather_of(tuple(range(engine._nranks)), text, timeout, "cpu_static()")
    except PeerLostError as lost:
        raise TimeoutError(
            f"rank {engine._cur_rank} waited {timeout:g} s for ranks {list(lost.ranks)} to prepare the static "
            "program too. Every rank of the job must call train() or eval(); the log of one of these "
            "ranks may say why it did not. Give cpu_static(timeout=...) more if they are only slow."
        ) from lost
    texts = [f"  rank {rank}: {one}\n" for rank, one in enumerate(told) if one]
    if texts:
        raise StaticGroupsError(
            "a static program that communicates in more than one group cannot run on CPU: its executor "
            "would use one group for all operators, and gradients would be wrong without a word. "
            f"Groups by rank:\n{''.join(texts)}"
            "Test training on a mesh with data parallelism alone, or this model in dynamic mode; on this "
            "mesh compare the tensors that are fed. On GPUs the same script runs unchanged."
        )


def _make_current(ranks: tuple[int, ...]) -> None:
    """Make these ranks the group in which the CPU operators of this process communicate.

    A dynamic reshard over the group does it; gloo is set up by the first one. Collective over `ranks`.
    """
    import paddle
    from paddle.distributed.auto_parallel.api import dtensor_from_local
    from paddle.distributed.auto_parallel.static.utils import dygraph_guard

    def reshard() -> None:
        mesh = paddle.distributed.ProcessMesh(list(ranks), dim_names=["group"])
        partial = dtensor_from_local(paddle.zeros([1], dtype="float32"), mesh, [paddle.distributed.Partial()])
        paddle.distributed.reshard(partial, mesh, [paddle.distributed.Replicate()])

    dygraph_guard(reshard)()
