"""Mixtures of streams against an oracle that draws one sample after the other."""

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

from paddle_shard import Stream
from paddle_shard.errors import StateError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import mesh, sharded
from tests.trials import trials

NAMES = ("web", "code", "chat", "new", "last")
PARTS = 4


def turns(weights, num):
    """Which source is drawn, for the first `num` draws: of those that are due, the one with the earliest deadline."""
    shares = {
        name: Fraction(weight, sum(weights.values()))
        for name, weight in weights.items()
    }
    slack = Fraction(1, max(1, 2 * len(shares) - 2))
    drawn, found = Counter(), []
    for k in range(1, num + 1):
        due = [
            name for name, share in shares.items() if k * share - drawn[name] >= slack
        ]
        found.append(
            min(
                due,
                key=lambda name: math.floor((drawn[name] + 1 - slack) / shares[name]),
            )
        )
        drawn[found[-1]] += 1
    return found


def part_by_hand(given, part, stripe):
    """What a part of the mixture holds: sample i of each source is of part (i // stripe) mod P."""
    own = {
        name: [
            1000 * NAMES.index(name) + i
            for i in range(length)
            if i // stripe % PARTS == part
        ]
        for name, length in given["lengths"].items()
    }
    at, ended, found = Counter(), set(), []
    for name in turns(given["weights"], 400):
        if at[name] and at[name] % len(own[name]) == 0:
            ended.add(name)
            if len(ended) == (len(own) if given["stop"] == "all" else 1):
                return found
        found.append(own[name][at[name] % len(own[name])])
        at[name] += 1
    raise AssertionError("no end")


def steps_by_hand(given, at, stripe):
    """(rows, which are real) of each step from a position of the parts on; rows that are not real may be any."""
    parts = [part_by_hand(given, part, stripe) for part in range(PARTS)]
    size, tail, lengths = given["rows"], given["tail"], [len(part) for part in parts]
    while at < (min(lengths) - size + 1 if tail == "drop" else max(lengths)):
        rows = [
            (part[k % len(part)] if k < len(part) or tail == "repeat" else None)
            for part in parts
            for k in range(at, at + size)
        ]
        yield rows
        at += size


def stream_loader(given, ranks):
    known = given["known"]
    streams = {
        name: Stream.of(values if known else lambda values=values: iter(values))
        for name, length in given["lengths"].items()
        for values in [[1000 * NAMES.index(name) + i for i in range(length)]]
    }
    mixed = Stream.mixture(streams, given["weights"], stop=given["stop"]).in_parts(
        PARTS
    )
    return sharded(
        DataLoader(mixed, batch_size=PARTS * given["rows"]),
        mesh(list(range(ranks))),
        tail=given["tail"],
    )


