"""What a signal's handler raises (a time limit, a preemption notice) leaves the loop as itself, wherever it strikes."""

import ast
import gzip
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import DataReadError
from paddle_shard.handlers import ignoring
from paddle_shard.plan.tails import find_tail
from paddle_shard.ranks.agreement import Coordinator
from paddle_shard.ranks.verdict import Terms
from paddle_shard.samplers import UserBatches
from paddle_shard.sources.files import RemoteFile
from paddle_shard.sources.shards import ShardSource
from paddle_shard.sources.text import LINES, text_source
from tests.deadlines import HANG
from tests.ranks.simulated_group import SimulatedGroup, World, end

PACKAGE = Path(paddle_shard.__file__).parent
# File or file:function -> why no handler of the user's runs there, or what it raises cannot leave.
ELSEWHERE = {
    "reading/worker.py": "a worker's handlers are reset",
    "reading/prefetcher.py:_run": "a thread of its own",
    "ranks/agreement.py:_run": "a thread of its own",
    "ranks/agreeing.py:meet": "it is called by that thread",
    "ranks/star.py": "it is called by that thread",
    "ranks/rendezvous.py:connected": "it is called by that thread",
    "ranks/rendezvous.py:store": "it is called by that thread",
    "errors.py:text_of": "the file imports nothing; the text of an error takes microseconds",
}
WIDE = {"BaseException", "Exception", "OSError", "TimeoutError"}  # which a handler's own is likely to be
ASKS = ("raise_if_a_handlers", "raised_by_a_handler")

ONE = dist.ProcessMesh([0], dim_names=["dp"])
TWO = dist.ProcessMesh([0, 1], dim_names=["dp"])


