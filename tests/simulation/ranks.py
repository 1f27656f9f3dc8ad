"""Simulate ranks that agree: random jobs, schedules and faults, each replayed from its seed.

    python -m tests.simulation.ranks --seeds 10000 [--first 0] [--seconds 600] [--defect NAME]
    python -m tests.simulation.ranks --seed 4711 [--trace]

A trial that fails prints its seed and what has gone wrong. `--seed` runs it again, action by action.
"""

import hashlib
import json
import math
import random
import sys
from dataclasses import dataclass, replace

from tests.simulation import defects, seeds
from tests.simulation.scripts import (
    differing_script,
    leaving_script,
    led_script,
    outcome,
    random_script,
    short_script,
)
from tests.simulation.seeds import Failed
from tests.simulation.world import TIMEOUT, World

MOST_ACTIONS = 200_000
MOST_SECONDS = 20 * TIMEOUT
SLACK = 1.0
"""Seconds for which the clock may go on while a thread or a message is ready: less than any rank waits for another."""
SOON = 5.0
"""Seconds in which a rank that was killed is named."""
FAULTS = ("kill", "freeze", "pause", "cut", "silence")


@dataclass
class Fault:
    """What happens to one rank at some moment."""

    kind: str
    rank: int
    at: int
    """Number of actions before it."""


@dataclass
class Job:
    """Some passes of some ranks, a schedule, and perhaps a fault."""

    seed: str
    size: int
    scripts: list
    threaded: tuple
    sharing: tuple = ()
    """Ranks that have mapped the memory of the table."""
    meets: bool = False
    """True if each step ends with a collective in which no other thread of a rank runs."""
    fault: Fault | None = None
    length: int | None = None
    """Number of actions of a short job, as estimated: its schedule is a `Swarm`."""


SHORT_JOBS = 20
"""Short jobs of each seed."""


def jobs_of(seed):
    """Return the jobs of a seed: two without a fault, one with, one in which a rank leaves alone, and short ones."""
    rng = random.Random(seed)
    found = []
    for kind in ("sound", rng.choice(["sound", "led"]), "faulty", "leaves"):
        size = (
            rng.randint(3, 5)
            if kind == "faulty" and rng.random() < 0.8
            else rng.randint(2, 5)
        )
        scripts = [random_script(rng, size) for _ in range(rng.randint(1, 3))]
        if kind == "sound":
            for is_other in (True, False):
                scripts.insert(
                    rng.randint(1, len(scripts)),
                    differing_script(rng, size, is_other=is_other),
                )
        elif kind == "led":
            size = 4
            scripts = [led_script(rng) for _ in range(2)]
        elif kind == "leaves":
            scripts = [random_script(rng, size), leaving_script(rng, size)]
        threaded = tuple(rank for rank in range(size) if rng.random() < 0.6)
        sharing = random.Random(f"memory of {seed}.{len(found)}").choice(
            [(), *3 * [range(size)], range(1, size)]
        )
        meets = (
            random.Random(f"collectives of {seed}.{len(found)}").random() < 0.5
        )
        meets = meets and kind in ("sound", "led")
        job = Job(
            f"{seed}.{len(found)}",
            size,
            scripts,
            threaded,
            tuple(sharing),
            meets,
        )
        if kind == "faulty":
            actions = sum(
                5 * size * (outcome(script, size)[0] + 2) for script in scripts
            )
            victim = rng.choice([0, *range(1, size), *range(1, size)])
            job.fault = Fault(
                rng.choice(["kill", "kill", "kill", "kill", *FAULTS]),
                victim,
                rng.randrange(actions),
            )
        found.append(job)
    return found + [
        short_job(f"{seed}.short{number}") for number in range(SHORT_JOBS)
    ]


def short_job(seed):
    """Return a job of a few steps: what happens once in a pass, at its end, is a large part of it."""
    rng = random.Random(seed)
    size = rng.choice([2, 2, 3])
    script = short_script(rng, size)
    job = Job(
        seed,
        size,
        [script],
        threaded=tuple(rank for rank in range(size) if rng.random() < 0.5),
        sharing=tuple(rng.choice([(), *5 * [range(size)]])),
        meets=rng.random() < 0.8,
        length=8 * size * (outcome(script, size)[0] + 1),
    )
    if not job.meets and rng.random() < 0.5:
        job.fault = Fault(
            "kill", rng.randrange(size), rng.randrange(job.length)
        )
    return job


