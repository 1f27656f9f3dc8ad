"""Data that changes again and again on the way, against an oracle that draws one sample after the other."""

import copy
import json
import math
from collections import Counter
from fractions import Fraction
from itertools import islice
from unittest import mock

import numpy as np
import paddle.distributed as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

from paddle_shard import Mixture, Stream
from paddle_shard.errors import ArgumentError, DataReadError, StateError
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation, permutation
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import Made, mesh, sharded
from tests.trials import trials

NAMES = ("web", "code", "chat", "new", "last")


class Oracle:
    """The run as docs/mixtures.md tells it. Only the order of a shuffled pass of a source is the library's."""

    def __init__(self):
        self.segments, self.lengths = [], []
        """(first position, {name: (weight, length)}) and (first epoch, samples of an epoch), of all that was given."""
        self.steps, self.samples = set(), {}
        """What is left out: (epoch, position), and (name, index) -> (epoch, position) from which on."""

    def length(self, epoch):
        return [samples for first, samples in self.lengths if first <= epoch][-1]

    def first(self, epoch):
        return sum(self.length(one) for one in range(epoch))

    def change(self, given, epoch, samples):
        """Other sources, weights or lengths, from a saved sample on."""
        at, begins = self.first(epoch), epoch + (samples > 0)
        at += samples
        now = [one for one in given.schedule() if one[0] <= at][-1]
        later = [one for one in given.schedule() if one[0] > at]
        self.segments = [*(one for one in self.segments if one[0] < at), (at, now[1]), *later]
        self.lengths = [*(one for one in self.lengths if one[0] < begins), (begins, given.epoch_length())]

    def longest(self, name):
        """The longest that a source ever was: none may come back shorter."""
        return max(sources.get(name, (0, 0))[1] for _, sources in self.segments)

    def draws(self, end):
        """(name, index) at each position of the run."""
        found, passes = [], {}
        for number, (first, sources) in enumerate(self.segments):
            last = self.segments[number + 1][0] if number + 1 < len(self.segments) else end
            weights = {name: weight for name, (weight, _) in sources.items() if weight}
            slack, drawn = Fraction(1, max(1, 2 * len(weights) - 2)), Counter()
            for k in range(1, min(last, end) - first + 1):
                share = {name: Fraction(weight, sum(weights.values())) for name, weight in weights.items()}
                may = [name for name in weights if k * share[name] - drawn[name] >= slack]
                name = min(may, key=lambda one: math.floor((drawn[one] + 1 - slack) / share[one]))
                drawn[name] += 1
                of_pass = passes.get(name, (-1, 0, 0))
                if of_pass[1] == of_pass[2]:  # it begins a new pass, with the length of now
                    of_pass = of_pass[0] + 1, 0, sources[name][1]
                found.append((name, self.index(name, *of_pass)))
                passes[name] = of_pass[0], of_pass[1] + 1, of_pass[2]
        return found

    shuffle = False

    def index(self, name, number, place, length):
        if not self.shuffle:
            return place
        order = Permutation(length, derive_key("source", name, 0, number, size=64))
        return int(order(np.array([place]))[0])

    def samples_of(self, epoch):
        """The samples of an epoch, in their order."""
        return self.draws(self.first(epoch + 1))[self.first(epoch) :]

    def left_out(self, epoch, position, sample):
        return (epoch, position) in self.steps or self.samples.get(sample, (math.inf,)) <= (epoch, position)

    def batches(self, epoch, at, given):
        """(first position, end, rows: None for one that is left out, or a sample) of each step from a position on."""
        length, draws = self.length(epoch), self.samples_of(epoch)
        while at < length and not (given.tail == "drop" and length - at < given.batch):
            end = min(at + given.batch, length)
            rows = [None if self.left_out(epoch, k, draws[k]) else draws[k] for k in range(at, end)]
            yield at, end, rows
            at = end


class OracleOfOne(Oracle):
    """The run of a single data set."""

    def change(self, given, epoch, samples):
        self.lengths = [*(one for one in self.lengths if one[0] < epoch), (epoch, given.epoch_length())]

    def samples_of(self, epoch):
        places = np.arange(self.length(epoch))
        order = permutation(len(places), "order", 0, epoch)(places) if self.shuffle else places
        return [("web", index) for index in order.tolist()]


