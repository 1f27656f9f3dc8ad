"""A static page of a plan: its tables, the mesh and the first steps, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from paddle_shard.extras.cli.answer import Rows, cell

_STYLE = "body{font:14px sans-serif;margin:2em;max-width:60em}table{border-collapse:collapse;margin:1em 0}"
_CELLS = "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}.hazard{color:#a00}"


def page_of(
    title: str, contents: Iterable[str | Rows], pictures: Sequence[str], hazards: Iterable[tuple[str, str]]
) -> str:
    """Return a page of HTML that loads nothing.

    Args:
        title: What is shown.
        contents: Lines and tables.
        pictures: SVG elements.
        hazards: (what is wrong, what would help).
    """
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f'<p class="hazard"><strong>{escape(what)}.</strong> {escape(fix)}</p>' for what, fix in hazards]
    for content in contents:
        body.append(f"<p>{escape(content)}</p>" if isinstance(content, str) else _table(content))
    body += [f"<figure>{picture}</figure>" for picture in pictures]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}{_CELLS}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _table(rows: Rows) -> str:
    if not rows:
        return ""
    names = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in rows[0])
    lines = ["".join(f"<td>{escape(cell(value))}</td>" for value in row.values()) for row in rows]
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
