"""`paddle-shard simulate`: the laws hold, planted faults are found, and its numbers are those of brute force."""

import json
import random
import re
from itertools import pairwise

import numpy as np
import pytest

from paddle_shard.cli.main import main
from paddle_shard.plan.balance import dealt
from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Draws, source_and_index
from paddle_shard.plan.orders import ORDERINGS, PaddleOrder, find_ordering
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.shuffle import Permutation
from paddle_shard.plan.state import LoaderState, sealed
from paddle_shard.sources.mixture import Mixture
from paddle_shard.sources.packed import write_lengths
from tests.orders_and_tails import SERVING_TAILS, delivered
from tests.record.runs import asked, asked_elsewhere
from tests.trials import trials

FINE = ["--samples", 5000, "--batch-size", 64, "--mesh", "dp=4"]


def simulated(capsys, *arguments):
    enough = [] if "--seconds" in arguments else ["--seconds", "900"]  # also where the machine is busy
    code = main(["simulate", *map(str, arguments), *enough, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == bool(found["hazards"])
    return found


def broken(found):
    return [hazard["what"] for hazard in found["hazards"] if "fault of the library" in hazard["remedy"]]


def some_flags(draw, order):
    ranks, accumulation = draw.choice([1, 2, 3, 4]), draw.choice([1, 1, 2])
    batch_size, mp = ranks * draw.randint(1, 9), draw.choice([1, 2, 3])
    flags = ["--batch-size", batch_size, "--accumulation", accumulation, "--tail", draw.choice(SERVING_TAILS)]
    flags += ["--mesh", draw.choice([f"dp={ranks},mp={mp}", f"mp={mp},dp={ranks}"]), "--seed", draw.randint(0, 99)]
    flags += ["--restarts", draw.randint(0, 5), "--epoch", draw.randint(0, 3)]
    if order == "mixture":
        for name, most in [("web", 900), ("code", 40), ("chat", 9)][: draw.randint(1, 3)]:
            flags += ["--source", f"{name}={draw.randint(1, most)}:{draw.choice([0.1, 0.25, 0.7])}"]
        return [*flags, "--samples", draw.randint(50, 900), *draw.choice([[], ["--shuffle"]])]
    return [*flags, "--samples", draw.choice([draw.randint(1, 60), draw.randint(60, 2000)]), "--shuffle", order]


@pytest.mark.parametrize("order", [*map(str, ORDERINGS), "mixture"])
def test_the_laws_hold_for_every_order_and_tail_over_restarts_on_random_meshes(order, capsys):
    draw = random.Random(order)
    for _ in range(trials(12)):
        flags = some_flags(draw, order)
        found = simulated(capsys, *flags)
        if "leaves no step" in str(found["hazards"]):
            continue
        assert broken(found) == [], flags
        assert [law["holds"] for law in found["laws"]] == ["yes"] * 3
        steps = [leg["steps"] for leg in found["starts"]]
        assert [leg["from_step"] for leg in found["starts"]] == [sum(steps[:at]) for at in range(len(steps))]
        assert min(steps) > 0
        if sum(steps) < 1000:  # a small epoch is counted to its end, as each rank reads it
            counted = " ".join(law["counted"] for law in found["laws"])
            assert "SAMPLED" not in counted, flags
            assert f"all {sum(steps)} steps, of all ranks" in counted


def doubled(monkeypatch):
    call = Permutation.__call__
    monkeypatch.setattr(Permutation, "__call__", lambda self, at: np.where(call(self, at) == 5, 6, call(self, at)))


def doubled_by_paddle(monkeypatch):
    call = PaddleOrder.__call__
    monkeypatch.setattr(PaddleOrder, "__call__", lambda self, at: np.where(call(self, at) == 5, 6, call(self, at)))


def drawn_twice(monkeypatch):
    at = Draws.at

    def wrong(self, positions):
        sources, draws = at(self, positions)
        return sources, np.where(draws == 7, 8, draws)

    monkeypatch.setattr(Draws, "at", wrong)


def one_rank_takes_another_data_rank(monkeypatch):
    data_rank = MeshLayout.data_rank
    monkeypatch.setattr(
        MeshLayout, "data_rank", lambda self, rank, axes: 0 if rank == 2 else data_rank(self, rank, axes)
    )


def one_data_rank_reads_others_rows(monkeypatch):
    monkeypatch.setattr(
        "paddle_shard.cli.simulate.slice_rows",
        lambda rows, ranks, data_rank, micro: slice_rows(rows, ranks, data_rank and ranks - 1, micro),
    )


def one_data_rank_ends_early(monkeypatch):
    from paddle_shard.cli import simulate

    steps_of = simulate._Leg.steps_of

    def fewer(self, mesh, axes, rank, steps):
        steps = list(steps)
        return steps_of(self, mesh, axes, rank, steps[:-1] if rank == 1 and len(steps) > 1 else steps)

    monkeypatch.setattr(simulate._Leg, "steps_of", fewer)


def a_batch_is_lost_at_a_restart(monkeypatch):
    read = LoaderState.from_dict

    def later(saved, fingerprint):
        return read(sealed({**saved, "steps": saved["steps"] + 1, "samples": saved["samples"] + 8}), fingerprint)

    monkeypatch.setattr(LoaderState, "from_dict", later)


def a_batch_comes_again_after_a_restart(monkeypatch):
    read = LoaderState.from_dict

    def earlier(saved, fingerprint):
        return read(sealed({**saved, "steps": saved["steps"] - 1, "samples": saved["samples"] - 8}), fingerprint)

    monkeypatch.setattr(LoaderState, "from_dict", earlier)


def another_order_after_a_restart(monkeypatch):
    read = LoaderState.from_dict

    def later(saved, fingerprint):
        return read(sealed({**saved, "epoch": saved["epoch"] + 1}), fingerprint)

    monkeypatch.setattr(LoaderState, "from_dict", later)


ONCE, EQUAL, ALIKE = range(3)


@pytest.mark.parametrize(
    ("plant", "flags", "laws"),
    [
        (doubled, ["--shuffle"], {ONCE}),
        (doubled_by_paddle, ["--shuffle", "paddle"], {ONCE}),
        (drawn_twice, ["--source", "web=100:1", "--source", "chat=50:1"], {ONCE}),
        (one_rank_takes_another_data_rank, [], {ALIKE}),
        (one_data_rank_reads_others_rows, ["--mesh", "dp=4"], {EQUAL}),
        (one_data_rank_ends_early, [], {EQUAL}),
        (a_batch_is_lost_at_a_restart, ["--restarts", 2, "--seed", 1], {ONCE}),
        (a_batch_comes_again_after_a_restart, ["--restarts", 2], {ONCE}),
        (another_order_after_a_restart, ["--restarts", 2, "--shuffle"], {ONCE}),
    ],
)
def test_a_planted_fault_is_found_and_its_law_named(plant, flags, laws, capsys, monkeypatch):
    plant(monkeypatch)
    flags = ["--samples", 203, "--batch-size", 8, *flags]
    found = simulated(capsys, *flags, *([] if "--mesh" in flags else ["--mesh", "dp=2,mp=2"]))

    assert broken(found)
    assert {at for at, law in enumerate(found["laws"]) if law["holds"] == "NO"} >= laws


def test_a_sample_that_stays_where_it_is_moves_by_nothing(capsys):
    quality = simulated(capsys, "--samples", 5, "--batch-size", 8, "--mesh", "dp=8")["quality"]
    assert quality["how far a sample moves, of all (mixed: 0.333)"] == 0


def test_what_time_is_too_short_for_is_never_said_to_be_counted(capsys, monkeypatch):
    doubled(monkeypatch)
    seen = set()
    for seconds in (1e-9, 0.2, 0.4, 0.8, 900):
        found = simulated(capsys, "--samples", 10**6, *FINE[2:], "--shuffle", "--seconds", seconds)
        law = found["laws"][0]
        assert law["holds"] == "NO" or "SAMPLED" in law["counted"], law
        seen.add(law["holds"])
    assert seen >= {"NO", "not counted"}


def test_the_quality_of_an_order_is_what_brute_force_finds(capsys):
    for order in ("True", "False", "blocks"):
        plan = ShardPlan(num_samples=5000, batch_size=64, num_data_ranks=4, shuffle=find_ordering(order == "True"))
        if order == "blocks":
            plan = ShardPlan(num_samples=5000, batch_size=64, num_data_ranks=4, shuffle="blocks")
        ids = plan.order(epoch=0)(np.arange(5000)).tolist()
        quality = simulated(capsys, *FINE, "--shuffle", order)["quality"]

        kept = sum(b == a + 1 for a, b in pairwise(ids)) / 4999  # pairs
        assert quality["neighbours that stay neighbours, of all"] == pytest.approx(kept, abs=1e-4)
        moved = sum(abs(i - at) for at, i in enumerate(ids)) / 5000**2
        assert quality["how far a sample moves, of all (mixed: 0.333)"] == pytest.approx(moved, abs=1e-4)
        if order == "blocks":
            few = np.mean([len({i // Blocks().size for i in ids[at : at + 64]}) for at in range(0, 5000, 64)])
            assert quality["blocks of which a batch is"] == pytest.approx(few, abs=1e-4)
            assert quality["blocks of the data"] == 5


def test_the_drift_of_a_mixture_is_what_brute_force_finds_and_inside_its_bound(capsys):
    weights, lengths = {"web": 0.6, "code": 0.3, "chat": 0.1}, {"web": 900, "code": 300, "chat": 70}
    flags = [f"--source={name}={length}:{weights[name]}" for name, length in lengths.items()]
    for epoch in (0, 2):
        found = simulated(capsys, *flags, *FINE, "--shuffle", "--epoch", epoch)
        mixture = Mixture({name: range(length) for name, length in lengths.items()}, weights, num_samples=5000)
        shuffle = mixture.ordering(find_ordering(True))
        drawn = []
        for earlier in range(epoch + 1):
            plan = ShardPlan(num_samples=5000, batch_size=64, num_data_ranks=4, shuffle=shuffle)
            drawn += source_and_index(np.array(delivered(plan, earlier)))[0].tolist()
        drawn, drift = np.array(drawn), 0.0
        for at, weight in enumerate(weights.values()):
            share = weight * np.arange(1, len(drawn) + 1)
            drift = max(drift, np.abs(np.cumsum(drawn == at) - share)[5000 * epoch :].max())

        assert found["quality"]["drift of a source, in samples"] == pytest.approx(drift, abs=1e-4)
        assert found["quality"]["bound of the drift"] == 0.75
        assert drift <= 0.75


def test_the_imbalance_of_lengths_is_what_brute_force_finds_and_balance_is_the_remedy(capsys, tmp_path):
    lengths = np.random.default_rng(0).lognormal(5, 1, 5000).astype(int) + 1
    write_lengths(tmp_path / "lengths.npz", lengths, "input_ids")
    found = simulated(capsys, *FINE, "--shuffle", "--lengths", tmp_path / "lengths.npz")

    plan = ShardPlan(num_samples=5000, batch_size=64, num_data_ranks=4, shuffle=True)
    ratios, tokens, padded, best = [], 0, 0, []
    for step in range(plan.num_steps):
        of_ranks = [lengths[plan.indices(epoch=0, step=step, data_rank=rank)] for rank in range(4)]
        costs = [of.sum() for of in of_ranks]
        ratios.append(max(costs) / np.mean(costs))
        rows = np.concatenate(of_ranks)
        tokens, padded = tokens + rows.sum(), padded + rows.max() * len(rows)
        ids = plan.take(epoch=0, step=step, rows=range(len(rows)))
        most, mean = dealt(ids, len(ids), num_data_ranks=4, costs_of=lambda i: lengths[i].astype(float)[:, None])[1]
        best.append(most / mean)
    quality = found["quality"]
    assert quality["longest data rank, by the mean"] == pytest.approx(np.mean(ratios), abs=1e-4)
    assert quality["the same at the worst step"] == pytest.approx(max(ratios), abs=1e-4)
    assert quality["the same with balance="] == pytest.approx(np.mean(best), abs=1e-4)
    assert quality["padding to the longest row, of all"] == pytest.approx(1 - tokens / padded, abs=1e-4)
    (hazard,) = found["hazards"]
    assert f"has {np.mean(ratios):.2f} times the mean" in hazard["what"]
    assert "balance=" in hazard["remedy"]


def test_an_order_that_mixes_a_few_blocks_only_is_a_hazard(capsys):
    flags = "--samples", 10**6, "--batch-size", 67, "--mesh", "dp=1", "--shuffle", "blocks", "--seconds", 2
    (hazard,) = simulated(capsys, *flags)["hazards"]
    assert re.search(r"a batch is of \d\.\d blocks on average", hazard["what"])
    assert "Blocks(window=)" in hazard["remedy"]


def test_a_billion_samples_on_a_hundred_thousand_ranks_take_as_long_as_they_may_and_what_is_sampled_is_said():
    flags = "--samples", 10**9, "--batch-size", 10**5, "--mesh", "dp=50000,mp=2", "--shuffle", "--restarts", 2
    found = asked_elsewhere("simulate", *flags, "--replicas", "leader", "--seconds", 6)

    assert {law["holds"] for law in found["laws"]} <= {"yes", "not counted"}
    counted = re.fullmatch(
        r"SAMPLED (\d+) of 1000000000 positions of the epoch; SAMPLED \d+ .*", found["laws"][0]["counted"]
    )
    assert int(counted[1]) < 10**9
    assert re.search(r"SAMPLED \d+ of 10000 steps, of all ranks", found["laws"][1]["counted"])


@pytest.mark.parametrize(
    ("flags", "hazard"),
    [
        (["--samples", 5, "--batch-size", 8, "--mesh", "dp=8"], "8 data ranks share 5 samples"),
        (
            ["--samples", 64, "--batch-size", 8, "--mesh", "dp=2,mp=2", "--data-axes", "mp"],
            "axis 'dp' of 2 ranks carries",
        ),
        (["--samples", 64, "--batch-size", 8, "--mesh", "mp=2,dp=4"], "axis 'mp' is further apart than 'dp'"),
        (
            ["--source=web=9000:0.7", "--source=chat=10:0.3", "--batch-size", 8, "--mesh", "dp=2"],
            "'chat' has 10 samples",
        ),
    ],
)
def test_what_is_wrong_with_the_plan_is_said_here_too(flags, hazard):
    for command in ("plan", "simulate"):
        assert "HAZARD: " in (said := asked(command, *flags, code=1))
        assert hazard in said


def test_restarts_that_do_not_fit_are_said():
    said = asked("simulate", "--samples", 64, "--batch-size", 64, "--mesh", "dp=4", "--restarts", 3)
    assert "0 restarts instead of 3: an epoch of 1 steps has no more" in said


def test_how_far_it_is_is_said_on_stderr_only_if_it_takes_long():
    flags = "--samples", 10**9, "--batch-size", 10**5, "--mesh", "dp=4", "--shuffle"
    assert "ids counted" in asked("simulate", *flags, "--seconds", 5)
    assert "ids counted" not in asked("simulate", *FINE)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--restarts", -1], "--restarts -1 --seconds 50.0: neither may be negative"),
        (["--seconds", 0], "--seconds 0.0: neither"),
        (["--lengths", "none.npz"], "'none.npz' is no file of lengths"),
        (["--samples", 10**9, "--shuffle", "paddle"], "Paddle's order is a table"),
        (["--mesh", "dp4"], "must be axes and sizes"),
        (["--epoch", -1, "--shuffle", "paddle"], "--epoch must be an int >= 0"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_what_to_do(flags, text):
    assert text in asked("simulate", *FINE, *flags, code=2)


def test_lengths_of_other_samples_are_refused(tmp_path):
    write_lengths(tmp_path / "lengths.npz", np.arange(7), "input_ids")
    said = asked("simulate", *FINE, "--lengths", tmp_path / "lengths.npz", code=2)
    assert "has 7 lengths, not one for each sample" in said


def test_files_that_are_not_counted_have_no_order_to_simulate(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 100)
    flags = "--files", tmp_path / "*.txt", "--batch-size", 8, "--mesh", "dp=2"
    assert "There is no order to simulate" in asked("simulate", *flags, code=2)


def test_a_plan_that_cannot_be_made_is_a_hazard_with_its_remedy(capsys):
    (hazard,) = simulated(capsys, "--samples", 64, "--batch-size", 6, "--mesh", "dp=4")["hazards"]
    assert "6 cannot be split evenly over 4" in hazard["what"]
    (hazard,) = simulated(capsys, *FINE, "--samples", 7, "--tail", "drop")["hazards"]
    assert "leaves no step" in hazard["what"]


def test_it_takes_no_number_of_workers_on_which_nothing_of_it_depends(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--samples", "50", "--batch-size", "8", "--mesh", "dp=2", "--workers", "2"])

    assert "unrecognized arguments: --workers" in capsys.readouterr().err
