"""Random runs: what the record tells of them, against what each rank was given, one process playing all ranks."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paddle.io import BatchSampler, DataLoader

from paddle_shard import Mixture, ShardPlan
from paddle_shard.extras.cli.places import samples_of
from paddle_shard.extras.cli.proof import proof_of
from paddle_shard.extras.cli.timeline import timeline
from paddle_shard.plan.orders import ordering_of
from paddle_shard.run.record_lines import read_record
from paddle_shard.testing.simulated import simulated_rank
from tests.helpers import Made, mesh, sharded
from tests.orders_and_tails import ALL, BLOCKS, UNNAMED
from tests.trials import trials

LENGTH = 43


@pytest.mark.parametrize("shuffle", [*ALL, *UNNAMED, "mixture"], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_record_remakes_the_order_from_a_saved_state(shuffle, ranks):
    if shuffle == "mixture":
        schedule = [(0, {"a": 2, "b": 1}), (10, {"a": 1, "b": 1})]
        shuffle = Mixture(
            {"a": Made(length=30), "b": Made(length=7)},
            schedule,
            num_samples=LENGTH,
        ).ordering(
            ShardPlan(
                num_samples=5, batch_size=1, num_data_ranks=1, shuffle=True
            ).ordering
        )
    plan = ShardPlan(
        num_samples=LENGTH,
        batch_size=8,
        num_data_ranks=ranks,
        shuffle=shuffle,
        seed=3,
        accumulation=2,
    )
    saved = json.loads(json.dumps(plan.fingerprint()))

    again = ordering_of(saved)

    assert again == plan.ordering
    other = ShardPlan(
        num_samples=LENGTH,
        batch_size=8,
        num_data_ranks=ranks,
        shuffle=again,
        seed=3,
        accumulation=2,
    )
    for epoch in (0, 2):
        one, two = (
            of.samples(epoch=epoch, first=0, end=of.num_positions)
            for of in (plan, other)
        )
        assert one.tolist() == two.tolist()


def test_order_that_nobody_knows_is_told_as_that():
    assert ordering_of({"shuffle": "mine"}) is None


def dataset(kind):
    if kind != "mixture":
        return Made(lambda i: np.array([i]), LENGTH)
    sources = {
        "a": Made(lambda i: np.array([i]), 40),
        "b": Made(lambda i: np.array([1000 + i]), 9),
    }
    return Mixture(sources, {"a": 5, "b": 2}, num_samples=LENGTH)


class Ranks:
    """The ranks of a job in one process, in lockstep; the first one writes the record."""

    def __init__(
        self, path, data_ranks, each, accumulation, kind, tail, skip_steps
    ):
        self.world, self.loaders, self.batches = data_ranks, [], None
        at = mesh(list(range(data_ranks)))
        for rank in range(data_ranks):
            with simulated_rank(rank, data_ranks):
                data = dataset(kind)
                sampler = BatchSampler(
                    data, batch_size=data_ranks * each, shuffle=True
                )
                sampler._acc_steps = accumulation
                options = {"shuffle": BLOCKS} if kind == "blocks" else {}
                options |= {"record": path} if rank == 0 else {}
                options |= {"skip_steps": skip_steps}
                self.loaders.append(
                    sharded(
                        DataLoader(data, batch_sampler=sampler),
                        at,
                        tail=tail,
                        **options,
                    )
                )

    def all(self, function):
        found = []
        for rank in range(self.world):
            with simulated_rank(rank, self.world):
                found.append(function(rank))
        return found

    def take(self, most):
        """(epoch, step, [rows of each rank, None for one that is not real]) of up to so many steps."""
        for _ in range(most):
            if self.batches is None:
                self.batches = self.all(lambda rank: iter(self.loaders[rank]))
            found = self.all(lambda rank: next(self.batches[rank], None))
            if found[0] is None:
                self.batches = None
                return
            rows = []
            for batch, batches in zip(found, self.batches, strict=True):
                ids, valid = (
                    one._local_value().numpy().reshape(-1).tolist()
                    for one in (batch, batches.valid)
                )
                rows.append(
                    [
                        one if real else None
                        for one, real in zip(ids, valid, strict=True)
                    ]
                )
            yield self.batches[0].epoch, self.batches[0].step - 1, rows

    def save(self):
        return self.all(
            lambda rank: json.loads(json.dumps(self.loaders[rank].state_dict()))
        )[0]

    def load(self, state):
        self.batches = None
        self.all(lambda rank: self.loaders[rank].load_state_dict(state))


JOBS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3]),  # data ranks
        st.sampled_from([2, 4]),  # rows of each
        st.lists(
            st.one_of(
                st.tuples(st.just("take"), st.integers(1, 9)),
                st.tuples(st.just("save"), st.none()),
                st.tuples(st.just("leave"), st.none()),
                st.tuples(st.just("certificate"), st.none()),
                st.tuples(st.just("load"), st.integers(0, 5)),
            ),
            min_size=1,
            max_size=7,
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=trials(40))
@given(
    jobs=JOBS,
    accumulation=st.sampled_from([1, 2]),
    kind=st.sampled_from(["plain", "mixture", "blocks"]),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    skip_steps=st.sampled_from([None, None, [(3, 5)], [(0, 1), (9, 14)]]),
)
@example(
    jobs=[
        (
            1,
            4,
            [("take", 5), ("certificate", None), ("leave", None), ("take", 9)],
        )
    ],
    accumulation=1,
    kind="plain",
    tail="pad",
    skip_steps=None,
)
@example(
    jobs=[(1, 2, [("take", 5)]), (3, 4, [("take", 1)])],
    accumulation=2,
    kind="plain",
    tail="drop",
    skip_steps=None,
)
def test_record_tells_what_each_rank_was_given(
    jobs, accumulation, kind, tail, skip_steps
):
    if kind == "blocks":  # whose order depends on the rows of a micro-batch
        jobs = [(jobs[0][0], jobs[0][1], does) for _, _, does in jobs]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "run.jsonl"))
        delivered, told = _play(
            path, jobs, accumulation, kind, tail, skip_steps
        )
        lines, problems = read_record(path)
    assert problems == []
    if not told:
        return
    run = timeline(lines)
    ours = [
        (leg.start.epoch, step, _rows(leg, step))
        for leg in run.deliveries
        for step in range(leg.start.steps, leg.steps)
    ]
    # else left out
    ours = [
        one
        for one in ours
        if any(row is not None for of_rank in one[2] for row in of_rank)
    ]
    assert ours == [tuple(one) for _, *one in delivered]
    wanted = Counter(
        (epoch, one)
        for epoch, _, rows in ours
        for of in rows
        for one in of
        if one is not None
    )

    for epoch in run.epochs:
        proof = proof_of(run, epoch)
        # all could be, and were
        assert not [
            problem for problem in proof["problems"] if "read" in problem
        ]
        of_epoch = {
            one: count for (of, one), count in wanted.items() if of == epoch
        }
        assert proof["delivered"] == sum(of_epoch.values())
        if kind != "mixture":  # which draws a sample as often as it likes
            assert bool(proof["again"]) == any(
                count > 1 for count in of_epoch.values()
            )
            if "so far" not in proof["text"] and not proof["problems"]:
                assert len(of_epoch) == proof["num_samples"]
    for sample in {one for _, one in wanted}:
        name = (
            sample
            if kind != "mixture"
            else ("ab"[sample // 1000], sample % 1000)
        )
        places = [
            (leg.start.epoch, step)
            for leg, step, _ in run.places_of(name)
            if step < leg.steps
        ]
        hits = [
            (epoch, step)
            for _, epoch, step, rows in delivered
            for of in rows
            for one in of
            if one == sample
        ]
        assert places == hits


def _rows(leg, step):
    """What the record says each rank has had."""
    shares = samples_of(
        leg.plan, leg.job.meshes, leg.start.epoch, step, leg.skips
    )
    number = {"a": 0, "b": 1000}
    return [
        [
            number[one[0]] + one[1] if isinstance(one, list) else one
            for one in of["samples"]
        ]
        for of in shares
    ]


def _play(path, jobs, accumulation, kind, tail, skip_steps):
    """Play the jobs; return what counts in the end, and whether any line tells of it."""
    saved, way, told = [], [], False
    for number, (data_ranks, each, does) in enumerate(jobs, 1):
        times = (
            accumulation if kind == "blocks" or number % 2 else 3 - accumulation
        )
        ranks = Ranks(path, data_ranks, each, times, kind, tail, skip_steps)
        way = []  # nothing is continued unless a state is loaded
        for action, what in [
            *([("load", 5)] if number > 1 and saved else []),
            *does,
            ("save", None),
        ]:
            if action == "take":
                way += [(number, *step) for step in ranks.take(what)]
            elif action == "save":
                saved.append((ranks.save(), list(way)))
                told = told or bool(way)
            elif action == "leave":
                ranks.batches = None
            elif (
                action == "certificate" and data_ranks == 1
            ):  # which ranks make together
                ranks.loaders[0].certificate()
            elif action == "load" and saved:
                state, _ = saved[what % len(saved)]
                ranks.load(state)
                # Of jobs that have saved the same position, nobody knows which was loaded. The newest counts.
                names = state.keys() - {"certificate", "contents", "checksum"}
                alike = [
                    way
                    for one, way in saved
                    if all(one[name] == state[name] for name in names)
                ]
                way = list(alike[-1])
    return way, told
