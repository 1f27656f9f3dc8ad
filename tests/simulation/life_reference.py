"""The life of a run by the documentation: the rows of each step, and what a loader says of itself.

Written from docs/ alone. Only the order of shuffled data, and the source that a mixture draws next, come from a
straight run on one rank; they are checked by the laws that docs/ states of them.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import chain, pairwise

PARTS = 6
MIXTURES = ("mixture", "mixture in order")
INDEXED = ("in order", "shuffled", "packed", *MIXTURES)
MIXED = ("mixed", "mixed functions")
STREAMS = ("mapped", "filtered", "windowed", "batched", *MIXED)
UNKNOWN = ("filtered", "mixed functions")
"""Streams of which no rank knows the end before it has seen it."""
SOURCES = {"a": 7, "b": 5, "c": 6}
"""Lengths of the sources of a `Mixture`; those of a stream's are longer by `MORE`."""
MORE = 20
WINDOW = 5
ROW = 8
"""Tokens of a packed row."""


@dataclass(frozen=True)
class Settings:
    """What the loaders of a job are made with."""

    kind: str
    length: int
    seed: int = 0
    bad: tuple = ()  # samples that cannot be read
    weights: tuple = ((0, (2, 1, 0)),)  # of a mixture
    stop: str = "first"  # of a mixture of streams
    # (sample of the run, rows); of a stream, one entry
    sizes: tuple = ((0, 6),)
    skip: tuple = ()
    tail: str = "pad"
    on_error: str = "skip"
    ranks: int = 1
    mp: int = 1
    prefetch: int = 2
    workers: int = 0

    @property
    def is_stream(self):
        return self.kind in STREAMS

    @property
    def num_samples(self):
        return len(order(self, 0)) if self.kind == "packed" else self.length


def documents(length):
    """Return documents whose tokens are all different, some longer than a row."""
    return [
        [100 * number + token + 1 for token in range(number * 7 % 11 + 1)]
        for number in range(length)
    ]


# The order


@cache
def straight(settings, epoch):
    """Return (rows, which are real) of each step of an epoch, read by one process."""
    from tests.simulation.life import read_epoch

    return read_epoch(settings, epoch)


def plain(settings, size):
    """Return the settings of a straight run."""
    kept = ("kind", "length", "seed", "weights", "stop")
    values = {name: getattr(settings, name) for name in kept}
    return Settings(**values, sizes=((0, size),), prefetch=0)


def order(settings, epoch):
    """Return the samples of an epoch of data with an index, in their order."""
    if settings.kind == "in order":
        return list(range(settings.length))
    return _order(plain(settings, 60), epoch)


