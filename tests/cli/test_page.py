"""The page in a browser: each number that it shows is compared with what the library says, one row at a time."""

import json
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from paddle_shard.cli.main import main
from paddle_shard.cli.page import page_of, view_of
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, source_and_index
from paddle_shard.plan.order import Ordering
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.weights import Segment
from tests.cli.chromium import chromium, needs_chromium

pytestmark = pytest.mark.processes

FOLDED = MeshLayout(shape=(2, 2, 2), axes=("dp", "pp", "sharding"), process_ids=tuple(range(8, 16)))
MIXING = Mixing(
    ("web", "</script><b>&", "chat"), (Segment(0, (7, 2, 1), (900, 80, 60)), Segment(333, (1, 2, 3), (900, 80, 70)))
)
DASH = "\N{EN DASH}"
SEGMENTED = ((0, 48), (480, 40))
STRETCHES = [
    {"epoch": 0, "first": 0, "end": 480, "run": "dp=2"},
    {"epoch": 0, "first": 440, "end": 760, "run": "dp=4"},
    {"epoch": 1, "first": 0, "end": 400, "run": "dp=4"},
]


def a_plan(**more):
    return ShardPlan(**({"num_samples": 1003, "batch_size": 40, "num_data_ranks": 4} | more))


CASES = {
    "in order": (a_plan(), Skips()),
    "shuffled": (a_plan(shuffle=True, accumulation=2, tail="fill"), Skips()),
    "few": (a_plan(num_samples=50, batch_size=8, shuffle=True, tail="drop"), Skips()),
    "blocks": (a_plan(shuffle=Blocks(size=16, window=4)), Skips()),
    "paddle": (a_plan(num_samples=1001, shuffle="paddle"), Skips()),
    "mixture": (a_plan(shuffle=MIXING, tail="drop"), Skips()),
    "resumed": (a_plan(segments=SEGMENTED), Skips().joined([(0, 600, 680)], [(100, 0, 0), (700, 0, 0)])),
    "1e9": (a_plan(num_samples=10**9, batch_size=256, shuffle=True), Skips()),
    "1e9 blocks": (a_plan(num_samples=10**9 + 1, batch_size=256, shuffle=Blocks(), accumulation=2), Skips()),
    "1e9 small blocks": (a_plan(num_samples=10**9, batch_size=64, shuffle=Blocks(size=16, window=4)), Skips()),
    "2^52": (a_plan(num_samples=2**52 - 7, batch_size=256, shuffle=True), Skips()),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """The path of a page, its plan, and what it leaves out."""
    return made(request.param, tmp_path)


@pytest.fixture(params=["mixture", "resumed", "1e9 blocks"])
def some_case(request, tmp_path):
    """The same, for what is alike in all of them."""
    return made(request.param, tmp_path)


def made(name, tmp_path):
    plan, skips = CASES[name]
    view = view_of(plan, FOLDED, ("dp", "sharding"), plans={0: plan}, skips=skips, stretches=STRETCHES)
    path = tmp_path / "plan.html"
    path.write_text(page_of(view), encoding="utf-8")
    return path, plan, skips


def table(browser, name):
    """The rows of the table of a picture, as text."""
    browser.run(f"document.querySelector('#{name} details').open = true")
    browser.settle()
    return browser.run(
        f"[...document.querySelectorAll('#{name} tr')].slice(1).map(r => [...r.cells].map(c => c.textContent))"
    )


def titles(browser, name, mark):
    """What the shapes of a picture say when a mouse is over them."""
    return browser.run(f"[...document.querySelectorAll('#{name} [aria-label={mark}] title')].map(t => t.textContent)")


def named(plan, sample):
    """A sample as the page writes it."""
    if not isinstance(plan.ordering, Mixing):
        return str(sample)
    source, index = source_and_index(sample)
    return f"{plan.ordering.names[source]}:{index}"


def rows_of(plan, skips, step, epoch=0):
    """[row, position, sample, state, data rank, row there] of a step, from each data rank's own indices."""
    first, num_rows = plan.first_position(step=step), plan.num_rows(step=step)
    samples = plan.take(epoch=epoch, step=step, rows=np.arange(num_rows))
    valid = plan.valid(epoch=epoch, step=step, rows=np.arange(num_rows))
    out = skips.rows(epoch, first, samples)
    micro, found = plan.micro_size(step=step), []
    for row in range(num_rows):
        begin = row // micro * micro
        part = min(micro, num_rows - begin) // plan.num_data_ranks
        rank, local = (row - begin) // part, begin // plan.num_data_ranks + (row - begin) % part
        assert plan.indices(epoch=epoch, step=step, data_rank=rank)[local] == samples[row]
        state = "padding" if not valid[row] else "left out" if out[row] else "real"
        found.append([row, first + row, samples[row], state, rank, local])
    return found


def looked_at(plan):
    return sorted({0, 1, plan.num_steps // 2, plan.num_steps - 1})


# The numbers


@needs_chromium
def test_the_rows_of_a_step_are_those_of_the_plan_and_go_to_the_ranks_of_their_data_rank(browser, case):
    path, plan, skips = case
    for step in looked_at(plan):
        browser.open(path, f"epoch=0&step={step}")
        expected = rows_of(plan, skips, step)

        shown = table(browser, "flow")

        assert [row[:6] for row in shown] == [
            [*map(str, row[:2]), named(plan, row[2]), *map(str, row[3:])] for row in expected
        ]
        for row in shown:
            ranks = [rank for rank in FOLDED.process_ids if FOLDED.data_rank(rank, ("dp", "sharding")) == int(row[4])]
            assert row[6] == ", ".join(map(str, ranks))
        drawn = browser.run("[...document.querySelectorAll('#flow svg text')].map(t => t.textContent)")
        for text in (text for text in drawn if re.match(rf"\d+({DASH}\d+)?: ", text)):
            rows, samples = text.split(": ", 1)
            shown_rows = range(int(rows.split(DASH)[0]), len(expected))
            for row, sample in zip(shown_rows, samples.split(" (")[0].split(", "), strict=False):
                assert sample in ("…", named(plan, expected[row][2]))
    assert browser.errors == []


@needs_chromium
def test_large_meshes_are_drawn_in_the_order_of_their_ranks_with_long_numbers(browser, tmp_path):
    mesh = MeshLayout(shape=(12, 3, 4), axes=("dp", "pp", "mp"), process_ids=tuple(range(144)))
    plan = ShardPlan(num_samples=2**52 - 7, batch_size=24 * 12, num_data_ranks=12, shuffle=True, accumulation=2)
    path = tmp_path / "plan.html"
    path.write_text(page_of(view_of(plan, mesh, "dp")), encoding="utf-8")
    for width in (390, 1280):
        browser.open(path, f"step={plan.num_steps - 2}", width=width)
        rows = browser.run(
            "[...document.querySelectorAll('#mesh [aria-label^=\"y-axis tick label\"] text')].map(t => t.textContent)"
        )

        assert rows == [f"dp {dp}, pp {pp}" for dp in range(12) for pp in range(3)]
        for title in titles(browser, "mesh", "cell"):
            rank, data_rank = map(int, re.fullmatch(r"rank (\d+): data rank (\d+)", title).groups())
            assert data_rank == rank // 12
        assert browser.run(CUT_OFF) == []


CUT_OFF = """[...document.querySelectorAll('.picture svg')].flatMap(svg => {
  const {left, right} = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.width && (box.left < left - 1 || box.right > right + 1);
  }).map(text => text.textContent);
})"""
"""JavaScript: the texts that are not whole inside their picture."""


@needs_chromium
def test_the_mesh_shows_the_data_rank_of_each_rank_and_its_replicas(browser, case):
    path, plan, _ = case
    browser.open(path)

    assert titles(browser, "mesh", "cell") == [
        f"rank {rank}: data rank {FOLDED.data_rank(rank, ('dp', 'sharding'))}" for rank in FOLDED.process_ids
    ]
    assert [(row[0], row[1]) for row in table(browser, "mesh")] == [
        (str(rank), "2") for rank in range(plan.num_data_ranks)
    ]
    boxes = browser.run(
        "[...document.querySelectorAll('#mesh [aria-label=cell] rect')]"
        ".map(r => [r.getAttribute('y'), r.getAttribute('x')])"
    )
    ys, xs = (sorted({box[at] for box in boxes}, key=float) for at in (0, 1))
    assert [(ys.index(y), xs.index(x)) for y, x in boxes] == [divmod(at, 2) for at in range(8)]
    fills = browser.run(
        "[...document.querySelectorAll('#mesh [aria-label=cell] rect')].map(r => r.getAttribute('fill'))"
    )
    assert len(set(fills)) == 4
    assert fills[0] == fills[2] != fills[4]  # replicas along pp


@needs_chromium
def test_the_padding_and_the_load_of_each_step_are_counted_row_by_row(browser, case):
    path, plan, skips = case
    for step in (0, plan.num_steps - 1):
        browser.open(path, f"step={step}")
        shown = [list(map(int, row)) for row in table(browser, "loads")]

        assert step in [row[0] for row in shown]
        for row in shown:
            rows = rows_of(plan, skips, row[0])
            states = Counter(one[3] for one in rows)
            real = Counter(one[4] for one in rows if one[3] == "real")
            loads = [real[rank] for rank in range(plan.num_data_ranks)]
            assert row[1:] == [states["real"], states["padding"], states["left out"], max(loads), min(loads)]
        caption = browser.run("document.querySelector('#loads figcaption').textContent")
        if plan.num_steps < 100:
            every = [one[3] for step in range(plan.num_steps) for one in rows_of(plan, skips, step)]
            assert f"{every.count('padding')} row" in caption


@needs_chromium
def test_each_cell_of_the_heatmap_counts_the_rows_of_its_steps_and_samples(browser, case):
    path, plan, skips = case
    browser.open(path, "step=1")
    found = browser.run("heat.found.map(o => [o.step, o.row, o.position, o.sample, o.dataRank, o.state])")

    if plan.num_served <= 8192:  # then all rows are looked at
        assert len(found) == min(plan.num_served, plan.num_positions)
    assert len(found) <= 8192  # at any length
    strata = Counter(position * 16 // plan.num_positions for _, _, position, *_ in found)
    assert max(strata.values()) - min(strata.values()) <= max(2, plan.batch_size)
    rows = {}
    for step, row, position, sample, rank, state in found if len(found) < 2000 else found[::97]:
        if step not in rows:
            rows[step] = rows_of(plan, skips, step)
        one = rows[step][row]
        shown = list(map(int, source_and_index(one[2]))) if isinstance(plan.ordering, Mixing) else one[2]
        assert [position, sample, state, rank] == [one[1], shown, one[3], one[4]]
    # What is drawn: each row that is real lies in one cell, which counts it.
    sizes = [900, 80, 70]
    cells, ends = {}, {}
    for title in titles(browser, "heat", "rect"):
        x, y, counts = re.fullmatch(
            rf"steps (\d+{DASH}\d+), samples (\d+{DASH}\d+); times by data rank: (.*)", title
        ).groups()
        (x, x_end), (y, y_end) = (map(int, one.split(DASH)) for one in (x, y))
        cells[x, y] = {int(rank): int(times) for rank, times in (one.split(": ") for one in counts.split(", "))}
        ends[x, y] = x_end, y_end
    firsts_x, firsts_y = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    expected = {}
    for step, _, _, sample, rank, state in found:
        if state == "real":
            line = sum(sizes[: sample[0]]) + sample[1] if isinstance(sample, list) else sample
            key = (
                firsts_x[np.searchsorted(firsts_x, step, "right") - 1],
                firsts_y[np.searchsorted(firsts_y, line, "right") - 1],
            )
            assert step <= ends[key][0]
            assert line <= ends[key][1]
            expected.setdefault(key, Counter())[rank] += 1
    assert cells == expected
    # How it is drawn: each where it belongs, in the colour of the rank that has more than half, stronger if fuller.
    legend = browser.run("[...document.querySelectorAll('#heat .legend i')].map(i => i.style.background)")
    most = max(sum(cell.values()) for cell in cells.values())
    left, right = browser.run("[0, 1].map(step => heat.scale.apply(step))")
    shapes = browser.run(
        "[...document.querySelectorAll('#heat [aria-label=rect] rect')].filter(r => r.querySelector('title')).map(r => "
        "[+r.getAttribute('x'), (i => (i.style.background = r.getAttribute('fill'), i.style.background))"
        "(document.createElement('i')), +r.getAttribute('fill-opacity')])"
    )
    for (x, fill, opacity), ((step, _), cell) in zip(shapes, cells.items(), strict=True):
        rank, times = max(cell.items(), key=lambda one: one[1])
        assert abs(x - left - step * (right - left)) < 1
        assert fill == legend[rank if times * 2 > sum(cell.values()) else -1]
        assert abs(opacity - 0.3 - 0.7 * sum(cell.values()) / most) < 0.01
    for x, y, total, _ in table(browser, "heat"):
        assert int(total) == sum(cells[int(x), int(y)].values())


@needs_chromium
def test_the_drift_of_a_mixture_is_its_draws_less_its_share_and_inside_the_bound(browser, tmp_path):
    plan = CASES["mixture"][0]
    path = tmp_path / "plan.html"
    path.write_text(page_of(view_of(plan, FOLDED, ("dp", "sharding"))), encoding="utf-8")
    for epoch in (0, 2):
        browser.open(path, f"epoch={epoch}")
        shown = table(browser, "drift")

        assert len(shown) > 200
        for position, bound, *drift in shown:
            at = epoch * plan.num_samples + int(position)
            sources, _ = MIXING.draws.at(np.arange(at))
            share = [
                Fraction(one.parts[source], sum(one.parts)) * max(0, min(at, end) - one.first)
                for source in range(3)
                for one, end in zip(MIXING.segments, (333, at), strict=True)
            ]
            expected = [
                np.count_nonzero(sources == source) - share[2 * source] - share[2 * source + 1] for source in range(3)
            ]
            assert np.allclose(list(map(float, drift)), list(map(float, expected)), atol=2e-6)
            assert max(map(abs, expected)) <= Fraction(bound)
            assert float(bound) == (0.75 if at <= 333 else 1.5)  # 1 - 1/(2n - 2) for n = 3, of each segment


@needs_chromium
def test_the_life_of_a_run_says_what_was_delivered_once_and_twice(browser, case):
    path, plan, _ = case
    browser.open(path)

    caption = browser.run("document.querySelector('#life figcaption').textContent").replace(",", "")
    for epoch in (0, 1):
        times = Counter(p for one in STRETCHES if one["epoch"] == epoch for p in range(one["first"], one["end"]))
        assert f"epoch {epoch}: {len(times)} of {plan.num_positions} positions" in caption
        twice = sum(number == 2 for number in times.values())
        assert (f"{twice} twice" in caption) == bool(twice) or epoch == 1
    assert titles(browser, "life", "bar") == [
        f"{one['run']}: epoch {one['epoch']}, positions {one['first']}{DASH}{one['end'] - 1}" for one in STRETCHES
    ]


# The page


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_loads_nothing_fits_the_screen_and_can_be_read_in_both_themes(browser, some_case, width, dark):
    path, _, _ = some_case
    del browser.asked[:], browser.errors[:]
    browser.open(path, "step=1&tables", width=width, dark=dark)

    assert browser.asked == [f"file://{path}"]
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    paper, ink, quiet = browser.run(
        "['background-color', 'color'].map(p => getComputedStyle(document.body)[p])"
        ".concat(getComputedStyle(document.querySelector('figcaption')).color)"
    )
    assert contrast(paper, ink) > 10
    assert contrast(paper, quiet) > 4.5
    assert (luminance(paper) < 0.1) == dark
    assert browser.run(CUT_OFF) == []


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@needs_chromium
def test_epochs_and_steps_are_chosen_with_keys_alone(browser, some_case):
    path, plan, _ = some_case
    browser.open(path)
    browser.run("document.getElementById('stepSlider').focus()")
    for key, code, step in [
        ("ArrowRight", 39, 1),
        ("End", 35, plan.num_steps - 1),
        ("ArrowLeft", 37, plan.num_steps - 2),
    ]:
        browser.press(key, code)
        browser.settle()
        assert browser.run("[state.step, document.getElementById('step').valueAsNumber]") == [step, step]
        assert f"Step {step:,} of epoch 0" in browser.run("document.getElementById('now').textContent")
    browser.run("document.getElementById('epochSlider').focus()")
    browser.press("ArrowRight", 39)
    browser.settle()

    assert browser.run("[state.epoch, heat.epoch, location.hash]") == [1, 1, f"#epoch=1&step={plan.num_steps - 2}"]
    assert table(browser, "flow")[0][2] == named(plan, rows_of(plan, Skips(), plan.num_steps - 2, 1)[0][2])


@needs_chromium
def test_a_screen_reader_gets_a_name_and_a_text_for_each_picture_and_control(browser, some_case):
    browser.open(some_case[0])
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    found = {}
    for node in nodes:
        if not node["ignored"]:
            found.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))

    assert len(found["image"]) == len(browser.run("[...document.querySelectorAll('figure')].map(f => f.id)"))
    assert all(len(name) > 60 for name in found["image"])
    assert sorted(found["slider"]) == ["Epoch, slider", "Step, slider"]
    assert sorted(found["spinbutton"]) == ["Epoch", "Step"]
    assert all(found["button"])
    assert "status" in found  # what has changed is read aloud


@needs_chromium
def test_the_theme_can_be_switched_and_a_link_keeps_it(browser, some_case):
    browser.open(some_case[0], "theme=dark")
    assert luminance(browser.run("getComputedStyle(document.body).backgroundColor")) < 0.1

    browser.run("{const s = document.getElementById('theme'); s.value = 'light'; s.dispatchEvent(new Event('change'))}")
    assert luminance(browser.run("getComputedStyle(document.body).backgroundColor")) > 0.9


@needs_chromium
def test_a_picture_is_saved_as_svg_that_needs_nothing_of_the_page(browser, some_case):
    browser.open(some_case[0], "step=1")
    browser.run("HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }")
    for name in ("mesh", "flow", "heat", "loads", "life"):
        browser.run(f"document.querySelector('#{name} button').click()")
        file, href = browser.run("window.saved")
        text = browser.run(f"decodeURIComponent({json.dumps(href)}.split(',')[1])")

        assert file == f"{name}.svg"
        assert "var(" not in text
        assert (
            browser.run(
                f"new DOMParser().parseFromString({json.dumps(text)}, 'image/svg+xml').querySelector('parsererror')"
            )
            is None
        )


@needs_chromium
@pytest.mark.parametrize(
    ("plan", "skips", "said"),
    [
        (a_plan(num_samples=3, tail="drop"), Skips(), "The epoch has no step."),
        (a_plan(num_samples=3, tail="drop", shuffle=MIXING), Skips(), "The epoch has no step."),
        (
            a_plan(num_samples=1, batch_size=4),
            Skips(),
            "Step 0 of epoch 0: 4 rows from position 0 on, of which 3 padding",
        ),
        (
            a_plan(num_samples=30),
            Skips().joined([(0, 0, 30)], []),
            "of which 2 padding and 30 left out. The loader passes over",
        ),
        (a_plan(shuffle=Mixing(("a",), (Segment(0, (1,), (7,)),))), Skips(), "Step 1 of epoch 0: 40 rows"),
    ],
)
def test_epochs_without_a_step_a_sample_or_a_choice_are_shown_as_they_are(browser, tmp_path, plan, skips, said):
    path = tmp_path / "plan.html"
    path.write_text(page_of(view_of(plan, FOLDED, ("dp", "sharding"), skips=skips)), encoding="utf-8")
    del browser.errors[:]
    browser.open(path, "step=1&tables")

    assert browser.errors == []
    assert said in browser.run("document.querySelector('#flow figcaption').textContent")


@needs_chromium
def test_a_step_that_another_mesh_has_read_is_shown_without_data_ranks(browser, tmp_path):
    plan = a_plan(num_samples=48, batch_size=8, segments=((0, 6), (24, 8)))
    path = tmp_path / "plan.html"
    path.write_text(page_of(view_of(plan, FOLDED, ("dp", "sharding"))), encoding="utf-8")
    del browser.errors[:]
    browser.open(path, "step=1&tables")

    assert browser.errors == []
    caption = browser.run("document.querySelector('#flow figcaption').textContent")
    assert "4 data ranks cannot share them evenly: they were read on another mesh" in caption
    assert [row[4:] for row in table(browser, "flow")] == [["", "", ""]] * 6
    assert table(browser, "loads")[1] == ["1", "6", "0", "0", "6", "6"]
    assert "another mesh: 1" in titles(browser, "heat", "rect")[0]
    browser.open(path, "step=4&tables")
    assert [row[4] for row in table(browser, "flow")] == list("00112233")


# The view and the command


def test_the_command_writes_the_page_of_a_plan(tmp_path, capsys):
    path = tmp_path / "plan.html"
    arguments = ["plan", "--batch-size", "256", "--mesh", "dp=4", "--html", str(path), "--shuffle"]

    assert main([*arguments, "--samples", "50000"]) == 0
    text = path.read_text(encoding="utf-8")
    assert len(text) < 700_000
    hosts = set(re.findall(r"https?://([\w.]+)", text))
    assert hosts == {"www.w3.org"}  # names of namespaces

    assert main([*arguments, "--samples", "50000", "--data-axes", "mq"]) == 2
    assert "no axis 'mq'" in capsys.readouterr().err
    assert main([*arguments, "--source", "a=1000:0.7", "--source", "b=1000:0.3"]) == 0
    assert '"weights": [7, 3]' in path.read_text(encoding="utf-8")


class Unknown(Ordering):
    name = "unknown"


@pytest.mark.parametrize(
    ("more", "axes", "said"),
    [
        ({"num_samples": 2**53}, ("dp", "sharding"), "at most 2^52"),
        ({"num_samples": 10**7, "shuffle": "paddle"}, ("dp", "sharding"), "shuffle='paddle' with 10000000 samples"),
        ({"num_data_ranks": 5}, "dp", "have 2 data ranks"),
        ({"shuffle": Unknown()}, ("dp", "sharding"), "cannot compute the order"),
    ],
)
def test_what_a_page_cannot_show_is_refused_by_name(more, axes, said):
    with pytest.raises(ArgumentError, match=re.escape(said)):
        view_of(a_plan(**more), FOLDED, axes)


def test_a_view_is_json():
    for plan, skips in CASES.values():
        view = view_of(plan, FOLDED, ("dp", "sharding"), skips=skips, stretches=STRETCHES)
        assert json.loads(json.dumps(view)) == view
