"""The site has all pages; its lists of errors and names are those of the package."""

import ast
import inspect
import re
from pathlib import Path

import paddle_shard
from paddle_shard import errors

ROOT = Path(__file__).parents[2]
PACKAGE = Path(paddle_shard.__file__).parent


def texts():
    """The pieces of all texts of the package, without what is filled in."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_errors_page_lists_each_error_of_the_package():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    public = {
        name
        for name, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.PaddleShardError)
        and one is not errors.PaddleShardError
    }
    assert public == set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    page = re.sub(
        r"^## Errors of Paddle\n.*?(?=^## )", "", page, flags=re.M | re.S
    )
    package, missing = texts(), []
    for first in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        missing += [
            quoted
            for quoted in re.findall(r"`([^`]+)`", first)
            if quoted not in package
        ]
    assert missing == []


def test_site_reference_has_each_public_name():
    found = re.findall(
        r"^::: paddle_shard\.(\w+)$",
        (ROOT / "docs/api.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(found) == sorted(set(paddle_shard.__all__) - {"__version__"})


def test_site_navigation_has_each_page_once():
    listed = re.findall(
        r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    of_repository = re.findall(
        r'^    ".*?": "(.*?)",$',
        (ROOT / "docs/hooks.py").read_text(),
        re.MULTILINE,
    )
    there = [
        str(path.relative_to(ROOT / "docs"))
        for path in (ROOT / "docs").rglob("*.md")
    ]
    assert sorted(listed) == sorted([*there, *of_repository])


def test_words_of_the_glossary_are_in_order():
    words = re.findall(
        r"^\| (\w.*?) \| ",
        (ROOT / "docs/glossary.md").read_text(),
        re.MULTILINE,
    )[1:]
    assert words == sorted(words)


def test_landing_page_has_three_tabs_and_a_picture_of_a_plan():
    text = (ROOT / "docs/index.md").read_text()

    assert len(re.findall(r'^=== "', text, re.MULTILINE)) == 3
    assert "![" in text
    assert "](plan.svg)" in text


def test_python_of_a_page_fits_its_column():
    """The site shows 98 columns at 1280 pixels."""
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
    pages += [ROOT / "launch/README.md", *(ROOT / "skills").rglob("*.md")]
    wide = [
        f"{page.name}: {line}"
        for page in pages
        for block in re.findall(
            r"^ *```.*?^ *```", page.read_text(), re.MULTILINE | re.DOTALL
        )
        for line in block.splitlines()
        if len(line) > 98
    ]
    assert wide == []
