"""What do the benchmarks share: timing in turns, tables, targets?"""

import contextlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def samples_of_step(plan, step: int):
    """The samples of data rank 0 at a step of epoch 0, computed as a loader does."""
    from paddle_shard.plan.shard_plan import global_batches

    (batch,) = global_batches(plan, 0, [step])
    return batch.take(range(batch.num_rows // plan.num_data_ranks))


def machine() -> str:
    packages = ("numpy", "paddlepaddle", "paddlepaddle-gpu", "torch", "grain")
    found = [
        f"{name} {package_version(name)}"
        for name in packages
        if package_version(name)
    ]
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        + ", ".join(found)
    )


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(measures: dict, rounds: int, best: dict | None = None) -> dict:
    """Medians of several rounds. Each round takes every measure once, so that a slow spell hits all alike.

    The smallest of each goes into `best`: far below the median, it tells of a busy machine.
    """
    taken: dict = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            taken[name].append(measure())
    if best is not None:
        best.update((name, min(values)) for name, values in taken.items())
    return {name: statistics.median(values) for name, values in taken.items()}


def busy() -> str:
    """How many processes want to run; more than the cores slow these figures, ours and the peers'."""
    with contextlib.suppress(OSError, AttributeError):
        return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, of which this is about 1"
    return "load average not known"


def print_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """In Markdown, padded so that it reads in a terminal too."""
    lines = [head, *rows]
    widths = [
        max(len(line[column]) for line in lines) for column in range(len(head))
    ]
    text = [
        "| "
        + " | ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        )
        + " |"
        for line in lines
    ]
    print(
        "",
        title,
        "",
        text[0],
        "|" + "|".join("-" * (width + 2) for width in widths) + "|",
        *text[1:],
        "",
        sep="\n",
    )


def print_target(what: str, seen: str, reached: bool) -> None:
    print(
        f"- {what}: {seen}: {'reached' if reached else 'NOT reached'}",
        flush=True,
    )


def time_of(value: float) -> str:
    unit, scale = (
        ("s", 1)
        if value >= 1
        else ("ms", 1e3)
        if value >= 1e-3
        else ("us", 1e6)
    )
    return f"{value * scale:.3g} {unit}"


def bytes_of(value: float) -> str:
    if math.isnan(value):
        return "not measured"
    return (
        f"{value / 1e3:,.0f} kB"
        if value < 1e6
        else f"{value / 1e6:,.1f} MB"
        if value < 1e8
        else f"{value / 1e6:,.0f} MB"
    )


def ratio_of(value: float) -> str:
    return f"{value:,.0f} x" if value >= 10 else f"{value:.2g} x"
