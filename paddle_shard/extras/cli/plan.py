"""`paddle-shard plan`: the plan of a run that flags describe."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import (
    Answer,
    Json,
    Rows,
    argument,
    command,
)
from paddle_shard.extras.cli.page import page_of, svg_of
from paddle_shard.extras.cli.places import (
    Meshes,
    groups_of,
    samples_of,
    shapes_of,
)
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.orders import ORDERINGS
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.tails import TAILS

_MOST_SHOWN = 64
"""Ranks of a mesh whose ranks are shown."""
_STEPS_OF_PAGE = 8

_ORDERS = {str(name): name for name in ORDERINGS}


# Arguments


def mesh_of(text: str) -> MeshLayout:
    """Return the mesh that a user names: dp=4,mp=2 has the ranks 0 to 7.

    Raises:
        ArgumentError: It is no mesh.
    """
    if not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text):
        raise ArgumentError(
            f"--mesh must be axes and sizes such as dp=4,mp=2, got {text!r}."
        )
    axes, sizes = zip(
        *(axis.split("=") for axis in text.split(",")), strict=True
    )
    shape = tuple(map(int, sizes))
    process_ids = tuple(range(math.prod(shape)))
    return MeshLayout(shape=shape, axes=axes, process_ids=process_ids)


# The command


@command(
    argument(
        "--mesh",
        "axes and sizes in row-major order: dp=4,mp=2; once for each mesh",
        action="append",
        required=True,
    ),
    argument(
        "--data-axes",
        "axes that split the rows: dp (default) or dp,sharding; '' for none",
        default="dp",
    ),
    argument(
        "--batch-size",
        "rows of a global batch, before accumulation",
        type=int,
        required=True,
    ),
    argument("--samples", "length of the data set", type=int, required=True),
    argument(
        "--tail", "what becomes of the last rows", choices=TAILS, default="pad"
    ),
    argument(
        "--shuffle",
        "the order",
        nargs="?",
        const="True",
        default="False",
        choices=_ORDERS,
    ),
    argument("--seed", "seed of the order", type=int, default=0),
    argument("--accumulation", "micro-batches of a step", type=int, default=1),
    argument("--epoch", "the epoch", type=int, default=0),
    argument("--step", "also show the samples of each rank", type=int),
    argument(
        "--html",
        "also write the answer as a page, with steps from --step on",
        type=Path,
        metavar="FILE",
    ),
    argument(
        "--svg", "also draw the mesh and the step", type=Path, metavar="FILE"
    ),
)
def plan(options: argparse.Namespace) -> Answer:
    """Show which rank reads what.

    example: paddle-shard plan --samples 50000 --batch-size 256 --mesh dp=4,mp=2 --data-axes dp --shuffle --step 3
    """
    named = tuple(filter(None, options.data_axes.split(",")))
    meshes = [
        (mesh, [mesh.axes[axis] for axis in mesh.axis_indices(named)])
        for mesh in map(mesh_of, options.mesh)
    ]
    shard_plan = ShardPlan(
        num_samples=options.samples,
        batch_size=options.batch_size * options.accumulation,
        num_data_ranks=math.lcm(
            *(mesh.num_data_ranks(axes) for mesh, axes in meshes)
        ),
        tail=options.tail,
        shuffle=_ORDERS[options.shuffle],
        seed=options.seed,
        accumulation=options.accumulation,
    )
    numbers = facts_of_plan(shard_plan)
    values: Json = {"meshes": list(groups_of(meshes)), "plan": numbers}
    table = [
        {"what": name, "number": number} for name, number in numbers.items()
    ]
    text = [*_mesh_sections(meshes), table]
    if options.step is not None:
        values["step"] = samples_of(
            shard_plan, meshes, options.epoch, options.step, ()
        )
        text += [f"epoch {options.epoch}, step {options.step}", values["step"]]
    answer = Answer(values=values, text=text)
    if options.html is not None or options.svg is not None:
        _draw(answer, shard_plan, meshes, options)
    return answer


def facts_of_plan(plan: ShardPlan) -> dict[str, int]:
    """Return numbers of an epoch, by what they count."""
    last = plan.num_steps - 1
    # Paddle's order repeats samples before the tail does.
    padding = plan.num_positions - plan.num_samples
    last_rows = 0
    if plan.num_steps:
        padding += plan.padding(step=last)
        last_rows = plan.num_rows(step=last)
    return {
        "samples of an epoch": plan.num_samples,
        "steps of an epoch": plan.num_steps,
        "rows of a step": plan.batch_size,
        "rows of a data rank": plan.batch_size // plan.num_data_ranks,
        "rows of the last step": last_rows,
        "rows of padding in an epoch": padding,
        "samples dropped in an epoch": plan.num_positions - plan.num_served,
    }


def _mesh_sections(meshes: Meshes) -> list[str | Rows]:
    """Return each mesh in a line, and the ranks of each of its data ranks."""
    text: list[str | Rows] = []
    for number, (mesh, axes) in enumerate(meshes):
        split = f"rows split over {' and '.join(axes) or 'nothing'}: {mesh.num_data_ranks(axes)} data ranks"
        text.append(f"mesh {number}: {shapes_of([(mesh, axes)])}; {split}")
        if len(mesh.process_ids) <= _MOST_SHOWN:  # --json has larger ones
            text.append(list(groups_of([(mesh, axes)])))
    return text


def _draw(
    answer: Answer, plan: ShardPlan, meshes: Meshes, options: argparse.Namespace
) -> None:
    """Write the page and the picture that the options name.

    Raises:
        ArgumentError: There is no step to draw.
    """
    if not plan.num_steps:
        raise ArgumentError(
            "--html and --svg: there is no step that could be drawn. Leave them out to see why."
        )
    first = options.step or 0
    pictures = []
    for step in range(first, min(first + _STEPS_OF_PAGE, plan.num_steps)):
        samples = samples_of(plan, meshes, options.epoch, step, ())
        pictures.append(
            svg_of(meshes, samples, f"epoch {options.epoch}, step {step}")
        )
    if options.html is not None:
        options.html.write_text(
            page_of(f"Plan of epoch {options.epoch}", answer, pictures),
            encoding="utf-8",
        )
    if options.svg is not None:
        options.svg.write_text(pictures[0], encoding="utf-8")
