"""A life of a run: whatever is done with a loader, its steps, state and certificate are those of the documentation.

Lives are histories of a loader that Hypothesis makes: iterators that are left, epochs that are chosen, states that are
loaded on other meshes, with other arguments, or refused. Ranks are simulated in one process.

    python -m tests.simulation.life --seeds 1000 --seconds 600
    python -m tests.simulation.life --seed 4711 --trace
"""

import hashlib
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from hypothesis.reporting import with_reporter
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from paddle.io import DataLoader, Dataset

from paddle_shard import Mixture, Packed, Stream
from paddle_shard.errors import (
    ArgumentError,
    DataReadError,
    PaddleShardError,
    StateError,
)
from paddle_shard.testing import on_each_rank
from tests.helpers import local, mesh, sharded
from tests.simulation import life_defects, seeds
from tests.simulation.life_reference import (
    INDEXED,
    MIXED,
    MIXTURES,
    MORE,
    PARTS,
    ROW,
    SOURCES,
    STREAMS,
    UNKNOWN,
    WINDOW,
    Life,
    Settings,
    documents,
    order,
    rows_of,
)
from tests.simulation.seeds import Failed

LIVES = 12
"""Lives of a seed."""
TO_LAST, TO_END = 50, 51
"""Steps to deliver: up to the last one, or until the iterator has ended, too."""
ACTS = 20
"""Acts of a life."""
WAYS = {
    "deliver": 8,
    "begin": 1,
    "leave": 1,
    "set_epoch": 4,
    "save": 2,
    "load": 3,
    "certify": 3,
    "refuse": 2,
}
"""Act -> its weight. As rules of their own, Hypothesis would leave out some of them in each life."""
GRIDS = st.sampled_from(
    [(1, 1), (1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]
)
SIZES = st.one_of(
    st.sampled_from([((0, 6),), ((0, 12),)]),
    st.tuples(
        st.integers(1, 90), st.sampled_from([(6, 12), (12, 6), (12, 18)])
    ).map(lambda found: ((0, found[1][0]), (found[0], found[1][1]))),
)
WEIGHTS = [(2, 1, 0), (1, 1, 0), (1, 3, 0), (3, 2, 2)]


# Loaders


class Ids(Dataset):
    """Each sample is its index, and some fail."""

    def __init__(self, first, length, bad=()):
        self.first = first
        self.length = length
        self.bad = bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"bad sample {index}")
        return self.first + index


class Adds:
    """Maps samples of a stream, and fails for some."""

    def __init__(self, bad):
        self.bad = bad

    def __call__(self, sample):
        if sample in self.bad:
            raise ValueError(f"bad sample {sample}")
        return sample + 500


def is_kept(sample):
    return sample % 3 != 0


def ends_of(samples):
    return 1000 * samples[0] + samples[-1]


def data_of(given):
    """Return the data set, or stream, of a kind."""
    schedule = [
        (
            first,
            {
                name: weight
                for name, weight in zip(SOURCES, weights, strict=True)
                if weight
            },
        )
        for first, weights in given.weights
    ]
    names = [
        name
        for number, name in enumerate(SOURCES)
        if any(weights[number] for _, weights in given.weights)
    ]
    if given.kind in MIXTURES:
        sources = {
            name: Ids(1000 * number, SOURCES[name])
            for number, name in enumerate(names)
        }
        return Mixture(sources, weights=schedule, num_samples=given.length)
    if given.kind in MIXED:
        items = {
            name: range(1000 * number, 1000 * number + SOURCES[name] + MORE)
            for number, name in enumerate(names)
        }
        if given.kind == "mixed functions":
            items = {
                name: partial(iter, values) for name, values in items.items()
            }
        streams = {name: Stream.of(values) for name, values in items.items()}
        return Stream.mixture(streams, schedule, stop=given.stop).in_parts(
            PARTS
        )
    if given.kind == "packed":
        return Packed(
            [{"input_ids": ids} for ids in arrays(given.length)], length=ROW
        )
    stream = Stream.of(range(given.length))
    stages = {
        "mapped": lambda: stream.map(Adds(given.bad)),
        "filtered": lambda: stream.filter(is_kept).map(Adds(())),
        "windowed": lambda: stream.shuffle(WINDOW),
        "batched": lambda: stream.batch(2).map(ends_of),
    }
    if given.kind in stages:
        return stages[given.kind]().in_parts(PARTS)
    return Ids(0, given.length, given.bad)


