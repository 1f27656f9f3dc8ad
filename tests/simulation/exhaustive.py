"""Explore all interleavings of a small job: each visible step of each thread, each message, and one kill anywhere.

    python -m tests.simulation.exhaustive [--size 2] [--steps 3] [--kill] [--table] [--full] [--seconds 600]

Jobs that differ only in names of ranks, other than that of the hub, count as one. A state in which a rank waits for
ever, or ends otherwise than the oracle says, is an error; it is printed with the actions that lead to it.

A state of the job is a tuple of numbers: of the state of each rank, of what is on its way on each connection, and of
the table. What an action makes of one rank is computed once, and looked up afterwards.

Of interleavings that differ only in the order of actions that do not affect each other, one is visited (a persistent
set is chosen in each state): where nothing that the other ranks may do can affect a rank before it acts itself, only
its own actions are tried. When the hub has given up, ranks without a table cannot affect each other any more, and each
is followed to its end alone. Every rank comes to all the ends to which it comes with `--full`.
"""

import argparse
import copy
import itertools
import json
import logging
import math
import sys
import time
import types
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from paddle_shard.ranks.decision import RankProgress
from paddle_shard.ranks.protocol import Hub, Iteration, Member, _Tally
from paddle_shard.ranks.reports import loss_of
from tests.simulation.ranks import Failed, Fault, Job, check
from tests.simulation.scripts import Script, outcome
from tests.simulation.world import TIMEOUT, Memory, Rank, World

ATOMS = {type(None), bool, int, float, str, types.FunctionType}
"""Types of values that never change, by which most of the time goes: they are looked for first."""


def frozen(value):
    """Return a value that is equal for equal states, and can be compared by hash."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is list or kind is tuple:
        return tuple(
            [part if type(part) in ATOMS else frozen(part) for part in value]
        )
    if isinstance(value, dict):
        return tuple(
            sorted(
                ((repr(key), frozen(one)) for key, one in value.items()),
                key=lambda pair: pair[0],
            )
        )
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple):
        return tuple(map(frozen, value))
    if isinstance(value, set):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, BaseException):
        return str(value)
    names = getattr(kind, "__slots__", None) or vars(value)
    parts = [getattr(value, name) for name in names if name not in UNCHANGED]
    return tuple(
        [part if type(part) in ATOMS else frozen(part) for part in parts]
    )


UNCHANGED = {"world", "words", "terms", "scripts", "_member"}
COPIED = (Memory, Rank, Member, Hub, _Tally, Iteration, RankProgress)


def copied(value, known):
    """Return a copy of a rank; what never changes is shared.

    Args:
        value: Any part of it.
        known: id of a part -> its copy.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if id(value) in known:
        return known[id(value)]
    if kind is list:
        return [copied(one, known) for one in value]
    if isinstance(value, dict):
        found = known[id(value)] = copy.copy(value)
        found.update((key, copied(one, known)) for key, one in value.items())
        return found
    if kind is set:
        return set(value)
    if kind is types.MethodType:
        return types.MethodType(value.__func__, copied(value.__self__, known))
    if kind not in COPIED:
        return value
    made = known[id(value)] = object.__new__(kind)
    for name in getattr(kind, "__slots__", None) or vars(value):
        part = getattr(value, name)
        setattr(
            made, name, part if type(part) in ATOMS else copied(part, known)
        )
    return made


class Words(dict):
    """What is on the table, and whether it was read."""

    is_read = False

    def get(self, key):
        self.is_read = True
        return super().get(key)


class View(World):
    """A world in which one rank acts, that keeps what it sends."""

    def __init__(self, job, now, words, ranks):
        self.size, self.scripts, self.now, self.ranks = (
            job.size,
            job.scripts,
            now,
            ranks,
        )
        self.meets = False
        self.words = Words(words)
        self.sent = []
        self.is_cut = False

    def peers(self, rank):
        return [None]  # all are connected

    def send(self, source, target, message):
        self.sent.append(json.dumps(message))

    def cut(self, rank, *, loses=False):
        self.is_cut = True


