"""What lines of several guides promise. A claim is given both sides of the line."""

import json
import re

import numpy as np
from paddle.io import DataLoader

import paddle_shard
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.migration import (
    DATA,
    IDS,
    ODD,
    cut,
    flat,
    launched,
    shuffled,
    steps,
    stopped,
)
from tests.docs.test_docs import ROOT
from tests.helpers import DP2, ONE, Made, local, mesh, sharded


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


def resumes(new, _=None, make=shuffled, **how):
    """A run that two ranks have begun resumes at the next sample: on two ranks, and on one."""
    straight = steps(make)
    for after, meshes, ranks in ((1, DP2, (0, 1)), (2, ONE, (0,))):
        state, begun = stopped(after, make)

        def rest(meshes=meshes, state=state):
            loader = make(meshes, **how)
            new(loader=loader, state=state)
            return loader

        assert begun + steps(rest, ranks) == straight


def epochs_differ(given, *_, **options):
    """Every epoch has each sample once, on one data rank, in an order of its own."""

    def two():
        loader = sharded(given(), **options)
        return [[local(batch) for batch in loader] for _ in range(2)]

    found = on_each_rank((0, 1), two)
    epochs = [
        flat(found[0][epoch]) + flat(found[1][epoch]) for epoch in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [IDS, IDS]
    assert epochs[0] != epochs[1]


def chooses_epochs(new, *_):
    """A pass moves to the next epoch; `set_epoch` goes to any."""
    loader = shuffled(ONE)
    epochs = [[local(batch) for batch in loader] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    new(loader=loader, epoch=1)
    assert [local(batch) for batch in loader] == epochs[1]


def counts_real_rows(new, *_):
    """A metric has a value for each real row, once."""
    batches, total = (
        iter(sharded(DataLoader(ODD, batch_size=8), ONE, tail="fill")),
        [],
    )
    for batch in batches:
        assert len(local(batch)) == 8
        total += new(values=batch, batches=batches).numpy().tolist()
    assert total == list(range(21))


def by_a_recipe(library, recipe):
    """The recipe has the function that the page names, with its arguments, and is tested where the library is."""

    def claim(new, *_):
        source = (ROOT / f"demos/adapters/{recipe}.py").read_text()
        assert f"def {new.codes[0].partition('(')[0]}(" in source
        for name in re.findall(r"(\w+)=", new.codes[0]):
            assert re.search(rf"\b{name}\b", source)
        # `make test-adapters` runs it, in the environment of the library.
        assert any(
            path.name.startswith("test_")
            for path in (ROOT / "tests/adapters" / library).glob("*.py")
        )

    return claim


RAGGED = Made(lambda i: [1] * (i + 1), 24)
"""Rows of lengths 1 to 24."""


def padded(rows):
    """A collate function that pads to the longest row that it is given."""
    longest = max(map(len, rows))
    return np.array([[*row, *[0] * (longest - len(row))] for row in rows])


def pads_rows(new, *_):
    """Rows have one length on all ranks. On the longest, only real ranks agree: multiprocess/test_lengths.py."""

    def shapes():
        given = DataLoader(RAGGED, batch_size=8, collate_fn=padded)
        return [
            list(batch._local_value().shape)
            for batch in sharded(given, **new())
        ]

    assert on_each_rank((0, 1), shapes) == dict.fromkeys((0, 1), [[4, 24]] * 3)


def replicas_agree(new, *_):
    """Ranks that differ in another axis get the same rows; together, the others get each row once."""
    four = mesh([[0, 1], [2, 3]], "dp", "mp")
    found = on_each_rank(
        range(4),
        lambda: [
            local(batch)
            for batch in paddle_shard.shard_dataloader(
                DataLoader(DATA, batch_size=8, shuffle=True), four, **new()
            )
        ],
    )
    assert found[0] == found[1] != found[2] == found[3]
    assert sorted(flat(found[0]) + flat(found[2])) == IDS


def seeds_differ(new, *_):
    """Another seed gives another order of the same samples."""
    assert steps(lambda: shuffled(**new())) != steps(shuffled)
    assert sorted(flat(steps(lambda: shuffled(**new())))) == IDS


def drops_what_is_short(new, *_):
    """Full batches only, and no sample twice."""
    assert (
        steps(lambda: sharded(DataLoader(ODD, batch_size=8), **new()))
        == cut(IDS)[:2]
    )


def as_many_steps(new, *_):
    """The length of a loader is how many steps each rank makes."""

    def both():
        loader = sharded(DataLoader(ODD, batch_size=8))
        return new(loader=loader), len(list(loader))

    assert on_each_rank((0, 1), both) == {0: (3, 3), 1: (3, 3)}


def counts_delivered(new, *_):
    """A state is JSON, and knows nothing of what workers have read ahead."""
    # workers read ahead
    loader = sharded(DataLoader(DATA, batch_size=8, num_workers=2), ONE)
    batches = iter(loader)
    next(batches)
    state = new(loader=loader)
    batches.close()
    assert json.loads(json.dumps(state)) == state
    again = sharded(DataLoader(DATA, batch_size=8), ONE)
    again.load_state_dict(state)
    assert [local(batch) for batch in again] == cut(IDS)[1:]
