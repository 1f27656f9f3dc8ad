"""Lines for those who come from torchdata's DataLoader2, which its versions up to 0.9 have."""

from fractions import Fraction

from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Stream
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.migration import IDS, case, cut, flat, real, steps
from tests.docs.migration.claims import epochs_differ, resumes
from tests.helpers import DP2, ONE, sharded

PIPES = "From torchdata's DataLoader2"
STREAM = Stream.of(range(24))


@case(PIPES, "IterableWrapper(data)")
def samples_in_order(new, old):
    assert steps(
        lambda: sharded(
            DataLoader(new(data=range(24)).in_parts(1), batch_size=8), ONE
        ),
        (0,),
    ) == cut(IDS)
    assert (
        sorted(
            flat(
                steps(
                    lambda: sharded(
                        DataLoader(new(data=range(24)), batch_size=8)
                    )
                )
            )
        )
        == IDS
    )


@case(PIPES, "dp.map(function)")
def mapped(new, old):
    assert list(new(stream=STREAM, function=lambda i: i * i)) == [
        i * i for i in IDS
    ]


@case(PIPES, "dp.filter(keep)")
def filtered(new, old):
    stream = new(stream=STREAM, keep=lambda i: i % 3 == 0)
    assert list(stream) == IDS[::3]
    # Parts end at different times, and no kept sample is lost.
    assert (
        sorted(flat(real(sharded(DataLoader(stream, batch_size=8), ONE))))
        == IDS[::3]
    )


@case(PIPES, "dp.shuffle(buffer_size=1000)")
def windows(new, old):
    stream = new(stream=STREAM)
    epochs_differ(lambda: DataLoader(stream, batch_size=8))
    alone = steps(lambda: sharded(DataLoader(stream, batch_size=8)))
    assert (
        steps(lambda: sharded(DataLoader(stream, batch_size=8, num_workers=2)))
        == alone
    )


@case(PIPES, "dp.sharding_filter()")
def mapped_by_one_reader(new, old):
    before, after = [], []
    stream = STREAM.map(lambda i: before.append(i) or i)
    stream = new(stream=stream).map(lambda i: after.append(i) or i)
    assert (
        sorted(flat(steps(lambda: sharded(DataLoader(stream, batch_size=8)))))
        == IDS
    )
    assert sorted(after) == IDS, "by one of two readers"
    assert len(before) > 1.5 * len(after), (
        "by both, up to the last sample that each keeps"
    )


@case(PIPES, "dp.batch(4).map(function).unbatch()")
def groups(new, old):
    found = list(
        new(stream=STREAM, function=lambda group: [len(group)] * len(group))
    )
    assert found == [4] * 24


@case(PIPES, "dp.batch(b).collate()")
def global_batches(new, old):
    assert [
        len(batch) for batch in steps(lambda: sharded(new(stream=STREAM)))
    ] == [
        8,
        8,
        8,
    ]


@case(PIPES, "dp.cycle(2)")
def read_twice(new, old):
    assert list(new(stream=STREAM)) == IDS * 2


@case(PIPES, "SampleMultiplexer({web: 0.75, code: 0.25}, seed=0)")
def exact_shares(new, old):
    stream = new(web=Stream.of(range(60)), code=Stream.of(range(1000, 1030)))
    rows = list(stream)
    for end in range(1, len(rows) + 1):
        assert abs(
            sum(row >= 1000 for row in rows[:end]) - Fraction(end, 4)
        ) <= Fraction(1, 2)
    assert set(range(60)) | set(range(1000, 1030)) == set(rows), (
        "each source was read in full"
    )


@case(
    PIPES,
    "DataLoader2(dp, reading_service=MultiProcessingReadingService(num_workers=2))",
)
def any_number_of_workers(new, old):
    stream = STREAM.shuffle(5)
    found = steps(lambda: sharded(new(stream=stream)))
    assert sorted(flat(found)) == IDS
    assert found == steps(lambda: sharded(DataLoader(stream, batch_size=8)))


@case(PIPES, "DistributedReadingService()")
def no_sample_is_left_out(new, old):
    given = DataLoader(Stream.of(range(21)), batch_size=8)
    found = on_each_rank(
        (0, 1), lambda: real(paddle_shard.shard_dataloader(given, DP2, **new()))
    )
    assert len(found[0]) == len(found[1]) == 3
    assert sorted(flat(found[0]) + flat(found[1])) == list(range(21))


@case(PIPES, "loader.seed(7)")
def another_seed(new, old):
    given = DataLoader(STREAM.shuffle(1000), batch_size=8)
    orders = [
        steps(lambda options=options: sharded(given, **options))
        for options in ({}, new())
    ]
    assert orders[0] != orders[1]
    assert sorted(flat(orders[1])) == IDS


@case(
    PIPES,
    "loader.state_dict() and DataLoader2.from_state(state, reading_service)",
)
def next_sample(new, old):
    def make(meshes=DP2, workers=0):
        return sharded(
            DataLoader(STREAM.shuffle(2), batch_size=8, num_workers=workers),
            meshes,
        )

    def load(loader, state):
        new(1, loader=loader, state=state)
        assert new(0, loader=loader)["epoch"] == state["epoch"]

    resumes(load, make=make)
    resumes(load, make=make, workers=2)