class Able(NamedTuple):
    """What a rank may do, of itself."""

    actions: list
    takes: bool
    reads: bool
    """True if that depends on the table."""


class Step(NamedTuple):
    """What an action of a rank leads to."""

    rank: int
    words: int
    sent: tuple
    is_cut: bool
    reads: bool
    """True if it depends on the table."""


class Numbers:
    """Values, and a number for each; equal values have one number."""

    def __init__(self):
        self.values = []
        self._numbers = {}

    def of(self, key, value=None):
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return number


NOW, KILLED, WORDS, FIRST = range(4)
"""Places in a state: the time, (rank that was killed, when), the table, the first rank; then the connections."""
ENDED = ((), True)
"""What is on a connection that has ended and whose other end takes nothing more."""


class Space:
    """The states of a job, and what leads from one to another."""

    victim = None
    """A rank that is killed at any moment, or never; None: no rank is."""

    def __init__(self, job):
        """Begin with a job whose ranks are not threaded, and meet in no collectives."""
        self.job = job
        self.size = job.size
        self._ranks = Numbers()
        self._lines = Numbers()  # (messages on their way, whether more is lost)
        self._words = Numbers()
        self._able, self._steps, self._asks, self._announced = {}, {}, {}, {}
        self._dead = {}
        self._disturbed = {}
        self._followed = set()
        self.path = []
        """What has led to the state that is looked at."""
        self.ends = set()
        """(rank that was killed, rank, what it has delivered)."""
        others = range(1, job.size)
        self._sources = [others] + [(0,) for _ in others]
        """Rank -> to whom it is connected."""
        self._lines_at = {}
        """(source, target) -> place of the connection in a state."""
        for pair in [(0, one) for one in others] + [(one, 0) for one in others]:
            self._lines_at[pair] = FIRST + job.size + len(self._lines_at)

    def begin(self):
        """Return the first state, in which all are connected."""
        job = self.job
        world = World(job.size, job.scripts, sharing=job.sharing)
        for rank in range(job.size):
            world.apply(("drive", rank, None))
        ranks = [self._ranks.of(frozen(one), one) for one in world.ranks]
        lines = [self._lines.of(((), False)) for _ in range(2 * (job.size - 1))]
        return (0.0, None, self._words.of(()), *ranks, *lines)

    # What one rank does

    def copy(self, state, rank):
        """Return a copy of a rank in a world of its own."""
        ranks = [
            self._ranks.values[number] for number in state[FIRST:][: self.size]
        ]
        view = View(
            self.job, state[NOW], self._words.values[state[WORDS]], ranks
        )
        one = copied(ranks[rank], {id(ranks[rank].world): view})
        view.ranks[rank] = one
        one.world = view
        if one.member.table is not None:
            one.member.table.words = view.words
        return one

    def able(self, state, rank):
        key = (state[FIRST + rank], state[NOW], state[WORDS])
        found = self._able.get(key)
        if found is None:
            one = self.copy(state, rank)
            actions = [] if one.is_dead else one.actions()
            found = Able(actions, one.may_take(), one.world.words.is_read)
            self._able[key] = found
        return found

    def actions(self, state, rank):
        """Return what a rank may do, apart from being killed."""
        able = self.able(state, rank)
        if not able.takes:
            return able.actions
        values = self._lines.values
        return able.actions + [
            ("drive", rank, source)
            for source in self._sources[rank]
            if values[state[self._lines_at[source, rank]]][0]
        ]

    def step(self, state, action):
        kind, rank, source = action
        message = slow = None
        if source is not None:
            message = self._lines.values[state[self._lines_at[source, rank]]][
                0
            ][0]
        elif kind == "train":
            slow = self._is_ahead(state, rank)
        key = (
            state[FIRST + rank],
            state[NOW],
            state[WORDS],
            kind,
            message,
            slow,
        )
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._first_step(state, action, message)
        return found

    def _first_step(self, state, action, message):
        kind, rank, _ = action
        one = self.copy(state, rank)
        view = one.world
        was_awake = one.is_awake
        if kind == "drive":
            one.turn([] if message is None else [json.loads(message)])
        else:
            one.train()
        # A training thread goes on until what it has done can be seen by others.
        while kind == "train" and one.phase in ("next", "read"):
            if one.is_awake != was_awake:
                break
            one.train()
        for result in one.results:
            if result[1].startswith("wrong"):
                raise Failed(f"rank {rank}: {result}")
        words = self._words.of(tuple(sorted(view.words.items())))
        number = self._ranks.of(frozen(one), one)
        return Step(
            number, words, tuple(view.sent), view.is_cut, view.words.is_read
        )

    def _is_ahead(self, state, rank):
        """Return a rank that has not announced the step that this one asks for, if it asks for one."""
        number = state[FIRST + rank]
        if number not in self._asks:
            one = self._ranks.values[number]
            asks = one.phase in ("ask", "wait")
            self._asks[number] = (one.state.number, one.step) if asks else None
        asks = self._asks[number]
        if asks is None:
            return None
        iteration, step = asks
        for other in range(self.size):
            if self.announced(state, other).get(iteration, 0) <= step:
                return other
        return None

    def announced(self, state, rank):
        number = state[FIRST + rank]
        found = self._announced.get(number)
        if found is None:
            opened = self._ranks.values[number].opened.items()
            found = {iteration: one.progress.step for iteration, one in opened}
            self._announced[number] = found
        return found

    # What that makes of the job

    def after(self, state, choice):
        """Return the state after an action, a kill, or a wait."""
        kind, rank, source = choice
        following = list(state)
        if kind == "wait":
            waiting = range(self.size) if rank is None else [rank]
            ranks = [self.copy(state, rank) for rank in waiting]
            following[NOW] = min(one.next_time() for one in ranks)
            if following[NOW] > 3 * TIMEOUT:
                raise Failed("waits for ever")
            return tuple(following)
        if kind == "kill":
            following[FIRST + rank] = self._killed(state, rank)
            following[KILLED] = (rank, state[NOW])
            self._cut(following, rank)
            return tuple(following)
        step = self.step(state, choice)
        if source is not None:
            place = self._lines_at[source, rank]
            (_, *messages), is_ended = self._lines.values[state[place]]
            following[place] = self._lines.of((tuple(messages), is_ended))
        following[FIRST + rank], following[WORDS] = step.rank, step.words
        if step.sent:
            for target in self._sources[rank]:
                self._put(following, rank, target, step.sent)
        if step.is_cut:
            self._cut(following, rank)
        return tuple(following)

    def _killed(self, state, rank):
        number = state[FIRST + rank]
        if number not in self._dead:
            one = self.copy(state, rank)
            one.is_dead = True
            self._dead[number] = self._ranks.of(frozen(one), one)
        return self._dead[number]

    def _put(self, state, source, target, sent, *, is_last=False):
        place = self._lines_at[source, target]
        messages, is_ended = self._lines.values[state[place]]
        if not is_ended:
            state[place] = self._lines.of((messages + sent, is_last))

    def _cut(self, state, rank):
        loss = json.dumps(["lost", *loss_of([rank], "has ended or was killed")])
        for other in self._sources[rank]:
            self._put(state, rank, other, (loss,), is_last=True)
            state[self._lines_at[other, rank]] = self._lines.of(ENDED)

    # What need be tried

    def choices(self, state, *, full=False):
        """Return what to try in a state: all that may happen, or enough of it."""
        own = [self.actions(state, rank) for rank in range(self.size)]
        victim = self.victim if state[KILLED] is None else None
        if (
            victim is not None
            and self._ranks.values[state[FIRST + victim]].is_done
        ):
            victim = None
        kill = [] if victim is None else [("kill", victim, None)]
        if not any(own):
            return [*kill, ("wait", None, None)]
        if not full:
            able = [rank for rank in range(self.size) if own[rank]]
            for rank in sorted(able, key=lambda rank: len(own[rank])):
                kills = kill if rank == victim else []
                if len(able) == 1 and kills == kill:
                    break
                if self._is_apart(state, rank, own[rank]):
                    return own[rank] + kills
        return list(itertools.chain(kill, *own))

    def _is_apart(self, state, rank, actions):
        """Whether nothing that others may do affects what a rank may do now, or is affected by it."""
        lines = self._lines.values
        able = self.able(state, rank)
        steps = [self.step(state, action) for action in actions]
        reads = able.reads or any(step.reads for step in steps)
        posts = any(step.words != state[WORDS] for step in steps)
        empty = [
            source
            for source in self._sources[rank]
            if able.takes and not lines[state[self._lines_at[source, rank]]][0]
        ]
        return not self._is_disturbed(state, rank, (reads, posts, *empty))

    def _is_disturbed(self, state, rank, needs):
        """Whether others may, before a rank acts, send to it where it waits for that, or post what it reads."""
        key = list(state)
        key[FIRST + rank] = tuple(self.announced(state, rank).items())
        for source in self._sources[rank]:
            key[self._lines_at[source, rank]] = None
        key = (rank, needs, self.victim, tuple(key))
        found = self._disturbed.get(key)
        if found is None:
            self._disturbed[key] = True  # should an action lead back here
            found = self._disturbed[key] = self._may_disturb(state, rank, needs)
        return found

    def _may_disturb(self, state, rank, needs):
        reads, posts, *empty = needs
        victim = self.victim if state[KILLED] is None else None
        for other in range(self.size):
            if other == rank:
                continue
            actions = self.actions(state, other)
            if posts and self.able(state, other).reads:
                return True
            for action in actions:
                step = self.step(state, action)
                if (step.sent or step.is_cut) and other in empty:
                    return True
                if (posts and step.reads) or (
                    reads and step.words != state[WORDS]
                ):
                    return True
            is_victim = (
                other == victim
                and not self._ranks.values[state[FIRST + other]].is_done
            )
            if is_victim:
                if other in empty:
                    return True
                actions = [*actions, ("kill", other, None)]
            for action in actions:
                self.path.append(action)
                if self._is_disturbed(self.after(state, action), rank, needs):
                    self.path.pop()
                    return True
                self.path.pop()
        return False

    # Ends

    def ends_in(self, state, *, full=False):
        """Whether nothing is left to explore in a state; what the ranks then come to is compared with the oracle."""
        ranks = [
            self._ranks.values[number] for number in state[FIRST:][: self.size]
        ]
        if all(one.is_done for one in ranks):
            for rank in range(self.size):
                self._verify(state, rank)
            return True
        hub = ranks[0]
        if full or self.job.sharing or not (hub.is_dead or hub.member.loss):
            return False
        for rank in range(self.size):
            self._follow(state, rank)
        return True

    def _follow(self, state, rank):
        """Follow one rank to all its ends, while the others do nothing."""
        announced = [
            repr(self.announced(state, other)) for other in range(self.size)
        ]
        lines = [
            state[self._lines_at[source, rank]]
            for source in self._sources[rank]
        ]
        key = (rank, state[:WORDS], state[FIRST + rank], *lines, *announced)
        if key in self._followed:
            return
        self._followed.add(key)
        one = self._ranks.values[state[FIRST + rank]]
        if one.is_done:
            self._verify(state, rank)
            return
        choices = self.actions(state, rank) or [("wait", rank, None)]
        for choice in choices:
            self.path.append(choice)
            self._follow(self.after(state, choice), rank)
            self.path.pop()

    def _verify(self, state, rank):
        """Compare the end of a rank with the oracle."""
        one = self._ranks.values[state[FIRST + rank]]
        end = (state[KILLED], rank, repr((one.results, one.finished_at)))
        if end in self.ends:
            return
        self.ends.add(end)
        fault, struck_at = None, 0.0
        if state[KILLED] is not None:
            victim, struck_at = state[KILLED]
            fault = Fault("kill", victim, 0)
        dead = types.SimpleNamespace(
            is_dead=True, is_connected=True, results=[]
        )
        ranks = [dead] * self.size
        ranks[rank] = one
        world = types.SimpleNamespace(ranks=ranks, struck_at=struck_at)
        check(replace(self.job, fault=fault), world)


