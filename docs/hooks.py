"""Adds pages of the repository to the site, and turns links between files of the repository into links of the site."""

import os
import re
from pathlib import Path

import jieba  # by which the search finds Chinese words
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "first-steps.md",
    "README_cn.md": "cn/index.md",
    "CONTRIBUTING.md": "how-it-works.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "demos/README.md": "demos.md",
    "launch/README.md": "launch.md",
    "skills/paddle_shard/SKILL.md": "agents.md",
}
"""File of the repository -> page of the site."""
URL = os.environ.get("PADDLE_SHARD_URL", "")
"""Where the repository's files can be read; without it, links to files that are no pages are shown as code."""


jieba.setLogLevel("ERROR")  # it tells what it loads


def on_files(files, config):
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(
            File.generated(
                config,
                page,
                content=(ROOT / source).read_text(encoding="utf-8"),
            )
        )
    return files


def on_post_build(config):
    """Write llms.txt, whose links lead to pages of the site."""

    def turned(found):
        page = PAGES.get(found[1]) or found[1].removeprefix("docs/")
        return f"]({page.removesuffix('.md')}/)"

    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    text = re.sub(r"\]\(([^)]+\.md)\)", turned, text)
    (Path(config.site_dir) / "llms.txt").write_text(text, encoding="utf-8")


def on_page_markdown(markdown, page, config, files):
    """Turn the links of a page: those to files of the repository lead to pages, or to where the file can be read."""
    here = page.file.src_uri
    source = next(
        (source for source, name in PAGES.items() if name == here),
        f"docs/{here}",
    )

    def turned(found):
        text, target, anchor = (
            found["text"],
            found["target"],
            found["anchor"] or "",
        )
        if "://" in target or not target:
            return found[0]
        wanted = os.path.relpath(ROOT / Path(source).parent / target, ROOT)
        name = PAGES.get(wanted) or (
            wanted.removeprefix("docs/") if wanted.startswith("docs/") else None
        )
        if name is not None and (
            name in PAGES.values() or (ROOT / "docs" / name).is_file()
        ):
            return (
                f"[{text}]({os.path.relpath(name, Path(here).parent)}{anchor})"
            )
        return (
            f"[{text}]({URL}/{wanted}{anchor})"
            if URL
            else text
            if text.startswith("`")
            else f"`{wanted}`"
        )

    outside = re.split(
        r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL
    )
    pattern = re.compile(
        r"(?<!!)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)"
    )
    pictures = re.compile(r"(!\[[^\]]*\]\()docs/([^)]+\))")
    return "".join(
        part
        if part.startswith("```")
        else pattern.sub(
            turned,
            pictures.sub(
                lambda one: one[1] + os.path.relpath(one[2], Path(here).parent),
                part,
            ),
        )
        for part in outside
    )
