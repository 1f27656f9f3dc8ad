"""A state knows what data it stands on: data that was written anew in the meantime is refused at the first batch."""

import dataclasses
import datetime
import decimal
import json
import queue
import threading

import numpy as np
import paddle
import pytest
from paddle.io import BatchSampler, DataLoader

import paddle_shard
from paddle_shard.errors import StateError
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.helpers import ONE, Made, locals_of, mesh, sharded

LENGTH = 24


def arrays(version):
    return paddle_shard.ArrayDataset(np.arange(LENGTH) + 100 * version)


def texts(version):
    return Made(lambda i: {"text": f"{i} of version {version}", "length": np.array(1)}, LENGTH)


def several(version):
    return paddle_shard.Mixture({"a": numbers(version), "b": numbers(version)}, {"a": 1, "b": 2})


def numbers(version):
    return Made(lambda i: np.array(i + 100 * version), LENGTH)


class Many(paddle.io.Dataset):
    """Reads batches at once."""

    def __init__(self, version):
        self.version = version

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return np.array(index + 100 * self.version)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Own(paddle.io.BatchSampler):
    def __init__(self):
        self.batch_size = 4

    def __iter__(self):
        return iter([list(range(i, i + 4)) for i in range(0, LENGTH, 4)])

    def __len__(self):
        return LENGTH // 4


KINDS = {"numbers": numbers, "arrays": arrays, "texts": texts, "mixture": several, "at once": Many}


def loader_of(dataset, *, workers=0, sampler=False, collate_fn=None, **options):
    how = {"batch_sampler": Own()} if sampler else {"batch_size": 4, "shuffle": True}
    return sharded(DataLoader(dataset, num_workers=workers, collate_fn=collate_fn, **how), ONE, **options)


def saved_after(loader, steps):
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_data_of_another_version_is_refused_and_the_same_is_resumed(kind, workers, steps, caplog, monkeypatch):
    """At the end of an epoch it is a line in the log: samples may be made in another way in each epoch."""
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())
    state = saved_after(loader_of(KINDS[kind](0), workers=workers), steps)

    same = loader_of(KINDS[kind](0), workers=workers)
    same.load_state_dict(state)
    other = loader_of(KINDS[kind](1), workers=workers)
    other.load_state_dict(state)
    resumed = [sum(1 for _ in same) for _ in range(2)]
    assert "the data is not what it was" not in caplog.text
    if steps < LENGTH // 4 or kind == "mixture":
        with pytest.raises(StateError, match=r"the data is not what it was .* override=\['contents'\]"):
            [sum(1 for _ in other) for _ in range(2)]
    else:
        assert [sum(1 for _ in other) for _ in range(2)] == resumed
        assert "the data is not what it was" in caplog.text
    anyway = loader_of(KINDS[kind](1), workers=workers)
    anyway.load_state_dict(state, override=["contents"])

    assert [sum(1 for _ in anyway) for _ in range(2)] == resumed


@pytest.mark.parametrize("steps", [1, 3])
def test_it_is_refused_with_the_users_own_sampler_too_and_again_at_the_next_try(steps):
    state = saved_after(loader_of(numbers(0), sampler=True), steps)
    other = loader_of(numbers(1), sampler=True)
    other.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(StateError, match="the data is not what it was"):
            next(iter(other))


@pytest.mark.parametrize("draw", [np.random.rand, lambda: float(paddle.rand([]))])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_draw_seeded_numbers_are_the_same_after_a_resume_in_a_later_epoch(draw, workers):
    def made():
        return loader_of(Made(lambda i: np.array([i, draw()]), LENGTH), workers=workers)

    loader = made()
    straight = [locals_of(loader) for _ in range(2)]
    again = made()
    again.load_state_dict(saved_after_epochs(made(), 1, 2))
    assert locals_of(again) == straight[1][2:]


def saved_after_epochs(loader, epochs, steps):
    for _ in range(epochs):
        for _ in loader:
            pass
    return saved_after(loader, steps)


