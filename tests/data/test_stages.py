"""Each stage does to a list the obvious thing, and opening it at a position is reading on from there."""

import json
import random
import zlib
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard import Stream
from paddle_shard.core.randomness import NumpyGenerator, PythonGenerator
from paddle_shard.data.iterable import IterableSource
from paddle_shard.data.stages.cut import Stripe
from paddle_shard.data.stages.mix import Mix
from paddle_shard.data.stages.pack import Pack, PackedRows
from paddle_shard.data.stages.stage import Opening, Stage, Unreadable
from paddle_shard.data.stages.steps import (
    Filter,
    Group,
    Map,
    Repeat,
    Shuffle,
    Unbatch,
    in_rounds,
)
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.seeding import mix
from paddle_shard.plan.tails import TAILS
from paddle_shard.plan.weights import Segment
from paddle_shard.reading.chunk_reader import ChunkReader, ChunkRequest
from paddle_shard.reading.reader import HowToRead
from tests.helpers import SeededBy
from tests.trials import trials

chains_settings = settings(max_examples=trials(60))


def seed_generators(key, number=None):
    seed = key if number is None else mix(key, number)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


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


def opening(num_parts=1, parts=None, **options):
    held = tuple(range(num_parts)) if parts is None else parts
    return Opening(
        parts=held,
        num_parts=num_parts,
        rng=SeededBy(seed_generators),
        **options,
    )


def contents(stage, asked=None):
    """The samples of each part that is asked for; None: of the only one."""
    found = [list(items) for items in stage.open(asked or opening())]
    return found if asked is not None else found[0]


lists_of_parts = st.lists(
    st.lists(st.integers(0, 99), max_size=20), min_size=1, max_size=4
)


# One stage


@given(parts=lists_of_parts)
def test_map_calls_its_function_for_each_sample(parts):
    assert contents(
        Map(Parts(parts), lambda x: x * 3 + 1), opening(len(parts))
    ) == [[x * 3 + 1 for x in p] for p in parts]


@given(parts=lists_of_parts)
def test_filter_keeps_what_its_function_likes(parts):
    found = contents(Filter(Parts(parts), lambda x: x % 3), opening(len(parts)))

    assert found == [[x for x in part if x % 3] for part in parts]


@given(parts=lists_of_parts, size=st.integers(1, 7))
def test_batch_fills_all_but_the_last_and_unbatch_undoes_it(parts, size):
    batches = contents(Group(Parts(parts), size), opening(len(parts)))

    assert [list(chain.from_iterable(part)) for part in batches] == parts
    assert all(len(batch) == size for part in batches for batch in part[:-1])
    assert all(1 <= len(part[-1]) <= size for part in batches if part)
    assert (
        contents(Unbatch(Group(Parts(parts), size)), opening(len(parts)))
        == parts
    )


@given(parts=lists_of_parts, times=st.integers(1, 4), says=st.booleans())
def test_repeat_reads_each_part_so_often(parts, times, says):
    assert contents(Repeat(Parts(parts, says), times), opening(len(parts))) == [
        part * times for part in parts
    ]


@given(
    part=st.lists(st.integers(), min_size=1, max_size=5),
    says=st.booleans(),
    skip=st.integers(0, 30),
)
def test_repeat_without_an_end_goes_round_and_round(part, says, skip):
    (items,) = Repeat(Parts([part], says)).open(opening(skip=skip))

    assert list(islice(items, 12)) == (part * 50)[skip : skip + 12]


@given(
    length=st.integers(0, 60), window=st.integers(1, 20), seed=st.integers(0, 9)
)
def test_shuffle_permutes_within_its_windows_only(length, window, seed):
    found = contents(
        Shuffle(Parts([list(range(length))]), window), opening(seed=seed)
    )[0]

    assert len(found) == length
    for first in range(0, length, window):
        assert sorted(found[first : first + window]) == list(
            range(first, min(first + window, length))
        )