class Given:
    """What the user gives: a mixture, and how it is loaded."""

    mixes = True

    def __init__(self):
        self.sources = {"web": (5, 11), "code": (3, 7), "chat": (1, 3)}
        """(weight, length; 0: it is gone) by name."""
        self.switch, self.num_samples, self.stop = None, 20, "first"
        self.ranks, self.rows, self.tail = 1, 4, "pad"

    @property
    def batch(self):
        return self.ranks * self.rows

    def schedule(self):
        """(first position, {name: (weight, length)}) of the mixture alone."""
        found = [(0, self.sources)]
        if self.switch is not None:  # the weights turned around
            weights = [weight for weight, length in self.sources.values() if length]
            later = {name: (weights.pop(), length) if length else (0, 0) for name, (_, length) in self.sources.items()}
            found.append((self.switch, later))
        return found

    def epoch_length(self):
        if self.num_samples is not None:
            return self.num_samples
        shares, at = Counter(), 0
        ever = {name for _, sources in self.schedule() for name, (weight, _) in sources.items() if weight}
        every = all if self.stop == "all" else any
        while not every(shares[name] >= self.sources[name][1] for name in ever):
            sources = [one for one in self.schedule() if one[0] <= at][-1][1]
            total = sum(weight for weight, _ in sources.values())
            shares.update({name: Fraction(weight, total) for name, (weight, _) in sources.items()})
            at += 1
        return at

    def order(self):
        """What a state is bound to."""

        def shares(sources):
            total = sum(weight for weight, _ in sources.values())
            return {name: (Fraction(weight, total), length) for name, (weight, length) in sources.items()}

        return [(first, shares(sources)) for first, sources in self.schedule()]

    def too_short(self, oracle, epoch, begun):
        """Whether a saved position cannot be continued with sources of this length."""
        return any(0 < length < oracle.longest(name) for name, (_, length) in self.sources.items())

    def loader(self, shuffle):
        return self.loader_of(self.data(), shuffle)

    def data(self):
        sources = {
            name: Made(lambda i, first=1000 * place: np.array(first + i), length) if length else None
            for place, (name, (_, length)) in enumerate(self.sources.items())
        }
        weights = [(first, {name: weight for name, (weight, _) in one.items()}) for first, one in self.schedule()]
        return Mixture(sources, weights, num_samples=self.num_samples, stop=self.stop)

    def loader_of(self, data, shuffle):
        given = DataLoader(data, batch_size=self.batch, shuffle=shuffle)
        loader = sharded(given, mesh(list(range(self.ranks))), tail=self.tail)
        loader._run.ranks = tuple(range(self.ranks))  # of a job with all of them
        return loader


class GivenOne(Given):
    """A single data set."""

    mixes = False

    def __init__(self):
        super().__init__()
        self.sources = {"web": (1, 20)}

    def epoch_length(self):
        return self.sources["web"][1]

    def order(self):
        return []

    def too_short(self, oracle, epoch, begun):
        return begun and self.epoch_length() < oracle.length(epoch)

    def data(self):
        return Made(length=self.epoch_length())


def possible(given):
    """Whether there can be such a mixture, and a loader of it."""
    try:
        given.loader(False)
    except ArgumentError as error:
        if not any(why in str(error) for why in ("at least one must be above", "never comes", "leaves no batch")):
            raise
        return False
    return True


def edited(given, edits):
    """The same with some changes, of which those are left out that no mixture can have."""
    given = copy.deepcopy(given)
    for kind, place, number in edits:
        other, name = copy.deepcopy(given), NAMES[place]
        weight, length = other.sources.get(name, (0, 0))
        if kind == "length" and name in other.sources:  # grown, shrunk, or back
            other.sources[name] = (weight or 1, number)
        elif kind == "gone" and length:
            other.sources[name] = (0, 0)
        elif kind == "weight" and length:
            other.sources[name] = (number % 4, length)
        elif kind == "new" and len(other.sources) < len(NAMES):
            other.sources[NAMES[len(other.sources)]] = (1 + number % 3, number)
        elif kind == "epoch":
            other.num_samples, other.stop = [(20, "first"), (27, "first"), (None, "first"), (None, "all")][number % 4]
        elif kind == "switch":
            other.switch = (None, 9, 30)[number % 3]
        elif kind == "tail":
            other.tail = ("pad", "fill", "drop")[number % 3]
        given = other if possible(other) else given
    return given


class Gathering(Exception):
    """Has what a rank would send to the others."""