def test_samples_that_are_never_the_same_are_a_warning(caplog, monkeypatch):
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())
    noise = np.random.default_rng()
    dataset = Made(lambda i: np.array([i, noise.random()]), LENGTH)
    state = saved_after(loader_of(dataset), 2)
    again = loader_of(dataset)
    again.load_state_dict(state)

    assert sum(1 for _ in again) == 4
    assert caplog.text.count("not the same each time they are read") == 1


def test_a_state_that_was_saved_again_before_the_next_batch_still_knows_the_data():
    state = saved_after(loader_of(numbers(0)), 2)
    between = loader_of(numbers(0))
    between.load_state_dict(state)
    other = loader_of(numbers(1))
    other.load_state_dict(between.state_dict())
    with pytest.raises(StateError, match="the data is not what it was"):
        next(iter(other))


def test_without_verify_nobody_looks():
    state = saved_after(loader_of(numbers(0), verify=None), 2)
    assert state["contents"] == []
    other = loader_of(numbers(1), verify=None)
    other.load_state_dict(state)
    assert sum(1 for _ in other) == 4


def test_one_process_reads_nothing_more_for_it():
    read = []
    loader = loader_of(Made(lambda i: read.append(i) or np.array(i), LENGTH), prefetch=0)
    for _ in range(2):
        for _ in loader:
            pass
    assert sorted(read) == sorted([*range(LENGTH)] * 2)


