"""The page of the record of a run in a browser: what it shows of each step is what real ranks were given."""

import re

import pytest

from tests.cli.chromium import chromium, needs_chromium
from tests.cli.test_page import CUT_OFF, DASH, table, titles
from tests.record.record_worker import SOURCES
from tests.record.runs import COUNTED, Given, asked, whole_run

pytestmark = [pytest.mark.multiprocess, needs_chromium]
JOBS = {1: "job 1: mp=2,dp=2", 2: "job 2: dp=2", 3: "job 3: dp=2,sharding=2"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("run"))


def page_of_run(given, code=0):
    asked("plan", given.record, "--html", given.folder / "run.html", code=code)
    return given.folder / "run.html"


def caption(browser, name):
    return browser.run(f"document.querySelector('#{name} figcaption').textContent")


def test_each_step_is_shown_on_the_mesh_that_has_read_it(browser, run):
    path, looked = page_of_run(run, code=1), 0
    for job, rows in enumerate(run.rows, 1):
        for (epoch, step), of_ranks in rows[: COUNTED[job]]:
            browser.open(path, f"epoch={epoch}&step={step}")
            on_mesh = [int(re.match(r"rank (\d+)", one)[1]) for one in titles(browser, "mesh", "cell")]
            assert sorted(on_mesh) == sorted(of_ranks)
            for row in table(browser, "flow"):
                source, sample = row[2].split(":")
                for rank in map(int, row[6].split(", ")):
                    ids, valid = of_ranks[rank]
                    assert valid[int(row[5])] == (row[3] == "real")
                    if row[3] == "real":
                        assert ids[int(row[5])] == 1000 * list(SOURCES).index(source) + int(sample)
                        looked += 1
            assert JOBS[job] in caption(browser, "mesh")
    assert looked > 100
    assert browser.errors == []


def test_the_heatmap_counts_the_rows_of_the_data_ranks_that_have_read_them(browser, run):
    browser.open(page_of_run(run, code=1), "epoch=0")
    found = browser.run("heat.found.filter(o => o.state === 'real').map(o => [o.step, o.dataRank])")
    ranks = {1: 2, 2: 2, 3: 4}
    for job, rows in enumerate(run.rows, 1):
        for (epoch, step), of_ranks in rows[: COUNTED[job]]:
            if epoch == 0:
                shown = [rank for of, rank in found if of == step]
                assert set(shown) <= set(range(ranks[job]))
                readers = len(of_ranks) // ranks[job]
                assert len(shown) * readers == sum(sum(valid) for _, valid in of_ranks.values())
    assert "left out" in browser.run("document.querySelector('#heat svg').textContent")


def test_what_was_delivered_and_does_not_count_is_told(browser, run):
    browser.open(page_of_run(run, code=1))
    rows = [row for row in table(browser, "life") if row[4] == "no"]
    assert rows == [["0", "64", "68", JOBS[2], "no"]]
    assert f"{JOBS[2]}: epoch 0, positions 64{DASH}67, does not count" in titles(browser, "life", "bar")
    assert "epoch 0: 80 of 96 positions" in caption(browser, "life")


@pytest.mark.parametrize("width", [390, 1280])
def test_of_a_stream_the_page_shows_who_reads_which_part(browser, tmp_path, width):
    given = Given(tmp_path)
    given.job([[0, 1]], ["mp", "dp"], "dp", 8, ["take", 3], ["save", "a"], data="stream")
    given.job([0], ["dp"], "dp", 8, ["load", "a"], ["take", 2], ["save", "b"], data="stream")
    del browser.errors[:]
    browser.open(page_of_run(given), width=width)

    assert browser.errors == []
    assert table(browser, "parts") == [
        ["job 1: mp=1,dp=2", "0", "0", f"0{DASH}1"],
        ["job 1: mp=1,dp=2", "1", "1", f"2{DASH}3"],
        ["job 2: dp=1", "0", "0", f"0{DASH}3"],
    ]
    assert [row[1:3] for row in table(browser, "life")] == [["0", "24"], ["24", "40"]]
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(CUT_OFF) == []
    assert browser.run("[...document.querySelectorAll('figure')].map(f => f.id)") == ["mesh", "parts", "life"]
    assert browser.run("document.getElementById('controls').offsetHeight") == 0  # there is no step to choose
    assert browser.run("[...document.querySelectorAll('#mesh [aria-label=cell] rect')].length") == 1  # the newest mesh


def test_of_rows_that_are_dealt_by_cost_nobody_is_named(browser, tmp_path):
    given = Given(tmp_path)
    given.job([0, 1], ["dp"], "dp", 8, ["take", 3], ["save", "a"], data="96", options={"balance": 1})
    browser.open(page_of_run(given), "step=1")

    assert "Rows are dealt by cost" in caption(browser, "flow")
    assert [row[4:] for row in table(browser, "flow")] == [["", "", ""]] * 8
    shown = {int(row[2]) for row in table(browser, "flow")}
    assert shown == {sample for ids, _ in given.rows[0][1][1].values() for sample in ids}
