"""A mixture given to a loader: resumed anywhere, on other meshes, with other weights; errors that name the source."""

import ast
import json
import re

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Mixture, Stream
from paddle_shard.errors import ArgumentError, ArgumentTypeError, DataReadError, StateError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, mesh, sharded
from tests.trials import trials

LENGTHS = {"web": 23, "code": 7, "chat": 3}


def sources(lengths=LENGTHS):
    """Sample i of the source at place p is 1000 p + i; a source of no length is gone."""
    return {
        name: Made(lambda i, first=1000 * place: np.array(first + i), length) if length else None
        for place, (name, length) in enumerate(lengths.items())
    }


def make(
    batch_size=4,
    at=ONE,
    *,
    weights=None,
    lengths=LENGTHS,
    num_samples=40,
    shuffle=True,
    workers=0,
    **options,
):
    weights = {"web": 5, "code": 3, "chat": 1} if weights is None else weights
    mixture = Mixture(sources(lengths), weights, num_samples=num_samples)
    return sharded(DataLoader(mixture, batch_size=batch_size, shuffle=shuffle, num_workers=workers), at, **options)


def ids(batches, most=None):
    """The real rows of this rank, of up to `most` batches."""
    found = []
    for batch in batches:
        found.append(batch._local_value().numpy()[batches.valid._local_value().numpy()].tolist())
        if most is not None and len(found) == most:
            break
    return found


def flat(batches):
    return [row for batch in batches for row in batch]


def joined(data_ranks, function):
    """What all data ranks deliver together at each step, in the order of the global batch's rows."""
    per_rank = on_each_rank(range(data_ranks), function)
    steps = {len(found) for found, _ in per_rank.values()}
    assert len(steps) == 1
    rows = [[row for rank in range(data_ranks) for row in per_rank[rank][0][step]] for step in range(steps.pop())]
    states = [state for _, state in per_rank.values()]
    assert all(state["history"] == states[0]["history"] for state in states)
    return rows, states[0]


@settings(max_examples=trials(30))
@given(
    stops=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=5),
    shuffle=st.booleans(),
    workers=st.sampled_from([0, 0, 0, 2]),
    seed=st.integers(0, 2),
)
def test_a_run_is_resumed_on_any_mesh_with_any_batch_size(stops, shuffle, workers, seed):
    straight_loader = make(shuffle=shuffle, seed=seed)
    straight = flat(flat([ids(iter(straight_loader)) for _ in stops]))  # each delivers up to an epoch
    delivered, state = [], None
    for number, (data_ranks, multiple, steps) in enumerate(stops):

        def run(data_ranks=data_ranks, multiple=multiple, steps=steps, state=state, first=number == 0):
            at, counted = mesh(list(range(data_ranks)), "dp"), workers if first else 0
            loader = make(data_ranks * multiple, at, shuffle=shuffle, seed=seed, workers=counted)
            if state is not None:
                loader.load_state_dict(state)
            with iter(loader) as batches:
                found = ids(batches, steps)
            return found, json.loads(json.dumps(loader.state_dict()))

        rows, state = joined(data_ranks, run)
        delivered += flat(rows)

    assert delivered == straight[: len(delivered)]