class Schedule:
    """Chooses what happens next: at random, or by priorities that change a few times (PCT)."""

    def __init__(self, rng):
        self._rng = rng
        self._by_priority = rng.random() < 0.5
        self._priorities = {}
        self._changes = {
            int(math.exp(rng.uniform(0, 7))) for _ in range(rng.randint(0, 3))
        }
        self._lowest = 0.0
        self.count = 0

    def choose(self, actions):
        self.count += 1
        if not self._by_priority:
            return self._rng.choice(actions)
        best = max(actions, key=self._priority)
        if self.count in self._changes:
            self._lowest -= 1.0
            self._priorities[best] = self._lowest
            best = max(actions, key=self._priority)
        return best

    def _priority(self, action):
        if action not in self._priorities:
            self._priorities[action] = self._rng.random()
        return self._priorities[action]


class Swarm(Schedule):
    """Of a short job: threads that are slow, up to three hundred times, or priorities that change during the job.

    Each job draws anew which threads are slow, so that in some job of some seed the thread is that a certain defect
    needs: a driver that sends late, or a training thread that stays behind the one that reads for it.
    """

    def __init__(self, rng, length):
        super().__init__(rng)
        self._changes = {
            rng.randrange(length) for _ in range(rng.randint(0, 3))
        }
        self._weights = {}

    def choose(self, actions):
        if self._by_priority:
            return super().choose(actions)
        self.count += 1
        weights = [self._weight(kind, rank) for kind, rank, _ in actions]
        return self._rng.choices(actions, weights)[0]

    def _weight(self, *thread):
        if thread not in self._weights:
            self._weights[thread] = 10 ** self._rng.uniform(-2.5, 0)
        return self._weights[thread]


def run(seed, trace=None):
    """Run the jobs of a seed; return (a digest of all that has happened, number of actions). Raises Failed."""
    digest, count = hashlib.sha256(), 0
    for job in jobs_of(seed):
        if trace:
            trace(job)
        count += run_job(job, digest, trace)
    return digest.hexdigest(), count


def run_job(job, digest, trace=None):
    """Run a job; return its number of actions. Raises Failed."""
    rng = random.Random(f"schedule of {job.seed}")
    world = World(
        job.size,
        job.scripts,
        threaded=job.threaded,
        sharing=job.sharing,
        meets=job.meets,
    )
    schedule = Schedule(rng) if job.length is None else Swarm(rng, job.length)
    fault, slack = job.fault, SLACK
    while not world.is_done:
        if fault is not None and schedule.count >= fault.at:
            strike(world, fault)
            fault = None
            if trace:
                trace(f"{world.now:8.3f} {job.fault}")
            continue
        actions = world.actions()
        if not actions:
            world.now = world.next_time()
            slack = SLACK
            if world.now > MOST_SECONDS:
                phases = {
                    one.rank: (one.phase, one.results)
                    for one in world.ranks
                    if not one.is_dead
                }
                raise Failed(f"waits for ever: {phases}")
            continue
        if slack > 0 and rng.random() < 0.03:
            passed = rng.uniform(0, min(slack, 0.3))
            slack -= passed
            world.now += passed
        action = schedule.choose(actions)
        count = rng.choice([1, 1, 1, 3])
        if trace:
            kind, rank, source = action
            taken = json.dumps(world.channels.get((source, rank), [])[:count])
            trace(
                f"{world.now:8.3f} {kind} {rank} {'' if source is None else f'from {source}: {taken}'}"
            )
        try:
            world.apply(action, count)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise Failed(f"a thread ends with {error!r}") from error
        digest.update(f"{world.now} {action}".encode())
        if schedule.count > MOST_ACTIONS:
            raise Failed("goes on for ever")
    check(job, world)
    digest.update(repr([one.results for one in world.ranks]).encode())
    return schedule.count


