"""Lines for those who come from Grain."""

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard import ExternalLoader
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.migration import IDS, case, cut, flat, real, steps
from tests.docs.migration.claims import (
    epochs_differ,
    replicas_agree,
    resumes,
    seeds_differ,
)
from tests.helpers import DP2, ONE, local, sharded

GRAIN = "From Grain"


def grains():
    """Its names, as pages have them. A test that asks for them is skipped where it is not installed."""
    pytest.importorskip("grain")
    import grain.python

    names = {
        name: getattr(grain.python, name)
        for name in ("Batch", "IndexSampler", "ShardOptions")
    }
    return {**names, "grain": grain, "MapDataset": grain.MapDataset}


def numbers():
    return grains()["grain"].MapDataset.range(24)


def ours(new, **names):
    return new(ExternalLoader=ExternalLoader, **grains(), **names)


@case(
    GRAIN,
    "grain.DataLoader(data_source=source, sampler=sampler, operations=[Batch(b)])",
)
def any_source(new, old):
    sampler = grains()["IndexSampler"](
        num_records=24, shuffle=False, num_epochs=1, seed=0
    )
    theirs = flat(
        batch.tolist()
        for batch in old(**grains(), source=range(24), sampler=sampler)
    )
    assert (
        flat(steps(lambda: sharded(ours(new, source=range(24)))))
        == theirs
        == IDS
    )


@case(GRAIN, "IndexSampler(num_records=len(source), shuffle=True, seed=7)")
def shuffled_by_the_loader(new, old):
    seeds_differ(lambda: new(1))
    epochs_differ(lambda: ours(new, source=range(24)))


case(
    GRAIN,
    "ShardOptions(shard_index=rank, shard_count=2) or ShardByJaxProcess()",
)(replicas_agree)


@case(GRAIN, "worker_count=2")
def any_number_of_workers(new, old):
    loaders = [
        DataLoader(range(24), batch_size=8, **options)
        for options in ({}, new())
    ]
    assert (
        steps(lambda: sharded(loaders[1]))
        == steps(lambda: sharded(loaders[0]))
        == cut(IDS)
    )


@case(GRAIN, "MapDataset.source(source).shuffle(seed=7).map(function).batch(b)")
def steps_of_a_map_dataset(new, old):
    epochs_differ(lambda: ours(new, source=range(24), function=lambda x: x))
    found = flat(
        steps(
            lambda: sharded(
                ours(new, source=range(24), function=lambda x: x * x)
            )
        )
    )
    assert sorted(found) == [i * i for i in IDS]


@case(GRAIN, "the same, and its order has to stay")
def its_own_order(new, old):
    dataset = grains()["MapDataset"].source(range(24)).shuffle(seed=7)
    loader = sharded(ours(new, source=range(24)), ONE)
    assert [flat(real(loader)) for _ in range(2)] == [
        [dataset[i] for i in IDS]
    ] * 2


@case(GRAIN, "dataset[rank::ranks]")
def no_split(new, old):
    assert list(ours(new, dataset=numbers())) == IDS


@case(GRAIN, "dataset.repeat()")
def passes_are_epochs(new, old):
    assert not new.codes
    epochs_differ(lambda: DataLoader(numbers(), batch_size=8, shuffle=True))


@case(GRAIN, "dataset.filter(keep)")
def a_stream_of_what_is_kept(new, old):
    dataset = old(dataset=numbers(), keep=lambda x: x % 3 == 0)
    given = DataLoader(ours(new, dataset=dataset), batch_size=8)
    assert sorted(flat(real(sharded(given, ONE)))) == IDS[::3]


@case(GRAIN, "dataset.random_map(function)")
def drawn_anew(new, old):
    dataset = ours(
        new, dataset=numbers(), function=lambda x: x + np.random.random()
    )

    def two_epochs():
        loader = sharded(DataLoader(dataset, batch_size=8))
        return [flat(local(batch) for batch in loader) for _ in range(2)]

    first, again = (
        on_each_rank((0, 1), two_epochs),
        on_each_rank((0, 1), two_epochs),
    )
    assert first == again
    assert first[0][0] != first[0][1]
    assert [int(x) for x in first[0][0]] == [int(x) for x in first[0][1]]


@case(GRAIN, "MapDataset.mix([web, code], weights=[0.75, 0.25])")
def exact_shares(new, old):
    web, code = numbers(), grains()["MapDataset"].range(1000, 1010)
    theirs, mixture = (
        old(web=web, code=code, **grains()),
        ours(new, web=web, code=code),
    )
    rows = flat(real(sharded(DataLoader(mixture, batch_size=4), ONE)))
    assert len(rows) == len(mixture) == len(theirs)
    assert sorted(rows) == sorted(theirs[i] for i in range(len(theirs)))
    for end in range(1, len(rows) + 1):
        assert abs(sum(row >= 1000 for row in rows[:end]) - end / 4) <= 1 / 2


@case(GRAIN, "iterator.set_state(iterator.get_state())")
def next_sample(new, old):
    def make(meshes=DP2, workers=0):
        given = DataLoader(
            numbers(), batch_size=8, shuffle=True, num_workers=workers
        )
        return sharded(given, meshes)

    resumes(
        lambda loader, state: new(loader=loader, other=_saved(state)), make=make
    )
    resumes(
        lambda loader, state: new(loader=loader, other=_saved(state)),
        make=make,
        workers=2,
    )


def _saved(state):
    """Another loader, whose state this is."""
    return type("Other", (), {"state_dict": lambda self: state})()


@case(GRAIN, "an IterDataset")
def its_own_state(new, old):
    def build(share):
        mine = (
            numbers()
            .seed(share.seed + share.epoch)
            .shuffle()[share.shard :: share.num_shards]
        )
        batches = iter(mine.to_iter_dataset().batch(8 // share.num_shards))
        if share.state is not None:
            batches.set_state(share.state)
        return batches

    def two_epochs():
        loader = sharded(ours(new, build=build))
        return [[local(batch) for batch in loader] for _ in range(2)]

    found = on_each_rank((0, 1), two_epochs)
    for epoch in range(2):
        assert sorted(flat(found[0][epoch]) + flat(found[1][epoch])) == IDS
    stopped = sharded(ours(new, build=build))
    batches = iter(stopped)
    begun = [local(next(batches))]
    batches.close()
    again = sharded(ours(new, build=build))
    again.load_state_dict(stopped.state_dict())
    assert begun + [local(batch) for batch in again] == found[0][0]