@settings(max_examples=trials(30))
@given(
    switches=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 2, 9])), min_size=1, max_size=4),
    stop=st.integers(0, 12),
    workers=st.sampled_from([0, 0, 0, 2]),
)
def test_a_switch_of_weights_is_made_again_by_every_resumed_run(switches, stop, workers):
    """Each switch: (steps before it, weight of "chat")."""
    loader = make(4, workers=workers)
    delivered, states, shares = [], [loader.state_dict()], []
    weights = iter([weight for _, weight in switches])
    left = [steps for steps, _ in switches]
    batches = iter(loader)
    while len(delivered) < 20:
        if left and left[0] == 0:
            left.pop(0)
            shares.append(loader.set_weights({"web": 1, "code": 1, "chat": next(weights)}))
            states[-1] = loader.state_dict()
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            continue
        delivered.append(batch._local_value().numpy().tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
        if left:
            left[0] -= 1
    batches.close()
    assert shares == sorted(shares)

    again = make(2)
    again.load_state_dict(states[min(stop, 19)])
    if stop >= sum(steps for steps, _ in switches):  # all switches are in the state
        wanted = flat(delivered[stop:])
        found = []
        while len(found) < len(wanted):
            found += flat(ids(iter(again)))
        assert found[: len(wanted)] == wanted
    last = make(4)
    last.load_state_dict(states[-1])
    last.set_epoch(0)
    assert flat(ids(iter(last))) == flat(delivered)[:40]


def test_weights_may_change_by_schedule_and_the_counts_are_exact():
    weights = [(0, {"web": 1, "code": 1, "chat": 0}), (20, {"web": 1, "code": 0, "chat": 3})]
    loader = make(weights=weights)
    with iter(loader) as batches:
        rows = flat(ids(batches))

    counts = [[sum(row // 1000 == source for row in part) for source in range(3)] for part in (rows[:20], rows[20:])]
    assert counts == [[10, 10, 0], [5, 0, 15]]
    assert {name: drawn.drawn for name, drawn in loader.sources().items()} == {"web": 15, "code": 10, "chat": 15}
    assert loader.sources()["chat"].epochs == 5
    assert loader.sources()["chat"].weight == 0.75


def test_a_switch_is_after_what_any_rank_has_requested():
    loader = make(4, workers=2)
    with iter(loader) as batches:
        ids(batches, 2)
        at = loader.set_weights({"web": 0, "code": 1, "chat": 0})
        rows = flat(ids(batches))
        assert 8 <= at < 40
        assert {row // 1000 for row in rows[at - 8 :]} == {1}
        found = loader.certificate()
        assert found.exact
        assert found.sources == {name: drawn.drawn for name, drawn in loader.sources().items()}
        assert sum(found.sources.values()) == found.delivered == 40


@settings(max_examples=trials(40))
@given(
    steps=st.integers(0, 9),
    grown=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    gone=st.sampled_from([None, "web", "chat"]),
    added=st.integers(0, 5),
    num_samples=st.sampled_from([40, 52]),
    shuffle=st.booleans(),
)
def test_sources_may_be_added_removed_or_grow_from_the_saved_sample_on(steps, grown, gone, added, num_samples, shuffle):
    old = make(shuffle=shuffle)
    straight = flat([flat(ids(iter(make(shuffle=shuffle)))) for _ in range(1)])
    with iter(old) as batches:
        before = flat(ids(batches, steps)) if steps else []
    state = json.loads(json.dumps(old.state_dict()))

    lengths = {name: length + more for (name, length), more in zip(LENGTHS.items(), grown, strict=True)}
    weights = {"web": 2, "code": 2, "chat": 2}
    if gone is not None:
        lengths[gone], weights[gone] = 0, 0
    if added:
        lengths["new"], weights["new"] = added, 4
    new = make(lengths=lengths, weights=weights, num_samples=num_samples, shuffle=shuffle)
    with pytest.raises(StateError, match="mixture: saved"):
        new.load_state_dict(state)
    new.load_state_dict(state, override=["mixture", "num_samples"])
    rest = flat(ids(iter(new)))
    then = flat([flat(ids(iter(new))) for _ in range(2)])

    assert before == straight[: len(before)]
    assert len(before + rest) == (40 if steps else num_samples), "the epoch that was begun ends on its old length"
    assert len(then) == 2 * num_samples
    drawn = rest + then
    period = sum(weights.values())
    counts = [sum(row // 1000 == place for row in drawn[: len(drawn) // period * period]) for place in range(4)]
    wanted = [weights.get(name, 0) * (len(drawn) // period) for name in ("web", "code", "chat", "new")]
    assert counts == wanted, "the new weights hold from the saved sample on"
    for place, (name, length) in enumerate(lengths.items()):  # the source's epoch that was begun, and those after it
        rows = [row - 1000 * place for row in before + drawn if row // 1000 == place]
        begun = sum(row // 1000 == place for row in before)
        first = LENGTHS.get(name, 0)
        ends = -(-begun // first) * first if first else 0
        for at in range(0, min(ends, len(rows)), first or 1):
            assert len(set(rows[at : at + first])) == len(rows[at : at + first])
            assert set(rows[at : at + first]) <= set(range(first))
        for at in range(ends, len(rows), length or 1):
            assert len(set(rows[at : at + length])) == len(rows[at : at + length])
            assert set(rows[at : at + length]) <= set(range(length))
    again = make(lengths=lengths, weights=weights, num_samples=num_samples, shuffle=shuffle)
    again.load_state_dict(json.loads(json.dumps(new.state_dict())))
    assert flat(ids(iter(again))) == flat(ids(iter(new))), "the next resume needs no override"


@pytest.mark.parametrize("tail", ["pad", "fill"])
@pytest.mark.parametrize("switches", [False, True])
def test_padding_holds_no_sample_of_a_source_that_is_gone(tail, switches):
    def run():
        at = mesh([0, 1])
        old = make(2, at, weights={"web": 1, "code": 1, "chat": 0}, num_samples=5)
        next(iter(old))
        weights = {"web": 0, "code": 1, "chat": 0}
        weights = [(0, weights), (100, {"web": 0, "code": 0, "chat": 1})] if switches else weights
        new = make(2, at, weights=weights, lengths={**LENGTHS, "web": 0}, num_samples=5, tail=tail)
        new.load_state_dict(old.state_dict(), override=["mixture", "tail"])
        return [batch._local_value().numpy().tolist() for batch in new]

    rows = [row for steps in on_each_rank([0, 1], run).values() for row in flat(steps)]
    assert len(rows) == 4
    assert {row // 1000 for row in rows} == {1}


def resumed(old, lengths, weights=None, **options):
    """A loader with other sources, which goes on where another one is."""
    given = {name: 2 if length else 0 for name, length in lengths.items()} if weights is None else weights
    new = make(lengths=lengths, weights=given, **options)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())), override=["mixture", "num_samples"])
    return new


GONE = {**LENGTHS, "code": 0}


def test_weights_that_are_to_hold_from_a_sample_on_are_those_of_a_schedule():
    before, after = {"web": 5, "code": 3, "chat": 1}, {"web": 1, "code": 0, "chat": 1}
    want = flat(ids(iter(make(weights=[(0, before), (18, after)], num_samples=40))))
    loader = make()
    batches = iter(loader)
    begun = ids(batches, 1)
    with pytest.raises(ArgumentError, match=r"at=2, but a rank has requested the samples of the run up to \d+ already"):
        loader.set_weights(after, at=2)
    for wrong in (18.5, -1, 1 << 60):
        with pytest.raises(ArgumentError, match=f"at must be an int in .*, got {wrong}"):
            loader.set_weights(after, at=wrong)
    assert loader.set_weights({"web": 0, "code": 1, "chat": 0}, at=30) == 30
    assert loader.set_weights(after, at=18) == 18
    assert flat(begun) + flat(ids(batches)) == want
    fresh = make()
    fresh.set_weights(after, at=18)
    resumed = make()
    resumed.load_state_dict(fresh.state_dict())
    assert flat(ids(iter(resumed))) == want


def test_a_source_that_is_gone_comes_back_as_long_as_it_was_or_longer():
    old = make()
    next(iter(old))
    without = resumed(old, GONE)
    next(iter(without))

    with pytest.raises(StateError, match="the source 'code' had 7 samples and has 4 now"):
        resumed(without, {**LENGTHS, "code": 4})
    again = resumed(without, LENGTHS)
    assert {row // 1000 for row in flat(ids(iter(again)))} == {0, 1, 2}


def test_a_source_that_is_gone_gets_no_weight():
    old = make()
    next(iter(old))
    new = resumed(old, GONE)

    with pytest.raises(ArgumentError, match="source 'code' is None; it needs the weight 0"):
        new.set_weights({"web": 1, "code": 1, "chat": 1})
    assert 1 not in {row // 1000 for row in flat(ids(iter(new)))}


@pytest.mark.parametrize("steps", [0, 1])
def test_what_was_left_out_of_a_source_that_is_gone_does_not_matter(steps):
    old = make()
    old.skip(samples=[("code", 3)])
    if steps:
        next(iter(old))
    new = resumed(old, GONE)

    assert len(new) == 10
    assert len(ids(iter(new))) == 10 - steps
    assert new.certificate().exact


def test_an_earlier_epoch_says_which_source_of_then_is_gone():
    old = make()
    flat(ids(iter(old)))
    new = resumed(old, GONE)
    new.set_epoch(0)

    with pytest.raises(DataReadError, match=r"reading sample \('code', .*source 'code' is gone"):
        flat(ids(iter(new)))
    assert any(place.step >= 0 for place in new.where(sample=("code", 3), epoch=0))


def test_longer_epochs_keep_the_weights_that_were_switched():
    old, new = make(), make(num_samples=52)
    next(iter(old))
    at = old.set_weights({"web": 0, "code": 1, "chat": 0})
    state = old.state_dict()
    new.load_state_dict(state, override=["num_samples"])

    assert {row // 1000 for row in flat(ids(iter(new)))[at - state["samples"] :]} == {1}


def test_weights_that_are_switched_in_an_earlier_epoch_are_for_the_sources_of_now():
    old = make()
    flat(ids(iter(old)))
    new = resumed(old, {**LENGTHS, "new": 5})
    new.set_epoch(0)
    other = make(lengths={**LENGTHS, "new": 5}, weights={**dict.fromkeys(LENGTHS, 2), "new": 2})
    other.load_state_dict(new.state_dict())
    other.set_weights({"web": 0, "code": 0, "chat": 0, "new": 1})

    assert sorted(flat(ids(iter(other)))[:5]) == [3000, 3001, 3002, 3003, 3004]


@pytest.mark.parametrize("of_mixture", [False, True])
def test_data_that_grew_and_shrank_again_has_the_length_of_now(of_mixture):
    def loader(length):
        if of_mixture:
            return make(num_samples=length)
        return sharded(DataLoader(Made(length=length), batch_size=4), ONE)

    one = loader(40)
    next(iter(one))
    state = one.state_dict()
    for length in (52, 40, 44, 40):
        one = loader(length)
        one.load_state_dict(state, override=["num_samples"])
        state = one.state_dict()

    assert [len(flat(ids(iter(one)))) for _ in range(3)] == [36, 40, 40]


def test_a_source_that_has_shrunk_is_refused():
    state = make().state_dict()
    with pytest.raises(StateError, match="the source 'web' had 23 samples and has 10 now"):
        make(lengths={**LENGTHS, "web": 10}).load_state_dict(state, override=["mixture"])


def test_old_sources_keep_their_order():
    state = make().state_dict()
    other = make(lengths={"code": 7, "web": 23, "chat": 3})

    with pytest.raises(StateError, match="Name the old ones first"):
        other.load_state_dict(state, override=["mixture"])


@settings(max_examples=trials(30))
@given(length=st.integers(1, 30), more=st.integers(1, 20), steps=st.integers(0, 6), shuffle=st.booleans())
def test_an_epoch_of_data_that_has_grown_ends_on_the_old_length(length, more, steps, shuffle):
    def loader(length):
        return sharded(DataLoader(Made(length=length), batch_size=4, shuffle=shuffle), ONE)

    old = loader(length)
    straight = flat(ids(iter(loader(length))))
    with iter(old) as batches:
        before = flat(ids(batches, steps)) if steps else []
    steps = old.state_dict()["samples"]  # 0 if the loop has moved on to the next epoch
    new = loader(length + more)
    new.load_state_dict(old.state_dict(), override=["num_samples"])
    assert len(new) == -(-(length if steps else length + more) // 4)
    rest = flat(ids(iter(new)))
    if not steps:
        assert sorted(rest) == list(range(length + more))
        return
    assert before + rest == straight
    assert new.certificate().exact
    assert sorted(flat(ids(iter(new)))) == list(range(length + more))
    assert new.certificate().exact


@pytest.mark.parametrize("was", [Made(length=9), paddle_shard.Packed([np.arange(4)] * 9, 4)])
def test_the_error_offers_an_override_only_where_it_is_accepted(was):
    now = Made(length=8) if isinstance(was, Made) else paddle_shard.Packed([np.arange(4)] * 8, 4)
    old = sharded(DataLoader(was, batch_size=3), ONE)
    batches = iter(old)
    next(batches)
    begun = old.state_dict()
    list(batches)
    for state, offered in ((begun, False), (old.state_dict(), True)):
        new = sharded(DataLoader(now, batch_size=3), ONE)
        with pytest.raises(StateError, match="num_samples: saved 9, now 8") as found:
            new.load_state_dict(state)
        assert ("override=" in str(found.value)) == offered
        if offered:
            names = re.search(r"override=(\[.*?\])", str(found.value))[1]
            new.load_state_dict(state, override=ast.literal_eval(names))


def test_data_that_has_shrunk_in_mid_epoch_is_refused():
    old = sharded(DataLoader(Made(length=9), batch_size=4), ONE)
    next(iter(old))
    with pytest.raises(StateError, match="Only data that has grown can be continued"):
        sharded(DataLoader(Made(length=8), batch_size=4), ONE).load_state_dict(
            old.state_dict(), override=["num_samples"]
        )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epoch", [0, 2])
def test_where_names_every_place_of_a_sample(shuffle, epoch):
    def run():
        loader = make(6, mesh([0, 1], "dp"), shuffle=shuffle)
        loader.set_epoch(epoch)
        with iter(loader) as batches:
            found = ids(batches)
        return found, loader.where(sample=("chat", 1), epoch=epoch), loader.where(sample=("web", 22), epoch=epoch)

    per_rank = on_each_rank([0, 1], run)
    rows = {rank: per_rank[rank][0] for rank in per_rank}
    for places, wanted in ((per_rank[0][1], 2001), (per_rank[0][2], 22)):
        found = [(place.step, place.data_rank, place.row) for place in places]
        assert found == [
            (step, rank, row)
            for step in range(len(rows[0]))
            for rank in (0, 1)
            for row, value in enumerate(rows[rank][step])
            if value == wanted
        ]
    assert len(per_rank[0][1]) >= 1


def test_a_sample_that_is_read_again_in_an_epoch_gets_other_random_numbers():
    def noisy(_):
        return np.random.rand(2)

    mixture = Mixture({"one": Made(noisy, 1), "two": Made(noisy, 2)}, {"one": 1, "two": 1}, num_samples=24)
    rows = [batch._local_value().numpy().tolist() for batch in sharded(DataLoader(mixture, batch_size=4), ONE)]
    again = [
        batch._local_value().numpy().tolist()
        for batch in sharded(DataLoader(mixture, batch_size=4, num_workers=2), ONE)
    ]

    assert rows == again
    assert len({tuple(row) for row in flat(rows)}) == 24


# Errors, and other ways to read it


class Broken(paddle.io.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 3:
            raise OSError("the disk is gone")
        return np.array(index)


@pytest.mark.parametrize("kinds", [("int32", "int64"), ("float32", "float64")])
@pytest.mark.parametrize("streams", [False, True])
def test_a_field_of_two_dtypes_is_an_error(kinds, streams):
    of = {kind: Made(lambda i, kind=kind: {"x": np.array([i], kind)}, 8) for kind in kinds}
    if streams:
        mixture = Stream.mixture({kind: Stream.of([one[i] for i in range(8)]) for kind, one in of.items()})
    else:
        mixture = Mixture(of)
    loader = sharded(DataLoader(mixture.in_parts(1) if streams else mixture, batch_size=4), ONE)

    with pytest.raises(DataReadError, match=rf"differ in their dtype at field \['x'\]: {', '.join(kinds)}"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_source_and_the_index_in_it(workers):
    mixture = Mixture({"good": Made(length=5), "bad": Broken()})

    with pytest.raises(DataReadError, match=r"reading sample \('bad', 3\) failed") as caught:
        list(sharded(DataLoader(mixture, batch_size=2, num_workers=workers), ONE))
    assert caught.value.index == ("bad", 3)
    assert caught.value.indices[caught.value.indices.index(("bad", 3))] == ("bad", 3)
    loader = sharded(DataLoader(mixture, batch_size=2, num_workers=workers), ONE, on_error="skip")
    assert sum(map(len, ids(iter(loader)))) == 9
    assert loader.stats.total.skipped == 1


def test_a_plain_loader_and_any_sampler_read_positions_of_the_first_epoch():
    mixture = Mixture(sources(), {"web": 5, "code": 3, "chat": 1}, num_samples=40)
    order = flat(ids(iter(make(shuffle=False))))

    assert [int(mixture[at]) for at in range(40)] == order
    assert int(mixture[-1]) == order[-1]
    assert flat(batch.numpy().tolist() for batch in DataLoader(mixture, batch_size=5)) == order
    drawn = paddle.io.BatchSampler(sampler=[3, 39, 0], batch_size=3)
    (batch,) = sharded(DataLoader(mixture, batch_sampler=drawn), ONE)
    assert batch._local_value().numpy().tolist() == [order[3], order[39], order[0]]
    with pytest.raises(IndexError):
        mixture[40]


def test_weights_are_by_length_unless_they_are_given():
    mixture = Mixture(sources())

    assert len(mixture) == 33
    assert sorted(int(mixture[at]) for at in range(33)) == sorted(
        1000 * place + at for place, length in enumerate(LENGTHS.values()) for at in range(length)
    )
    assert repr(mixture) == "Mixture(web 0.697, code 0.2121, chat 0.09091; 33 samples in an epoch)"


@pytest.mark.parametrize(("stop", "length"), [("first", 14), ("all", 46)])
def test_an_epoch_ends_with_the_first_or_the_last_source(stop, length):
    assert len(Mixture({"a": Made(length=23), "b": Made(length=7)}, {"a": 1, "b": 1}, stop=stop)) == length


@pytest.mark.parametrize(
    ("given", "options", "error", "says"),
    [
        ([1, 2], {}, ArgumentTypeError, "sources must be a dict"),
        ({}, {}, ArgumentError, "1 to 4096 sources"),
        ({1: Made()}, {}, ArgumentTypeError, "name of a source must be a str"),
        ({"a": iter([])}, {}, ArgumentTypeError, "source 'a' must have a length and an index"),
        ({"a": Made(length=0)}, {}, ArgumentError, "source 'a' must have 1 to 2^40 samples"),
        ({"a": Made()}, {"stop": "last"}, ArgumentError, "stop must be 'first' or 'all'"),
        ({"a": Made()}, {"num_samples": 0}, ArgumentError, "num_samples must be in"),
        ({"a": Made()}, {"num_samples": "9"}, ArgumentTypeError, "num_samples must be an int"),
        ({"a": Made()}, {"weights": [(1, {"a": 1})]}, ArgumentError, "must begin at sample 0"),
        ({"a": Made()}, {"weights": [0.5]}, ArgumentTypeError, "weights must be a dict, or a list"),
        ({"a": Made(), "b": None}, {"weights": {"a": 1, "b": 1}}, ArgumentError, "'b' is None; it needs the weight 0"),
        (
            {"a": Made(length=9), "b": Made()},
            {"weights": [(0, {"a": 1, "b": 1}), (4, {"a": 0, "b": 1})], "stop": "all"},
            ArgumentError,
            "stop='all' never comes",
        ),
    ],
)
def test_bad_arguments_are_named(given, options, error, says):
    with pytest.raises(error) as caught:
        Mixture(given, **options)
    assert says in str(caught.value)


def test_what_is_for_mixtures_is_refused_for_other_data():
    loader = sharded(DataLoader(Made(), batch_size=4), ONE)

    with pytest.raises(ArgumentError, match=r"set_weights\(\) is for a loader over a paddle_shard.Mixture"):
        loader.set_weights({"web": 1})
    with pytest.raises(ArgumentError, match=r"sources\(\) is for a loader over a paddle_shard.Mixture"):
        loader.sources()
    with pytest.raises(ArgumentError, match="weights must name each source once"):
        make().set_weights({"web": 1})
    with pytest.raises(ArgumentError, match=r"sample of a mixture must be \(name of a source, index in it\)"):
        make().where(sample=3)
    for shuffle in ("blocks", "paddle"):
        with pytest.raises(ArgumentError, match="the sources of a Mixture are shuffled"):
            sharded(DataLoader(Mixture(sources()), batch_size=4), ONE, shuffle=shuffle)


def test_weights_of_a_wrong_type_are_told_to_the_other_ranks_too(monkeypatch):
    told = []
    monkeypatch.setattr("paddle_shard.ranks.agreeing.tell_failed", lambda *said: told.append(said))

    with pytest.raises(ArgumentTypeError, match=r"weights: the weight of 'web' must"):
        make().set_weights({"web": "1", "code": 1, "chat": 1})
    [(what, error, ranks)] = told
    assert (what, type(error), ranks) == ("its set_weights() failed", ArgumentTypeError, (0,)), "the others do not wait"


def test_all_orders_of_one_process_are_public(tmp_path):
    assert "Mixture" in paddle_shard.__all__
    assert dist.get_world_size() == 1
