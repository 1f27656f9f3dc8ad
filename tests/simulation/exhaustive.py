"""Explore all interleavings of a small job: each visible step of each thread, each message, and one kill anywhere.

    python -m tests.simulation.exhaustive [--size 2] [--steps 3] [--kill] [--seconds 600]

Jobs that differ only in names of ranks, other than that of the hub, count as one. A state in which a rank waits for
ever, or ends otherwise than the oracle says, is an error; it is printed with the actions that lead to it.
"""

import argparse
import itertools
import logging
import math
import sys
import time
import types
from dataclasses import replace

from paddle_shard.ranks.decision import RankProgress
from paddle_shard.ranks.protocol import Hub, Iteration, Member, _Tally
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
        return tuple([part if type(part) in ATOMS else frozen(part) for part in value])
    if kind is dict:
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
    return tuple([part if type(part) in ATOMS else frozen(part) for part in parts])


UNCHANGED = {"world", "terms", "scripts", "_member"}


def state_of(world):
    """Return what tells a state from others."""
    return hash(frozen(world))


COPIED = (World, Memory, Rank, Member, Hub, _Tally, Iteration, RankProgress)


def copied(value, known=None):
    """Return a copy of a state; what never changes is shared."""
    kind = type(value)
    if kind in ATOMS:
        return value
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if kind is list:
        return [copied(one, known) for one in value]
    if kind is dict:
        found = known[id(value)] = {}
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
        setattr(made, name, part if type(part) in ATOMS else copied(part, known))
    return made


def act(world, action):
    """Do an action; a training thread goes on until what it has done can be seen by others."""
    one = world.ranks[action[1]]
    was_awake = one.is_awake
    world.apply(action)
    while (
        action[0] == "train"
        and one.phase in ("next", "read")
        and one.is_awake == was_awake
    ):
        one.train()


def explore(job, *, kills, until=math.inf):
    """Visit all states of a job; return (states, ends, whether all were visited). Raises Failed."""
    world = World(job.size, job.scripts, threaded=job.threaded, sharing=job.sharing)
    for rank in range(job.size):
        world.apply(("drive", rank, None))  # all connect first
    pending = [(world, None, ())]
    seen = {state_of(world)}
    ends = 0
    while pending:
        if time.monotonic() > until:
            return len(seen), ends, False
        world, killed, path = pending.pop()
        if world.is_done:
            ends += 1
            verify(job, world, killed, path)
            continue
        moves = world.actions()
        choices = [("act", action) for action in moves]
        if kills and killed is None:
            choices += [("kill", one.rank) for one in world.ranks if not one.is_done]
        if not moves:
            choices.append(("wait", None))
        for choice in choices:
            following, victim = copied(world), killed
            if choice[0] == "act":
                act(following, choice[1])
            elif choice[0] == "kill":
                victim = choice[1]
                following.struck_at = following.now
                following.kill(victim)
            else:
                following.now = following.next_time()
                if following.now > 3 * TIMEOUT:
                    raise Failed(f"{job}: waits for ever after {[*path, choice]}")
            state = hash((state_of(following), victim))
            if state not in seen:
                seen.add(state)
                pending.append((following, victim, (*path, choice)))
    return len(seen), ends, True


def verify(job, world, killed, path):
    fault = None if killed is None else Fault("kill", killed, 0)
    try:
        check(replace(job, fault=fault), world)
    except Failed as failure:
        raise Failed(f"{failure} in {job.scripts} after {list(path)}") from None


def scripts_of(size, num_steps):
    """Yield what the ranks' data may do within some steps: one end or failure on each rank, up to symmetry."""
    events = [("end", step) for step in range(num_steps + 1)] + [
        ("fail", step) for step in range(num_steps)
    ]
    for first in events:
        for others in itertools.combinations_with_replacement(events, size - 1):
            ends = {
                rank: step
                for rank, (kind, step) in enumerate((first, *others))
                if kind == "end"
            }
            fails = {
                rank: step
                for rank, (kind, step) in enumerate((first, *others))
                if kind == "fail"
            }
            yield Script(prefetch=1, ends=ends, fails=fails, must_agree=True, noisy=-1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--kill", action="store_true", help="one rank is killed at any moment, or none"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="the ranks are on one host, and share a table",
    )
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    logging.getLogger("paddle_shard").setLevel(logging.CRITICAL)
    begun = time.monotonic()
    states = ends = jobs = 0
    is_whole = True
    for script in scripts_of(options.size, options.steps):
        sharing = tuple(range(options.size)) if options.table else ()
        job = Job("exhaustive", options.size, [script], (), sharing)
        try:
            found, final, all_visited = explore(
                job, kills=options.kill, until=begun + options.seconds
            )
        except Failed as failure:
            print(failure)
            sys.exit(1)
        states, ends, jobs, is_whole = (
            states + found,
            ends + final,
            jobs + 1,
            is_whole and all_visited,
        )
        print(
            f"{outcome(script, options.size)}: {found} states, {final} ends", flush=True
        )
        if not is_whole:
            break
    seconds = time.monotonic() - begun
    print(
        f"{jobs} jobs, {states} states, {ends} ends, {seconds:.0f} s{'' if is_whole else ', not all'}: no failure"
    )


if __name__ == "__main__":
    main()
