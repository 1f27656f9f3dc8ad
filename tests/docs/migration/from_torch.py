"""Lines for those who come from torch and torchdata."""

import json
import re

from paddle.io import BatchSampler, DataLoader

import paddle_shard
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.migration import (
    DATA,
    IDS,
    ODD,
    case,
    chooses_epochs,
    cut,
    epochs_differ,
    flat,
    resumes,
    shuffled,
    steps,
    stopped,
)
from tests.docs.test_docs import ROOT
from tests.helpers import ONE, Made, local, mesh, sharded

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