@pytest.mark.parametrize("how", ["before the end", "after the end", "in the next epoch"])
def test_samples_that_are_made_in_another_way_in_each_epoch_are_no_false_alarm(how, caplog):
    """As those of a curriculum, of which the program sets the epoch."""

    class Curriculum(Made):
        epoch = 0

        def __getitem__(self, index):
            return np.array(index + 100 * self.epoch)

    def made():
        return loader_of(Curriculum(length=LENGTH))

    def epochs(loader, number):
        found = []
        for _ in range(number):
            loader.dataset.epoch = loader.epoch
            found.append(locals_of(loader))
        return found

    straight = epochs(made(), 3)
    loader = made()
    steps = {"before the end": LENGTH // 4, "after the end": 0, "in the next epoch": 2}[how]
    if how != "before the end":
        epochs(loader, 1)
    loader.dataset.epoch = loader.epoch
    state = saved_after(loader, steps)
    again = made()
    again.load_state_dict(state)
    rest = epochs(again, 3 - again.epoch)

    assert [batch for epoch in rest for batch in epoch][-6:] == straight[2]
    other = made()
    other.load_state_dict(state)
    other.dataset.epoch = 7
    if how == "in the next epoch":
        with pytest.raises(StateError, match="the data is not what it was"):
            next(iter(other))


@pytest.mark.parametrize("version", [0, 1])
def test_data_that_has_grown_must_hold_what_it_held(version):
    state = saved_after(loader_of(numbers(0)), 2)
    grown = loader_of(Made(lambda i: np.array(i + 100 * version), LENGTH + 8))
    grown.load_state_dict(state, override=["num_samples"])
    if version:
        with pytest.raises(StateError, match="the data is not what it was"):
            next(iter(grown))
    else:
        assert sum(1 for _ in grown) == 4


def test_a_sample_that_is_left_out_after_a_load_is_not_read_to_look_at_it():
    read = []
    state = saved_after(loader_of(numbers(0)), 2)
    gone = [sample for _, sample, _ in state["contents"]]
    again = loader_of(Made(lambda i: read.append(i) or np.array(i), LENGTH), prefetch=0)
    again.load_state_dict(state)
    again.skip(samples=gone)
    for _ in again:
        pass
    assert not set(gone) & set(read)


@dataclasses.dataclass
class Shape:
    size: int
    names: set


@pytest.mark.parametrize(
    "made",
    [
        lambda n: Shape(n, {"a"}),
        lambda n: Shape(0, {"a", str(n)}),
        lambda n: frozenset({n, "b"}),
        lambda n: bytearray(b"%d" % n),
        lambda n: decimal.Decimal(n),
        lambda n: datetime.date(2020, 1, 1 + n),
        lambda n: np.array([n, "x"], object),
    ],
)
def test_other_kinds_of_values_are_seen_to_differ(made):
    def data(version):
        return loader_of(
            Made(lambda i: (np.array(i), made(version)), LENGTH),
            collate_fn=lambda rows: np.stack([row[0] for row in rows]),
        )

    state = saved_after(data(0), 2)
    same, other = data(0), data(1)
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert sum(1 for _ in same) == 4
    with pytest.raises(StateError, match="the data is not what it was"):
        next(iter(other))


@pytest.mark.parametrize("source", ["a", "b", "c"])
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_mixture_knows_a_sample_of_each_source_that_its_first_batch_has(source, steps):
    def mixed(rewritten):
        sources = {name: numbers(10 * (name == rewritten)) for name in "abc"}
        return loader_of(paddle_shard.Mixture(sources, {"a": 1, "b": 1, "c": 2}))

    other = mixed(source)
    other.load_state_dict(saved_after(mixed(None), steps))
    with pytest.raises(StateError, match="the data is not what it was"):
        next(iter(other))


def test_a_sample_of_a_mixture_is_named_by_its_source():
    state = saved_after(loader_of(several(0)), 2)
    other = loader_of(several(1))
    other.load_state_dict(state)
    with pytest.raises(StateError, match=r"sample \('[ab]', \d+\) \(now"):
        next(iter(other))


def test_a_sample_of_bfloat16_is_shown_as_such():
    def loader(version):
        return loader_of(Made(lambda i: paddle.full([2], i % 8 + 16 * version, "bfloat16"), LENGTH))

    state, other = saved_after(loader(0), 2), loader(1)
    other.load_state_dict(state)
    with pytest.raises(StateError, match=r"now bfloat16\[2\] (1[6-9]|2[0-3])\.0"):
        next(iter(other))


def drawn(_=0):
    return np.random.rand(4)


class Ahead:
    """Draws beside the thread that reads, as far ahead as there is room."""

    def __init__(self):
        self.ready = queue.Queue(4)
        self.process = None

    def __call__(self, index):
        if self.process is None:
            self.process = threading.Thread(target=self.run, daemon=True)
            self.process.start()
        return self.ready.get()

    def run(self):
        while True:
            self.ready.put(drawn())


def joined(index):
    """Draws in a thread of its own, for which it waits."""
    found = []
    thread = threading.Thread(target=lambda: found.append(drawn()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("made", "said"), [(Ahead, 1), (lambda: joined, 0), (lambda: drawn, 0), (lambda: np.array, 0)])
def test_samples_that_are_drawn_beside_the_thread_that_reads_are_said_once_also_on_one_rank(
    made, said, workers, caplog, monkeypatch
):
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())
    for _ in range(2):
        for _ in sharded(DataLoader(Made(made(), LENGTH), batch_size=4, num_workers=workers), ONE):
            pass

    assert caplog.text.count("not the same each time they are read") == said


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_whose_items_are_lists_have_batches_that_their_collate_function_takes_out(workers):
    """As PaddleScience has them, whose data sets read a whole list of indices at once."""
    data = Made(lambda indices: np.array(indices), 10)
    inner = BatchSampler(data, shuffle=True, batch_size=4)

    def made():
        outer = BatchSampler(sampler=inner, batch_size=1)
        given = DataLoader(data, batch_sampler=outer, collate_fn=lambda one: one[0], num_workers=workers)
        return sharded(given, mesh([[0, 1]], "dp", "mp"))

    ranks = on_each_rank(range(2), lambda: locals_of(made()))
    one = ranks[0]
    assert ranks[1] == one
    assert sorted(row for batch in one for row in batch) == list(range(10))
    with simulated_rank(0, 2):
        loader = made()
        next(batches := iter(loader))
        state = loader.state_dict()
        batches.close()
        resumed = made()
        resumed.load_state_dict(state)
        assert locals_of(resumed) == one[1:]
