"""Lines for those who come from torch and torchdata."""

from paddle.io import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from tests.docs.migration import (
    DATA,
    IDS,
    case,
    cut,
    flat,
    shuffled,
    steps,
    stopped,
)
from tests.docs.migration.claims import (
    as_many_steps,
    by_a_recipe,
    chooses_epochs,
    counts_delivered,
    counts_real_rows,
    drops_what_is_short,
    epochs_differ,
    replicas_agree,
    resumes,
    seeds_differ,
)
from tests.helpers import ONE, Made, local, sharded

# From torch's DistributedSampler

TORCH = "From torch's DistributedSampler"


case(TORCH, "DataLoader(data, batch_size=b, sampler=DistributedSampler(data))")(
    epochs_differ
)


@case(TORCH, "DistributedSampler(data, shuffle=False)")
def in_order(new, old):
    assert steps(lambda: sharded(new())) == cut(IDS)


case(TORCH, "num_replicas=dp_size, rank=dp_rank")(replicas_agree)


case(TORCH, "sampler.set_epoch(epoch)")(chooses_epochs)


case(TORCH, "seed=7")(seeds_differ)


case(TORCH, "drop_last=True")(drops_what_is_short)


case(TORCH, "a metric over samples that come twice")(counts_real_rows)


case(TORCH, "len(data) // world_size")(as_many_steps)


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


case(
    STATEFUL,
    "StatefulDataLoader(data, sampler=StatefulDistributedSampler(data))",
)(epochs_differ)


class Unsplit(IterableDataset):
    """Samples one after the other."""

    def __iter__(self):
        return iter(range(24))


class Split(IterableDataset):
    """Each worker has samples of its own."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 24, info.num_workers))


def each_once(make):
    for workers in (0, 2):
        found = steps(lambda workers=workers: sharded(make(workers)))
        assert sorted(flat(found)) == IDS


@case(STATEFUL, "StatefulDataLoader(iterable, batch_size=b)")
def iterable(new, old):
    each_once(
        lambda workers: DataLoader(
            new(iterable=Unsplit()).dataset, batch_size=8, num_workers=workers
        )
    )


@case(STATEFUL, "an IterableDataset that splits itself by get_worker_info()")
def splits_itself(new, old):
    each_once(
        lambda workers: DataLoader(
            new(iterable=Split()).dataset, batch_size=8, num_workers=workers
        )
    )


case(STATEFUL, "loader.state_dict()")(counts_delivered)


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
        assert sorted(set(data.read)) == sorted(flat(rest)), (
            "nothing that was delivered is read again"
        )


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
        self.at, self.loaded, self.batch_size, self.drop_last = (
            0,
            None,
            8,
            False,
        )

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


@case(STATEFUL, "a batch sampler with state_dict")
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


class IndicesBackwards(Sampler):
    """A sampler of indices with a state of its own."""

    def __init__(self):
        self.at, self.loaded = 0, None

    def __iter__(self):
        while self.at < 24:
            self.at += 1
            yield 24 - self.at
        self.at = 0

    def __len__(self):
        return 24

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.loaded = state["at"]


@case(STATEFUL, "sampler=sampler, which yields indices, with state_dict")
def sampler_of_indices_with_a_state(new, old):
    for after in (1, 2):
        loader = sharded(new(sampler=IndicesBackwards()), ONE)
        batches = iter(loader)
        begun, state = (
            [local(next(batches)) for _ in range(after)],
            loader.state_dict(),
        )
        batches.close()
        own = IndicesBackwards()
        again = sharded(new(sampler=own), ONE)
        again.load_state_dict(state)
        assert begun + [local(batch) for batch in again] == cut(IDS[::-1])
        assert own.loaded is not None


case(STATEFUL, "torchdata.nodes, or a loader that has to stay")(
    by_a_recipe("torchdata", "torchdata_recipe")
)
