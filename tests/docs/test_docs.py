"""The Python of README.md and docs/ runs, and every name, file, command and test that they mention exists."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import paddle_shard
from paddle_shard.extras.telemetry import serve_metrics
from tests.deadlines import HANG
from tests.jobs import preload, run_ranks

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "skills/paddle_shard/SKILL.md"
PAGES = [ROOT / "README.md", AGENTS, *sorted((ROOT / "docs").glob("*.md"))]
ALL = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "llms.txt",
    ROOT / "demos/README.md",
    ROOT / "launch/README.md",
]
OTHERS = {
    "resampled",
    "pin_memory",
    "use_buffer_reader",
    "persistent_workers",
    "nranks",
    "local_rank",
    "num_replicas",
    "rank",
    "input_spec",
}
"""Options of other libraries."""
RANKS = {
    "README.md": 4,
    "evaluation.md": 2,
    "lengths.md": 4,
    "checkpoint.md": 2,
    "elastic.md": 2,
    "failures.md": 2,
    "static.md": 2,
    "tutorial.md": 2,
}
RANKS |= {"from_paddle.md": 2, "migration.md": 2}
"""Of the pages whose meshes have several."""
EXTRAS = {
    "streams.md": ["PIL"],
    "tutorial.md": ["sklearn"],
    "migration.md": ["PIL", "webdataset", "datasets", "grain"],
}


def name_of(page):
    return page.name


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_in(page):
    text = without_blocks(page.read_text())
    # test_migration.py runs what is this library's in their tables
    if page.name in (
        "from_paddle.md",
        "migration.md",
    ):
        text = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "page",
    [
        # test_tutorial runs the tutorial, too, and kills it.
        pytest.param(
            page, marks=[pytest.mark.long] * (page.name == "tutorial.md")
        )
        for page in PAGES
        if "```python" in page.read_text()
    ],
    ids=name_of,
)
def test_python_of_a_page_runs(page, tmp_path):
    for extra in EXTRAS.get(page.name, ()):
        pytest.importorskip(extra)
    (tmp_path / "work").mkdir()
    worker = Path(__file__).with_name("page_worker.py")
    ranks = RANKS.get(page.name, 1)
    if ranks > 1:
        preload(*EXTRAS.get(page.name, ()))

    reports = run_ranks(
        worker,
        ranks,
        tmp_path / "run",
        args=[page, tmp_path / "work"],
        timeout=HANG,
    )

    assert all(report["blocks"] for report in reports)
    for promised in re.findall(r"prints `([^`]+)`", page.read_text()):
        assert all(promised in report["printed"] for report in reports), (
            reports[0]["printed"]
        )


def test_scripts_of_other_libraries_are_python():
    """They stand beside those that replace them, in blocks of `py`, and do not run: their libraries are not here."""
    for page in (ROOT / "docs/from_paddle.md", ROOT / "docs/migration.md"):
        blocks = re.findall(
            r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        )
        assert blocks
        for block in blocks:
            compile(block, str(page), "exec")


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_files_that_a_page_links_to_exist(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())

    assert [
        link
        for link in links
        if "://" not in link and not (page.parent / link).exists()
    ] == []


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_names_of_this_library_that_a_page_mentions_exist(page):
    missing = []
    for dotted in re.findall(r"paddle_shard(?:\.\w+)+", page.read_text()):
        found = paddle_shard
        for name in dotted.split(".")[1:]:
            if not hasattr(found, name):
                try:
                    importlib.import_module(f"{found.__name__}.{name}")
                except (ImportError, AttributeError):
                    missing.append(dotted)
                    break
            found = getattr(found, name)
    assert missing == []


def test_bare_names_in_the_recipes_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`(?:\w+\.)*([A-Za-z_]\w+)(?:\(.*?\))?`", text))
    files = [
        file
        for folder in ("paddle_shard", "tests")
        for file in (ROOT / folder).rglob("*.py")
    ]
    there = set(
        re.findall(r"\w+", "\n".join(file.read_text() for file in files))
    )
    there |= {part for file in files for part in file.relative_to(ROOT).parts}
    assert named - there == set()


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_options_that_a_page_mentions_exist(page):
    known = {
        "cls",
        "one_by_one",
        "size",
        "window",
        "index",
        "counts",
        "cache_dir",
        "shuffle_shards",
        "splits_itself",
        "num_workers",
    }
    # what Checkpoints saves is named by the user
    known |= {
        "model",
        "optimizer",
        "data",
    }
    known |= {
        "batch_sampler",
        "batch_size",
        "drop_last",
        "callbacks",
        "fastdct",
        "fastupsample",
        "distributed_dataloader",
        "enable_auto_parallel",
        "dim",
        "sample",
        "override",
        "shuffle",
        "args",
        "num_ranks",
        "collate_fn",
    }
    classes = (
        paddle_shard.Mixture,
        paddle_shard.Packed,
        paddle_shard.BucketBatchSampler,
    )
    classes = *classes, paddle_shard.Checkpoints, paddle_shard.TrainerCallback
    classes += paddle_shard.ExternalLoader, paddle_shard.RayReaders
    for takes in (
        paddle_shard.shard_dataloader,
        paddle_shard.patch_paddle,
        serve_metrics,
        *classes,
    ):
        known |= set(inspect.signature(takes).parameters)
    mentioned = {
        name
        for code in code_in(page)
        for name in re.findall(r"(?<![\w.\-/])([a-z]\w*)=", code)
    }

    assert mentioned - known - OTHERS == set()


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_targets_of_make_that_a_page_mentions_exist(page):
    targets = set(
        re.findall(
            r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE
        )
    )
    mentioned = [
        target
        for code in code_in(page)
        for target in re.findall(r"^make ([a-z-]+)", code)
    ]

    assert set(mentioned) <= targets


@pytest.mark.parametrize(
    ("page", "fewest"), [("differences.md", 25), ("guarantees.md", 15)]
)
def test_tests_that_a_page_names_exist(page, fewest):
    named = re.findall(
        r"`([^`]*test_[^`]*)`", (ROOT / "docs" / page).read_text()
    )
    assert len(named) > fewest
    sources = {
        path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")
    }
    for code in named:
        file, _, test = (
            code.rpartition("::") if "::" in code else ("", "", code)
        )
        if code.endswith(".py"):
            file, test = code, "def test_"
        elif not file:
            file, test = "loader/test_paddle_defects.py", f"def {test}("
        else:
            test = f"def {test}("
        assert any(
            str(path).endswith(file) and test in source
            for path, source in sources.items()
        ), code


def test_readme_links_every_page():
    linked = re.findall(r"\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text())

    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert {*linked, "index.md"} == set(pages)


def test_page_for_agents_is_short_and_says_when_to_read_it():
    text = AGENTS.read_text()

    assert len(text.splitlines()) <= 120
    assert re.match(
        r"---\nname: paddle_shard\ndescription: .*?\n---\n", text, re.DOTALL
    )


def test_llms_txt_lists_every_page():
    linked = re.findall(r"\(docs/(\w+\.md)\)", (ROOT / "llms.txt").read_text())

    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert {*linked, "index.md"} == pages


def test_make_knows_every_command_of_the_readme():
    makefile = (ROOT / "Makefile").read_text()

    for target in ("demo", "demos", "test", "quick"):
        assert re.search(rf"^## {target}: ", makefile, re.MULTILINE), (
            "`make help` shows these lines"
        )