@settings(max_examples=trials(60))
@given(
    lengths=st.tuples(
        st.integers(16, 30), st.integers(16, 30), st.sampled_from([0, 16, 20])
    ),
    weights=st.tuples(*[st.integers(1, 4)] * 3),
    stop=st.sampled_from(["first", "all"]),
    known=st.booleans(),
    stops=st.lists(
        st.tuples(
            st.integers(0, 6),
            st.sampled_from([1, 2]),
            st.integers(1, 4),
            st.sampled_from(["pad", "drop", "repeat"]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_mixture_of_streams_is_resumed_at_any_step_on_any_mesh_with_any_tail(
    lengths, weights, stop, known, stops
):
    """Each stop: (steps before it, data ranks, rows of each part in a batch, tail) of the stretch that it ends."""
    of = {
        name: (length, weight)
        for name, length, weight in zip(NAMES, lengths, weights, strict=False)
        if length
    }
    given = {
        "lengths": {name: length for name, (length, _) in of.items()},
        "weights": {name: weight for name, (_, weight) in of.items()},
        "stop": stop,
        "known": known,
    }
    state, at, stripe, count, tail = None, 0, None, 0, None
    for steps, ranks, rows, now in stops:
        given = {**given, "rows": rows, "tail": now}
        ranks = (
            ranks if known else 1
        )  # where lengths are not known, ranks tell each other that a part has ended
        stripe = rows if at == 0 else stripe  # that of the first batch of the epoch
        left = (
            [] if state and state["ended"] else list(steps_by_hand(given, at, stripe))
        )

        def run(
            given=given,
            ranks=ranks,
            state=state,
            changed=tail not in (None, now),
            steps=steps,
        ):
            loader = stream_loader(given, ranks)
            if state is not None:
                loader.load_state_dict(state, override=["tail"] if changed else [])
            length, found = len(loader) if given["known"] else None, []
            with iter(loader) as batches:
                for batch in islice(batches, steps):
                    value, valid = (
                        one._local_value().numpy().tolist()
                        for one in (batch, batches.valid)
                    )
                    found.append(
                        [
                            row if real else None
                            for row, real in zip(value, valid, strict=True)
                        ]
                    )
                over = len(found) < steps and next(batches, None) is None
            return found, json.loads(json.dumps(loader.state_dict())), length, over

        per_rank = on_each_rank(range(ranks), run)
        told = per_rank[0]
        for step in range(len(told[0])):
            assert [
                row for rank in range(ranks) for row in per_rank[rank][0][step]
            ] == left[step]
        assert len(told[0]) == min(steps, len(left))
        assert all(one[1:] == told[1:] for one in per_rank.values())
        assert told[2] in (None, count + len(left))
        state, tail = told[1], now
        at, count = (
            (0, 0) if told[3] else (at + len(told[0]) * rows, count + len(told[0]))
        )
        assert (state["samples"], state["steps"]) == (at * PARTS, count)


def scheduled(weights, rows, ranks=1, *, filtered=False):
    streams = {
        name: Stream.of(range(1000 * at, 1000 * at + 64))
        for at, name in enumerate(NAMES[:3])
    }
    mixed = Stream.mixture(streams, weights)
    mixed = (mixed.filter(bool) if filtered else mixed).in_parts(PARTS)
    return sharded(DataLoader(mixed, batch_size=PARTS * rows), mesh(list(range(ranks))))


def taken(batches, steps=None):
    return [batch._local_value().numpy().tolist() for batch in islice(batches, steps)]


@settings(max_examples=trials(20))
@given(
    switch=st.integers(1, 90),
    steps=st.integers(1, 6),
    rows=st.integers(1, 3),
    ranks=st.sampled_from([1, 2]),
)
def test_the_schedule_of_a_stream_mixture_is_extended_after_the_position(
    switch, steps, rows, ranks
):
    schedule = [(0, {"web": 2, "code": 1}), (switch, {"web": 1, "chat": 1})]
    straight = taken(iter(scheduled(schedule, rows)))
    due = [entry for entry in schedule if entry[0] < PARTS * rows * steps]
    first = scheduled(due, rows)
    with iter(first) as batches:
        begun = taken(batches, steps)
    state = json.loads(json.dumps(first.state_dict()))

    def run():
        loader = scheduled(schedule, rows, ranks)
        loader.load_state_dict(state)
        return taken(iter(loader))

    per_rank = on_each_rank(range(ranks), run).values()
    assert (
        begun
        + [
            [row for part in parts for row in part]
            for parts in zip(*per_rank, strict=True)
        ]
        == straight
    )
    with pytest.raises(
        StateError,
        match="stream: saved .*, now .* only after the position",
    ):
        scheduled([(0, {"web": 1, "code": 1}), *schedule[1:]], rows).load_state_dict(
            state
        )


def test_a_schedule_is_not_extended_before_a_stage_that_changes_positions():
    first = scheduled([(0, {"web": 2, "code": 1})], 2, filtered=True)
    next(iter(first))
    extended = scheduled(
        [(0, {"web": 2, "code": 1}), (80, {"chat": 1})], 2, filtered=True
    )
    with pytest.raises(StateError, match="stream: saved"):
        extended.load_state_dict(first.state_dict())
