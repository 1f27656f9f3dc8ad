"""The global batches of a stream are the same for every number of data ranks and workers, and after a resume."""

import os
import random
from itertools import count

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Stream
from paddle_shard.core.randomness import NumpyGenerator, PythonGenerator
from paddle_shard.data.iterable import IterableSource
from paddle_shard.data.stages.cut import Stripe
from paddle_shard.data.stages.stage import Opening, Stage
from paddle_shard.data.stages.steps import (
    Filter,
    Group,
    Map,
    Repeat,
    Shuffle,
    Unbatch,
)
from paddle_shard.errors import DataReadError
from paddle_shard.plan.parts import PartsPlan, chunks_of
from paddle_shard.plan.seeding import mix
from paddle_shard.plan.step import SamplerStep, Step
from paddle_shard.plan.tails import TAILS
from paddle_shard.reading.batch import Batch as ReadBatch
from paddle_shard.reading.batch import Chunk, joined
from paddle_shard.reading.chunk_reader import (
    ChunkReader,
    ChunkRequest,
    OwnBatches,
)
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.reader import HowToRead
from tests.helpers import SeededBy
from tests.trials import trials

GENERATORS = (NumpyGenerator(), PythonGenerator())
HOW, DRAWS = HowToRead(generators=()), HowToRead(generators=GENERATORS)
MISSING = "missing"
# readers are told what they read by its parts
STEP = Step(epoch=0, number=0, num_rows=0, micro_size=0, num_positions=0)
WORKERS = range(6)


class Parts(Stage):
    """A source whose parts are given lists, with or without saying how long they are."""

    cuts = True

    def __init__(self, parts, says_lengths=True):
        self.parts, self.says_lengths = parts, says_lengths

    def open(self, opening):
        assert opening.num_parts == len(self.parts)
        return [
            iter(self.parts[part][opening.skip :]) for part in opening.parts
        ]

    def lengths(self, opening):
        return (
            [len(self.parts[part]) for part in opening.parts]
            if self.says_lengths
            else None
        )


# The oracle: one process, plain lists