@cache
def _order(settings, epoch):
    found = [
        row
        for step in straight(settings, epoch)
        for row, is_real in step
        if is_real
    ]
    if settings.kind == "shuffled":
        assert sorted(found) == list(range(settings.length))
    if settings.kind == "packed":
        tokens = [token for row in found for token in row if token]
        assert sorted(tokens) == [
            *chain.from_iterable(documents(settings.length))
        ]
        assert {len(row) for row in found} == {ROW}
    if settings.kind in MIXTURES:
        earlier = [
            row for before in range(epoch) for row in _order(settings, before)
        ]
        run = earlier + found
        check_shares([row // 1000 for row in run], settings.weights)
        for number, length in enumerate(SOURCES.values()):
            drawn = [row % 1000 for row in run if row // 1000 == number]
            for first in range(0, len(drawn), length):
                once = drawn[first : first + length]
                assert len({*once}) == len(once), (
                    "a sample twice before all once"
                )
                assert settings.kind == "mixture" or once == sorted(once)
    return found


def check_shares(drawn, weights, slack=0):
    """Each source is within 1 - 1/(2n-2) samples of its share after every prefix; the bounds of entries add up."""
    counts = Counter()
    shares = Counter()
    bound = 0
    entries = [*weights, (len(drawn) + 1, None)]
    for (first, of_sources), (end, _) in pairwise(entries):
        if first >= len(drawn):
            return
        num = sum(weight > 0 for weight in of_sources)
        bound += (1 - Fraction(1, 2 * num - 2) if num > 1 else 0) + slack
        for source in drawn[first:end]:
            counts[source] += 1
            for number, weight in enumerate(of_sources):
                shares[number] += Fraction(weight, sum(of_sources))
                assert abs(counts[number] - shares[number]) <= bound


def cut(items, each):
    """Return the parts of a list: each has `each` rows of every batch."""
    return [
        [item for at, item in enumerate(items) if at // each % PARTS == part]
        for part in range(PARTS)
    ]


@cache
def parts_of(settings, epoch, each):
    """Return the samples of each part of a stream in an epoch that begins with `each` rows of a part; None: is bad."""
    found = cut(range(settings.length), each)
    if settings.kind == "mapped":
        return [
            [None if i in settings.bad else i + 500 for i in part]
            for part in found
        ]
    if settings.kind == "filtered":
        return [[i + 500 for i in part if i % 3] for part in found]
    if settings.kind == "batched":
        pairs = [
            [part[at : at + 2] for at in range(0, len(part), 2)]
            for part in found
        ]
        return [[1000 * pair[0] + pair[-1] for pair in part] for part in pairs]
    steps = straight(plain(settings, PARTS * each), epoch)
    read = [
        [
            row
            for step in steps
            for row, is_real in step[part * each : (part + 1) * each]
            if is_real
        ]
        for part in range(PARTS)
    ]
    for part in range(PARTS):
        if settings.kind == "windowed":
            for first in range(0, len(found[part]), WINDOW):
                window = found[part][first : first + WINDOW]
                assert sorted(read[part][first : first + WINDOW]) == window
            assert len(read[part]) == len(found[part])
        else:
            check_part(settings, part, each, read[part])
    return read


def check_part(settings, part, each, read):
    """A part of a mixture draws from the same part of each source, by the weights, until its end."""
    weights = [(first // PARTS, weights) for first, weights in settings.weights]
    check_shares([row // 1000 for row in read], weights, slack=len(weights) > 1)
    rounds = []
    for number, length in enumerate(SOURCES.values()):
        if not any(entry[number] for _, entry in weights):
            continue
        source = cut([1000 * number + i for i in range(length + MORE)], each)[
            part
        ]
        drawn = [row for row in read if row // 1000 == number]
        assert drawn == (source * (len(drawn) // len(source) + 1))[: len(drawn)]
        rounds.append(Fraction(len(drawn), len(source)))
    if settings.stop == "first":
        assert max(rounds) == 1
    else:
        assert min(rounds) >= 1


# Steps


@dataclass(frozen=True)
class Step:
    """A step of an epoch."""

    first: int  # position
    count: int  # positions
    size: int  # rows of a full batch


@dataclass(frozen=True)
class Start:
    """A position of a run; `past` are the steps of the epoch before it, skipped ones included."""

    epoch: int = 0
    steps_before: int = 0
    past: tuple = ()
    ended: bool = False

    @property
    def samples(self):
        return sum(step.count for step in self.past)


def steps_from(settings, start):
    """Return the steps of an epoch from a position on, skipped ones included."""
    found = []
    at = start.samples
    origin = start.epoch * settings.num_samples
    while not start.ended:
        size = [rows for first, rows in settings.sizes if first <= origin + at][
            -1
        ]
        if settings.is_stream:
            count = size
            lengths = [
                len(part)
                for part in parts_of(
                    settings, start.epoch, each_of(start, settings)
                )
            ]
            is_short = (at + size) // PARTS > min(lengths)
            is_over = at // PARTS >= max(lengths)
        else:
            count = min(size, settings.num_samples - at)
            is_short = count < size
            is_over = count <= 0
        if is_over or (settings.tail == "drop" and is_short):
            break
        found.append(Step(at, count, size))
        at += count
    return tuple(found)


def each_of(start, settings):
    """Return the rows that a part had in the batch that began the epoch."""
    return (start.past[0].size if start.past else settings.sizes[0][1]) // PARTS


def rows_of(settings, start, step):
    """Return (sample, whether it is real) of each row of a step; None for any sample."""
    if settings.is_stream:
        parts = parts_of(settings, start.epoch, each_of(start, settings))
        repeats = settings.tail == "repeat"
        places = range(step.first // PARTS, (step.first + step.size) // PARTS)
        samples = [
            part[k % len(part)] if k < len(part) or repeats else None
            for part in parts
            for k in places
        ]
        return [(sample, sample is not None) for sample in samples]
    samples = order(settings, start.epoch)
    rows = [
        (None, False) if sample in settings.bad else (sample, True)
        for sample in samples[step.first : step.first + step.count]
    ]
    unit = step.size if settings.tail == "fill" else settings.ranks
    is_known = not settings.bad and settings.kind not in MIXTURES
    padding = [samples[k % len(samples)] for k in range(-len(rows) % unit)]
    return rows + [(sample if is_known else None, False) for sample in padding]


# The run


@dataclass
class Pass:
    """An iterator."""

    settings: Settings
    start: Start
    number: int
    taken: int = 0  # steps, skipped ones included
    is_live: bool = True  # made since a state was loaded
    is_over: bool = False

    def __post_init__(self):
        self.steps = steps_from(self.settings, self.start)
        self.epoch = self.start.epoch

    def is_skipped(self, number):
        step = self.start.steps_before + number
        return any(first <= step < end for first, end in self.settings.skip)

    def next(self):
        """Return the number of steps of the next one and those before it, or None at the end."""
        before = len(self.start.past)
        for taken in range(self.taken, len(self.steps)):
            if not self.is_skipped(before + taken):
                return taken + 1
        return None

    @property
    def table(self):
        """All steps of the epoch, as this pass counts them."""
        return self.start.past + self.steps

    @property
    def position(self):
        is_known = self.settings.kind not in UNKNOWN
        is_last = is_known and self.taken == len(self.steps)
        past = self.start.past + self.steps[: self.taken]
        return replace(self.start, past=past, ended=self.start.ended or is_last)


@dataclass(frozen=True)
class Saved:
    """A saved state."""

    settings: Settings
    start: Start
    delivered: Counter  # positions of the epoch
    lost: Counter  # those that could not be read
    is_sure: bool  # of what all ranks have delivered
    is_unknown: bool


@dataclass
class Life:
    """Where a run stands, and what it has delivered."""

    settings: Settings
    epoch: int = 0
    loaded: Start = None  # until a pass from it has ended
    known: tuple = (0, 0)  # (epoch, steps of the run before it)
    last: Pass = None  # the newest pass that has delivered, or ended
    passes: list = field(default_factory=list)
    # epoch -> Counter of positions
    delivered: dict = field(default_factory=dict)
    lost: dict = field(default_factory=dict)
    # epochs of which a rank knows its own deliveries
    partial: set = field(default_factory=set)
    unknown: set = field(default_factory=set)  # of which deliveries are lost
    num_passes: int = 0

    def load(self, saved, *, by_rank=False):
        """Go on from a state: of one rank, or of each rank its own."""
        start = saved.start
        epoch = self.epoch = start.epoch
        self.loaded, self.known, self.last = (
            start,
            (epoch, start.steps_before),
            None,
        )
        for other in self.passes:
            other.is_live = False
        self.delivered = {epoch: saved.delivered.copy()}
        self.lost = {epoch: saved.lost.copy()}
        is_known = saved.is_sure or by_rank
        is_empty = not saved.delivered and not saved.lost
        is_unknown = saved.is_unknown or not is_known
        self.unknown = {epoch} if is_unknown and not is_empty else set()
        self.partial = set() if saved.is_sure or not by_rank else {epoch}

    def start(self, epoch):
        if self.loaded is not None and self.loaded.epoch == epoch:
            return self.loaded
        return Start(epoch, self.steps_before(epoch))

    def steps_before(self, epoch):
        first, steps = self.known if epoch >= self.known[0] else (0, 0)
        for before in range(first, 0 if self.settings.is_stream else epoch):
            start = Start(before)
            if self.loaded is not None and self.loaded.epoch == before == first:
                start = self.loaded
            steps += len(start.past) + len(steps_from(self.settings, start))
        return steps

    def begin(self):
        self.num_passes += 1
        self.passes.append(
            Pass(self.settings, self.start(self.epoch), self.num_passes)
        )
        return self.passes[-1]

    def deliver(self, it, taken):
        step = it.steps[taken - 1]
        it.taken = taken
        if not it.is_live:
            return
        if self.last is None or it.number > self.last.number:
            self.last = it
        if self.settings.ranks > 1:
            self.partial.add(it.epoch)
        rows = rows_of(self.settings, it.start, step)[: step.count]
        for position, (_, is_real) in enumerate(rows, step.first):
            account = self.delivered if is_real else self.lost
            account.setdefault(it.epoch, Counter())[position] += 1

    def end(self, it):
        """A pass has come to its end: the loader moves to the next epoch."""
        it.taken, it.is_over = len(it.steps), True
        self.passes.remove(it)
        if not it.is_live:
            return
        if it.start is self.loaded:
            self.loaded = None
        is_current = it.epoch == self.epoch
        if is_current:
            steps = it.start.steps_before + len(it.table)
            self.known, self.epoch = (it.epoch + 1, steps), it.epoch + 1
        if is_current or self.last is None or it.number >= self.last.number:
            self.last = it

    def present(self):
        """Return the pass whose position is that of the run, or None: the next one's beginning is."""
        last = self.last
        return (
            None
            if last is None or last.is_over or last.epoch != self.epoch
            else last
        )

    def position(self):
        it = self.present()
        return self.start(self.epoch) if it is None else it.position

    def num_batches(self):
        it = self.present() or Pass(self.settings, self.start(self.epoch), 0)
        return sum(not it.is_skipped(step) for step in range(len(it.table)))

    def save(self):
        start = self.position()
        epoch = start.epoch
        return Saved(
            self.settings,
            start,
            self.delivered.get(epoch, Counter()).copy(),
            self.lost.get(epoch, Counter()).copy(),
            epoch not in self.partial,
            epoch in self.unknown,
        )

    def certificate(self):
        """Return what a certificate says of the newest epoch; only its epoch where deliveries are not known."""
        epoch = self.epoch if self.loaded is None else self.loaded.epoch
        it = self.last or Pass(self.settings, self.start(epoch), 0)
        self.partial -= {it.epoch, self.epoch}
        if it.epoch in self.unknown:
            return {"epoch": it.epoch, "exact": False}
        skipped = {
            position
            for number, step in enumerate(it.table)
            if it.is_skipped(number)
            for position in range(step.first, step.first + step.count)
        }
        served = sum(step.count for step in it.table)
        due = {*range(served)} - skipped
        delivered = self.delivered.get(it.epoch, Counter())
        lost = self.lost.get(it.epoch, Counter())
        if {*delivered, *lost} - due:
            # A state has what the tail drops, or `skip_steps` skips, by now: not said.
            return {"epoch": it.epoch}
        missed = len(due - {*delivered} - {*lost}) + lost.total()
        return {
            "epoch": it.epoch,
            "exact": served > 0 and not lost and delivered == Counter(due),
            "num_samples": len(due),
            "dropped": self.settings.num_samples - served,
            "skipped": len(skipped),
            "delivered": delivered.total(),
            "missed": missed,
            "repeated": delivered.total() - len(due) + missed,
        }