@given(
    length=st.integers(0, 70),
    num_parts=st.integers(1, 6),
    stripe=st.integers(1, 4),
    data=st.data(),
)
def test_stripe_assigns_rows_by_turns(length, num_parts, stripe, data):
    found = contents(
        Stripe(IterableSource(range(length))), opening(num_parts, stripe=stripe)
    )

    # take a stripe of each part by turns, as the rows of a micro-batch stand
    again = []
    for first in range(0, length, stripe):
        again += [x for part in found for x in part[first : first + stripe]]
    assert again == list(range(length))
    some = tuple(
        sorted(data.draw(st.sets(st.integers(0, num_parts - 1), min_size=1)))
    )
    assert contents(
        Stripe(IterableSource(range(length))),
        opening(num_parts, some, stripe=stripe),
    ) == [found[part] for part in some]


def test_map_is_not_called_for_what_is_skipped():
    called = []
    stage = Map(Parts([list(range(10))]), called.append)
    contents(stage, opening(skip=7))

    assert called == [7, 8, 9]


def test_shuffle_reads_again_less_than_a_window():
    called = []
    stage = Shuffle(
        Map(Parts([list(range(40))]), lambda x: called.append(x) or x), 8
    )
    contents(stage, opening(skip=29))

    assert called == list(range(24, 40))


def test_shuffle_reads_a_window_and_nothing_more():
    called = []
    (items,) = Shuffle(
        Map(Parts([list(range(40))]), lambda x: called.append(x) or x), 8
    ).open(opening())
    assert called == []
    next(items)

    assert called == list(range(8))


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, None])
def test_sizes_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(
        ArgumentError, match=f"size must be an int >= 1, got {wrong!r}"
    ):
        Stream.of([]).batch(wrong)
    with pytest.raises(
        ArgumentError, match=f"window must be an int >= 1, got {wrong!r}"
    ):
        Stream.of([]).shuffle(wrong)
    if wrong is not None:  # without an end
        with pytest.raises(
            ArgumentError, match=f"times must be an int >= 1, got {wrong!r}"
        ):
            Stream.of([]).repeat(wrong)


# Rounds


