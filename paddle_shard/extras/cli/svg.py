"""The mesh and the samples of a step as a picture for a paper, which any program shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paddle_shard.extras.cli.answer import cell
from paddle_shard.extras.cli.places import Meshes, shapes_of

_COLOURS = ("4269d0", "efb118", "ff725c", "6cc5b0", "3ca951", "ff8ab7", "a463f2", "97bbf5", "9c6b4e", "9498a0")
_WIDTH, _BOX, _LINE, _MOST_LINES, _MOST_TEXT = 720, 40, 18, 64, 96


def svg_of(meshes: Meshes, given: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return a picture of the first mesh, coloured by data rank, and of what each data rank is given.

    Args:
        meshes: Each with its data axes.
        given: Each replica group with its samples; see `samples_of`.
        title: What is shown.
    """
    mesh, axes = meshes[0]
    columns = min(mesh.shape[-1] if len(mesh.shape) > 1 else 16, 64)
    wide, marks = min(_BOX, (_WIDTH - 20) / columns), [_text(10, 16, title)]
    for at, rank in enumerate(mesh.process_ids[: columns * _MOST_LINES]):
        x, y, data_rank = 10 + at % columns * wide, 44 + at // columns * 24, mesh.data_rank(rank, axes)
        box = f'<rect x="{x:g}" y="{y}" width="{wide - 2:g}" height="22" {_fill(data_rank)}>'
        marks.append(f"{box}<title>rank {rank}: data rank {data_rank}</title></rect>")
        marks += [_text(x + wide / 2 - 1, y + 15, str(rank), ' text-anchor="middle"')] if wide > 20 else []
    what = f"ranks on {shapes_of(meshes[:1])}, columns along {mesh.axes[-1]}; a colour is a data rank"
    marks.append(_text(10, 36, what))
    top = 60 + 24 * min(-(-len(mesh.process_ids) // columns), _MOST_LINES)
    of_mesh = [group for group in given if group["mesh"] in (0, None)]
    for line, group in enumerate(of_mesh[:_MOST_LINES]):
        data_rank, ranks = group["data_rank"], cell(group["ranks"])
        who = "rows that are dealt by cost" if data_rank is None else f"data rank {data_rank}, on ranks {ranks}"
        y, text = top + line * _LINE, f"{who}: {cell(group['samples'])}"
        marks.append(f'<rect x="10" y="{y}" width="12" height="12" {_fill(data_rank)}/>')
        marks.append(_text(28, y + 10, text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."))
    height = top + _LINE * min(len(of_mesh), _MOST_LINES) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
    return f'{head} font-size="11">{"".join(marks)}</svg>\n'


def _fill(data_rank: int | None) -> str:
    """Return the colour of a data rank: one of ten, or one that is far from its neighbours'."""
    if data_rank is not None and data_rank >= len(_COLOURS):
        return f'fill="hsl({data_rank * 137.5 % 360:g},60%,60%)" fill-opacity="0.7"'
    return f'fill="#{_COLOURS[-1 if data_rank is None else data_rank]}" fill-opacity="0.7"'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y}"{more}>{escape(text)}</text>'
