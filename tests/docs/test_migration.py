"""Each line of the tables of docs/migration.md keeps its promise: its new side runs as it stands on the page."""

import json
import re

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler

import paddle_shard
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.test_docs import ROOT
from tests.helpers import DP2, ONE, Made, local, mesh, sharded

DATA = Made(length=24)
ODD = Made(length=21)
"""Of a length that two ranks cannot share."""
NAMES = {"paddle": paddle, "dist": dist, "paddle_shard": paddle_shard, "mesh": DP2, "data": DATA, "b": 4, "B": 8}
NAMES |= {name: getattr(paddle_shard, name) for name in paddle_shard.__all__}
NAMES |= {"DataLoader": DataLoader, "np": np}
IDS = list(range(24))


def launched(data, batch_size, **options):
    """Paddle's sampler as it is on a rank of two. It takes their number from the launcher's variables."""
    return DistributedBatchSampler(data, batch_size, num_replicas=2, rank=dist.get_rank(), **options)


NAMES |= {"DistributedBatchSampler": launched}


def lines():
    """(section, old, new) of each line of each table that says what one gets."""
    found, section, head = [], "", ""
    for line in (ROOT / "docs/migration.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].replace("`", "")
        if not line.startswith("|"):
            head = ""
        elif not head:
            head = line
        elif head == "| old | new | you get |" and line.startswith("| "):
            old, new, promise = line.strip("| ").split(" | ")
            assert promise
            found.append((section, old, new))
    return found


class Side:
    """What stands on one side of a line. Its pieces of code can be run."""

    def __init__(self, cell):
        self.codes = re.findall(r"`([^`]+)`", cell)

    def __call__(self, number=0, **names):
        """Return the value of a piece of code, or the options that it is."""
        code = self.codes[number]
        return eval(f"dict({code})" if re.match(r"\w+=[^=]", code) else code, {**NAMES, **names})


CASES = {}


def case(section, old):
    """The test of the line of a section whose old side begins like this."""

    def keep(function):
        assert (section, old) not in CASES
        CASES[section, old] = function
        return function

    return keep


def cases_of(line):
    section, old, _ = line
    return [key for key in CASES if section == key[0] and re.match(re.escape(key[1]) + r"(\W|$)", old.replace("`", ""))]


def steps(make, ranks=(0, 1)):
    """The global batches of an epoch: the rows of both ranks, one after the other. Alone: those of one rank."""
    per_rank = on_each_rank(ranks, lambda: [local(batch) for batch in make()])
    return [flat(rows) for rows in zip(*per_rank.values(), strict=True)]


def flat(batches):
    return [row for batch in batches for row in batch]


def cut(rows, size=8):
    return [rows[at : at + size] for at in range(0, len(rows), size)]


@pytest.mark.parametrize("line", lines(), ids=lambda line: f"{line[0]}: {line[1]}"[:90])
def test_a_line_keeps_its_promise(line, tmp_path, monkeypatch):
    found = cases_of(line)
    assert len(found) == 1, f"{len(found)} cases for this line: {line}"
    monkeypatch.chdir(tmp_path)

    CASES[found[0]](Side(line[2]), Side(line[1]))


def test_each_case_is_of_a_line_of_the_page():
    used = [key for line in lines() for key in cases_of(line)]

    assert sorted(used) == sorted(CASES)


# From dist.shard_dataloader

PADDLE = "From dist.shard_dataloader"


@case(PADDLE, 'dist.shard_dataloader(given, mesh, shard_dims="dp")')
def same_rows(new, old):
    assert steps(lambda: new(given=DataLoader(DATA, batch_size=8))) == cut(IDS)
    # Paddle's own stops with numpy 2.4, unless a loader of this library was made before.
    assert steps(lambda: old(given=DataLoader(DATA, batch_size=8))) == cut(IDS)


@case(PADDLE, 'dist.shard_dataloader(given, [mesh, mesh], input_keys=["x", "y"], shard_dims="dp")')
def fields_on_meshes(new, old):
    given = DataLoader(Made(lambda i: {"x": np.array(i), "y": np.array(-i)}), batch_size=8)
    batch = next(iter(new(given=given)))
    assert {key: local(leaf) for key, leaf in batch.items()} == {"x": [0, 1, 2, 3], "y": [0, -1, -2, -3]}
    assert all(leaf.process_mesh == DP2 for leaf in batch.values())


@case(PADDLE, "for step, batch in enumerate(loader())")
def both_loops(new, old):
    def run(code):
        found = []
        names = {"found": found, "loader": sharded(DataLoader(DATA, batch_size=8)), "local": local}
        exec(f"{code}: found.append((step, local(batch)))", names)
        return found

    assert len(run(new.codes[0])) == 3
    assert run(new.codes[0]) == run("for step, batch in enumerate(loader)")


@case(PADDLE, "DataLoader(data, batch_size=B, shuffle=True), and its order has to stay")
def order_of_paddle(new, old):
    keeps_the_order(new, old)


def keeps_the_order(new, given):
    """Rows of two epochs are those of Paddle's sampler."""

    def theirs():
        sampler, found = launched(DATA, 4, shuffle=True), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    def ours():
        loader = sharded(given(), **new())
        return [[local(batch) for batch in loader] for _ in range(2)]

    assert on_each_rank((0, 1), ours) == on_each_rank((0, 1), theirs)


@case(PADDLE, "a call in code that you cannot edit")
def patched(new, old):
    before = dist.shard_dataloader
    patch = new()
    try:
        made = dist.shard_dataloader(DataLoader(DATA, batch_size=8), [DP2], shard_dims="dp")
        assert isinstance(made, paddle_shard.ShardDataloader)
    finally:
        patch.undo()
    assert dist.shard_dataloader is before


@case(PADDLE, "a run that begins its epoch again after a stop")
def goes_on_on_another_mesh(new, old):
    resumes(new)


def shuffled(meshes=DP2, workers=0, data=DATA, **options):
    return sharded(DataLoader(data, batch_size=8, shuffle=True, num_workers=workers), meshes, **options)


def stopped(after=1, **how):
    """The state after some steps of each rank, and the global batches up to there."""

    def run():
        loader = shuffled(**how)
        batches = iter(loader)
        rows = [local(next(batches)) for _ in range(after)]
        batches.close()
        return rows, json.loads(json.dumps(loader.state_dict()))

    found = on_each_rank((0, 1), run)
    return found[0][1], [one + two for one, two in zip(found[0][0], found[1][0], strict=True)]


def resumes(new, **how):
    """A run that two ranks have begun goes on with the next sample: on two ranks, and on one."""
    straight = steps(shuffled)
    for after in (1, 2):
        state, begun = stopped(after)
        for meshes, ranks in ((DP2, (0, 1)), (ONE, (0,))):

            def rest(meshes=meshes, state=state):
                loader = shuffled(meshes, **how)
                new(loader=loader, state=state)
                return loader

            assert begun + steps(rest, ranks) == straight


# From paddle.io.DistributedBatchSampler

SAMPLER = "From paddle.io.DistributedBatchSampler"


def of_each_rank(given, **options):
    return on_each_rank((0, 1), lambda: [local(batch) for batch in sharded(given(), **options)])


@case(SAMPLER, "DistributedBatchSampler(data, batch_size=b)")
def rows_of_the_sampler(new, old):
    theirs = on_each_rank((0, 1), lambda: list(old()))
    assert of_each_rank(new) == theirs


@case(SAMPLER, "DistributedBatchSampler(data, batch_size=b, shuffle=True)")
def order_by_seed(new, old):
    epochs_differ(new)
    assert steps(lambda: sharded(new(), seed=1)) != steps(lambda: sharded(new(), seed=2))


def epochs_differ(given):
    """Every epoch has each sample once, on one data rank, in an order of its own."""

    def two():
        loader = sharded(given())
        return [[local(batch) for batch in loader] for _ in range(2)]

    found = on_each_rank((0, 1), two)
    epochs = [flat(found[0][epoch]) + flat(found[1][epoch]) for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [IDS, IDS]
    assert epochs[0] != epochs[1]


@case(SAMPLER, "the same, and its order has to stay")
def order_of_the_sampler(new, old):
    keeps_the_order(new, lambda: DataLoader(DATA, batch_size=8, shuffle=True))


@case(SAMPLER, "a sampler that has to stay")
def kept_sampler(new, old):
    assert of_each_rank(new) == on_each_rank((0, 1), lambda: list(launched(DATA, 4)))


@case(SAMPLER, "drop_last=True")
def full_batches(new, old):
    assert steps(lambda: sharded(new(data=ODD))) == cut(IDS)[:2]


@case(SAMPLER, "samples that come twice to make ranks equal")
def padding_is_marked(new, old):
    def rows():
        batches = iter(sharded(DataLoader(ODD, batch_size=8), **new()))
        return [(local(batch), local(batches.valid)) for batch in batches]

    found = on_each_rank((0, 1), rows)
    assert [len(batch) for batch, _ in found[0]] == [len(batch) for batch, _ in found[1]]
    real = [
        row for each in found.values() for batch, valid in each for row, good in zip(batch, valid, strict=True) if good
    ]
    assert sorted(real) == list(range(21))
    theirs = flat(flat(on_each_rank((0, 1), lambda: list(launched(ODD, 4))).values()))
    assert len(theirs) == 22, "Paddle's sampler repeats a sample without a mark"


@case(SAMPLER, "sampler.set_epoch(epoch)")
def epochs_by_themselves(new, old):
    chooses_epochs(new)


def chooses_epochs(new):
    """A pass moves to the next epoch; `set_epoch` goes to any."""
    loader = shuffled(ONE)
    epochs = [[local(batch) for batch in loader] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    new(loader=loader, epoch=1)
    assert [local(batch) for batch in loader] == epochs[1]


# From torch's DistributedSampler

TORCH = "From torch's DistributedSampler"


@case(TORCH, "DataLoader(data, batch_size=b, sampler=DistributedSampler(data))")
def each_once(new, old):
    epochs_differ(new)


@case(TORCH, "DistributedSampler(data, shuffle=False)")
def in_order(new, old):
    assert steps(lambda: sharded(new())) == cut(IDS)


@case(TORCH, "num_replicas=dp_size, rank=dp_rank")
def replicas_get_the_same(new, old):
    four = mesh([[0, 1], [2, 3]], "dp", "mp")
    found = on_each_rank(
        range(4),
        lambda: [
            local(batch)
            for batch in paddle_shard.shard_dataloader(DataLoader(DATA, batch_size=8, shuffle=True), four, **new())
        ],
    )
    assert found[0] == found[1] != found[2] == found[3]
    assert sorted(flat(found[0]) + flat(found[2])) == IDS


@case(TORCH, "sampler.set_epoch(epoch)")
def epochs_of_torch(new, old):
    chooses_epochs(new)


@case(TORCH, "seed=7")
def other_seeds(new, old):
    assert steps(lambda: shuffled(**new())) != steps(shuffled)
    assert sorted(flat(steps(lambda: shuffled(**new())))) == IDS


@case(TORCH, "drop_last=True")
def no_sample_twice(new, old):
    assert steps(lambda: sharded(DataLoader(ODD, batch_size=8), **new())) == cut(IDS)[:2]


@case(TORCH, "a metric over samples that come twice")
def exact_metric(new, old):
    counts_real_rows(new)


def counts_real_rows(new):
    batches, total = iter(sharded(DataLoader(ODD, batch_size=8), ONE, tail="fill")), []
    for batch in batches:
        assert len(local(batch)) == 8
        total += new(values=batch, batches=batches).numpy().tolist()
    assert total == list(range(21))


@case(TORCH, "len(data) // world_size")
def number_of_steps(new, old):
    def both():
        loader = sharded(DataLoader(ODD, batch_size=8))
        return new(loader=loader), len(list(loader))

    assert on_each_rank((0, 1), both) == {0: (3, 3), 1: (3, 3)}


@case(TORCH, "DistributedDataParallel(model)")
def local_rows(new, old):
    batch = next(iter(sharded(DataLoader(DATA, batch_size=8), **new())))
    assert not batch.is_dist()
    assert batch.tolist() == [0, 1, 2, 3]


# From torchdata's StatefulDataLoader

STATEFUL = "From torchdata's StatefulDataLoader"


@case(STATEFUL, "StatefulDataLoader(data, batch_size=b, num_workers=2)")
def a_state_with_workers(new, old):
    def run():
        loader = sharded(new(), ONE)
        batches = iter(loader)
        first, state = local(next(batches)), loader.state_dict()
        batches.close()
        again = sharded(new(), ONE)
        again.load_state_dict(state)
        return [first, *(local(batch) for batch in again)]

    assert run() == cut(IDS)


@case(STATEFUL, "loader.state_dict()")
def delivered_samples(new, old):
    loader = sharded(DataLoader(DATA, batch_size=8, num_workers=2), ONE)  # workers read ahead
    batches = iter(loader)
    next(batches)
    state = new(loader=loader)
    batches.close()
    assert json.loads(json.dumps(state)) == state
    again = sharded(DataLoader(DATA, batch_size=8), ONE)
    again.load_state_dict(state)
    assert [local(batch) for batch in again] == cut(IDS)[1:]


@case(STATEFUL, "loader.load_state_dict(state)")
def next_sample(new, old):
    resumes(new)
    resumes(new, workers=2)


class Counting(Made):
    """Notes what is read."""

    def __init__(self):
        super().__init__(length=24)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def rest_reads_only_what_is_left():
    for after in (1, 2):
        state, begun = stopped(after)
        data = Counting()
        loader = shuffled(ONE, data=data, verify=None, prefetch=0)
        loader.load_state_dict(state)
        rest = [local(batch) for batch in loader]
        assert begun + rest == steps(shuffled)
        assert sorted(set(data.read)) == sorted(flat(rest)), "nothing that was delivered is read again"


@case(STATEFUL, "snapshot_every_n_steps=100")
def any_step(new, old):
    assert not new.codes
    rest_reads_only_what_is_left()


@case(STATEFUL, "if step < done: continue")
def no_continue(new, old):
    assert not new.codes
    rest_reads_only_what_is_left()


class Backwards(BatchSampler):
    """A sampler with a state of its own."""

    def __init__(self):
        self.at, self.loaded, self.batch_size, self.drop_last = 0, None, 8, False

    def __iter__(self):
        while self.at < 3:
            self.at += 1
            yield IDS[::-1][8 * self.at - 8 : 8 * self.at]
        self.at = 0

    def __len__(self):
        return 3

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, Backwards.loaded = state["at"], state["at"]


@case(STATEFUL, "a sampler with state_dict")
def sampler_with_a_state(new, old):
    loader = sharded(new(sampler=Backwards()), ONE)
    batches = iter(loader)
    first, state = local(next(batches)), loader.state_dict()
    batches.close()
    Backwards.loaded = None
    again = sharded(new(sampler=Backwards()), ONE)
    again.load_state_dict(state)
    assert [first, *(local(batch) for batch in again)] == cut(IDS[::-1])
    assert Backwards.loaded is not None


@case(STATEFUL, "torchdata.nodes, or a loader that has to stay")
def recipe_of_torchdata(new, old):
    by_a_recipe("torchdata", new, "torchdata_recipe")


def by_a_recipe(library, new, recipe):
    """The recipe has the function that the page names, with its arguments, and is tested where the library is."""
    source = (ROOT / f"demos/adapters/{recipe}.py").read_text()
    assert f"def {new.codes[0].partition('(')[0]}(" in source
    for name in re.findall(r"(\w+)=", new.codes[0]):
        assert re.search(rf"\b{name}\b", source)
    # `make test-adapters` runs it, in the environment of the library.
    assert any(path.name.startswith("test_") for path in (ROOT / "tests/adapters" / library).glob("*.py"))
