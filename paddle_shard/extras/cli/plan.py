"""`paddle-shard plan`: the plan of a run that flags describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paddle_shard.core.checks import listed
from paddle_shard.data.mixture import Mixture
from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import (
    Answer,
    Hazard,
    Rows,
    argument,
    command,
    parsed,
)
from paddle_shard.extras.cli.page import page_of, svg_of
from paddle_shard.extras.cli.places import Meshes, groups_of, samples_of, shapes_of
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, drawn_of
from paddle_shard.plan.orders import ORDERINGS, find_ordering
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.tails import TAILS

_MOST_RANKS = 10**6
"""Ranks of a mesh, all of which are held in memory."""
_MOST_ROWS = 10**8
"""Rows of a batch, all of which are held in memory."""
_MOST_SHOWN = 64
"""Ranks of a mesh whose ranks are shown."""
_STEPS_OF_PAGE = 8
_MUCH = 0.01
"""Share of the samples above which dropping them is a hazard."""


_ORDERS = {str(name): name for name in ORDERINGS}


# Arguments


def mesh_of(text: str) -> MeshLayout:
    """Return the mesh that a user names: dp=4,mp=2 with the ranks 0 to 7, or dp=2,mp=1@3,1 with these ranks."""
    shape, ranks = parsed(
        r"(\w+=\d+(?:,\w+=\d+)*)(?:@(\d+(?:,\d+)*))?",
        text,
        "axes and sizes such as dp=4,mp=2",
    )
    axes, numbers = zip(*(axis.split("=") for axis in shape.split(",")), strict=True)
    sizes = tuple(map(int, numbers))
    num_ranks = math.prod(sizes)
    if num_ranks > _MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"has {num_ranks} ranks; at most {_MOST_RANKS} are supported"
        )
    process_ids = map(int, ranks.split(",")) if ranks else range(num_ranks)
    try:
        return MeshLayout(shape=sizes, axes=axes, process_ids=tuple(process_ids))
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_of(least: int) -> Callable[[str], int]:
    """Return the argument type of ints of at least `least`."""

    def count(text: str) -> int:
        number = int(text)
        if not least <= number <= _MOST_ROWS:
            raise argparse.ArgumentTypeError(
                f"must be an int from {least} to {_MOST_ROWS}, got {number}"
            )
        return number

    return count


def source_of(text: str) -> tuple[str, int, float]:
    """Return the source of a mixture that a user names: name=samples:weight."""
    name, samples, weight = parsed(
        r"(.+)=(\d+):(\d*\.?\d+)", text, "name=samples:weight such as web=1000:0.7"
    )
    return name, int(samples), float(weight)


# The command


@command(
    argument(
        "--mesh",
        "axes and sizes in row-major order: dp=4,mp=2; with its ranks: dp=2,mp=1@3,1; once for each mesh",
        type=mesh_of,
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
        type=count_of(1),
        required=True,
    ),
    argument(
        "--samples",
        "length of the data set; of a mixture, samples of an epoch",
        type=int,
    ),
    argument(
        "--source",
        "a source of a mixture: web=samples:weight",
        type=source_of,
        action="append",
    ),
    argument("--tail", "what becomes of the last rows", choices=TAILS, default="pad"),
    argument(
        "--shuffle",
        "the order",
        nargs="?",
        const="True",
        default="False",
        choices=_ORDERS,
    ),
    argument("--seed", "seed of the order", type=int, default=0),
    argument("--accumulation", "micro-batches of a step", type=count_of(1), default=1),
    argument("--epoch", "the epoch", type=count_of(0), default=0),
    argument("--step", "also show the samples of each rank", type=count_of(0)),
    argument(
        "--html",
        "also write the answer as a page, with steps from --step on",
        type=Path,
        metavar="FILE",
    ),
    argument("--svg", "also draw the mesh and the step", type=Path, metavar="FILE"),
)
def plan(options: argparse.Namespace) -> Answer:
    """Show which rank reads what, and hazards of the plan. Exits with 1 if there is a hazard.

    example: paddle-shard plan --samples 50000 --batch-size 256 --mesh dp=4,mp=2 --data-axes dp --shuffle --step 3
    """
    named = tuple(filter(None, options.data_axes.split(",")))
    meshes = [
        (mesh, [mesh.axes[axis] for axis in mesh.axis_indices(named)])
        for mesh in options.mesh
    ]
    shard_plan = _plan_of(options, meshes)
    numbers = facts_of_plan(shard_plan)
    values: dict[str, Any] = {"meshes": list(groups_of(meshes)), "plan": numbers}
    table = [{"what": name, "number": number} for name, number in numbers.items()]
    text: list[str | Rows] = [*_mesh_sections(meshes), table]
    if isinstance(shard_plan.ordering, Mixing):
        sources = drawn_of(shard_plan.ordering, shard_plan.num_samples)
        values["sources"] = [
            {"source": name, **asdict(drawn)} for name, drawn in sources.items()
        ]
        text.append(values["sources"])
    if options.step is not None:
        values["step"] = samples_of(shard_plan, meshes, options.epoch, options.step, ())
        text += [f"epoch {options.epoch}, step {options.step}", values["step"]]
    hazards = list(hazards_of(shard_plan, meshes, options.epoch))
    answer = Answer(values=values, text=text, hazards=hazards)
    if options.html is not None or options.svg is not None:
        _draw(answer, shard_plan, meshes, options)
    return answer


def _plan_of(options: argparse.Namespace, meshes: Meshes) -> ShardPlan:
    """Return the plan that the flags describe.

    Raises:
        ArgumentError: There is no data or no such plan, or two sources have one name.
    """
    samples = options.samples
    shuffle = find_ordering(_ORDERS[options.shuffle])
    if options.source:
        lengths = {name: range(length) for name, length, _ in options.source}
        weights = {name: weight for name, _, weight in options.source}
        if len(lengths) < len(options.source):
            raise ArgumentError(
                f"--source: two of {[name for name, *_ in options.source]} have one name."
            )
        mixture = Mixture(lengths, weights, num_samples=samples)
        samples = len(mixture)
        shuffle = mixture.ordering(shuffle)
    if samples is None:
        raise ArgumentError(
            "give the data: --samples, or --source for each source of a mixture."
        )
    counts = [mesh.num_data_ranks(axes) for mesh, axes in meshes]
    return ShardPlan(
        num_samples=samples,
        batch_size=options.batch_size * options.accumulation,
        num_data_ranks=math.lcm(*counts),
        tail=options.tail,
        shuffle=shuffle,
        seed=options.seed,
        accumulation=options.accumulation,
    )


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


def hazards_of(plan: ShardPlan, meshes: Meshes, epoch: int) -> Iterator[Hazard]:
    """Yield the hazards of a plan; of its steps, the last one of an epoch is examined, on the first mesh."""
    dropped = plan.num_positions - plan.num_served
    if dropped > _MUCH * plan.num_samples:
        what = f"tail={plan.tail!r} drops {dropped} of {plan.num_samples} samples in each epoch"
        yield Hazard(what, "tail='pad' serves them, and a smaller batch drops fewer")
    if plan.num_steps:
        step = plan.num_steps - 1
        shares = samples_of(plan, meshes[:1], epoch, step, ())
        idle = [
            share["data_rank"]
            for share in shares
            if share["samples"].count(None) == len(share["samples"])
        ]
        if idle:
            num_rows = plan.num_rows(step=step)
            padding = sum(one["samples"].count(None) for one in shares)
            what = (
                f"the last step of the epoch, {step}, has {padding} of {num_rows} rows of padding, and nothing else on "
                f"{len(idle)} of its data ranks: {listed(idle)}"
            )
            fix = (
                "A mean over the valid rows of such a rank divides by 0: divide the sum of all ranks by their count. "
                "tail='drop' leaves such a step out"
            )
            yield Hazard(what, fix)


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
        pictures.append(svg_of(meshes, samples, f"epoch {options.epoch}, step {step}"))
    if options.html is not None:
        options.html.write_text(
            page_of(f"Plan of epoch {options.epoch}", answer, pictures),
            encoding="utf-8",
        )
    if options.svg is not None:
        options.svg.write_text(pictures[0], encoding="utf-8")
