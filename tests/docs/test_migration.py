"""Each line of docs/from_paddle.md and docs/migration.md keeps its promise: its new side runs as it stands there."""

import pkgutil
from importlib import import_module

import pytest

from tests.docs import migration
from tests.docs.migration import CASES, Side, cases_of, lines

for guide in pkgutil.iter_modules(migration.__path__):
    pytest.register_assert_rewrite(f"{migration.__name__}.{guide.name}")
    import_module(f"{migration.__name__}.{guide.name}")


@pytest.mark.parametrize(
    "line", lines(), ids=lambda line: f"{line[0]}: {line[1]}"[:90]
)
def test_line_keeps_its_promise(line, tmp_path, monkeypatch):
    found = cases_of(line)
    assert len(found) == 1, f"{len(found)} cases for this line: {line}"
    monkeypatch.chdir(tmp_path)

    CASES[found[0]](Side(line[2]), Side(line[1]))


def test_migration_cases_are_of_lines_of_the_page():
    used = [key for line in lines() for key in cases_of(line)]

    assert sorted(used) == sorted(CASES)