def arrays(length):
    import numpy as np

    return [np.array(tokens) for tokens in documents(length)]


def loader_of(given):
    """Make the loader of this rank. The data axis comes second, so that ranks of one data rank lie apart."""
    ids = [
        [m * given.ranks + d for d in range(given.ranks)]
        for m in range(given.mp)
    ]
    options = {
        "tail": given.tail,
        "seed": given.seed,
        "prefetch": given.prefetch,
        "on_error": given.on_error,
        "batch_size": [*given.sizes] if len(given.sizes) > 1 else None,
        "skip_steps": [*given.skip] or None,
    }
    is_shuffled = given.kind in ("shuffled", "packed", "mixture")
    dataloader = DataLoader(
        data_of(given),
        batch_size=given.sizes[0][1],
        num_workers=given.workers,
        **({"shuffle": True} if is_shuffled else {}),
    )
    return sharded(dataloader, mesh(ids, "mp", "dp"), "dp", **options)


def values_of(batch):
    """Return the sample of each of this rank's rows."""
    if isinstance(batch, dict):
        return [tuple(row) for row in local(batch["input_ids"])]
    return local(batch)


def rows_here(batches):
    """Return (sample, whether it is real) of each of this rank's rows of the next step; None at the end."""
    batch = next(batches, None)
    if batch is None:
        return None
    return list(zip(values_of(batch), local(batches.valid), strict=True))


def read_epoch(given, epoch):
    """Return the rows of each step of an epoch that is read from its beginning to its end."""

    loader = loader_of(given)
    loader.set_epoch(epoch)
    with iter(loader) as batches:
        return list(iter(lambda: rows_here(batches), None))