def explore(job, *, kills, until=math.inf, full=False):
    """Visit all states of a job; return (number of states, ends, whether all were visited). Raises Failed.

    Args:
        job: It.
        kills: True: one rank, or none, is killed at any moment.
        until: When to give up.
        full: True: also interleavings that differ only in the order of what does not affect each other.
    """
    num_states = 0
    alike = {0: 0}
    for rank in range(1, job.size):
        events = [
            (kind, steps.get(rank))
            for script in job.scripts
            for kind, steps in (("end", script.ends), ("fail", script.fails))
        ]
        alike.setdefault(repr(events), rank)
    space = Space(job)
    for space.victim in alike.values() if kills else [None]:
        num_states += _explore(space, until, full)
        if time.process_time() > until:
            return num_states, space.ends, False
    return num_states, space.ends, True


def _explore(space, until, full):
    """Visit all states; return their number."""
    first = space.begin()
    seen = {hash(first)}
    states = [first]
    stack = [iter(space.choices(first, full=full))]
    path = space.path
    while stack:
        choice = next(stack[-1], None)
        if choice is None:
            stack.pop()
            states.pop()
            if path:
                path.pop()
            continue
        path.append(choice)
        try:
            following = space.after(states[-1], choice)
            number = hash(following)
            if number in seen or space.ends_in(following, full=full):
                seen.add(number)
                path.pop()
                continue
            seen.add(number)
            stack.append(iter(space.choices(following, full=full)))
            states.append(following)
        except Failed as failure:
            raise Failed(
                f"{failure} in {space.job.scripts} after {path}"
            ) from None
        if len(seen) % 256 == 0 and time.process_time() > until:
            break
    return len(seen)


