"""Lines for those who come from Paddle's own loader or sampler."""

import numpy as np
import paddle.distributed as dist
from paddle.io import DataLoader

import paddle_shard
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.migration import (
    DATA,
    IDS,
    ODD,
    case,
    cut,
    flat,
    launched,
    of_each_rank,
    steps,
)
from tests.docs.migration.claims import (
    chooses_epochs,
    epochs_differ,
    keeps_the_order,
    pads_rows,
    resumes,
)
from tests.helpers import DP2, Made, local, sharded

# From dist.shard_dataloader

PADDLE = "From dist.shard_dataloader"


@case(PADDLE, 'dist.shard_dataloader(given, mesh, shard_dims="dp")')
def same_rows(new, old):
    given = DataLoader(
        Made(lambda i: (np.array(i), np.array(-i)), 24), batch_size=8
    )
    assert steps(lambda: (batch[0] for batch in new(given=given))) == cut(IDS)
    # Paddle's own stops with numpy 2.4, unless a loader of this library was made before. Paddle 3.0's must be called.
    assert steps(lambda: (batch[0] for batch in old(given=given)())) == cut(IDS)


@case(
    PADDLE,
    'dist.shard_dataloader(given, [mesh, mesh], input_keys=["x", "y"], shard_dims="dp")',
)
def fields_on_meshes(new, old):
    given = DataLoader(
        Made(lambda i: {"x": np.array(i), "y": np.array(-i)}), batch_size=8
    )
    batch = next(iter(new(given=given)))
    assert {key: local(leaf) for key, leaf in batch.items()} == {
        "x": [0, 1, 2, 3],
        "y": [0, -1, -2, -3],
    }
    assert all(leaf.process_mesh == DP2 for leaf in batch.values())


@case(PADDLE, "for step, batch in enumerate(loader())")
def both_loops(new, old):
    def run(code):
        found = []
        names = {
            "found": found,
            "loader": sharded(DataLoader(DATA, batch_size=8)),
            "local": local,
        }
        exec(f"{code}: found.append((step, local(batch)))", names)
        return found

    assert len(run(new.codes[0])) == 3
    assert run(new.codes[0]) == run("for step, batch in enumerate(loader)")


@case(
    PADDLE,
    "DataLoader(data, batch_size=B, shuffle=True), and its order has to stay",
)
def order_of_paddle(new, old):
    keeps_the_order(new, old)


case(PADDLE, "a loop that pads the batch by hand on each rank")(pads_rows)


@case(PADDLE, "a call in code that you cannot edit")
def patched(new, old):
    before = dist.shard_dataloader
    patch = new()
    try:
        made = dist.shard_dataloader(
            DataLoader(DATA, batch_size=8), [DP2], shard_dims="dp"
        )
        assert isinstance(made, paddle_shard.ShardDataloader)
    finally:
        patch.undo()
    assert dist.shard_dataloader is before


case(PADDLE, "a run that begins its epoch again after a stop")(resumes)


# From paddle.io.DistributedBatchSampler

SAMPLER = "From paddle.io.DistributedBatchSampler"


@case(SAMPLER, "DistributedBatchSampler(data, batch_size=b)")
def rows_of_the_sampler(new, old):
    theirs = on_each_rank((0, 1), lambda: list(old()))
    assert of_each_rank(new) == theirs


@case(SAMPLER, "DistributedBatchSampler(data, batch_size=b, shuffle=True)")
def order_by_seed(new, old):
    epochs_differ(new)
    assert steps(lambda: sharded(new(), seed=1)) != steps(
        lambda: sharded(new(), seed=2)
    )


@case(SAMPLER, "the same, and its order has to stay")
def order_of_the_sampler(new, old):
    keeps_the_order(new, lambda: DataLoader(DATA, batch_size=8, shuffle=True))


@case(SAMPLER, "a sampler that has to stay")
def kept_sampler(new, old):
    assert of_each_rank(new) == on_each_rank(
        (0, 1), lambda: list(launched(DATA, 4))
    )


@case(SAMPLER, "drop_last=True")
def full_batches(new, old):
    assert steps(lambda: sharded(new(data=ODD))) == cut(IDS)[:2]


@case(SAMPLER, "samples that come twice to make ranks equal")
def padding_is_marked(new, old):
    def rows():
        batches = iter(sharded(DataLoader(ODD, batch_size=8), **new()))
        return [(local(batch), local(batches.valid)) for batch in batches]

    found = on_each_rank((0, 1), rows)
    assert [len(batch) for batch, _ in found[0]] == [
        len(batch) for batch, _ in found[1]
    ]
    real = [
        row
        for each in found.values()
        for batch, valid in each
        for row, good in zip(batch, valid, strict=True)
        if good
    ]
    assert sorted(real) == list(range(21))
    theirs = flat(
        flat(on_each_rank((0, 1), lambda: list(launched(ODD, 4))).values())
    )
    assert len(theirs) == 22, "Paddle's sampler repeats a sample without a mark"


@case(SAMPLER, "a model in paddle.DataParallel, fleet or paddle.Model")
def local_rows(new, old):
    batch = next(iter(sharded(DataLoader(DATA, batch_size=8), **new())))
    assert not batch.is_dist()
    assert batch.tolist() == [0, 1, 2, 3]


@case(SAMPLER, "the same, in code that has to stay as it is")
def patched_sampler(new, old):
    def rows():
        patch = new()
        try:
            return list(DataLoader(DATA, batch_sampler=launched(DATA, 4)))
        finally:
            patch.undo()

    found = on_each_rank((0, 1), rows)
    theirs = on_each_rank((0, 1), lambda: list(launched(DATA, 4)))
    assert all(
        not batch.is_dist() for batches in found.values() for batch in batches
    )
    assert {
        rank: [batch.tolist() for batch in batches]
        for rank, batches in found.items()
    } == theirs


case(SAMPLER, "sampler.set_epoch(epoch)")(chooses_epochs)