def name_of(given, sample):
    """Return what `where` is asked for a sample."""
    if given.kind in MIXTURES:
        return "abc"[sample // 1000], sample % 1000
    if given.kind == "packed":
        rows = [
            tuple(row["input_ids"].tolist()) for row in _rows_of_packed(given)
        ]
        return rows.index(sample)
    return sample


def _rows_of_packed(given):
    packed = data_of(given)
    return [packed[index] for index in range(len(packed))]


def expect(what, got, wanted):
    if got != wanted:
        raise Failed(f"{what}: got {got}, documented {wanted}")


class Gathering(Exception):
    """Has what a rank would send to the others."""


# Lives


class LifeOfARun(RuleBasedStateMachine):
    """Loaders of simulated ranks, beside the run that the documentation describes."""

    trace = staticmethod(lambda line: None)
    counts = None

    @initialize(
        kind=st.sampled_from(INDEXED * 2 + STREAMS),
        length=st.integers(12, 40),
        seed=st.integers(0, 2),
        data=st.data(),
    )
    def make(self, kind, length, seed, data):
        draw = data.draw
        length += MORE * (kind in (*STREAMS, "packed"))
        bad = ()
        if kind in ("in order", "shuffled", "mapped"):
            bad = tuple(
                sorted(draw(st.sets(st.integers(0, length - 1), max_size=2)))
            )
        weights = ((0, WEIGHTS[0]),)
        if kind in MIXTURES + MIXED and draw(st.booleans()):
            weights += (
                (draw(st.integers(1, 50)), draw(st.sampled_from(WEIGHTS[1:3]))),
            )
        skip = ()
        if kind in INDEXED:
            ranges = st.tuples(st.integers(0, 12), st.integers(1, 3))
            skip = tuple(
                (first, first + count)
                for first, count in draw(st.lists(ranges, max_size=1))
            )
        given = Settings(
            kind,
            length,
            seed,
            bad,
            weights,
            draw(st.sampled_from(["first", "all"])),
            skip=skip,
        )
        self.saved = []
        self.iterators = []
        self.has_mixed_sizes = False
        self.build(replace(given, **self.changes(given, draw)))
        self.check()

    def changes(self, given, draw):
        """Draw what may differ between save and resume."""
        ranks, mp = draw(GRIDS) if given.kind not in UNKNOWN else (1, 1)
        tails = ["pad", "fill", "drop"]
        if given.kind in STREAMS:
            tails = ["pad", "drop"]
            if given.kind in ("batched", *MIXED):
                tails.append("repeat")
        on_error = "skip"
        if given.bad and given.kind in INDEXED and ranks * mp == 1:
            on_error = draw(st.sampled_from(["skip", "raise"]))
        sizes = draw(
            SIZES
            if given.kind in INDEXED
            else st.sampled_from([((0, 6),), ((0, 12),)])
        )
        has_workers = ranks * mp == 1 and draw(st.integers(0, 19)) == 19
        return {
            "tail": draw(st.sampled_from(tails)),
            "sizes": sizes,
            "on_error": on_error,
            "ranks": ranks,
            "mp": mp,
            "prefetch": draw(st.sampled_from([0, 0, 1, 2, 3])),
            "workers": 2 if has_workers else 0,
        }

    def extended(self, given, start, draw):
        """Draw schedules that differ after a position only."""
        found = {}
        if given.kind in MIXTURES + MIXED:
            at = max(1, start.samples)
            more = 2 * PARTS
            if given.kind in MIXTURES:
                at = max(1, start.epoch * given.length + start.samples)
                more = 0
            kept = tuple(entry for entry in given.weights if entry[0] < at)
            first = at + more + draw(st.integers(0, 30))
            found["weights"] = (*kept, (first, draw(st.sampled_from(WEIGHTS))))
        if given.kind in INDEXED:
            step = start.steps_before + len(start.past)
            kept = tuple(
                (first, min(end, step) if first < step < end else end)
                for first, end in given.skip
                if first < step
            )
            first = step + draw(st.integers(0, 4))
            found["skip"] = (*kept, (first, first + draw(st.integers(1, 2))))
        return found

    def build(self, given):
        self.settings = given
        self.life = Life(given)
        self.world = range(given.ranks * given.mp)
        self.loaders = self.each(lambda rank: loader_of(given))
        self.trace(f"make {given}")
        if self.counts is not None:
            self.counts["loaders"] += len(self.world)

    def each(self, do):
        """Return what each rank returns, by rank."""
        if len(self.world) == 1:  # which this process is
            return {0: do(0)}
        ranks = iter(self.world)
        return on_each_rank(self.world, lambda: do(next(ranks)))

    def close(self):
        for of_ranks, _ in self.iterators:
            self.each(lambda rank, of_ranks=of_ranks: of_ranks[rank].close())
        self.iterators = []

    def teardown(self):
        if hasattr(self, "loaders"):
            self.close()
            self.each(lambda rank: self.loaders[rank].close())

    @rule(
        name=st.sampled_from(
            [name for name in WAYS for _ in range(WAYS[name])]
        ),
        data=st.data(),
    )
    def act(self, name, data):
        getattr(self, name)(data.draw)

    # Iterators

    def begin(self, draw=None):
        if len(self.iterators) == 3:
            return
        of_ranks = self.each(lambda rank: iter(self.loaders[rank]))
        it = self.life.begin()
        self.iterators.append((of_ranks, it))
        self.trace(
            f"begin {it.number}: epoch {it.epoch}, {it.start.samples} samples"
        )
        expect("epoch", {one.epoch for one in of_ranks.values()}, {it.epoch})
        self.check()

    def deliver(self, draw):
        if not self.iterators:
            self.begin()
        steps = draw(st.sampled_from([1, 1, 2, 3, TO_LAST, TO_END, TO_END]))
        chosen = self.iterators[draw(st.integers(0, len(self.iterators) - 1))]
        of_ranks, it = chosen
        self.trace(f"deliver {steps} of {it.number}")
        for _ in range(steps):
            taken = it.next()
            if taken is None and steps == TO_LAST:
                break
            if taken is None:
                found = self.each(lambda rank: rows_here(of_ranks[rank]))
                expect("a step behind the end", {*found.values()}, {None})
                self.iterators.remove(chosen)
                self.life.end(it)
                if draw(st.booleans()):
                    self.choose(it.epoch)  # once more, from its beginning
                break
            step = it.steps[taken - 1]
            rows = rows_of(self.settings, it.start, step)
            read = self.samples_read(it, step, rows)
            if self.settings.on_error == "raise" and read & {
                *self.settings.bad
            }:
                self.fail(chosen)
                break
            found = self.each(lambda rank: rows_here(of_ranks[rank]))
            self.compare(found, rows)
            self.life.deliver(it, taken)
            number = len(it.start.past) + taken
            expect("step", {one.step for one in of_ranks.values()}, {number})
            self.check()
            self.look(it, number - 1, rows)
        self.check()

    def samples_read(self, it, step, rows):
        """Return the samples that the ranks read for a step, also for padding; of a stream, none are named."""
        given = self.settings
        if given.is_stream:
            return set()
        samples = order(given, it.epoch)
        padding = [
            samples[k % len(samples)] for k in range(len(rows) - step.count)
        ]
        read = [*samples[step.first : step.first + step.count], *padding]
        of_rank = len(rows) // given.ranks
        for first in range(0, len(rows), of_rank):
            # A rank that can read none of its rows, and has read none before, fails.
            is_all_bad = {*read[first : first + of_rank]} <= {*given.bad}
            hypothesis.assume(given.on_error == "raise" or not is_all_bad)
        return {*read}

    def compare(self, found, rows):
        ranks = self.settings.ranks
        expect("a step less", None in found.values(), False)
        for first in self.world[::ranks]:
            got = [
                row
                for rank in range(first, first + ranks)
                for row in found[rank]
            ]
            expect(
                "valid",
                [is_real for _, is_real in got],
                [is_real for _, is_real in rows],
            )
            pairs = zip(got, rows, strict=True)
            known = [
                (None if row[0] is None else sample, is_real)
                for (sample, is_real), row in pairs
            ]
            expect("rows", known, rows)
        if self.counts is not None:
            self.counts["steps"] += 1

    def fail(self, chosen):
        of_ranks, it = chosen
        self.trace(f"fail {it.number}")
        with pytest.raises(DataReadError, match="bad sample"):
            self.each(lambda rank: next(of_ranks[rank]))
        with pytest.raises(PaddleShardError, match="has failed before"):
            self.each(lambda rank: next(of_ranks[rank]))
        self.iterators.remove(chosen)

    def leave(self, draw):
        if not self.iterators:
            return
        of_ranks, it = self.iterators.pop(
            draw(st.integers(0, len(self.iterators) - 1))
        )
        self.trace(f"leave {it.number}")
        self.each(lambda rank: of_ranks[rank].close())
        self.check()

    def set_epoch(self, draw):
        now = self.life.epoch
        saved = [one.start.epoch for _, one in self.saved]
        self.choose(
            draw(st.sampled_from([now, max(0, now - 1), now + 1, *saved]))
        )

    def choose(self, epoch):
        if (
            self.settings.skip
            and self.has_mixed_sizes
            and epoch < self.life.known[0]
        ):
            return  # how many steps earlier epochs had is not said then
        for chosen in list(self.iterators):
            if chosen[1].epoch == epoch < self.life.epoch:
                self.each(lambda rank, of=chosen[0]: of[rank].close())
                self.iterators.remove(chosen)
        self.trace(f"set_epoch({epoch})")
        self.each(lambda rank: self.loaders[rank].set_epoch(epoch))
        self.life.epoch = epoch
        self.check()

    # What the loader says of itself

    def check(self):
        """The state, on each rank, is where the run stands."""
        start = self.life.position()
        states = {rank: self.loaders[rank].state_dict() for rank in self.world}
        wanted = {
            "epoch": start.epoch,
            "ended": start.ended,
            "samples": start.samples,
            "steps": len(start.past),
        }
        for rank, state in states.items():
            loader = self.loaders[rank]
            expect("state", {name: state[name] for name in wanted}, wanted)
            expect("epoch", loader.epoch, self.life.epoch)
            if not self.settings.is_stream:
                expect(
                    "steps before", state["steps_before"], start.steps_before
                )
                expect("len", len(loader), self.life.num_batches())
            expect("JSON", state, json.loads(json.dumps(state)))
        return states

    def look(self, it, number, rows):
        """`where` names the place of a sample that was just delivered."""
        given = self.settings
        if given.is_stream or self.life.present() is not it:
            return
        row = number % len(rows)
        sample, is_real = rows[row]
        if not is_real:
            return
        of_rank = len(rows) // given.ranks
        place = (number, row // of_rank, row % of_rank)
        loader = self.loaders[0]
        name = name_of(given, sample)
        found = loader.where(sample=name)
        places = found if given.kind in MIXTURES else [found]
        found = [(one.step, one.data_rank, one.row) for one in places]
        expect(f"where {place}", place in found, True)
        if given.kind in MIXTURES:
            drawn = loader.sources()
            upto = it.epoch * given.length + it.position.samples
            run = [one for e in range(it.epoch + 1) for one in order(given, e)][
                :upto
            ]
            counts = Counter("abc"[one // 1000] for one in run)
            expect(
                "sources",
                {name: one.drawn for name, one in drawn.items()},
                {name: counts[name] for name in drawn},
            )

    def certify(self, draw):
        if self.settings.is_stream:
            with pytest.raises(ArgumentError, match="stream"):
                self.loaders[0].certificate()
            return

        def gathering(legs, *others):
            raise Gathering(legs)

        def sent(rank):
            with (
                mock.patch("paddle_shard.run.run.gathered", gathering),
                pytest.raises(Gathering) as raised,
            ):
                self.loaders[rank].certificate()
            return raised.value.args[0]

        accounts = json.loads(json.dumps(list(self.each(sent).values())))
        with mock.patch("paddle_shard.run.run.gathered", lambda *_: accounts):
            found = self.each(lambda rank: self.loaders[rank].certificate())
        expect("certificates", len({*map(str, found.values())}), 1)
        self.trace(f"certify: {found[0]}")
        wanted = self.life.certificate()
        got = {name: getattr(found[0], name) for name in wanted}
        expect("certificate", got, wanted)
        self.check()

    # States

    def save(self, draw=None):
        states = json.loads(json.dumps(list(self.check().values())))
        self.trace(f"save {self.life.position()}")
        self.saved = [*self.saved[-3:], (states, self.life.save())]

    def load(self, draw):
        """Load a state into the same loaders, or into others on another mesh and with other arguments."""
        states, saved = self.take(draw)
        how = draw(st.sampled_from(["same", "other", "other"]))
        old = saved.settings
        new = self.settings
        if how == "other":
            new = replace(old, **self.changes(old, draw))
            if draw(st.booleans()):
                new = replace(new, **self.extended(old, saved.start, draw))
        elif (new.weights, new.skip) != (old.weights, old.skip):
            return
        has_grid = (new.ranks, new.mp) == (old.ranks, old.mp)
        by_rank = has_grid and draw(st.booleans())
        if how == "other":
            self.close()
            self.each(lambda rank: self.loaders[rank].close())
            self.build(new)
        override = []
        if new.tail != old.tail:
            override = ["tail"]
            with pytest.raises(StateError, match="tail"):
                self.each(
                    lambda rank: self.loaders[rank].load_state_dict(states[0])
                )
        self.trace(f"load {saved.start}, by rank: {by_rank}")
        self.each(
            lambda rank: self.loaders[rank].load_state_dict(
                states[rank if by_rank else 0], override=override
            )
        )
        self.has_mixed_sizes |= (new.sizes, new.tail) != (old.sizes, old.tail)
        self.life.load(saved, by_rank=by_rank)
        self.check()

    def take(self, draw):
        """Return a state: of the present position, or one that was saved before."""
        which = draw(st.integers(0, 3))
        if which == 0 or not self.saved:
            self.save()
        return self.saved[-1 - which % len(self.saved)]

    def refuse(self, draw):
        """A state of another run, or that differs before its position, is refused by name."""
        states, saved = self.take(draw)
        given = saved.settings
        start = saved.start
        indexed = given.kind in INDEXED
        changes = {"damaged": ({}, "damaged")}
        if given.kind != "packed":
            length = {"length": given.length + 1}
            changes["length"] = (length, "num_samples" if indexed else "stream")
        if given.kind in MIXED:
            del changes["length"]
        if given.kind in ("shuffled", "packed", "mixture", "windowed"):
            changes["seed"] = ({"seed": given.seed + 1}, "seed")
        if given.kind in ("in order", "shuffled"):
            other = {"in order": "shuffled", "shuffled": "in order"}[given.kind]
            changes["order"] = ({"kind": other}, "shuffle")
        if given.kind in MIXTURES + MIXED and start.samples:
            entry = (0, (5, 1, 0))
            name = "mixture" if indexed else "stream"
            changes["weights"] = (
                {"weights": (entry, *given.weights[1:])},
                f"{name}: saved .*, now ",
            )
        step = start.steps_before + len(start.past)
        if (
            indexed
            and step
            and not any(a <= step - 1 < b for a, b in given.skip)
        ):
            skip = (*given.skip, (step - 1, step + 1))
            changes["skip"] = ({"skip": skip}, "skip_steps: saved .*, now ")
        names = [*changes, *changes.keys() & {"weights", "skip"}]
        name = draw(st.sampled_from(sorted(names)))
        self.trace(f"refuse {name}")
        change, match = changes[name]
        state = dict(states[0])
        if name == "damaged":
            state["samples"] += 1
        loader = loader_of(replace(given, ranks=1, mp=1, workers=0, **change))
        with pytest.raises(StateError, match=match):
            loader.load_state_dict(state)
        after = loader.state_dict()
        expect(
            "state",
            (after["epoch"], after["samples"], after["ended"]),
            (0, 0, False),
        )


def run_lives(lives, trace, phases, seed=None, acts=ACTS):
    """Run lives; return the counts of what was done. Raises Failed."""
    counts = {"loaders": 0, "steps": 0}
    attributes = {"counts": counts, "trace": staticmethod(trace)}
    machine = type("LifeOfARun", (LifeOfARun,), attributes)
    settings = hypothesis.settings(
        max_examples=lives,
        stateful_step_count=acts,
        phases=phases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    if seed is not None:
        machine = hypothesis.seed(seed)(machine)
    with with_reporter(trace):
        try:
            run_state_machine_as_test(machine, settings=settings)
        except Failed:
            raise
        except (
            AssertionError,
            PaddleShardError,
            pytest.fail.Exception,
        ) as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
    return counts


def run(seed, trace=None):
    """Run the lives of a seed; return (digest of all that has happened, loaders, steps). Raises Failed."""
    digest = hashlib.sha256()

    def note(line):
        digest.update(line.encode())
        if trace:
            trace(line)

    counts = run_lives(LIVES, note, [Phase.generate], seed)
    return digest.hexdigest(), counts["loaders"], counts["steps"]


def shrunk(seed):
    """Return the rules of a smaller life that fails too, and how."""
    lines = []
    try:
        with mock.patch.object(engine, "MAX_SHRINKING_SECONDS", 60):
            run_lives(LIVES, lines.append, [Phase.generate, Phase.shrink], seed)
    except Failed as failure:
        is_first = [line.startswith("make") for line in lines]
        last = len(lines) - 1 - is_first[::-1].index(True)
        return "\n  ".join(lines[last:]), failure
    return "none", "no failure"


def main():
    module = sys.modules[__name__]
    defects = life_defects.DEFECTS
    options = seeds.parser_of(module, defects).parse_args()
    seeds.main(options, module, defects, ("loaders", "steps"))


if __name__ == "__main__":
    main()