def strike(world, fault):
    """Have a fault happen."""
    one = world.ranks[fault.rank]
    world.struck_at = world.now
    if fault.kind == "kill":
        world.kill(fault.rank)
    elif fault.kind == "freeze":
        one.frozen_until = world.now + 5 * TIMEOUT
    elif fault.kind == "pause":
        one.frozen_until = world.now + 1.5
    elif fault.kind == "cut":
        world.cut(fault.rank, loses=True)
    else:
        world.fall_silent(fault.rank)


def check(job, world):
    """Compare what the ranks have delivered with the oracle."""
    expected = [outcome(script, job.size) for script in job.scripts]
    if job.scripts[-1].leaves:
        check_left(job, world, expected)
        return
    fault = job.fault
    for one in world.ranks:
        if one.results == expected or (
            one.is_dead and one.results == expected[: len(one.results)]
        ):
            continue
        if fault is None or fault.kind == "pause":
            raise Failed(f"rank {one.rank}: {one.results}, not {expected}")
        is_beyond = fault.kind != "kill" and fault.rank == one.rank
        odd = {
            result[1]
            for result, right in zip(one.results, expected, strict=False)
            if result != right
        }
        if is_beyond and odd <= {"lost", "deserted", "ended"}:
            # it is on the other side of what has happened, or goes on when the others have given up
            continue
        *before, last = one.results
        at = min(len(before), len(expected) - 1)
        if (
            before != expected[: len(before)]
            or last[1] != "lost"
            or last[0] > expected[at][0]
        ):
            raise Failed(
                f"rank {one.rank}: {one.results}, not {expected} or a part of it"
            )
        # A hub that is cut off takes others for lost, and those that come later hear that of it.
        is_unclear = is_beyond or (
            fault.kind in ("cut", "silence", "freeze") and fault.rank == 0
        )
        is_named = [*last[2]] == [fault.rank]
        if not is_named and not (is_unclear and last[2]):
            raise Failed(f"rank {one.rank} names {last[2]}, not {[fault.rank]}")
        seconds = one.finished_at - world.struck_at
        if (
            fault.kind == "kill"
            and world.ranks[fault.rank].is_connected
            and seconds > SOON
        ):
            raise Failed(
                f"rank {one.rank} waits {seconds:.1f} s until it names the rank that was killed"
            )


def check_left(job, world, expected):
    """Check what the ranks have delivered of which one has left its last loop alone."""
    [(leaver, step)] = job.scripts[-1].leaves.items()
    steps = set()
    for one in world.ranks:
        *before, last = one.results or [(0, "nothing")]
        is_right = (
            before == expected[:-1]
            and last[1:] == ("deserted", [leaver])
            and last[0] >= step
        )
        if one.rank == leaver:
            is_right = one.results == [*expected[:-1], (step, "left", None)]
        else:
            steps.add(last[0])
        if not is_right:
            raise Failed(
                f"rank {one.rank}: {one.results}, but rank {leaver} has left before step {step}"
            )
    if len(steps) > 1:
        raise Failed(f"the others stop at the steps {sorted(steps)}")


def shrunk(seed):
    """Return a smaller job that fails too, and how."""
    return seeds.shrunk(
        jobs_of(seed), lambda job: run_job(job, hashlib.sha256()), smaller_jobs
    )


def smaller_jobs(job):
    """Yield jobs with one thing less."""
    for number in range(len(job.scripts) if len(job.scripts) > 1 else 0):
        yield replace(
            job, scripts=job.scripts[:number] + job.scripts[number + 1 :]
        )
    for name, less in (
        ("fault", None),
        ("threaded", ()),
        ("sharing", ()),
        ("meets", False),
    ):
        if getattr(job, name):
            yield replace(job, **{name: less})
    for number, script in enumerate(job.scripts):
        fewer = [{"noisy": -1}] if script.noisy >= 0 else []
        fewer += [
            {name: {}}
            for name in ("fails", "differs", "leaders")
            if getattr(script, name) and script.ends
        ]
        for change in fewer:
            yield replace(
                job,
                scripts=[
                    *job.scripts[:number],
                    replace(script, **change),
                    *job.scripts[number + 1 :],
                ],
            )


def main():
    module = sys.modules[__name__]
    seeds.main(
        seeds.parser_of(module, defects.DEFECTS).parse_args(),
        module,
        defects.DEFECTS,
        ("actions",),
    )


if __name__ == "__main__":
    main()
