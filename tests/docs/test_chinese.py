"""The pages in Chinese do not fall behind: they have the code, the tables, the headings and the links of the others."""

import re
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT, without_blocks

PAGES = [ROOT / "README_cn.md", *sorted((ROOT / "docs/cn").glob("*.md"))]


def english(page):
    return (
        ROOT / "README.md" if page.parent == ROOT else ROOT / "docs" / page.name
    )


def blocks(page):
    return re.findall(
        r"^```.*?^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )


def codes(text):
    """The code in a text. In batches(rows) the words are of either language."""
    return sorted(
        code for code in re.findall(r"`([^`]+)`", text) if "batch(" not in code
    )


def rows(page):
    """Of each line of a table: the code in its first column, and the number of columns."""
    lines = [
        line.strip("| ")
        for line in without_blocks(page.read_text()).splitlines()
        if line.startswith("|")
    ]
    return [(codes(line.split(" | ")[0]), line.count(" | ")) for line in lines]


def targets(page):
    """The files of the repository and the addresses that a page links to; a page in Chinese is its English one."""
    found = re.findall(r"\]\(([^)#]+)[^)]*\)", without_blocks(page.read_text()))
    paths = [
        one if "://" in one else (page.parent / one).resolve() for one in found
    ]
    return sorted(
        str(english(one) if isinstance(one, Path) and one in PAGES else one)
        for one in paths
    )


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_page_in_chinese_says_what_the_english_one_says(page):
    one, two = page.read_text(), english(page).read_text()
    assert blocks(page) == blocks(english(page))
    assert re.findall("^#+", one, re.MULTILINE) == re.findall(
        "^#+", two, re.MULTILINE
    )
    assert rows(page) == rows(english(page))
    assert codes(without_blocks(one)) == codes(without_blocks(two))
    # Each links to the other, in its second line.
    paths = {english(page).resolve(), page}
    assert {(page.parent / re.findall(r"\]\((.*?)\)", one)[0]).resolve()} == {
        english(page)
    }
    assert {
        (english(page).parent / re.findall(r"\]\((.*?)\)", two)[0]).resolve()
    } == {page}
    assert [one for one in targets(page) if one not in map(str, paths)] == [
        one for one in targets(english(page)) if one not in map(str, paths)
    ]


def test_pages_that_a_newcomer_needs_are_there():
    assert {
        "checkpoint.md",
        "from_paddle.md",
        "trainers.md",
        "troubleshooting.md",
    } <= {page.name for page in PAGES}