@given(
    parts=st.lists(
        st.lists(st.integers(0, 99), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    says=st.booleans(),
    skip=st.integers(0, 25),
)
def test_stage_in_rounds_numbers_the_round_of_each_sample(parts, says, skip):
    found = [
        list(islice(items, 15))
        for items in in_rounds(
            Parts(parts, says), opening(len(parts), skip=skip), None
        )
    ]
    straight = [
        [(number, x) for number in range(60) for x in part] for part in parts
    ]

    assert found == [pairs[skip : skip + 15] for pairs in straight]


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("skip", [0, 3])
def test_repeat_of_an_empty_part_is_an_error_and_no_hang(says, skip):
    first, second = Repeat(Parts([[], [1, 2]], says)).open(
        opening(2, skip=skip)
    )

    assert len(list(islice(second, 9))) == 9
    with pytest.raises(
        ArgumentError,
        match=r"part 0 of 2 has no sample .*in_parts.*tail='pad' or 'drop'",
    ):
        next(first)


def test_repeat_of_repeat_shuffles_each_round_by_itself():
    inner = Repeat(Shuffle(Parts([list(range(50))]), 50), 2)
    found = contents(Repeat(inner, 2))
    rounds = [tuple(found[n : n + 50]) for n in range(0, 200, 50)]

    assert len(set(rounds)) == 4


# Endless streams


def test_filter_may_drop_all_of_many_short_rounds():
    (items,) = Filter(
        Repeat(Parts([[1, 2]])), lambda sample: np.random.rand() < 0.02
    ).open(opening())

    assert len(list(islice(items, 30))) == 30


def test_filter_may_drop_a_part_of_several_rounds():
    assert (
        contents(
            Filter(Repeat(Parts([list(range(900))]), 9), lambda sample: False)
        )
        == []
    )


# Chains


def liked(sample):
    return zlib.crc32(repr(sample).encode()) % 4 > 0


def marked(sample):
    return ("m", sample)


def rolled(sample):
    """Draws from both global generators."""
    return (sample, int(np.random.randint(1 << 30)), random.randrange(1 << 30))


def doubled(sample):
    return [(sample, 0), (sample, 1)]


def coin(sample):
    return np.random.rand() < 0.7


def tokens(stage, most=3):
    """Documents of up to so many tokens, made of samples of any kind."""
    return Map(
        stage,
        lambda sample: np.arange(1 + zlib.crc32(repr(sample).encode()) % most),
    )


def unpacked(stage):
    """Rows as text, which can be compared."""
    return Map(
        stage,
        lambda row: str(
            [row["input_ids"].tolist(), row["segment_ids"].tolist()]
        ),
    )


def rows_of(length):
    return PackedRows(
        length=length,
        most_pieces=length,
        key="input_ids",
        labels=None,
        ignore_index=-100,
        pad_values={},
    )


STEPS = {
    "map": lambda s: Map(s, marked),
    "random map": lambda s: Map(s, rolled),
    "filter": lambda s: Filter(s, liked),
    "random filter": lambda s: Filter(s, coin),
    "shuffle 1": lambda s: Shuffle(s, 1),
    "shuffle 4": lambda s: Shuffle(s, 4),
    "shuffle 7": lambda s: Shuffle(s, 7),
    "batch": lambda s: Group(s, 3),
    "batch, map, unbatch": lambda s: Unbatch(
        Map(Group(s, 3), lambda batch: batch[::-1])
    ),
    "two of each": lambda s: Unbatch(Map(s, doubled)),
    "pack 5": lambda s: unpacked(Pack(tokens(s), rows_of(5), 3, "split")),
    "pack 9": lambda s: unpacked(Pack(tokens(s), rows_of(9), 4, "split")),
    "pack and split": lambda s: unpacked(
        Pack(tokens(s, 9), rows_of(3), 2, "split")
    ),
    "repeat 2": lambda s: Repeat(s, 2),
    "repeat 3": lambda s: Repeat(s, 3),
}
ONE_TO_ONE = [
    "map",
    "random map",
    "shuffle 1",
    "shuffle 4",
    "shuffle 7",
    "batch",
    "repeat 2",
    "repeat 3",
]
steps = st.lists(st.sampled_from(sorted(STEPS)), max_size=4)
sources = st.sampled_from(["list", "function", "parts", "silent parts"])


def chained(source, before, after, lengths):
    """A chain of stages over some lists, fresh each time; one that is cut by turns if its source cannot be."""
    if source.endswith("parts"):
        numbered = [
            [100 * part + n for n in range(length)]
            for part, length in enumerate(lengths)
        ]
        stage, before = Parts(numbered, source == "parts"), []
    else:
        samples = list(range(sum(lengths)))
        stage = IterableSource(
            samples if source == "list" else lambda: iter(samples)
        )
    for name in before:
        stage = STEPS[name](stage)
    if not source.endswith("parts"):
        stage = Stripe(stage)
    for name in after:
        stage = STEPS[name](stage)
    return stage


chained_arguments = {
    "source": sources,
    "before": steps,
    "after": steps,
    "lengths": st.lists(st.integers(0, 11), min_size=1, max_size=4),
    "stripe": st.integers(1, 3),
}


@chains_settings
@given(**chained_arguments, data=st.data())
@example("list", ["random map"], ["random map", "shuffle 4"], [9, 9], 2, None)
@example("function", ["shuffle 4", "repeat 2"], ["batch"], [9, 8], 1, None)
def test_stages_opened_at_a_position_read_on_from_there(
    source, before, after, lengths, stripe, data
):
    asked = {"num_parts": len(lengths), "stripe": stripe, "seed": 4}
    straight = contents(
        chained(source, before, after, lengths), opening(**asked)
    )
    longest = max(map(len, straight))
    some = range(longest + 3)
    if longest > 12:  # every one of a few, some of many
        some = sorted(
            data.draw(
                st.sets(st.integers(0, longest + 2), min_size=3, max_size=9)
            )
            if data
            else some
        )

    for skip in some:
        found = contents(
            chained(source, before, after, lengths), opening(**asked, skip=skip)
        )
        assert found == [part[skip:] for part in straight], skip


@pytest.mark.parametrize(("number", "step"), list(enumerate(sorted(STEPS))))
def test_stage_can_be_opened_at_every_position(number, step):
    # The stages take the sources by turns; any of both are in the law above.
    source = ("list", "function", "parts", "silent parts")[number % 4]
    asked = {"num_parts": 3, "stripe": 2, "seed": 1, "epoch": 2, "round": 1}
    # also for stages that keep few samples
    for lengths, some in (
        ([7, 5, 0], 12),
        ([73, 60, 2], 1),
    ):
        straight = contents(
            chained(source, [step], [step], lengths), opening(**asked)
        )
        longest = max(map(len, straight))
        apart = 1 + longest // 7

        for skip in (
            n
            for n in range(longest + 3)
            if n < some or n % apart == 0 or n > longest - 2
        ):
            found = contents(
                chained(source, [step], [step], lengths),
                opening(**asked, skip=skip),
            )
            assert found == [part[skip:] for part in straight], skip


@pytest.mark.parametrize("step", sorted(STEPS))
def test_stage_knows_its_lengths_or_says_that_it_does_not(step):
    parts = [list(range(length)) for length in range(30)]
    stage = STEPS[step](Parts(parts))
    said = stage.lengths(opening(len(parts)))

    assert (said is not None) == (step in ONE_TO_ONE)
    assert said is None or said == [
        len(part) for part in contents(stage, opening(len(parts)))
    ]


@pytest.mark.parametrize("step", sorted(STEPS))
def test_stage_that_is_opened_reads_nothing(step):
    read = []

    class Noted(Parts):
        def open(self, opening):
            return [
                (read.append(x) or x for x in part)
                for part in super().open(opening)
            ]

    STEPS[step](Noted([[1, 2, 3], [4, 5]])).open(opening(2))

    assert read == []


@pytest.mark.parametrize("step", sorted(STEPS))
def test_stage_is_deeper_than_the_one_before_it(step):
    first = STEPS[step](Parts([[1]]))

    assert STEPS[step](first).depth > first.depth > 0


@pytest.mark.parametrize("step", sorted(STEPS))
def test_stage_lets_no_unreadable_sample_vanish(step):
    parts = [[*range(8), Unreadable("broken"), *range(8, 20)]]
    found = contents(STEPS[step](Parts(parts)), opening(skip_errors=True))[0]

    assert any(isinstance(sample, Unreadable) for sample in found)


OF_NO_FUNCTION = [
    name
    for name in STEPS
    if not {"map", "filter", "two"} & set(name.replace(",", "").split())
]


def test_stages_that_order_or_count_otherwise_differ_in_prints():
    """Each stage, and each setting of it, that is in `STEPS`; what functions do, nobody can know."""
    found = {None: ([list(range(60))], Parts([[]]).fingerprint())}
    for name in OF_NO_FUNCTION:
        stage = STEPS[name](Parts([list(range(60))]))
        found[name] = (contents(stage, opening(seed=1)), stage.fingerprint())
    for one, (content, fingerprint) in found.items():
        for other, (other_content, other_fingerprint) in found.items():
            assert (
                content == other_content or fingerprint != other_fingerprint
            ), (
                one,
                other,
            )


@chains_settings
@given(**chained_arguments, skip=st.integers(0, 5), data=st.data())
def test_stages_open_parts_together_as_one_by_one(
    source, before, after, lengths, stripe, skip, data
):
    asked = {"num_parts": len(lengths), "stripe": stripe, "skip": skip}
    apart = [
        contents(
            chained(source, before, after, lengths),
            opening(parts=(part,), **asked),
        )[0]
        for part in range(len(lengths))
    ]
    some = tuple(
        sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    )
    together = chained(source, before, after, lengths).open(
        opening(parts=some, **asked)
    )

    found, going = (
        {part: [] for part in some},
        dict(zip(some, together, strict=True)),
    )
    turns = data.draw(st.randoms(use_true_random=False))
    while going:  # read in any order, with the generators moved in between
        part = turns.choice(sorted(going))
        seed_generators(turns.getrandbits(32))
        item = next(going[part], None)
        if item is None:
            del going[part]
        else:
            found[part].append(item)
    assert found == {part: apart[part] for part in some}


@chains_settings
@given(
    **(
        chained_arguments
        | {"after": st.lists(st.sampled_from(sorted(STEPS)), max_size=3)}
    ),
    skip=st.integers(0, 3),
)
def test_stage_lengths_are_what_comes_out_or_unknown(
    source, before, after, lengths, stripe, skip
):
    stage = chained(source, before, after, lengths)
    asked = {"num_parts": len(lengths), "stripe": stripe}
    said = stage.lengths(opening(**asked, skip=skip))
    counts = source in ("list", "parts") and set(after) | set(
        before if source == "list" else ()
    ) <= set(ONE_TO_ONE)

    assert (said is not None) == counts
    if counts:
        assert said == [len(part) for part in contents(stage, opening(**asked))]
        for part, length in enumerate(said):
            assert stage.lengths(opening(parts=(part,), **asked)) == [length]


# Randomness


@pytest.mark.parametrize(
    "changed", [{"epoch": 1}, {"seed": 1}, {"round": 1}, {"parts": (1,)}]
)
@pytest.mark.parametrize("step", ["shuffle", "random map", "random filter"])
def test_stages_draw_anew_in_another_epoch_seed_round_or_part(changed, step):
    same = list(range(200))
    stage = (
        Shuffle(Parts([same, same]), 200)
        if step == "shuffle"
        else STEPS[step](Parts([same, same]))
    )
    asked = {"num_parts": 2, "parts": (0,), "seed": 0, "epoch": 0, "round": 0}
    first, again, other = (
        contents(stage, opening(**(asked | how))) for how in ({}, {}, changed)
    )

    assert first == again
    assert first != other
    if step == "shuffle":
        assert sum(a == b for a, b in zip(first[0], other[0], strict=True)) < 20


def test_shuffle_orders_each_window_differently():
    found = contents(Shuffle(Parts([list(range(400))]), 20))
    orders = {
        tuple(x % 20 for x in found[first : first + 20])
        for first in range(0, 400, 20)
    }

    assert len(orders) == 20


def test_stages_of_one_chain_draw_different_numbers():
    samples = contents(Map(Map(Parts([list(range(20))]), rolled), rolled))

    assert all(
        inner[1:] != outer
        for inner, *outer in ((s[0], *s[1:]) for s in samples)
    )
    assert len({s[1:] for s in samples}) == 20


def test_source_that_draws_is_the_same_at_every_position():
    def drawn():
        for _ in range(12):
            yield (np.random.randint(1 << 30), random.random())

    straight = contents(IterableSource(drawn))
    for skip in range(14):
        seed_generators(skip)
        assert contents(IterableSource(drawn), opening(skip=skip)) == [
            straight[skip:]
        ]
    assert len(set(straight)) == 12
    assert contents(IterableSource(drawn), opening(epoch=1))[0] != straight


def test_unbatch_of_items_that_draw_is_the_same_for_all():
    def several(sample):
        for _ in range(3):
            yield sample, np.random.randint(1 << 30)

    stage = Unbatch(Map(Parts([[1, 2], [3, 4]]), several))
    apart = [contents(stage, opening(2, (part,)))[0] for part in range(2)]
    together = list(zip(*stage.open(opening(2)), strict=True))

    assert [list(part) for part in zip(*together, strict=True)] == apart


# Failures and endings


class Broken(Exception):
    pass


def breaks_at(number, error):
    def function(sample):
        if sample == number:
            raise error
        return sample

    return function


@pytest.mark.parametrize("error", [Broken("x"), StopIteration("x")])
@pytest.mark.parametrize("stage", [Map, Filter])
def test_stage_function_that_fails_ends_no_part_in_silence(stage, error):
    chain_ = Shuffle(
        Unbatch(Group(stage(Parts([[0, 1, 2, 3, 4]]), breaks_at(3, error)), 2)),
        1,
    )
    (items,) = chain_.open(opening())

    with pytest.raises((Broken, RuntimeError)):
        list(items)


def test_stages_that_are_opened_read_nothing():
    called = []

    def source():
        called.append(1)
        yield 1

    stage = Map(
        Shuffle(Group(Stripe(IterableSource(source)), 2), 3), called.append
    )
    stage.open(opening(3))
    Repeat(stage, 2).open(opening(3))

    assert called == []


# What a run is recognized by


def test_stage_fingerprint_tells_sizes_apart_and_is_json():
    base = Parts([[]])
    prints = [
        json.dumps(stage.fingerprint())
        for stage in (
            base,
            Shuffle(base, 2),
            Shuffle(base, 3),
            Group(base, 2),
            Unbatch(base),
            Repeat(base, 2),
            Repeat(base),
            Stripe(base),
            Group(Stripe(base), 2),
            Stripe(Group(base, 2)),
        )
    ]

    assert len(set(prints)) == len(prints)


def test_stage_fingerprint_is_not_changed_by_a_map():
    source = Parts([list(range(30))])
    plain = Shuffle(source, 10)
    mapped, filtered = (
        Shuffle(Map(source, lambda i: i), 10),
        Shuffle(Filter(source, lambda i: True), 10),
    )

    assert contents(mapped) == contents(plain)
    assert mapped.fingerprint() == plain.fingerprint()
    assert filtered.fingerprint() != plain.fingerprint()


def test_shuffle_after_shuffle_has_a_key_of_its_own():
    source = Parts([list(range(12))])
    once, twice = (
        contents(Shuffle(source, 12)),
        contents(Shuffle(Shuffle(source, 12), 12)),
    )

    assert twice != [once[i] for i in once]


@chains_settings
@given(
    before=steps,
    after=steps,
    length=st.integers(0, 60),
    stripe=st.integers(1, 3),
    per_step=st.integers(1, 3),
    num=st.integers(2, 4),
)
def test_stages_read_by_several_readers_have_one_digest(
    before, after, length, stripe, per_step, num
):
    """Each holds one part, and compares what all of them have read up to a step."""
    how = HowToRead(generators=(NumpyGenerator(), PythonGenerator()))
    readers = [
        ChunkReader(
            chained("function", before, after, [length]), None, list, how
        )
        for _ in range(num)
    ]
    plan = PartsPlan(
        batch_size=num * stripe * per_step,
        num_parts=num,
        num_data_ranks=num,
        accumulation=per_step,
        tail=TAILS["drop"],
    )
    for step in range(8):
        chunks = []
        for part, reader in enumerate(readers):
            asked = Opening(parts=(part,), num_parts=num, stripe=stripe)
            request = ChunkRequest(
                iterator_number=1,
                opening=asked,
                step=step,
                first_step=0,
                plan=plan,
                compared=True,
            )
            chunks.append(reader.read(request, 0))
        assert len({chunk.digest for chunk in chunks}) == 1
        if any(chunk.is_padding and any(chunk.is_padding) for chunk in chunks):
            return


class Counted(list):
    """A list that notes what is read of it."""

    def __init__(self, items):
        super().__init__(items)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("skip", [0, 3, 29, 30, 31, 61])
@pytest.mark.parametrize(
    "make",
    [
        lambda one: Repeat(one),
        lambda one: Repeat(one, 3),
        lambda one: Mix({"a": one}, [Segment(0, (1,))], "all"),
    ],
)
def test_stages_opened_in_a_round_read_the_source_once(make, skip):
    source = Counted(range(121))
    stage = make(Stripe(IterableSource(source)))

    straight = [list(islice(items, 70)) for items in stage.open(opening(4))]
    source.read.clear()
    opened = stage.open(opening(4, skip=skip))
    found = [[next(items, None) for items in opened] for _ in range(4)]

    wanted = [
        [one[at] if at < len(one) else None for one in straight]
        for at in range(skip, skip + 4)
    ]
    assert found == wanted
    # Where the parts of a round differ in length, those that are behind begin their round at another sample.
    assert max(Counter(source.read).values(), default=0) <= (
        2 if skip in (31, 61) else 1
    )
