"""What loaders, plans, streams and certificates show of themselves: in a notebook, as a page, as a picture."""

import json
import re
from html import escape
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset

from paddle_shard import Mixture, ShardPlan, Stream
from paddle_shard.cli.page import page_of, view_of
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.testing.simulated import on_each_rank
from tests.cli.chromium import chromium, needs_chromium
from tests.helpers import ONE, Made, mesh, sharded
from tests.record.runs import asked

HOSTILE = "<script>alert('1')</script>&\""


class NeverRead(Dataset):
    def __len__(self):
        return 43

    def __getitem__(self, index):
        raise AssertionError(f"sample {index} was read")


Named = type(HOSTILE, (NeverRead,), {})


def never():
    raise AssertionError("the stream was read")
    yield


def view_in(page):
    return json.loads(re.search(r'<script type="application/json" id="view">(.*?)</script>', page, re.DOTALL)[1])


class Cells(HTMLParser):
    """The cells of tables, row by row; tags must be closed."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open, self.tags = [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert not {name for name, _ in attributes} & {"src", "href", "onclick"}
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def facts_of(shown):
    cells = Cells(shown._repr_html_())
    assert cells.tags <= {"table", "caption", "tr", "th", "td"}
    return {row[0]: row[1] for row in cells.rows if len(row) == 2}, [row for row in cells.rows if len(row) != 2]


# In a notebook


def test_a_plan_shows_its_steps_and_its_padding():
    facts, _ = facts_of(ShardPlan(num_samples=43, batch_size=8, num_data_ranks=4, shuffle=True, seed=3))
    assert {
        name: facts[name]
        for name in (
            "samples of an epoch",
            "steps of an epoch",
            "rows of a step",
            "rows of padding in an epoch",
            "seed",
        )
    } == {
        "samples of an epoch": "43",
        "steps of an epoch": "6",
        "rows of a step": "8",
        "rows of padding in an epoch": "1",
        "seed": "3",
    }
    facts, _ = facts_of(ShardPlan(num_samples=43, batch_size=8, num_data_ranks=4, tail="drop"))
    assert (facts["steps of an epoch"], facts["samples dropped in an epoch"], facts["rows of padding in an epoch"]) == (
        "5",
        "3",
        "0",
    )
    few = ShardPlan(num_samples=3, batch_size=8, num_data_ranks=4, tail="drop")
    assert facts_of(few)[0]["steps of an epoch"] == "0"


def test_a_loader_shows_its_mesh_and_its_plan_without_reading():
    def shown():
        loader = sharded(DataLoader(Named(), batch_size=8), mesh([[0, 1], [2, 3]], "mp", "dp"), "dp")
        return facts_of(loader)

    for facts, grid in on_each_rank(range(4), shown).values():
        assert facts["steps of an epoch"] == "6"
        assert facts["data set"] == HOSTILE
        assert facts["rows of padding in an epoch"] == "1"
        assert facts["epoch"] == "0"
        assert grid == [
            ["ranks", "dp 0", "dp 1"],
            ["mp 0", "0 (data rank 0)", "1 (data rank 1)"],
            ["mp 1", "2 (data rank 0)", "3 (data rank 1)"],
        ]


LOADERS = {
    "a stream": lambda: DataLoader(Stream.of(never).shuffle(10).map(abs), batch_size=4),
    "counted files": lambda: Stream.of(range(8)).batch(4),
    "its own sampler": lambda: DataLoader(NeverRead(), batch_sampler=BatchSampler(sampler=[3, 4, 5], batch_size=2)),
    "whole batches": lambda: DataLoader(NeverRead(), batch_size=None),
    "batches": lambda: [np.zeros(4)] * 3,
    "a mixture": lambda: DataLoader(Mixture({HOSTILE: range(30), "b": range(9)}, {HOSTILE: 2, "b": 1}), batch_size=4),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_of_any_kind_shows_itself_and_never_raises(kind):
    loader = sharded(LOADERS[kind](), ONE)
    facts, _ = facts_of(loader)
    assert facts["tail"] == str(loader._shared.setup.source.tail)
    loader._run = None  # whatever is broken
    assert loader._repr_html_() == f"<pre>{escape(object.__repr__(loader))}</pre>"


def test_a_large_mesh_is_not_drawn_as_a_grid():
    def shown():
        grid = mesh(np.arange(1024).reshape(64, 16).tolist(), "dp", "mp")
        return facts_of(sharded(DataLoader(Made(length=4096), batch_size=64), grid, "dp"))

    ((facts, grid),) = on_each_rank([5], shown).values()
    assert grid == []
    assert facts["mesh"] == "dp=64, mp=16"


def test_a_stream_shows_its_stages_without_reading():
    facts, _ = facts_of(Stream.of(never).shuffle(10).map(abs).in_parts(4))
    assert facts["stages"] == "IterableSource > Shuffle > Map"
    assert facts["parts"] == "4"


def test_a_certificate_shows_what_it_proves():
    loader = sharded(DataLoader(Made(length=10), batch_size=4), ONE)
    batches = iter(loader)
    next(batches)
    facts, _ = facts_of(loader.certificate())
    assert facts["exactly once"] == "no"
    assert facts["delivered"] == "4"
    assert "positions" in facts["problem 1"]
    list(batches)
    facts, _ = facts_of(loader.certificate())
    assert (facts["exactly once"], facts["samples"], facts["delivered"]) == ("yes", "10", "10")


# As a page


def test_a_loader_explains_itself_as_the_command_explains_the_plan(tmp_path):
    at = mesh([[0, 1], [2, 3]], "mp", "dp")

    def explained():
        loader = sharded(DataLoader(Named(), batch_sampler=BatchSampler(Named(), batch_size=8, shuffle=True)), at, "dp")
        loader.skip(steps=[2])
        page = loader.explain(tmp_path / f"plan-{dist.get_rank()}.html")
        plan = loader.plan
        layout = MeshLayout(shape=(2, 2), axes=("mp", "dp"), process_ids=(0, 1, 2, 3))
        return page, view_of(plan, layout, "dp", plans={0: plan}, skips=loader._run.skips)

    flags = "--samples", len(Named()), "--batch-size", 8, "--mesh", "mp=2,dp=2", "--shuffle"
    hazards = [(one["what"], one["remedy"]) for one in asked("plan", *flags, "--json", code=1)["hazards"]]
    assert len(hazards) == 2
    for rank, (page, view) in on_each_rank(range(4), explained).items():
        assert page == page_of(view, hazards)
        assert (tmp_path / f"plan-{rank}.html").read_text(encoding="utf-8") == page
        assert view_in(page)["skips"]["stretches"] == [[0, 16, 24]]
        assert len(repr(page)) < 100


def test_a_loader_with_a_record_explains_its_whole_life(tmp_path):
    def loader_of(batch_size):
        given = DataLoader(Made(length=40), batch_size=batch_size)
        return sharded(given, ONE, record=tmp_path / "run.jsonl")

    assert view_in(loader_of(4).explain())["stretches"] == []  # nothing was delivered yet
    loader = loader_of(4)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    loader = loader_of(8)
    loader.load_state_dict(state)
    batches = iter(loader)
    next(batches)
    early = view_in(loader.explain())  # of what this job has delivered, no line tells yet
    assert early["epochs"]["0"]["segments"] == [[0, 4], [12, 8]]
    (shown,) = asked("plan", tmp_path / "run.jsonl", "--step", 3, "--json")["step"]
    assert shown["samples"] == list(range(12, 20))
    loader.state_dict()

    page = loader.explain()

    asked("plan", tmp_path / "run.jsonl", "--html", tmp_path / "run.html")
    assert page == (tmp_path / "run.html").read_text(encoding="utf-8")
    assert [(one["first"], one["end"]) for one in view_in(page)["stretches"]] == [(0, 12), (12, 20)]


def test_without_a_record_what_was_delivered_is_the_position_of_the_run():
    loader = sharded(DataLoader(Made(length=40), batch_size=4), ONE)
    batches = iter(loader)
    next(batches), next(batches)
    (stretch,) = view_in(loader.explain())["stretches"]
    assert (stretch["epoch"], stretch["first"], stretch["end"]) == (0, 0, 8)


def test_a_stream_is_explained_by_its_parts_and_an_order_of_your_own_not_at_all():
    view = view_in(sharded(DataLoader(Stream.of(never).in_parts(2), batch_size=4), ONE).explain())
    assert (view["order"]["kind"], view["mesh"]["parts"]) == ("stream", [[0, 1]])
    with pytest.raises(ArgumentError, match="explain: the order is that of"):
        sharded(LOADERS["its own sampler"](), ONE).explain()


@needs_chromium
def test_a_page_shows_itself_in_a_notebook(tmp_path):
    page = sharded(DataLoader(NeverRead(), batch_size=8), ONE).explain()
    path = tmp_path / "notebook.html"
    path.write_text(f"<body data-busy=no>{page._repr_html_()}</body>", encoding="utf-8")
    with chromium(tmp_path / "profile") as browser:
        browser.open(path)
        inside = "document.querySelector('iframe').contentDocument"
        for _ in range(100):
            if browser.run(f"{inside}.body.dataset.busy") == "no":
                break
            browser.run("new Promise((go) => setTimeout(go, 50))")
        assert browser.errors == []
        assert browser.run(f"{inside}.querySelectorAll('figure svg').length") == 4
        assert browser.run("document.documentElement.scrollWidth") <= 1280


# As a picture


def test_the_svg_has_the_mesh_and_the_samples_of_the_step(tmp_path):
    path = tmp_path / "plan.svg"
    flags = "--samples", 43, "--batch-size", 8, "--mesh", "dp=2,mp=2@3,1,0,2", "--replicas", "leader", "--shuffle"
    asked("plan", *flags, "--step", 5, "--svg", path)

    picture = ElementTree.parse(path).getroot()
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    plan = ShardPlan(num_samples=43, batch_size=8, num_data_ranks=2, shuffle=True)
    for data_rank, ranks in enumerate([(3, 1), (0, 2)]):
        ids = plan.indices(epoch=0, step=5, data_rank=data_rank)
        real = 43 - 40 - 2 * data_rank
        samples = [*map(str, ids[:real]), *["-"] * (len(ids) - real)]
        assert f"data rank {data_rank}, on ranks {ranks[0]} {ranks[1]}: {' '.join(samples)}" in texts
    cells = [one[0].text for one in picture.iter("{http://www.w3.org/2000/svg}rect") if len(one)]
    assert cells == [f"rank {rank}: data rank {at // 2}" for at, rank in enumerate((3, 1, 0, 2))]
    assert "epoch 0, step 5" in texts
    asked("plan", *flags, "--svg", path)
    assert "epoch 0, step 0" in path.read_text(encoding="utf-8")


def test_the_svg_of_a_record_escapes_what_it_did_not_name(tmp_path):
    data = Mixture({HOSTILE: Made(length=30), "b": Made(length=9)}, {HOSTILE: 2, "b": 1})
    loader = sharded(DataLoader(data, batch_size=4), ONE, record=tmp_path / "run.jsonl")
    next(iter(loader))
    asked("plan", tmp_path / "run.jsonl", "--svg", tmp_path / "run.svg")
    picture = ElementTree.parse(tmp_path / "run.svg").getroot()
    assert any(HOSTILE in (one.text or "") for one in picture.iter("{http://www.w3.org/2000/svg}text"))


def test_a_plan_without_samples_has_no_svg(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    flags = "--files", tmp_path / "a.txt", "--batch-size", 2, "--mesh", "dp=1", "--svg", tmp_path / "a.svg"
    assert f"HAZARD: {tmp_path / 'a.svg'} is not drawn: there is no step." in asked("plan", *flags, code=1)


def test_a_plan_that_cannot_be_drawn_still_says_why_there_is_none(tmp_path):
    flags = "--samples", 1000, "--batch-size", 30, "--mesh", "dp=4", "--html", tmp_path / "a.html"
    said = asked("plan", *flags, code=1)
    assert "28 or 32" in said
    assert "a.html is not drawn: the order is not known here, or no plan fits." in said
    assert not (tmp_path / "a.html").exists()


def test_a_source_that_is_called_like_a_mark_of_the_page_stays_a_name(tmp_path):
    sources = "--source=__HAZARDS__=9000:0.7", "--source=__VIEW__=10:0.3"
    asked("plan", *sources, "--batch-size", 8, "--mesh", "dp=2", "--html", tmp_path / "a.html", code=1)
    page = (tmp_path / "a.html").read_text()
    assert page.count('<ul id="hazards"') == page.count('id="view"') == 1
    assert "source &#x27;__VIEW__&#x27; has 10 samples" in page
    assert "__HAZARDS__" in page.partition('id="view">')[2]


@pytest.mark.parametrize("counts", [False, True])
def test_the_page_of_a_stream_of_files_says_that_its_parts_differ(counts, tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("a line\n" * (10 + 90 * (number == 2)))
    stream = Stream.lines(tmp_path / "*.txt", counts=counts).in_parts(4)
    page = sharded(DataLoader(stream, batch_size=8), ONE).explain()
    assert ("the parts differ in size: about 68% of all rows are padding" in page) == (not counts)


def test_the_page_has_the_hazards(tmp_path):
    flags = "--samples", 5, "--batch-size", 8, "--mesh", "dp=8", "--html", tmp_path / "a.html"
    asked("plan", *flags, code=1)
    page = (tmp_path / "a.html").read_text()
    assert '<ul id="hazards" aria-label="Hazards"><li><strong>8 data ranks share 5 samples: ' in page
    asked("plan", "--samples", 64, *flags[2:-1], tmp_path / "b.html")
    assert '<ul id="hazards"' not in (tmp_path / "b.html").read_text()
