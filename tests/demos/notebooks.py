"""Runs the notebooks of demos/notebooks, as Jupyter would, and writes what they print into them.

python -m tests.demos.notebooks
"""

import ast
import contextlib
import io
import json
import logging
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "demos/notebooks"


def printed(notebook):
    """What each cell of code prints, and the value of its last line, one after the other in one namespace."""
    names, found = {"__name__": "__main__"}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree, text, value = (
            ast.parse("".join(cell["source"])),
            io.StringIO(),
            None,
        )
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(text):
            exec(compile(tree, "<cell>", "exec"), names)
            if last is not None:
                value = eval(
                    compile(ast.Expression(last.value), "<cell>", "eval"), names
                )
        found.append(
            text.getvalue() + ("" if value is None else f"{value!r}\n")
        )
    return found


def outputs_of(text):
    lines = text.splitlines(keepends=True)
    return (
        [{"output_type": "stream", "name": "stdout", "text": lines}]
        if lines
        else []
    )


def write(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    of_cells = iter(printed(notebook))
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell.update(
                execution_count=number,
                metadata={},
                outputs=outputs_of(next(of_cells)),
            )
    path.write_text(
        json.dumps(notebook, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for one in sorted(FOLDER.glob("*.ipynb")):
        write(one)
