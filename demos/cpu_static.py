"""A recipe to copy: train `dist.to_static` models on CPU processes, without a GPU, to test them.

Paddle refuses ("No CUDA device found") when a static program's communication groups are made. The CPU kernels
are there and gloo works; what is missing is that an operator finds its group.

On CPU all operators of a process, dynamic and static, share one device context, and that holds *one*
communication group. A dynamic reshard puts its own group there; a static program puts its group there only if
there is none yet, and then ignores the ring ids of its operators. So a static step uses whatever group was
used last, without a word: gradients are summed over the wrong ranks, or not at all. What this file does:

- a program that uses one group has that group made current before each of its steps;
- a program that uses several raises on every rank before its first step, because no order is right.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock


class StaticGroupsError(RuntimeError):
    """A static program cannot be trained on CPU: it uses more than one communication group."""


class CpuStatic(ExitStack):
    """The patch that `cpu_static` applied; `undo` takes it back, as does leaving its `with` block."""

    undo = ExitStack.close
    """Put Paddle's methods and `POD_NAME` back; models that were prepared before keep training. Safe to call again."""


def cpu_static() -> CpuStatic:
    """Let `dist.to_static` models train and evaluate on CPU processes, with gloo.

    Call it after `init_parallel_env` and before `dist.to_static`. Where Paddle is compiled for an
    accelerator nothing is changed, so the same script runs there.

    The losses that a static step returns are the local means, as everywhere in Paddle. A mesh may have several
    axes, as long as the program communicates along one of them: data parallel with replicas is right,
    data parallel with tensor parallel raises.

    All ranks of the job must prepare their models in the same order, those outside the mesh too.

    Returns:
        The patch. Applied again before it was taken back, it changes nothing.

    Raises:
        StaticGroupsError: From `train()` or `eval()`, on all ranks, naming the groups, if on any rank the
            program uses more than one.

    Examples:
        >>> with cpu_static():  # doctest: +SKIP
        ...     model = dist.to_static(layer, loader, loss_fn, optimizer)
        ...     for inputs, labels in loader:
        ...         loss = model(inputs, labels)
    """
    from paddle.distributed.auto_parallel.static.engine import Engine
    from paddle.distributed.auto_parallel.static.process_group import (
        ProcessGroup,
    )
    from paddle.framework import core

    patch = CpuStatic()
    has_accelerator = (
        core.is_compiled_with_cuda()
        or core.is_compiled_with_xpu()
        or core.get_all_custom_device_type()
    )
    if has_accelerator or Engine._init_comm.__module__ == __name__:
        return patch
    # with it, DistModel calls fleet.init: a dozen gloo groups
    if "POD_NAME" in os.environ:
        patch.callback(
            os.environ.setdefault, "POD_NAME", os.environ.pop("POD_NAME")
        )
    patch.enter_context(mock.patch.object(Engine, "_init_comm", _prepare))
    patch.enter_context(
        mock.patch.object(ProcessGroup, "instantiate", lambda group: None)
    )
    return patch


def _prepare(engine: Any) -> None:
    """Stand in for `Engine._init_comm`: the programs are built, nothing has run."""
    import paddle

    if engine._nranks < 2:
        return
    if not engine._in_pir_mode:
        raise NotImplementedError(
            "cpu_static() needs PIR programs: unset FLAGS_enable_pir_api=0."
        )
    programs = {
        mode: [main] for mode, main in engine._pir_dense_main_progs.items()
    }
    plan = engine._job_plan
    if plan is not None:  # pipelines and gradient accumulation run parts of it
        parts = [plan.ir_program(kind) for kind in plan.job_types()]
        programs["train"] = programs.get("train", []) + parts
    try:
        groups = {
            mode: _groups(of_mode, engine._cur_rank)
            for mode, of_mode in programs.items()
        }
        _agree(groups)
    except Exception:
        paddle.disable_static()  # as `train` and `eval` do when they return
        raise
    # Where a program communicates in no group, as on a mesh of replicas, Paddle still meets all ranks at its start.
    everyone = tuple(range(engine._nranks))
    ranks_of = {
        mode: used[0] if used else everyone for mode, used in groups.items()
    }
    for ranks in dict.fromkeys(ranks_of.values()):
        _make_current(ranks)  # creates the group, while all ranks are here
    vars(engine).pop("run", None)
    run = engine.run

    def run_in_group(*args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("mode") or engine._mode
        if mode in ranks_of:
            _make_current(ranks_of[mode])
        return run(*args, **kwargs)

    engine.run = run_in_group


def _groups(programs: Iterable[Any], global_rank: int) -> list[tuple[int, ...]]:
    """Return the ranks of each group that a rank's operators communicate in, each once."""
    from paddle.distributed.auto_parallel.static.process_group import (
        get_process_group,
    )

    groups = set()
    for program in programs:
        for ring in _rings(program.global_block()):
            ranks = tuple(get_process_group(ring).ranks)
            if len(ranks) > 1 and global_rank in ranks:
                groups.add(ranks)
    return sorted(groups)


def _rings(block: Any) -> Iterator[int]:
    """Yield the ring of each operator that communicates, also in inner blocks."""
    for op in block.ops:
        if op.has_attr("ring_id"):
            yield op.attrs()["ring_id"]
        for inner in op.blocks():
            yield from _rings(inner)


def _agree(groups: dict[str, list[tuple[int, ...]]]) -> None:
    """Wait until every rank has examined its program; raise on all if one of them cannot be trained."""
    import paddle.distributed as dist
    from paddle.distributed.auto_parallel.static.utils import dygraph_guard

    unsupported = [
        f"{mode} uses {[*map(list, used)]}"
        for mode, used in groups.items()
        if len(used) > 1
    ]
    texts: list[str] = []
    dygraph_guard(dist.all_gather_object)(texts, "; ".join(unsupported))
    lines = [
        f"  rank {rank}: {text}\n" for rank, text in enumerate(texts) if text
    ]
    if lines:
        raise StaticGroupsError(
            "a static program that communicates in more than one group cannot run on CPU: its executor "
            "would use one group for all operators, and gradients would be wrong without a word. "
            f"Groups by rank:\n{''.join(lines)}"
            "Test training on a mesh with data parallelism alone, or this model in dynamic mode; on this "
            "mesh compare the tensors that are fed. On GPUs the same script runs unchanged."
        )


def _make_current(ranks: tuple[int, ...]) -> None:
    """Make these ranks the group in which the CPU operators of this process communicate.

    A dynamic reshard over the group does it; gloo is set up by the first one. Collective over `ranks`.
    """
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.auto_parallel.api import dtensor_from_local
    from paddle.distributed.auto_parallel.static.utils import dygraph_guard

    def reshard() -> None:
        mesh = dist.ProcessMesh(list(ranks), dim_names=["group"])
        zeros = paddle.zeros([1], dtype="float32")
        terms = dtensor_from_local(zeros, mesh, [dist.Partial()])
        dist.reshard(terms, mesh, [dist.Replicate()])

    dygraph_guard(reshard)()
