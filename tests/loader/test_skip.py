"""`skip`: steps and samples that are never read, on any mesh, after any resume; the certificate says so."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler, IterableDataset

from paddle_shard import BucketBatchSampler, Mixture
from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError
from paddle_shard.plan.state import sealed
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, mesh, sharded
from tests.trials import trials

LENGTH = 43


class Reads(Made):
    """Remembers which samples were read, in one process."""

    def __init__(self, length=LENGTH):
        super().__init__(length=length)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return np.array(index)


def make(at, batch_size, *, data=None, accumulation=1, workers=0, **options):
    data = Made(length=LENGTH) if data is None else data
    sampler = BatchSampler(data, batch_size=batch_size, shuffle=True)
    sampler._acc_steps = accumulation
    return sharded(DataLoader(data, batch_sampler=sampler, num_workers=workers), at, **options)


def rows_of(batches, most=None):
    """[(rows, valid)] of this rank, of up to `most` batches."""
    found = []
    while most is None or len(found) < most:
        try:
            batch = next(batches)
        except StopIteration:
            break
        found.append((batch._local_value().numpy().tolist(), batches.valid._local_value().numpy().tolist()))
    return found


def real(steps):
    return [row for rows, valid in steps for row, is_real in zip(rows, valid, strict=True) if is_real]


@settings(max_examples=trials(60))
@given(
    data_ranks=st.sampled_from([1, 2, 3]),
    each=st.integers(1, 4),
    accumulation=st.sampled_from([1, 2]),
    steps=st.lists(st.integers(0, 20), max_size=6),
    samples=st.lists(st.integers(0, LENGTH - 1), max_size=9),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    options=st.sampled_from([{}, {"balance": np.arange(LENGTH)}, {"shuffle": "blocks"}, {"prefetch": 2}]),
    workers=st.sampled_from([0, 0, 0, 2]),
)
def test_all_is_delivered_as_before_but_for_what_is_left_out(
    data_ranks, each, accumulation, steps, samples, tail, options, workers
):
    at, size = mesh(list(range(data_ranks))), data_ranks * each
    if options.get("shuffle"):
        options = {"shuffle": "blocks"} if data_ranks == 1 else {}

    def loader(**more):
        return make(at, size, accumulation=accumulation, workers=workers, tail=tail, **options, **more)

    def plain():
        with iter(loader()) as batches:
            return rows_of(batches)

    straight = on_each_rank(range(data_ranks), plain)
    num_steps = len(straight[0])
    steps = [step for step in steps if step < num_steps]
    gone = {row for found in straight.values() for step in steps for row in real(found[step : step + 1])}

    def without():
        data = Reads()
        made = loader(data=data, verify=None)
        made.skip(steps=steps, samples=samples)
        asked = list(made.batch_sampler)
        with iter(made) as batches:
            found = rows_of(batches)
        assert [rows for rows, _ in found] == asked
        made.set_epoch(0)
        assert len(made) == len(found)
        places = {sample: made.where(sample=sample, epoch=0) for sample in range(LENGTH)}
        return places, found, data.read

    per_rank = on_each_rank(range(data_ranks), without)
    left = [
        step
        for step in range(num_steps)
        if step not in steps and any(set(real(straight[rank][step : step + 1])) - set(samples) for rank in straight)
    ]
    for rank, (_, found, read) in per_rank.items():
        assert len(found) == len(left), "all ranks make the same steps"
        if not workers:
            assert not set(read) & (gone | set(samples)), "what is left out is never read"
        for (rows, valid), step in zip(found, left, strict=True):
            assert len(rows) == len(straight[rank][step][0])
            assert set(real([(rows, valid)])) <= set(range(LENGTH)) - gone - set(samples)
    for step, at_step in zip(left, range(len(left)), strict=True):
        before, after = (
            Counter(row for rank in side for row in real(side[rank][number : number + 1]))
            for side, number in ((straight, step), ({rank: found for rank, (_, found, _) in per_rank.items()}, at_step))
        )
        assert after == Counter({row: count for row, count in before.items() if row not in samples})
    for sample, place in per_rank[0][0].items():
        if place is None:
            assert sample in gone | set(samples) or tail == "drop"
        else:
            rows, valid = per_rank[place.data_rank][1][left.index(place.step)]
            assert (rows[place.row], valid[place.row]) == (sample, True)


@settings(max_examples=trials(40))
@given(
    before=st.integers(0, 5),
    first=st.integers(0, 8),
    count=st.integers(0, 4),
    samples=st.lists(st.integers(0, LENGTH - 1), max_size=5),
    stops=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_a_resumed_run_leaves_out_the_same_positions_on_any_mesh_with_any_batch_size(
    before, first, count, samples, stops
):
    loader = make(ONE, 4)
    order = [row for rows, _ in rows_of(iter(make(ONE, 4, tail="drop", data=Made(length=LENGTH)))) for row in rows]
    order += sorted(set(range(LENGTH)) - set(order)) if len(order) < LENGTH else []
    with iter(loader) as batches:
        delivered = real(rows_of(batches, before))
        state = loader.state_dict()
    loader.load_state_dict(state)
    steps = [step for step in range(before + first, before + first + count) if step < 11]
    loader.skip(steps=steps, samples=samples)
    gone = set(order[4 * steps[0] : 4 * (steps[-1] + 1)] if steps else ()) | set(samples)
    state = json.loads(json.dumps(loader.state_dict()))

    for data_ranks, multiple, most in [*stops, (2, 2, None)]:
        if state["epoch"] or state["ended"]:
            break

        def run(data_ranks=data_ranks, multiple=multiple, most=most, state=state):
            loader = make(mesh(list(range(data_ranks))), data_ranks * multiple)
            loader.load_state_dict(state)
            with iter(loader) as batches:
                found = rows_of(batches, most)
            return found, json.loads(json.dumps(loader.state_dict()))

        per_rank = on_each_rank(range(data_ranks), run)
        delivered += [row for found, _ in per_rank.values() for row in real(found)]
        state = per_rank[0][1]
    wanted = set(range(LENGTH)) - (gone - set(order[: 4 * before])) | set(order[: 4 * before])
    assert len(delivered) == len(set(delivered)) or before
    if state["epoch"]:
        assert set(delivered) == wanted


def test_the_certificate_names_what_was_left_out_and_is_exact():
    loader = make(ONE, 4)
    loader.skip(steps=[2, 9, 10], samples=[7])
    place = make(ONE, 4).where(sample=7, epoch=0)
    with iter(loader) as batches:
        rows_of(batches, 4)
        state = loader.state_dict()
    assert state["steps"] == 5
    again = make(ONE, 4)
    again.load_state_dict(state)
    rows_of(iter(again))

    left_out = 4 + 4 + 3 + (place.step not in (2, 9, 10))
    for one in (again,):
        found = one.certificate()
        assert (found.exact, found.skipped, found.num_samples) == (True, left_out, LENGTH - left_out)
        assert f"and {left_out} are skipped by the user" in str(found)
    assert again.stats.total.skipped == (place.step in (5, 6, 7, 8))


def test_a_sample_of_a_mixture_is_left_out_wherever_it_is_drawn():
    mixture = Mixture(
        {"web": Made(length=20), "code": Made(lambda i: np.array(100 + i), 5)}, {"web": 1, "code": 1}, num_samples=36
    )
    loader = make(ONE, 6, data=mixture)
    loader.skip(samples=[("code", 3), ("web", 11)])
    for epoch in range(3):
        steps = rows_of(iter(loader))
        assert not {103, 11} & {row for rows, _ in steps for row in rows}
        found = loader.certificate()
        assert found.exact
        counted = [row // 100 for rows, valid in steps for row, real in zip(rows, valid, strict=True) if real]
        assert found.sources == {"web": counted.count(0), "code": counted.count(1)}
        assert sum(found.sources.values()) == found.num_samples == found.delivered
        assert loader.where(sample=("code", 3), epoch=epoch) == []


@pytest.mark.parametrize("own", ["consecutive", "paddle's"])
def test_samplers_of_ones_own_leave_out_too(own):
    data = Reads(40)

    def made():
        sampler = {
            "consecutive": BatchSampler(sampler=list(range(39, -1, -1)), batch_size=4),
            "paddle's": DistributedBatchSampler(data, 4, num_replicas=1, rank=0, shuffle=True),
        }[own]
        return sharded(DataLoader(data, batch_sampler=sampler), ONE, verify=None)

    straight = rows_of(iter(made()))
    loader = made()
    loader.skip(steps=[1, 2], samples=[straight[4][0][1], straight[7][0][0]])
    data.read = []
    found = rows_of(iter(loader))

    gone = [*real([straight[1], straight[2]]), straight[4][0][1], straight[7][0][0]]
    assert sorted(real(found) + gone) == list(range(40))
    assert len(found) == len(straight) - 2
    assert not set(data.read) & set(gone)
    assert (loader.certificate().exact, loader.certificate().skipped) == (True, 10)


class Uneven(BatchSampler):
    def __init__(self):
        self.batch_size = 4

    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]])

    def __len__(self):
        return 3


def test_steps_of_a_sampler_whose_batches_may_differ_are_refused_and_samples_are_not():
    loader = sharded(DataLoader(Made(length=10), batch_sampler=Uneven()), ONE)
    with pytest.raises(ArgumentError, match="Uneven may make batches of different sizes"):
        loader.skip(steps=[1])
    with pytest.raises(ArgumentTypeError, match="steps must be a list or range of ints, got 1"):
        loader.skip(steps=1)
    with pytest.raises(ArgumentTypeError, match="samples must be a list of samples, got 7"):
        loader.skip(samples=7)
    loader.skip(samples=[4, 5])
    assert real(rows_of(iter(loader))) == [0, 1, 2, 3, 6, 7, 8, 9]


class Whole(Made):
    def __getitem__(self, index):
        return np.full((2, 1), index)


def test_items_that_are_batches_are_left_out():
    loader = sharded(DataLoader(Whole(length=5), batch_size=None), ONE)
    loader.skip(steps=[1], samples=[4])
    assert [rows[0][0] for rows, _ in rows_of(iter(loader))] == [0, 2, 3]


class Endless(IterableDataset):
    def __iter__(self):
        return iter([np.arange(2)])


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"steps": [11]}, ArgumentError, "epoch 0 has steps 0 to 10 left, got 11"),
        ({"steps": [-1]}, ArgumentError, "got -1"),
        ({"steps": ["1"]}, ArgumentTypeError, "a step must be an int, got '1'"),
        ({"samples": [LENGTH]}, ArgumentError, f"0 or more below {LENGTH}, got {LENGTH}"),
        ({"samples": ["a"]}, ArgumentTypeError, "a sample must be an index in the data set, got 'a'"),
        ({"samples": [True]}, ArgumentTypeError, "got True"),
        ({"steps": [0], "epoch": -1}, ArgumentError, "epoch must be an int >= 0, got -1"),
    ],
)
def test_what_cannot_be_left_out_is_named(arguments, error, says):
    loader = make(ONE, 4)
    with pytest.raises(error) as caught:
        loader.skip(**arguments)
    assert says in str(caught.value)
    assert loader.state_dict()["history"] is None, "nothing was left out"


def test_steps_that_were_delivered_and_open_iterators_are_refused():
    loader = make(ONE, 4)
    batches = iter(loader)
    rows_of(batches, 3)
    with pytest.raises(ArgumentError, match="an iterator of the loader is open"):
        loader.skip(steps=[5])
    batches.close()
    with pytest.raises(ArgumentError, match="a loop over epoch 0 was left at step 3"):
        loader.skip(steps=[5])
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ArgumentError, match="epoch 0 has steps 3 to 10 left; the run is at step 3, got 2"):
        loader.skip(steps=[2])
    loader.skip(steps=[3])
    assert len(rows_of(iter(loader))) == 7


def test_streams_and_damaged_states_are_refused():
    with pytest.raises(ArgumentError, match=r"skip\(\) needs samples that have a number: this is a stream"):
        sharded(DataLoader(Endless(), batch_size=2), ONE).skip(steps=[0])
    lengths = np.arange(1, 41)
    given = DataLoader(Made(length=40), batch_sampler=BucketBatchSampler(lengths, max_tokens=80))
    with pytest.raises(ArgumentError, match="BucketBatchSampler may make batches of different sizes"):
        sharded(given, ONE).skip(steps=[0])
    loader = make(ONE, 4)
    loader.skip(samples=[1])
    state = loader.state_dict()
    for damaged in ({"stretches": [[0, 3]], "samples": []}, {"stretches": []}, {"stretches": [], "samples": [None]}):
        with pytest.raises(StateError, match="state is damaged: history is .*'skips'"):
            make(ONE, 4).load_state_dict(sealed({**state, "history": {**state["history"], "skips": damaged}}))


@pytest.mark.parametrize("steps", [0, 2, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_was_delivered_before_it_is_left_out_is_no_false_alarm(steps, workers):
    """The epoch of the stop stays exact, and so do those after it, without the sample."""
    loader = make(ONE, 4, workers=workers)
    with iter(loader) as batches:
        served = real(rows_of(batches, steps))
    state = loader.state_dict()
    resumed = make(ONE, 4, workers=workers)
    resumed.load_state_dict(state)
    gone = [*served[:2], *(sample for sample in range(LENGTH) if sample not in served)][:3]
    resumed.skip(samples=gone)

    for epoch in range(3):
        with iter(resumed) as batches:
            found = real(rows_of(batches))
        certificate = resumed.certificate()
        assert certificate.exact, str(certificate)
        expected = set(range(LENGTH)) - (set(served) if epoch == 0 else set()) - set(gone)
        assert sorted(found) == sorted(expected)


def test_a_sample_by_which_the_data_has_grown_is_left_out_before_the_epoch_that_has_it():
    def of(length):
        return sharded(DataLoader(Made(length=length), batch_size=4), ONE)

    old = of(12)
    next(iter(old))
    new = of(16)
    new.load_state_dict(old.state_dict(), override=["num_samples"])
    new.skip(samples=[15])

    assert [real(rows_of(iter(new))) for _ in range(2)] == [list(range(4, 12)), list(range(15))]
    with pytest.raises(ArgumentError, match="0 or more below 16, got 16"):
        of(16).skip(samples=[16])