class Job:
    """The loaders of all ranks, and where the oracle stands."""

    def __init__(self, given, oracle, shuffle):
        self.given, self.oracle, self.shuffle = given, oracle, shuffle
        self.oracle.shuffle = shuffle
        self.oracle.change(self.given, 0, 0)
        self.loaders, self.passes = self.each(lambda _: self.given.loader(shuffle)), None
        self.loaded = -1, 0, 0, 0, False
        """Epoch, position, step, steps that were delivered, if it had ended: of the loaded state, until it is used."""
        self.seen, self.asked = {}, 0
        """How often each position of each epoch was delivered, and the position of the run after the last of them."""
        self.set_epoch(0)

    def each(self, do):
        found = on_each_rank(range(self.given.ranks), lambda: do(dist.get_rank()))
        return [found[rank] for rank in range(self.given.ranks)]

    # Actions

    def run(self, steps):
        """Deliver some steps, or all of the epoch."""
        if self.passes is None:
            self.passes = self.each(lambda rank: iter(self.loaders[rank]))
        left = [one for one in self.left() if any(one[2])]
        wanted = left[:steps]
        here = {name for name, (_, length) in self.given.sources.items() if length}
        drawn = {sample[0] for _, _, rows in wanted for sample in rows if sample}
        lengths = self.each(lambda rank: len(self.loaders[rank]))
        assert lengths == [self.count + len(left)] * self.given.ranks
        if not drawn <= here:  # an earlier epoch is served again, without a source of then
            with pytest.raises(DataReadError, match="is gone"):
                self.each(lambda rank: [*self.passes[rank]])
            return False
        per_rank = self.each(lambda rank: self.taken(rank, len(wanted), steps is None or len(left) < steps))
        for number, (first, end, rows) in enumerate(wanted):
            got = [row for one in per_rank for row in one[0][number]]
            real = [rows[k] if k < len(rows) else None for k in range(len(got))]
            assert [valid for _, valid in got] == [sample is not None for sample in real]
            told = [(NAMES[value // 1000], value % 1000) for value, _ in got]
            assert [sample for sample, one in zip(told, real, strict=True) if one] == [one for one in real if one]
            assert {name for name, _ in told} <= here
            size = (
                self.given.batch
                if self.given.tail == "fill"
                else -(-(end - first) // self.given.ranks) * self.given.ranks
            )
            assert len(got) == (size if end - first < self.given.batch else self.given.batch)
            seen = self.seen.setdefault(self.epoch, Counter())
            seen.update(first + k for k, sample in enumerate(rows) if sample)
            self.at, self.count = end, self.count + 1
            self.asked = max(self.asked, self.oracle.first(self.epoch) + end)
        if per_rank[0][1]:
            assert all(ended for _, ended in per_rank)
            self.ended()
        return True

    def left(self):
        """The steps of the epoch that are left, also those that are left out."""
        return [] if self.over else list(self.oracle.batches(self.epoch, self.at, self.given))

    def set_epoch(self, epoch):
        if self.passes is None:
            self.each(lambda rank: self.loaders[rank].set_epoch(epoch))
            found = self.loaded if self.loaded[0] == epoch else (epoch, 0, 0, 0, False)
            self.epoch, self.at, self.step, self.count, self.over = found

    def taken(self, rank, num, to_the_end):
        batches, found = self.passes[rank], []
        for _ in range(num):
            batch = next(batches)
            found.append(
                list(
                    zip(
                        batch._local_value().numpy().tolist(),
                        batches.valid._local_value().numpy().tolist(),
                        strict=True,
                    )
                )
            )
        return found, to_the_end and next(batches, None) is None

    def ended(self):
        if self.loaded[0] == self.epoch:
            self.loaded = -1, 0, 0, 0, False
        draws = self.oracle.samples_of(self.epoch)
        served = [k for k in range(self.at) if not self.oracle.left_out(self.epoch, k, draws[k])]
        seen, told = self.seen.get(self.epoch, Counter()), self.certificate()
        assert told.epoch == self.epoch
        if self.at:
            assert told.exact == (seen == Counter(served)), (str(told), seen)
            if told.exact and self.given.mixes:
                assert told.sources == {name: sum(draws[k][0] == name for k in served) for name in told.sources}
        self.passes = None
        self.set_epoch(self.epoch + 1)

    def together(self, call):
        """What a call that is collective returns: each rank gets what all of them say."""

        def saying(said, *others):
            raise Gathering(said)

        def said_by(rank):
            with mock.patch("paddle_shard.position.run.gathered", saying), pytest.raises(Gathering) as it:
                call(self.loaders[rank])
            return it.value.args[0]

        said = json.loads(json.dumps(self.each(said_by)))
        with mock.patch("paddle_shard.position.run.gathered", lambda *others: said):
            found = self.each(lambda rank: call(self.loaders[rank]))
        assert len(set(map(str, found))) == 1
        return found[0]

    def certificate(self):
        return self.together(lambda loader: loader.certificate())

    def resume(self, ranks, rows, edits):
        """Save, and load into a loader of what has changed since."""
        self.certificate()  # so that each state knows what all ranks have delivered
        state = json.loads(json.dumps(self.each(lambda rank: self.loaders[rank].state_dict())[0]))
        assert (state["epoch"], state["samples"]) == (self.epoch, self.at)
        if self.passes:
            self.each(lambda rank: self.passes[rank].close())
        before, begun = self.given, self.at > 0 and not state["ended"]  # what is left may be served in smaller batches
        given = edited(self.given, edits)
        given.ranks, given.rows = ranks, rows
        given = given if possible(given) else copy.deepcopy(before)
        epoch, samples = state["epoch"], state["samples"]
        override = [] if given.order() == before.order() else ["mixture"]
        override += [] if given.epoch_length() == before.epoch_length() else ["num_samples"]
        override += [] if given.tail == before.tail else ["tail"]

        def load(_):
            loader = given.loader(self.shuffle)
            loader.load_state_dict(state, override=override)
            return loader

        self.given = given
        if given.too_short(self.oracle, epoch, begun) and override:
            with pytest.raises(StateError, match="Only data that has grown can be continued"):
                self.each(load)
            self.given = given = copy.deepcopy(before)
            override = []
        self.loaders = self.each(load)
        if "mixture" in override:
            self.oracle.change(given, epoch, samples)
        elif "num_samples" in override:
            begins = epoch + (samples > 0)
            self.oracle.lengths = [
                *(one for one in self.oracle.lengths if one[0] < begins),
                (begins, given.epoch_length()),
            ]
        self.loaded = epoch, samples, state["steps"], self.count, state["ended"]
        self.seen, self.passes = {epoch: self.seen.get(epoch, Counter())}, None
        self.asked = self.oracle.first(epoch) + samples
        self.set_epoch(epoch)

    def skip(self, step, place, index):
        """Leave out a step, or a sample, from now on."""
        if self.passes is not None:
            return
        sample = NAMES[place], index
        steps = [self.step + step] if step is not None and step < len(self.left()) else []
        samples = [sample] if step is None and index < self.given.sources.get(sample[0], (0, 0))[1] else []
        for one in steps:
            first, end, _ = self.left()[one - self.step]
            self.oracle.steps |= {(self.epoch, k) for k in range(first, end)}
        for one in samples:
            self.oracle.samples[one] = min(self.oracle.samples.get(one, (math.inf,)), (self.epoch, self.at))
        samples = samples if self.given.mixes else [index for _, index in samples]
        self.each(lambda rank: self.loaders[rank].skip(steps=steps, samples=samples))

    def weights(self, number):
        """Switch the weights while the run goes on."""
        names = list(self.given.sources)
        weights = {name: (number + 7 * at) % 4 for at, name in enumerate(names)}
        gone = [name for name in names if weights[name] and not self.given.sources[name][1]]
        if not any(weights.values()) or not self.given.mixes:
            return
        if gone:
            with pytest.raises(ArgumentError, match=f"{gone[0]!r} is None; it needs the weight 0"):
                self.together(lambda loader: loader.set_weights(weights))
            return
        at = self.together(lambda loader: loader.set_weights(weights))
        assert at >= self.asked
        now = {name: (weights[name], length) for name, (_, length) in self.given.sources.items()}
        self.oracle.segments = [*(one for one in self.oracle.segments if one[0] < at), (at, now)]


EDITS = st.tuples(
    st.sampled_from(["length", "length", "gone", "weight", "new", "epoch", "switch", "tail"]),
    st.integers(0, 4),
    st.integers(1, 14),
)


def actions_of(edits, samples):
    """What may happen to any data: it is run, resumed after some edits, or left out in part; or goes to an epoch."""
    return [
        st.tuples(st.just("run"), st.sampled_from([1, 2, 3, None])),
        st.tuples(st.just("resume"), st.sampled_from([1, 1, 2]), st.integers(1, 5), edits),
        st.tuples(st.just("skip"), st.one_of(st.none(), st.integers(0, 3)), *samples),
        st.tuples(st.just("set_epoch"), st.integers(0, 3)),
    ]


ACTIONS = st.one_of(
    *actions_of(st.lists(EDITS, max_size=3), (st.integers(0, 4), st.integers(0, 10))),
    st.tuples(st.just("weights"), st.integers(0, 63)),
)


EDITS_OF_ONE = st.tuples(st.sampled_from(["length", "length", "tail"]), st.just(0), st.integers(8, 40))
ACTIONS_OF_ONE = st.one_of(*actions_of(st.lists(EDITS_OF_ONE, max_size=1), (st.just(0), st.integers(0, 30))))


@settings(max_examples=trials(120))
@given(shuffle=st.booleans(), actions=st.lists(ACTIONS, max_size=12))
def test_whatever_becomes_of_a_mixture_each_draw_is_delivered_once(shuffle, actions):
    play(Job(Given(), Oracle(), shuffle), actions)


@settings(max_examples=trials(60))
@given(shuffle=st.booleans(), actions=st.lists(ACTIONS_OF_ONE, max_size=12))
def test_whatever_becomes_of_a_data_set_each_sample_is_delivered_once(shuffle, actions):
    play(Job(GivenOne(), OracleOfOne(), shuffle), actions)


def play(job, actions):
    for name, *how in [*actions, ("run", None), ("run", None)]:
        if getattr(job, name)(*how) is False:
            return


# Streams, whose sources begin anew in each epoch

PARTS = 2


def turns(weights, num):
    """Which source is drawn, for the first `num` draws."""
    oracle = Oracle()
    oracle.segments = [(0, {name: (weight, 1 << 30) for name, weight in weights.items()})]
    return [name for name, _ in oracle.draws(num)]


def part_by_hand(given, part, stripe):
    """What a part of the mixture holds: sample i of each source is of part (i // stripe) mod P."""
    own = {
        name: [1000 * NAMES.index(name) + i for i in range(length) if i // stripe % PARTS == part]
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
    mixed = Stream.mixture(streams, given["weights"], stop=given["stop"]).in_parts(PARTS)
    return sharded(DataLoader(mixed, batch_size=PARTS * given["rows"]), mesh(list(range(ranks))), tail=given["tail"])


@settings(max_examples=trials(60))
@given(
    lengths=st.tuples(st.integers(9, 30), st.integers(9, 30), st.sampled_from([0, 9, 20])),
    weights=st.tuples(*[st.integers(1, 4)] * 3),
    stop=st.sampled_from(["first", "all"]),
    known=st.booleans(),
    stops=st.lists(
        st.tuples(
            st.integers(0, 6), st.sampled_from([1, 2]), st.integers(1, 4), st.sampled_from(["pad", "drop", "repeat"])
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_mixture_of_streams_is_resumed_at_any_step_on_any_mesh_with_any_tail(lengths, weights, stop, known, stops):
    """Each stop: (steps before it, data ranks, rows of each part in a batch, tail) of the stretch that it ends."""
    of = {name: (length, weight) for name, length, weight in zip(NAMES, lengths, weights, strict=False) if length}
    given = {
        "lengths": {name: length for name, (length, _) in of.items()},
        "weights": {name: weight for name, (_, weight) in of.items()},
        "stop": stop,
        "known": known,
    }
    state, at, stripe, count, tail = None, 0, None, 0, None
    for steps, ranks, rows, now in stops:
        given = {**given, "rows": rows, "tail": now}
        ranks = ranks if known else 1  # where lengths are not known, ranks tell each other that a part has ended
        stripe = rows if at == 0 else stripe  # that of the first batch of the epoch
        left = [] if state and state["ended"] else list(steps_by_hand(given, at, stripe))

        def run(given=given, ranks=ranks, state=state, changed=tail not in (None, now), steps=steps):
            loader = stream_loader(given, ranks)
            if state is not None:
                loader.load_state_dict(state, override=["tail"] if changed else [])
            length, found = len(loader) if given["known"] else None, []
            with iter(loader) as batches:
                for batch in islice(batches, steps):
                    value, valid = (one._local_value().numpy().tolist() for one in (batch, batches.valid))
                    found.append([row if real else None for row, real in zip(value, valid, strict=True)])
                over = len(found) < steps and next(batches, None) is None
            return found, json.loads(json.dumps(loader.state_dict())), length, over

        per_rank = on_each_rank(range(ranks), run)
        told = per_rank[0]
        for step in range(len(told[0])):
            assert [row for rank in range(ranks) for row in per_rank[rank][0][step]] == left[step]
        assert len(told[0]) == min(steps, len(left))
        assert all(one[1:] == told[1:] for one in per_rank.values())
        assert told[2] in (None, count + len(left))
        state, tail = told[1], now
        at, count = (0, 0) if told[3] else (at + len(told[0]) * rows, count + len(told[0]))
        assert (state["samples"], state["steps"]) == (at * PARTS, count)
