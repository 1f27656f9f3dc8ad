"""Lines for those who come from MosaicML Streaming. `make test-adapters ADAPTERS=mds` runs what needs the library."""

from fractions import Fraction

from paddle.io import DataLoader

from paddle_shard import Blocks, Mixture
from tests.docs.migration import DATA, case, flat, real, steps
from tests.docs.migration.claims import (
    by_a_recipe,
    counts_delivered,
    epochs_differ,
    replicas_agree,
    resumes,
    seeds_differ,
)
from tests.helpers import DP2, ONE, Made, sharded

MOSAIC = "From MosaicML Streaming"


@case(MOSAIC, "StreamingDataset(local=folder, batch_size=b, shuffle=True)")
def files_on_the_host(new, old):
    # their data set has an index and a length, as this one: tests/adapters/mds reads real files
    def given():
        return new(LocalDataset=lambda folder: DATA, folder="mds")

    epochs_differ(given)
    resumes(
        lambda loader, state: loader.load_state_dict(state),
        make=lambda meshes=DP2: sharded(given(), meshes),
    )


case(
    MOSAIC,
    "StreamingDataset(remote=remote, local=cache, batch_size=b, shuffle=True)",
)(by_a_recipe("mds", "mds_recipe"))


@case(MOSAIC, "shuffle_block_size=4")
def blocks_stay_together(new, old):
    options = new()
    assert isinstance(options["shuffle"], Blocks)
    given = DataLoader(DATA, batch_size=8)
    epochs_differ(lambda: given, None, **options)
    found = steps(lambda: sharded(given, **options))
    # In rows of each part, samples of two blocks are mixed; each block is opened by one data rank.
    halves = [
        flat(batch[:4] for batch in found),
        flat(batch[4:] for batch in found),
    ]
    assert not {row // 4 for row in halves[0]} & {row // 4 for row in halves[1]}


WEB, CODE = Made(length=70), Made(lambda i: 1000 + i, length=30)


def shares(rows):
    return Fraction(sum(row >= 1000 for row in rows), len(rows))


@case(
    MOSAIC,
    "StreamingDataset(streams=[Stream(local=web, proportion=0.75), Stream(local=code, proportion=0.25)])",
)
def exact_shares(new, old):
    rows = flat(
        real(
            sharded(
                DataLoader(new(web=WEB, code=CODE), batch_size=8, shuffle=True),
                ONE,
            )
        )
    )
    for end in range(1, len(rows) + 1):
        assert abs(shares(rows[:end]) * end - Fraction(end, 4)) <= Fraction(
            1, 2
        )


@case(MOSAIC, "epoch_size=48")
def samples_of_an_epoch(new, old):
    rows = flat(
        real(
            sharded(
                DataLoader(new(web=WEB, code=CODE), batch_size=8, shuffle=True),
                ONE,
            ),
            epochs=3,
        )
    )
    assert len(rows) == 3 * 48
    web = [row for row in rows if row < 1000]
    assert len(set(web[:70])) == 70, (
        "an epoch of the mixture is no end for its sources"
    )


@case(MOSAIC, "proportion= without epoch_size=")
def as_many_as_there_are(new, old):
    rows = flat(
        real(
            sharded(
                DataLoader(new(web=WEB, code=CODE), batch_size=8, shuffle=True),
                ONE,
            )
        )
    )
    assert len(rows) == 100
    shorter = Mixture(
        {"web": WEB, "code": CODE}, weights={"web": 0.1, "code": 0.9}
    )
    assert len(shorter) == 34, "code has been read once"


case(MOSAIC, "replication=2")(replicas_agree)
case(MOSAIC, "shuffle_seed=7")(seeds_differ)
case(MOSAIC, "StreamingDataLoader(dataset, batch_size=b).state_dict()")(
    counts_delivered
)


@case(MOSAIC, "loader.load_state_dict(state)")
def next_sample(new, old):
    resumes(new)
    resumes(new, workers=2)