def scripts_of(size, num_steps):
    """Yield what the ranks' data may do within some steps: one end or failure on each rank, up to symmetry."""
    events = [("end", step) for step in range(num_steps + 1)] + [
        ("fail", step) for step in range(num_steps)
    ]
    for first in events:
        for others in itertools.combinations_with_replacement(events, size - 1):
            steps = defaultdict(dict)
            for rank, (kind, step) in enumerate((first, *others)):
                steps[kind][rank] = step
            yield Script(
                prefetch=1,
                ends=steps["end"],
                fails=steps["fail"],
                must_agree=True,
                noisy=-1,
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--kill",
        action="store_true",
        help="one rank is killed at any moment, or none",
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="the ranks are on one host, and share a table",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="visit all orders of independent actions",
    )
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    logging.getLogger("paddle_shard").setLevel(logging.CRITICAL)
    begun = time.process_time()
    states = ends = jobs = 0
    is_whole = True
    for script in scripts_of(options.size, options.steps):
        sharing = tuple(range(options.size)) if options.table else ()
        job = Job("exhaustive", options.size, [script], (), sharing)
        try:
            found, final, is_whole = explore(
                job,
                kills=options.kill,
                until=begun + options.seconds,
                full=options.full,
            )
        except Failed as failure:
            print(failure)
            sys.exit(1)
        states += found
        ends += len(final)
        jobs += 1
        what = outcome(script, options.size)
        print(f"{what}: {found} states, {len(final)} ends", flush=True)
        if not is_whole:
            break
    seconds = time.process_time() - begun
    rest = "" if is_whole else ", not all"
    print(
        f"{jobs} jobs, {states} states, {ends} ends, {seconds:.0f} s of CPU{rest}: no failure"
    )


if __name__ == "__main__":
    main()
