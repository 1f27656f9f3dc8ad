"""Pictures of a plan: a static HTML page and an SVG of a step, without scripts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from textwrap import shorten

from paddle_shard.extras.cli.answer import Answer, Rows, cell
from paddle_shard.extras.cli.places import Meshes, shapes_of

_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:60em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}"
)
_WIDTH = 720
_BOX = 24
"""Height of a rank of the mesh; its width is at most twice as much."""
_LINE = 18
_MOST_LINES = 64
_MOST_TEXT = 96


def page_of(title: str, answer: Answer, pictures: Iterable[str]) -> str:
    """Return an HTML page of an answer and some SVG pictures; it loads nothing."""
    body = [f"<h1>{escape(title)}</h1>"]
    body += [
        f"<p>{escape(section)}</p>"
        if isinstance(section, str)
        else _html_table(section)
        for section in answer.text
    ]
    body += [f"<figure>{picture}</figure>" for picture in pictures]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _html_table(rows: Rows) -> str:
    lines = [
        "".join(
            f"<th>{escape(name.replace('_', ' '))}</th>" for name in rows[0]
        )
    ]
    lines += [
        "".join(f"<td>{escape(cell(value))}</td>" for value in row.values())
        for row in rows
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def svg_of(meshes: Meshes, shares: Rows, title: str) -> str:
    """Return a picture of the first mesh, coloured by data rank, and of the samples of each data rank.

    Args:
        meshes: Each mesh with its data axes.
        shares: Each replica group with its samples; see `samples_of`.
        title: Title of the picture.
    """
    mesh, axes = meshes[0]
    marks = [
        _text(10, 16, title),
        _text(
            10, 36, f"ranks on {shapes_of(meshes[:1])}; a colour is a data rank"
        ),
    ]
    # The mesh: its last axis from left to right.
    columns = min(mesh.shape[-1] if len(mesh.shape) > 1 else 16, 64)
    width = min(2 * _BOX, _WIDTH // columns)
    ranks = mesh.process_ids[: columns * _MOST_LINES]
    for number, rank in enumerate(ranks):
        line, column = divmod(number, columns)
        x = 10 + column * width
        y = 44 + line * _BOX
        data_rank = mesh.data_rank(rank, axes)
        box = f'<rect x="{x}" y="{y}" width="{width - 2}" height="{_BOX - 2}" {_fill(data_rank)}>'
        marks.append(
            f"{box}<title>rank {rank}: data rank {data_rank}</title></rect>"
        )
        if width > 20:
            marks.append(_text(x + 4, y + 15, str(rank)))
    # The samples: a line for each data rank.
    y = 60 + _BOX * -(-len(ranks) // columns)
    for share in [share for share in shares if share["mesh"] == 0][
        :_MOST_LINES
    ]:
        text = f"data rank {share['data_rank']}, on ranks {cell(share['ranks'])}: {cell(share['samples'])}"
        marks.append(
            f'<rect x="10" y="{y}" width="12" height="12" {_fill(share["data_rank"])}/>'
        )
        marks.append(
            _text(28, y + 10, shorten(text, _MOST_TEXT, placeholder=" ..."))
        )
        y += _LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" '
    )
    head += 'font-family="sans-serif" font-size="11">'
    return f"{head}{''.join(marks)}</svg>\n"


def _fill(data_rank: int) -> str:
    """Return the colour of a data rank, far from its neighbours' in hue."""
    return f'fill="hsl({data_rank * 137.5 % 360:g},60%,60%)" fill-opacity="0.7"'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y}">{escape(text)}</text>'
