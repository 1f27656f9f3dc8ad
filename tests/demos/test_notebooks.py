"""The notebooks print what they show."""

import json
import logging

import pytest

from tests.demos.notebooks import FOLDER, outputs_of, printed

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_prints_what_it_shows(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    shown = [
        cell["outputs"]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    log = logging.getLogger("paddle_shard")
    level = log.level
    try:
        assert [outputs_of(text) for text in printed(notebook)] == shown
    finally:
        log.setLevel(level)
    assert sum(map(bool, shown)) >= 2


def test_notebooks_cover_the_first_tasks():
    assert [path.stem for path in NOTEBOOKS] == [
        "first_steps",
        "mixtures_and_packing",
        "resume_on_another_mesh",
    ]
