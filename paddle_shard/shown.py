"""Tables of values for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any


def as_html(
    shown: object, facts: Callable[[], Mapping[str, Any]], rows: Callable[[], Sequence[Mapping[str, Any]]] = list
) -> str:
    """Return a table of HTML; of a value that cannot say what it is, its class. It never raises.

    Args:
        shown: The value.
        facts: Returns what is to be said, by name.
        rows: Returns further rows, which have the same names.

    Examples:
        >>> as_html(3, lambda: {"a < b": True})
        '<table><caption>int</caption><tr><th>a &lt; b</th><td>True</td></tr></table>'
    """
    try:
        lines: list[tuple[str, tuple[Any, ...]]] = [("<th>{}</th><td>{}</td>", pair) for pair in facts().items()]
        if found := list(rows()):
            lines.append(("<th>{}</th>" * len(found[0]), tuple(found[0])))
        lines += [("<td>{}</td>" * len(row), tuple(row.values())) for row in found]
        body = "".join(f"<tr>{line.format(*(escape(str(cell)) for cell in cells))}</tr>" for line, cells in lines)
        return f"<table><caption>{escape(type(shown).__name__)}</caption>{body}</table>"
    except Exception:  # a notebook shows an error of this method instead of the value
        return f"<pre>{escape(object.__repr__(shown))}</pre>"