def oracle(plan, contents):
    """Every global batch as its rows, taken one by one from each part in turn; no more than 60 batches.

    Args:
        plan: Only its numbers and its tail are looked at.
        contents: (part, round) -> list.
    """

    def rounds(part):
        for number in count() if plan.repeats else range(1):
            for sample in contents(part, number):
                yield number, sample
        while True:
            yield None, MISSING

    parts, batches = [rounds(part) for part in range(plan.num_parts)], []
    while len(batches) < 60:
        rows = [
            next(part)
            for _ in range(plan.accumulation)
            for part in parts
            for _ in range(plan.micro_rows // len(parts))
        ]
        missing, fresh = (
            [number is None for number, _ in rows],
            any(number == 0 for number, _ in rows),
        )
        over = {
            "pad": all(missing),
            "drop": any(missing),
            "repeat": not fresh,
            "error": any(missing),
        }[plan.tail]
        if (over and plan.num_batches is None) or len(
            batches
        ) == plan.num_batches:
            break
        batches.append([sample for _, sample in rows])
    return batches


# The simulation: data ranks x workers that run ahead of each other


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def request(plan, parts, step, start=0, number=0, **opening):
    """What a loader asks of the reader of some parts."""
    return ChunkRequest(
        iterator_number=number,
        opening=Opening(
            parts=parts,
            num_parts=plan.num_parts,
            stripe=plan.stripe,
            skip=start * plan.samples_per_part,
            **opening,
        ),
        step=step,
        first_step=start,
        plan=plan,
        repeat=plan.repeats,
    )


def collated(samples):
    """Rows as a dict of an array, a list of strings and a nested pair."""
    return {
        "x": np.array([sample[0] for sample in samples]),
        "names": list(map(repr, samples)),
        "pair": [
            np.array([[len(sample), 7] for sample in samples]),
            "constant",
        ],
    }


def served(
    stage,
    plan,
    num_data_ranks,
    num_workers,
    turns,
    *,
    start=0,
    upto,
    readers=None,
    number=0,
    **opening,
):
    """Return what each data rank reads: [data rank][step]; workers read up to 4 steps ahead of delivery."""
    found = []
    for rank in range(num_data_ranks):
        parts = plan.parts_of(rank, num_data_ranks)
        chunks = chunks_of(parts, num_workers)
        own = readers or [
            ChunkReader(stage(), None, collated, DRAWS) for _ in chunks
        ]
        rows = plan.rows_of(parts)
        places = [np.searchsorted(rows, plan.rows_of(held)) for held in chunks]
        depth, ahead, batches = turns.randint(1, 4), [[] for _ in chunks], []
        asked = [start] * len(chunks)
        while len(batches) < upto - start:
            delivered = start + len(batches)
            able = [
                w
                for w in range(len(chunks))
                if asked[w] < min(upto, delivered + depth)
            ]
            if able and not (all(ahead) and turns.random() < 0.5):
                worker = turns.choice(able)
                chunk = own[worker].read(
                    request(
                        plan,
                        chunks[worker],
                        asked[worker],
                        start,
                        number,
                        **opening,
                    ),
                    worker,
                )
                assert isinstance(chunk, Chunk), chunk
                ahead[worker].append(chunk)
                asked[worker] += 1
            elif all(ahead):
                batches.append(
                    joined(STEP, [chunks_.pop(0) for chunks_ in ahead], places)
                )
        found.append(batches)
    return found


def put_together(plan, of_ranks):
    """Return the global batches up to the end that the tail defines, of what all data ranks have together."""
    batches = []
    for step, together in enumerate(zip(*of_ranks, strict=True)):
        whole, empty = (
            all(one.is_whole for one in together),
            all(one.is_empty for one in together),
        )
        fresh = any(one.has_new for one in together)
        over = {
            "pad": empty,
            "drop": not whole,
            "repeat": not fresh,
            "error": not whole,
        }[plan.tail]
        if over and plan.num_batches is None:
            break
        rows = [None] * plan.batch_size
        for rank, one in enumerate(together):
            places = plan.rows_of(plan.parts_of(rank, len(of_ranks))).tolist()
            # a rank that has had no sample yet: the loader finds what stands in
            if one.value is None:
                assert one.is_empty
                assert plan.tail == "pad"
                for place in places:
                    rows[place] = MISSING
                continue
            # None: all
            real_rows = (
                [True] * len(places)
                if one.is_padding is None
                else (~one.is_padding).tolist()
            )
            assert (
                len(real_rows)
                == len(one.value["x"])
                == len(one.value["names"])
                == len(places)
            )
            for place, real, x, name in zip(
                places,
                real_rows,
                one.value["x"].tolist(),
                one.value["names"],
                strict=True,
            ):
                # fields of one row stay together
                assert name.startswith(f"({x},")
                rows[place] = name if real else MISSING
            assert one.value["pair"][0].tolist() == [
                [len(eval(name)), 7] for name in one.value["names"]
            ]
            assert one.value["pair"][1] == "constant"
        batches.append(rows)
        assert plan.num_batches is None or step < plan.num_batches
    return batches


def all_rows(plan, of_ranks):
    """Every row of the global batches as it stands there, invalid ones, too; None where nothing stands."""
    batches = []
    for together in zip(*of_ranks, strict=True):
        rows = [None] * plan.batch_size
        for rank, one in enumerate(together):
            if one.value is not None:
                places = plan.rows_of(
                    plan.parts_of(rank, len(of_ranks))
                ).tolist()
                for place, name in zip(places, one.value["names"], strict=True):
                    rows[place] = name
        batches.append(rows)
    return batches


def named(batches):
    return [
        [sample if sample is MISSING else repr(sample) for sample in rows]
        for rows in batches
    ]


@st.composite
def plans_of(draw, num_parts, tails=("drop", "pad", "repeat", "num_batches")):
    tail = draw(st.sampled_from(tails))
    accumulation = draw(st.integers(1, 2))
    return PartsPlan(
        batch_size=num_parts * draw(st.integers(1, 3)) * accumulation,
        num_parts=num_parts,
        num_data_ranks=num_parts,
        accumulation=accumulation,
        tail=TAILS[
            draw(st.sampled_from(["pad", "drop", "repeat"]))
            if tail == "num_batches"
            else tail
        ],
        num_batches=draw(st.integers(1, 7)) if tail == "num_batches" else None,
    )


def liked(number):
    return number % 3 == 0 or number % 100 == 0


def paired(number):
    return (number, "f")


def drawn(sample):
    return (sample, int(np.random.randint(1 << 30)), random.randrange(1 << 30))


def stages_of(draw, plan):
    """A stage maker, and the oracle's (part, round) -> list of it."""
    low = 1 if plan.repeats else 0
    kind = draw(
        st.sampled_from(
            [
                "plain",
                "plain",
                "striped",
                "striped function",
                "shuffled",
                "filtered",
            ]
        )
    )
    if kind.startswith("striped"):  # dispatched by hand
        length = draw(
            st.integers(plan.num_parts * plan.stripe * low, 9 * plan.num_parts)
        )
        samples = [(n, "s") for n in range(length)]
        dispatched = [[] for _ in range(plan.num_parts)]
        for n, sample in enumerate(samples):
            dispatched[n // plan.stripe % plan.num_parts].append(sample)
        source = samples if kind == "striped" else lambda: iter(samples)
        return lambda: Stripe(
            IterableSource(source)
        ), lambda part, number: dispatched[part]
    lengths = draw(
        st.lists(
            st.integers(low, 14),
            min_size=plan.num_parts,
            max_size=plan.num_parts,
        )
    )
    parts = [
        [100 * part + n for n in range(length)]
        for part, length in enumerate(lengths)
    ]
    says = draw(st.booleans())
    if kind == "plain":
        pairs = [[(x, "p") for x in part] for part in parts]
        return lambda: Parts(pairs, says), lambda part, number: pairs[part]
    if kind == "filtered":
        return lambda: Map(
            Filter(Parts(parts, says), liked), paired
        ), lambda part, number: [
            (x, "f") for x in parts[part] if x % 3 == 0 or x % 100 == 0
        ]

    def stage():
        return Map(Unbatch(Group(Shuffle(Parts(parts, says), 5), 2)), drawn)

    def alone(part, number):
        return list(stage().open(plain_opening(plan, part, number))[0])

    return stage, alone


def seed_all(key, number=None):
    seed = key if number is None else mix(key, number)
    for generator in GENERATORS:
        generator.seed(seed)


def plain_opening(plan, part, number, **options):
    return Opening(
        parts=(part,),
        num_parts=plan.num_parts,
        stripe=plan.stripe,
        round=number,
        rng=SeededBy(seed_all),
        **options,
    )


P = pytest.mark.parametrize("num_parts", [1, 4, 6, 8])


@P
@settings(max_examples=trials(30))
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_chunk_reader_global_batches_equal_the_oracles(num_parts, data, seed):
    plan = data.draw(plans_of(num_parts))
    stage, contents = stages_of(data.draw, plan)
    expected, turns = named(oracle(plan, contents)), random.Random(seed)
    assume(expected)
    upto = len(expected) if plan.num_batches is not None else len(expected) + 2

    for ranks in divisors(num_parts):
        for workers in turns.sample(WORKERS, 2):
            of_ranks = served(stage, plan, ranks, workers, turns, upto=upto)
            assert put_together(plan, of_ranks) == expected, (ranks, workers)


@P
@settings(max_examples=trials(30))
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_chunk_reader_resumes_at_any_step_on_other_ranks(num_parts, data, seed):
    plan = data.draw(plans_of(num_parts))
    stage, contents = stages_of(data.draw, plan)
    expected, turns = named(oracle(plan, contents)), random.Random(seed)
    assume(expected)
    upto = len(expected) if plan.num_batches is not None else len(expected) + 1

    for start in range(upto):
        ranks, workers = (
            turns.choice(divisors(num_parts)),
            turns.choice(WORKERS),
        )
        of_ranks = served(
            stage, plan, ranks, workers, turns, start=start, upto=upto
        )
        assert put_together(plan, of_ranks) == expected[start:], (
            start,
            ranks,
            workers,
        )


@P
@settings(max_examples=trials(30))
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_chunk_reader_fills_missing_rows_alike_for_all_readers(
    num_parts, data, seed
):
    plan = data.draw(plans_of(num_parts, tails=["pad"]))
    stage, contents = stages_of(data.draw, plan)
    lengths, turns = (
        [len(contents(part, 0)) for part in range(num_parts)],
        random.Random(seed),
    )
    upto = -(-max(lengths) // plan.samples_per_part) + 2
    alone = all_rows(plan, served(stage, plan, 1, 0, turns, upto=upto))

    assert all(None not in rows for rows in alone) or not any(lengths)
    for ranks in divisors(num_parts):
        for workers in turns.sample(WORKERS, 2):
            start = turns.choice([0, *range(upto)])
            of_ranks = served(
                stage, plan, ranks, workers, turns, start=start, upto=upto
            )
            assert all_rows(plan, of_ranks) == alone[start:], (
                start,
                ranks,
                workers,
            )


@settings(max_examples=trials(80))
@given(data=st.data(), num_parts=st.sampled_from([1, 4, 6, 8]))
def test_chunk_reader_ends_parts_as_the_tail_says(data, num_parts):
    plan = data.draw(plans_of(num_parts))
    low = 1 if plan.repeats else 0
    lengths = data.draw(
        st.lists(st.integers(low, 12), min_size=num_parts, max_size=num_parts)
    )
    assume(any(lengths))
    ranks, turns = (
        data.draw(st.sampled_from(divisors(num_parts))),
        random.Random(0),
    )
    parts = [
        [(100 * part + n, "p") for n in range(length)]
        for part, length in enumerate(lengths)
    ]
    steps = plan.num_steps(lengths)
    of_ranks = served(
        lambda: Parts(parts),
        plan,
        ranks,
        2,
        turns,
        upto=max(1, steps + (plan.num_batches is None)),
    )
    batches = put_together(plan, of_ranks)

    assert len(batches) == steps
    for part in range(num_parts):
        delivered = [
            rows[row]
            for rows in batches
            for row in plan.rows_of((part,)).tolist()
        ]
        own = [repr(sample) for sample in parts[part]]
        if plan.repeats:  # round after round
            assert delivered == (own * len(delivered))[: len(delivered)]
            assert plan.num_batches is not None or delivered[: len(own)] == own
        elif (
            plan.tail == "drop"
        ):  # the beginning, and every part as far as the shortest allows
            assert delivered == own[: len(delivered)]
            assert (
                len(delivered)
                <= min(lengths)
                < len(delivered) + plan.samples_per_part
            )
        else:  # all, and what is missing stands at the end
            assert delivered[: len(own)] == own
            assert set(delivered[len(own) :]) <= {MISSING}


def test_chunk_reader_serves_passes_that_begin_anywhere():
    plan = PartsPlan(
        batch_size=4, num_parts=4, num_data_ranks=1, tail=TAILS["drop"]
    )
    stage = Map(
        Shuffle(
            Parts([list(range(100 * p, 100 * p + 9)) for p in range(4)]), 9
        ),
        drawn,
    )
    readers = [ChunkReader(stage, None, collated, DRAWS) for _ in range(2)]
    turns = random.Random(0)

    def epoch(number, epoch, **where):
        return put_together(
            plan,
            served(
                None,
                plan,
                1,
                2,
                turns,
                readers=readers,
                number=number,
                epoch=epoch,
                upto=9,
                **where,
            ),
        )

    first = epoch(1, 0)
    # left in the middle
    served(None, plan, 1, 2, turns, readers=readers, number=2, epoch=0, upto=4)
    assert epoch(3, 0) == first
    second = epoch(4, 1)
    assert epoch(5, 0, start=5) == first[5:]
    assert epoch(6, 1) == second

    assert first != second
    ids = [
        sorted(eval(name)[0] for rows in batches for name in rows)
        for batches in (first, second)
    ]
    assert ids[0] == ids[1]
    for reader in readers:
        reader.close()
    assert epoch(6, 0) == first  # closed, it knows no pass


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_missing_rows_are_told_in_the_order_of_the_rows(tail):
    plan = PartsPlan(
        batch_size=8,
        num_parts=2,
        num_data_ranks=1,
        accumulation=2,
        tail=TAILS[tail],
    )
    chunk = ChunkReader(Parts([[1, 2, 3], [4]]), None, None, HOW).read(
        request(plan, (0, 1), 0), None
    )

    # Rows of the micro-batches: parts 0, 0, 1, 1 and again; part 0 has three samples, part 1 one.
    assert list(chunk.is_padding) == [0, 0, 0, 1, 0, 1, 1, 1]
    assert (
        chunk.value is None
        if tail == "drop"
        else chunk.value[[0, 1, 2, 4]].tolist() == [1, 2, 4, 3]
    )


# Empty parts


def test_part_that_is_empty_is_all_padding_on_whatever_reader():
    plan = PartsPlan(
        batch_size=4, num_parts=4, num_data_ranks=4, tail=TAILS["pad"]
    )
    parts = [[(1, "a"), (2, "b")], [], [(3, "c")], []]
    for ranks in (1, 2, 4):
        of_ranks = served(
            lambda: Parts(parts), plan, ranks, 1, random.Random(0), upto=3
        )
        assert put_together(plan, of_ranks) == [
            [repr((1, "a")), MISSING, repr((3, "c")), MISSING],
            [repr((2, "b")), MISSING, MISSING, MISSING],
        ]


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("start", [0, 2])
def test_part_that_is_empty_cannot_be_repeated(says, start):
    plan = PartsPlan(
        batch_size=4, num_parts=2, num_data_ranks=1, tail=TAILS["repeat"]
    )
    failure = ChunkReader(Parts([[1, 2], []], says), None, None, HOW).read(
        request(plan, (0, 1), start, start), 3
    )

    assert (failure.cause_type, failure.index, failure.worker) == (
        "ArgumentError",
        (1, 2 * start),
        3,
    )
    assert "part 1 of 2 has no sample to repeat" in failure.cause
    assert "in_parts()" in failure.cause


def test_reader_without_a_sample_makes_no_rows_up():
    plan = PartsPlan(batch_size=4, num_parts=2, num_data_ranks=1)
    chunk = ChunkReader(Parts([[], []]), None, None, HOW).read(
        request(plan, (0, 1), 0), None
    )

    assert (chunk.value, list(chunk.is_padding)) == (None, [1, 1, 1, 1])


# Failures


class Broken(Exception):
    pass


def raising(value, error):
    def function(sample):
        if sample == value:
            raise error
        return sample

    return function


@settings(max_examples=trials(60))
@given(
    num_parts=st.sampled_from([1, 4, 6]),
    stripe=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    workers=st.integers(0, 5),
    data=st.data(),
)
def test_chunk_reader_names_a_failed_sample_at_its_step_only(
    num_parts, stripe, accumulation, workers, data
):
    plan = PartsPlan(
        batch_size=num_parts * stripe * accumulation,
        num_parts=num_parts,
        num_data_ranks=data.draw(st.sampled_from(divisors(num_parts))),
        accumulation=accumulation,
        tail=TAILS["drop"],
    )
    part, position = (
        data.draw(st.integers(0, num_parts - 1)),
        data.draw(st.integers(0, 23)),
    )
    at = position // plan.samples_per_part
    start = data.draw(st.integers(0, at))
    parts = [list(range(100 * p, 100 * p + 24)) for p in range(num_parts)]
    stage = Map(
        Parts(parts, data.draw(st.booleans())),
        raising(100 * part + position, Broken("it is")),
    )

    for rank in range(plan.num_data_ranks):
        for worker, held in enumerate(
            chunks_of(plan.parts_of(rank, plan.num_data_ranks), workers)
        ):
            reader = ChunkReader(stage, None, None, HOW)
            for step in range(start, at + 1):
                found = reader.read(request(plan, held, step, start), worker)
                if part not in held or step < at:
                    assert isinstance(found, Chunk)
                    continue
                assert isinstance(found, ReadFailure)
                assert (found.index, found.worker) == ((part, position), worker)
                assert found.what == f"reading sample {position} of part {part}"
                assert (found.cause_type, found.cause) == ("Broken", "it is")
                assert "raise error" in found.traceback


@pytest.mark.parametrize(
    "error",
    [StopIteration("x"), SystemExit(3), GeneratorExit(), MemoryError("x")],
)
def test_chunk_reader_raises_any_exception_of_a_part(error):
    plan = PartsPlan(batch_size=2, num_parts=2, num_data_ranks=1)
    stage = Map(Parts([[0, 1], [2, 3]]), raising(2, error))
    failure = ChunkReader(stage, None, None, HOW).read(
        request(plan, (0, 1), 0), 0
    )

    assert isinstance(failure, ReadFailure)
    assert failure.index == (1, 0)
    assert type(error).__name__ in failure.traceback


def test_collate_failure_blames_no_single_sample():
    def collate(samples):
        raise Broken(f"{samples}")

    plan = PartsPlan(batch_size=4, num_parts=2, num_data_ranks=1)
    failure = ChunkReader(Parts([[0, 1], [2, 3]]), None, collate, HOW).read(
        request(plan, (0, 1), 0), 1
    )

    assert (failure.what, failure.index, failure.cause) == (
        "collating 4 samples",
        None,
        "[0, 1, 2, 3]",
    )


def noisy(sample):
    return [sample, np.random.rand(), random.random()]


TAKEN_OVER = {
    "parts": lambda lists: Map(Parts(lists), noisy),
    "parts of unknown lengths": lambda lists: Map(
        Parts(lists, says_lengths=False), noisy
    ),
    "shuffled": lambda lists: Map(Shuffle(Parts(lists), 3), noisy),
    "filtered": lambda lists: Filter(
        Map(Parts(lists), noisy), lambda sample: sample[1] < 0.7
    ),
    "cut by turns": lambda lists: Map(
        Stripe(IterableSource(range(len(lists) * len(lists[0])))), noisy
    ),
    "drawn before the cut": lambda lists: Stripe(
        Map(IterableSource(range(len(lists) * len(lists[0]))), noisy)
    ),
}


@pytest.mark.parametrize("tail", ["pad", "drop", "repeat"])
@pytest.mark.parametrize("kind", TAKEN_OVER)
def test_chunk_reader_may_take_over_at_any_step(kind, tail):
    stage = TAKEN_OVER[kind](
        [
            list(range(100 * part, 100 * part + 11 + 3 * (part % 2)))
            for part in range(4)
        ]
    )
    plan = PartsPlan(
        batch_size=8, num_parts=4, num_data_ranks=1, tail=TAILS[tail]
    )

    def answers(first, *, start=0):
        reader = ChunkReader(stage, None, list, DRAWS)
        asked = [
            request(plan, (1, 3), step, start)._replace(compared=True)
            for step in range(first, 9)
        ]
        return [reader.read(one, 0) for one in asked]

    for start in (0, 2):
        expected = answers(start, start=start)
        assert all(isinstance(answer, Chunk) for answer in expected)
        for first in range(start, 9):
            assert answers(first, start=start) == expected[first - start :]


def test_chunk_reader_names_a_sample_that_fails_before_the_cut():
    plan = PartsPlan(batch_size=2, num_parts=2, num_data_ranks=2)
    reader = ChunkReader(
        Stripe(Map(IterableSource(range(6)), raising(3, Broken()))),
        None,
        None,
        HOW,
    )
    found = [reader.read(request(plan, (0,), step), None) for step in range(3)]

    (failure,) = (one for one in found if isinstance(one, ReadFailure))
    # which is sample 4 of the stream; 3 failed: (1, 1)
    assert failure.index != (0, 2)


def dies(number):
    if number == 9:
        os._exit(1)
    return number


def fails(number):
    if number == 9:
        raise Broken(f"{number}")
    return number


def collate_of_many_shapes(samples):
    return np.zeros([len(samples), 1 + samples[0] if 9 in samples else 1])


@pytest.mark.parametrize(
    ("stream", "collate_fn"),
    [
        (Stream.of(range(40)).map(fails), None),
        (Stream.of(range(40)).map(dies), None),
        (Stream.of(range(40)), collate_of_many_shapes),
    ],
    ids=["a sample fails", "a worker dies", "rows do not fit together"],
)
def test_chunk_reader_failure_names_samples_of_its_step(stream, collate_fn):
    given = DataLoader(
        stream.in_parts(4), batch_size=4, num_workers=2, collate_fn=collate_fn
    )
    loader = paddle_shard.shard_dataloader(
        given, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp"
    )
    with pytest.raises(DataReadError) as caught:
        list(loader)

    assert caught.value.step == 2
    # sample 9, which is the third of part 1
    assert (1, 2) in caught.value.indices
    assert "(1, 2)" in str(caught.value)


# Collating


def test_chunk_reader_collates_samples_in_the_order_of_rows():
    plan = PartsPlan(
        batch_size=8, num_parts=2, num_data_ranks=1, accumulation=2
    )
    parts = [[0, 1, 2, 3], [10, 11, 12, 13]]
    expected = [0, 1, 10, 11, 2, 3, 12, 13]

    assert (
        ChunkReader(Parts(parts), None, None, HOW)
        .read(request(plan, (0, 1), 0), None)
        .value.tolist()
        == expected
    )
    assert (
        ChunkReader(Parts(parts), None, list, HOW)
        .read(request(plan, (0, 1), 0), None)
        .value
        == expected
    )


def test_chunk_reader_seeds_the_draws_of_a_collate_fn():
    plan = PartsPlan(batch_size=2, num_parts=2, num_data_ranks=1)
    found = []
    for outside in (1, 2):
        seed_all(outside)
        reader = ChunkReader(
            Parts([[1], [2]]),
            None,
            lambda samples: np.random.rand(len(samples)),
            DRAWS,
        )
        found.append(reader.read(request(plan, (0, 1), 0), None).value.tolist())

    assert found[0] == found[1]


# Joining


def join(*batches, places=((0, 2), (1, 3))):
    chunks = [
        Chunk(batch, bytes(len(place)))
        for batch, place in zip(batches, places, strict=True)
    ]
    return joined(STEP, chunks, [np.array(place) for place in places])


class Foreign:
    """A tensor of another library: it has a shape and a dtype, and its memory is to be had by DLPack alone."""

    def __init__(self, values):
        self.array = np.array(values)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("made", [np.array, paddle.to_tensor, Foreign])
def test_joined_arrays_and_strings_keep_their_rows(made):
    found = join(
        {
            "x": made([0, 2]),
            "s": ["0", "2"],
            "pair": [made([[0], [2]]), b"c"],
            "o": np.array(["0", "2"], object),
        },
        {
            "x": made([1, 3]),
            "s": ["1", "3"],
            "pair": [made([[1], [3]]), b"c"],
            "o": np.array(["1", "3"], object),
        },
    ).value

    assert found["x"].tolist() == [0, 1, 2, 3]
    assert found["pair"][0].tolist() == [[0], [1], [2], [3]]
    assert found["s"] == found["o"].tolist() == ["0", "1", "2", "3"]
    assert found["pair"][1] == b"c"


def test_joined_rows_of_an_unknown_dtype_are_refused():
    one, other = (
        paddle.to_tensor(rows).cast("float8_e4m3fn")
        for rows in ([0.0, 2.0], [1.0, 3.0])
    )
    with pytest.raises((TypeError, RuntimeError), match="float8"):
        join({"x": one}, {"x": other})


def test_bfloat16_rows_are_joined_bit_by_bit():
    one, other = (
        paddle.to_tensor(rows).cast("bfloat16")
        for rows in ([0.5, 2.0], [1.0, 3.0])
    )
    found = join({"x": one}, {"x": other}).value["x"]

    assert paddle.to_tensor(found).dtype == paddle.bfloat16
    assert paddle.to_tensor(found).cast("float32").tolist() == [
        0.5,
        1.0,
        2.0,
        3.0,
    ]


@pytest.mark.parametrize("made", [np.array, paddle.to_tensor, Foreign])
def test_ranks_own_short_batch_is_filled_with_its_last_row(made):
    asked = ChunkRequest(
        iterator_number=0,
        opening=Opening(parts=(0,), num_parts=1),
        step=0,
        first_step=0,
        plan=PartsPlan(
            batch_size=1, num_parts=1, num_data_ranks=1, tail=TAILS["pad"]
        ),
        whole_items=True,
        local_rows=0,
    )
    own, step = (
        OwnBatches(),
        STEP._replace(sampler=SamplerStep(state={"rows": 0})),
    )
    values = [made([[n, n] for n in range(rows)]) for rows in (3, 2)]
    found = [
        ReadBatch(step=step, value=value, is_padding=None) for value in values
    ]
    for one in found:
        own.complete(one, asked)

    assert found[0].is_padding is None
    assert found[1].is_padding.tolist() == [False, False, True]
    assert found[1].value.tolist() == [[0, 0], [1, 1], [1, 1]]


@given(data=st.data(), rows=st.integers(1, 12), readers=st.integers(1, 5))
def test_joined_rows_keep_order_and_marks_however_dealt(data, rows, readers):
    dispatched = data.draw(
        st.lists(st.integers(0, readers - 1), min_size=rows, max_size=rows)
    )
    places = [
        [row for row, reader in enumerate(dispatched) if reader == own]
        for own in sorted(set(dispatched))
    ]
    padding = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    fresh = data.draw(
        st.lists(st.booleans(), min_size=len(places), max_size=len(places))
    )
    chunks = [
        Chunk(np.array(p), bytes(padding[row] for row in p), f)
        for p, f in zip(places, fresh, strict=True)
    ]
    found = joined(STEP, chunks, [np.array(place) for place in places])

    assert (found.value.tolist(), found.has_new) == (
        list(range(rows)),
        any(fresh),
    )
    mask = (
        [False] * rows
        if found.is_padding is None
        else found.is_padding.tolist()
    )
    assert mask == padding
    assert (found.is_whole, found.is_empty) == (not any(padding), all(padding))


def test_step_with_a_missing_chunk_has_marks_but_no_batch():
    chunks = [Chunk(np.array([0, 2]), None, True), Chunk(None, b"\0\1", False)]
    found = joined(STEP, chunks, [np.array([0, 2]), np.array([1, 3])])

    assert (found.value, found.is_padding.tolist(), found.has_new) == (
        None,
        [False, False, False, True],
        True,
    )


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (
            {"x": np.array([0, 2])},
            {"y": np.array([1, 3])},
            r"differ in keys: \['x'\], \['y'\]",
        ),
        (
            [np.array([[0], [2]])],
            [np.array([[1, 1], [3, 3]])],
            r"field \[0\].* row shape and dtype: .*\[1\].*\[2\]",
        ),
        (
            {"x": np.array([0, 2])},
            {"x": np.array([1.0, 3.0])},
            r"field \['x'\].*int64.*float64",
        ),
        (
            [np.array([0, 2]), 1],
            [np.array([1, 3])],
            "differ in number of fields: 2, 1",
        ),
    ],
)
def test_chunks_that_do_not_fit_together_are_refused_by_field(one, other, text):
    with pytest.raises(ValueError, match=text):
        join(one, other)


def test_array_that_has_no_row_for_each_sample_is_refused():
    constant = np.arange(5)
    with pytest.raises(ValueError, match="rows"):
        join(
            {"x": np.array([0, 2]), "mask": constant},
            {"x": np.array([1, 3]), "mask": constant},
        )


def test_joined_lists_of_dicts_keep_their_rows_or_are_refused():
    plan = PartsPlan(batch_size=4, num_parts=2, num_data_ranks=1)
    reader = [
        ChunkReader(
            Parts([[0, 1], [2, 3]]),
            None,
            lambda samples: [{"id": s} for s in samples],
            HOW,
        )
        for _ in range(2)
    ]
    one = reader[0].read(request(plan, (0, 1), 0, number=1), None).value
    chunks = [
        reader[part].read(request(plan, (part,), 0), None) for part in range(2)
    ]
    try:
        two = joined(STEP, chunks, [np.array([0, 1]), np.array([2, 3])]).value
    except ValueError:
        return

    assert two == one


# What a resume costs, and what it can be done with


def test_parts_that_are_opened_at_a_position_share_a_reading():
    called = []
    stage = Stripe(
        Map(
            IterableSource(list(range(40))),
            lambda sample: called.append(sample) or sample,
        )
    )
    plan = PartsPlan(batch_size=4, num_parts=4, num_data_ranks=1)
    reader = ChunkReader(stage, None, None, HOW)
    for step in range(1, 10):
        reader.read(request(plan, (0, 1, 2, 3), step, start=1), None)

    assert called == list(range(4, 40))


def test_chunk_reader_skips_without_calling_map():
    called = []
    stage = Map(
        Parts([list(range(10))], says_lengths=False),
        lambda sample: called.append(sample) or sample,
    )
    plan = PartsPlan(batch_size=2, num_parts=1, num_data_ranks=1)
    ChunkReader(stage, None, None, HOW).read(
        request(plan, (0,), 4, start=4), None
    )

    assert called == [8, 9]


def test_chunk_reader_opens_a_read_once_stream_once():
    plan = PartsPlan(batch_size=4, num_parts=4, num_data_ranks=2)
    chunk = ChunkReader(
        Stripe(IterableSource(iter(range(6)))), None, None, HOW
    ).read(request(plan, (2, 3), 1, start=1), None)

    assert (chunk.value, list(chunk.is_padding)) == (None, [1, 1])


# Whole batches as items


def items_served(
    stage,
    num_workers,
    steps,
    *,
    start=0,
    tail="drop",
    collate_fn=None,
    repeat=False,
):
    """What a loader of whole items gets: reader after reader, by turns."""
    width = max(1, num_workers)
    readers = [
        ChunkReader(stage, None, collate_fn, DRAWS) for _ in range(width)
    ]
    found = []
    for step in range(start, start + steps):
        first = start + (step - start) % width
        chunk = readers[first - start].read(
            ChunkRequest(
                iterator_number=0,
                opening=Opening(
                    parts=(first % width,), num_parts=width, skip=first // width
                ),
                step=step,
                first_step=first,
                stride=width,
                plan=PartsPlan(
                    batch_size=1,
                    num_parts=1,
                    num_data_ranks=1,
                    tail=TAILS[tail],
                ),
                repeat=repeat,
                whole_items=True,
            ),
            first - start,
        )
        assert isinstance(chunk, Chunk), chunk
        found.append(joined(STEP, [chunk], ()))
    return found


@given(
    length=st.integers(1, 25), workers=st.sampled_from(WORKERS), data=st.data()
)
def test_whole_items_keep_the_order_for_any_workers_and_step(
    length, workers, data
):
    start = data.draw(st.integers(0, length))
    items = [{"x": np.array([n])} for n in range(length)]
    found = items_served(
        Stripe(Map(IterableSource(items), lambda x: x)),
        workers,
        length - start + 7,
        start=start,
    )

    assert [one.value["x"].tolist() for one in found if one.is_whole] == [
        [n] for n in range(start, length)
    ]
    assert [one.is_whole for one in found] == [True] * (length - start) + [
        False
    ] * 7
    assert all(
        one.is_empty and one.value is None for one in found[length - start :]
    )


@pytest.mark.parametrize("workers", WORKERS)
def test_whole_items_of_padding_are_marked_and_collated(workers):
    found = items_served(
        Stripe(IterableSource(range(3))),
        workers,
        7,
        tail="pad",
        collate_fn=lambda n: np.array([n, n]),
    )

    assert [
        one.is_padding is None or (~one.is_padding).tolist() for one in found
    ] == [True] * 3 + [[False]] * 4
    assert [one.value.tolist() for one in found[:3]] == [[0, 0], [1, 1], [2, 2]]
    assert all(
        one.value is None or one.value.shape == (2,) for one in found[3:]
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("start", [0, 2, 5])
def test_whole_items_are_padded_with_the_first_of_the_stream(workers, start):
    found = items_served(
        Stripe(IterableSource(range(3))),
        workers,
        7,
        start=start,
        tail="pad",
        collate_fn=lambda n: np.array([n, n]),
    )

    expected = [n if n < 3 else 0 for n in range(start, start + 7)]
    assert [one.value.tolist() for one in found] == [[n, n] for n in expected]
    assert [one.is_whole for one in found] == [
        n < 3 for n in range(start, start + 7)
    ]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_whole_items_repeat_in_order_with_workers_that_divide(workers):
    found = items_served(
        Stripe(IterableSource(range(6))), workers, 14, repeat=True
    )

    assert [one.value for one in found] == [n % 6 for n in range(14)]
    assert [one.has_new for one in found] == [True] * 6 + [False] * 8


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_whole_items_repeat_in_order_with_any_workers(workers):
    found = items_served(Stripe(Repeat(IterableSource(range(5)))), workers, 14)

    assert [one.value for one in found] == [n % 5 for n in range(14)]


def test_whole_item_that_fails_is_named_by_worker():
    # item 1 * 4 + 3
    stage = Map(Stripe(IterableSource(range(20))), raising(7, Broken()))
    asked = ChunkRequest(
        iterator_number=0,
        opening=Opening(parts=(3,), num_parts=4),
        step=3,
        first_step=3,
        stride=4,
        plan=PartsPlan(
            batch_size=1, num_parts=1, num_data_ranks=1, tail=TAILS["drop"]
        ),
        whole_items=True,
    )
    reader = ChunkReader(stage, None, None, HOW)

    assert reader.read(asked, 2).value == 3
    failure = reader.read(asked._replace(step=7), 2)
    assert (failure.index, failure.worker) == ((3, 1), 2)