def turns_away(handler):
    """Whether an `except` clause may end otherwise than by raising what it has caught, unasked."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {getattr(one, "id", getattr(one, "attr", "")) for one in caught} if handler.type else WIDE
    last = handler.body[-1]
    reraises = isinstance(last, ast.Raise) and last.exc is None
    leaves = any(isinstance(node, ast.Return | ast.Continue) for one in handler.body for node in ast.walk(one))
    asks = any(getattr(node, "id", "") in ASKS for one in handler.body for node in ast.walk(one))
    return bool(names & WIDE) and not asks and (not reraises or leaves)


def suppresses(call):
    """Whether a call of `suppress` hides what a handler may raise."""
    names = {getattr(one, "id", getattr(one, "attr", "")) for one in call.args}
    return getattr(call.func, "id", getattr(call.func, "attr", "")) == "suppress" and bool(names & WIDE)


def clauses(text):
    """(function, clause) of every `except`."""
    return found_in(ast.parse(text), "")


def found_in(node, function):
    if isinstance(node, ast.ExceptHandler):
        yield function, node
    for child in ast.iter_child_nodes(node):
        yield from found_in(child, node.name if isinstance(node, ast.FunctionDef) else function)


def test_every_clause_that_catches_what_a_handler_may_raise_asks_whether_it_did():
    found = [
        f"{path.relative_to(PACKAGE)}:{function}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for function, clause in clauses(path.read_text())
        if turns_away(clause)
    ]
    assert [one for one in found if not one.startswith(tuple(ELSEWHERE))] == []
    assert [named for named in ELSEWHERE if not any(one.startswith(named) for one in found)] == []


def test_nothing_that_a_handler_may_raise_is_suppressed():
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and suppresses(node)
    ]
    assert calls == []  # handlers.ignoring lets it through


def test_a_planted_suppress_is_found():
    planted = "suppress(OSError)", "contextlib.suppress(ValueError, Exception)", "suppress(KeyError)", "f(OSError)"
    assert [suppresses(ast.parse(text, mode="eval").body) for text in planted] == [True, True, False, False]


def test_what_a_handler_raises_is_not_ignored(strike):
    with ignoring(OSError, Enough):
        raise OSError("of the code itself")
    with pytest.raises((Enough, TimeoutError)), ignoring(OSError, Enough):
        strike()


@pytest.mark.parametrize(
    ("text", "planted"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept (ValueError, OSError) as error: raise ValueError from error", True),
        ("try: f()\nexcept: return_(1)", True),
        ("try: f()\nexcept Exception:\n  if x: raise ValueError\n  raise", False),
        ("try: f()\nexcept Exception as error:\n  raise_if_a_handlers(error)", False),
        ("try: f()\nexcept KeyError: pass", False),
    ],
)
def test_a_planted_clause_is_found(text, planted):
    assert any(turns_away(clause) for _, clause in clauses(text)) == planted


class Enough(Exception):
    """What the handlers raise."""


def raises(number, frame):
    raise Enough


def raises_once(number, frame):
    signal.signal(number, signal.SIG_IGN)  # as one does so that a second notice does not interrupt the saving
    raise Enough


class Raises:
    def __call__(self, *_):
        raise TimeoutError("enough")  # an OSError, as reading raises them


@pytest.fixture(params=[raises, raises_once, Raises()], ids=["plain", "once", "object"])
def strike(request):
    """A function that has the handler run where it is called."""
    before = signal.signal(signal.SIGUSR1, request.param)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


class Data(paddle.io.Dataset):
    def __init__(self, at):
        self.at = at

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.at(index)
        return np.arange(2 if index == 3 else 1)  # of lengths that only a collate_fn can stack


def first(samples):
    return np.stack([sample[:1] for sample in samples])


class AtOnce(Data):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Bad(Data):
    """Sample 3 is bad, so that the samples are read one by one, and what stands in is looked for."""

    def __getitems__(self, indices):
        if 3 in indices:
            raise ValueError("one is bad")
        return [self[index] for index in indices]


def at(number, strike):
    return lambda index: strike() if index == number else None


def bad_but(number, strike):
    """All samples are bad; with the number that is tried last, the handler runs."""

    def check(index):
        if index == number:
            strike()
        raise ValueError("bad")

    return check


def on_call(number, strike, result=lambda given: given):
    calls = []

    def called(given):
        calls.append(given)
        if len(calls) == number:
            strike()
        return result(given)

    return called


def fails_with_several(strike):
    def collate(samples):
        if len(samples) == 1:
            strike()
        raise ValueError("not so many")

    return collate


def after(number, strike, items=range(16)):
    def generator():
        for item in items:
            if item == number:
                strike()
            yield item

    return generator


def file(number, strike, length=None):
    def read(name, skip):
        for item in range(skip, 8):
            if item == number:
                strike()
            yield item
        if number == "end":
            strike()

    return Stream(ShardSource(["a", "b"], read, counts=None if length is None else [length] * 2))


def pairs(strike):
    def items(item):
        yield item
        if item == 3:
            strike()
        yield item

    return items


PLACES = {
    "sample": lambda strike: (Data(at(3, strike)), first),
    "samples at once": lambda strike: (AtOnce(at(2, strike)), first),
    "samples one by one": lambda strike: (Bad(at(2, strike)), first),
    "another that could stand in": lambda strike: (Data(bad_but(5, strike)), first),
    "collate": lambda strike: (Data(lambda index: None), on_call(1, strike, first)),
    "collate of one": lambda strike: (Data(lambda index: None), fails_with_several(strike)),
    "map": lambda strike: (Stream.of(range(16)).map(on_call(3, strike)), None),
    "filter": lambda strike: (Stream.of(range(16)).filter(on_call(3, strike, lambda x: True)), None),
    "unbatch": lambda strike: (Stream.of(range(16)).map(pairs(strike)).unbatch(), None),
    "source": lambda strike: (Stream.of(after(3, strike)), None),
    "collate of a stream": lambda strike: (Stream.of(range(16)), on_call(1, strike, np.array)),
    "file": lambda strike: (file(3, strike), None),
    "end of a file": lambda strike: (file("end", strike, 8), None),
}
SKIPPED_ONLY = {"samples one by one", "another that could stand in", "collate of one"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}], ids=["", "no prefetch"])
def test_what_a_handler_raises_leaves_the_loop_as_itself(place, on_error, options, strike):
    dataset, collate_fn = PLACES[place](strike)
    dataset = dataset.in_parts(2) if isinstance(dataset, Stream) else dataset
    given = paddle.io.DataLoader(dataset, batch_size=4, collate_fn=collate_fn)
    loader = paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", on_error=on_error, **options)
    other = place in SKIPPED_ONLY and on_error == "raise"
    with pytest.raises(DataReadError if other else (Enough, TimeoutError)):
        for _ in loader:
            pass


def test_it_does_so_while_it_is_found_out_for_which_rank_a_sampler_draws(strike):
    class Striking:
        def __iter__(self):
            strike()
            yield [0]

        def __deepcopy__(self, memo):  # the fixture's frame cannot be copied
            return self

    with pytest.raises((Enough, TimeoutError)):
        UserBatches(batch_sampler=Striking(), num_data_ranks=1, tail=find_tail("pad")).first_draw(0)


def test_it_does_so_while_lines_are_counted(strike, tmp_path, monkeypatch):
    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    monkeypatch.setattr("paddle_shard.sources.files.decompressed", lambda *_: strike())
    with pytest.raises((Enough, TimeoutError)):
        text_source(path, LINES, counts=True)


def test_it_does_so_while_ranks_exchange_something_and_the_next_exchange_has_its_own_answers(strike):
    world = World(2, random.Random(0))
    one, two = (Coordinator(SimulatedGroup(world, rank), timeout=HANG, end_process=list) for rank in range(2))
    try:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises((Enough, TimeoutError), match="^(enough)?$"):
            one.open(Terms()).exchange("first of one")  # nobody else is there
        timer.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        heard = []
        other = threading.Thread(target=lambda: heard.extend(two.open(Terms()).exchange(f"{n} of two") for n in "12"))
        other.start()
        assert one.open(Terms()).exchange("2 of one") == ["2 of one", "2 of two"]  # not the answer to the first call
        other.join(HANG)
        assert heard == [["first of one", "1 of two"], ["2 of one", "2 of two"]]
    finally:
        end(one), end(two)


def test_a_server_is_not_asked_again_for_it(strike):
    asked = []

    def connect(name, start):
        asked.append(start)
        strike()

    with pytest.raises((Enough, TimeoutError)):
        RemoteFile("http://somewhere/x", connect)
    assert asked == [0]


def test_a_time_limit_that_the_users_own_code_sees_to_is_a_bad_sample():
    def limited(index):
        try:
            if index == 3:
                signal.raise_signal(signal.SIGUSR1)
        except Enough:
            raise ValueError("too slow") from None

    before = signal.signal(signal.SIGUSR1, raises)
    try:
        given = paddle.io.DataLoader(Data(limited), batch_size=4, collate_fn=first)
        loader = paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", on_error="skip")
        assert len(list(loader)) == 4
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert loader.stats.total.skipped == 1
