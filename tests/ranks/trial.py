"""One simulated job: what each rank's data does, what the ranks then deliver, and what they should."""

import random
import threading
import time
from dataclasses import dataclass, field

from paddle_shard.errors import AgreedFailure, PeerLostError, UnequalEndsError
from paddle_shard.ranks.agreement import Coordinator
from paddle_shard.ranks.verdict import CLOSED, END, FAIL, OK, Terms
from tests.deadlines import HANG
from tests.ranks.simulated_group import SimulatedGroup, World, end

FAR = 100  # steps; no script goes that far


class Killed(Exception):
    """Raised on the training thread of a rank that dies."""


@dataclass
class Script:
    """What happens in one pass."""

    prefetch: int
    ends: dict = field(default_factory=dict)  # rank -> first step without data
    fails: dict = field(default_factory=dict)  # rank -> step whose reading fails
    exhausted: dict = field(default_factory=dict)  # rank -> first step of padding
    break_at: int | None = None  # all ranks leave before this step
    must_agree: bool = False
    noisy: float = 0.0  # how often a rank notes something
    leaders: dict = field(default_factory=dict)  # rank -> rank that reads for it, until that one leaves


def note_of(rank, step, script):
    """What a rank has to say of a step: its first one and now and then."""
    if step and random.Random(f"{rank} {step} {script.noisy}").random() >= script.noisy:
        return None
    return f"rank {rank}, step {step}" * (1 + 3 * rank)


def outcome(script, size):
    """The oracle: how many steps every rank delivers, and how the pass ends."""
    limits = [(step, "failed") for step in script.fails.values()] + [(step, "ended") for step in script.ends.values()]
    if len(script.exhausted) == size:
        limits.append((max(script.exhausted.values()), "ended"))
    if script.break_at is not None:
        limits.append((script.break_at, "left"))
    step = min(step for step, _ in limits)
    kinds = {kind for at, kind in limits if at == step}
    kind = next(kind for kind in ("left", "failed", "ended") if kind in kinds)
    if kind == "failed":
        return step, "failed", sorted(r for r, s in script.fails.items() if s == step)
    if kind == "ended" and script.must_agree:
        ended = sorted(r for r, s in script.ends.items() if s == step)
        if 0 < len(ended) < size:
            return step, "unequal", ended
    return step, kind, None


def random_script(rng, size):
    script = Script(prefetch=rng.randint(1, 9))
    horizon = rng.choice([3, 10, 25])
    style = rng.choice(["drop", "drop", "error", "pad", "pad"])
    if style == "pad":
        script.exhausted = {r: rng.randint(0, horizon) for r in range(size)}
    else:
        last = rng.randint(0, horizon)
        ranks = rng.sample(range(size), rng.randint(1, size))
        spread = rng.choice([0, horizon])
        script.ends = {r: last + rng.randint(0, spread) for r in ranks}
        script.must_agree = style == "error"
    if rng.random() < 0.3:
        ranks = rng.sample(range(size), rng.randint(1, size))
        script.fails = {r: rng.randint(0, horizon) for r in ranks}
        for r in ranks:  # a source that has ended reads nothing more
            if script.ends.get(r, horizon + 1) <= script.fails[r]:
                del script.fails[r]
    if rng.random() < 0.25:
        script.break_at = rng.randint(0, horizon)
    script.noisy = rng.choice([0.0, 0.1, 0.7])
    return script


def ahead(agreement, step, count):
    """Up to which step a rank announces that reads so many steps ahead, whatever it is asked for."""
    final = agreement.outlook.kind != OK or agreement.is_decided
    return agreement.outlook.step if final else step + count


def led_script(rng):
    """Ranks of which two read for two others, that leave their loop before one of two streams has ended, or behind."""
    horizon = rng.choice([3, 10, 25])
    ends = [rng.randint(0, horizon) for _ in range(2)]
    return Script(
        prefetch=rng.randint(1, 9),
        exhausted={rank: ends[rank % 2] for rank in range(4)},
        break_at=rng.randint(max(0, min(ends) - 3), max(ends) + 1),
        leaders={2: 0, 3: 1},
    )


def report_of(rank):
    return f"report of {rank}"


class Rank:
    """Runs the passes of a job on one simulated rank."""

    def __init__(self, rank, group, rng, timeout, barrier, pause, table):
        self.rank, self.rng, self.barrier, self.pause = rank, rng, barrier, pause
        meet = SimulatedGroup.meet if table else lambda group: (None, {})
        self.coordinator = Coordinator(group, timeout=timeout, meet=meet, end_process=lambda: None)
        self.results = []  # a pass each: (steps delivered, how it ended, details)
        self.waited = []
        self.kill_at = None  # (pass, step)
        self.group = group

    def announce(self, script, agreement, wanted):
        """Announce the next step; where there is nothing special, perhaps some behind it at once."""
        step = agreement.outlook.step
        if self.pause:
            time.sleep(self.rng.random() * self.pause)
        if (text := note_of(self.rank, step, script)) is not None:
            agreement.note(text)
        if script.fails.get(self.rank) == step:
            agreement.announce(FAIL, report=report_of(self.rank))
        elif script.ends.get(self.rank) == step:
            agreement.announce(END)
        elif script.exhausted.get(self.rank, step + 1) <= step:
            agreement.announce(exhausted=True)
        else:
            special = {script.fails.get(self.rank), script.ends.get(self.rank), script.exhausted.get(self.rank)}
            upto = step + 1
            while upto < wanted and self.rng.random() < 0.5:
                if upto in special or note_of(self.rank, upto, script) is not None:
                    break
                upto += 1
            agreement.announce(steps=upto - step)

    def has_stopped(self, script, agreement):
        """Announce that nothing more is read, and return True, if the rank that reads for this one has left."""
        leader = self.group.world.opened.get((agreement.number, script.leaders.get(self.rank)))
        if leader is None or leader.outlook.kind != CLOSED or leader.outlook.step > agreement.outlook.step:
            return False  # what it has sent can still be taken
        agreement.announce_unread()
        return True

    def run_pass(self, number, script, agreement):
        step, stopped, self.group.world.opened[number, self.rank] = 0, False, agreement
        while step < FAR:
            if self.kill_at == (number, step):
                self.group.world.kill(self.rank)
                raise Killed
            if step == script.break_at:
                agreement.close()
                return step, "left", None
            # Who shares a reader reads ahead what is ready, which differs from rank to rank.
            count = self.rng.randint(1, script.prefetch) if script.leaders else script.prefetch
            while agreement.outlook.step < (wanted := ahead(agreement, step, count)):
                if stopped := stopped or self.has_stopped(script, agreement):
                    break
                self.announce(script, agreement, wanted)
            try:
                if not agreement.deliver(step):
                    agreement.close()
                    return step, "ended", None
            except AgreedFailure as error:
                sound = error.step == step and all(said == report_of(rank) for rank, said in error.reports)
                return step, "failed" if sound else f"wrongly: {error}", [rank for rank, _ in error.reports]
            except UnequalEndsError as error:
                return step, "unequal" if error.step == step else f"wrongly: {error}", list(error.ended)
            except PeerLostError as error:
                return step, "lost", sorted(error.ranks)
            told = dict(agreement.take_notes(step))
            noted = {r: note_of(r, step, script) for r in range(self.group.size)}
            if told != {rank: said for rank, said in noted.items() if said is not None}:
                return step, f"wrongly told: {told}", None
            if self.barrier is not None:
                self.barrier.wait(HANG)  # a rank that parts from the others breaks it for all
            step += 1
        return step, "ran away", None

    def run(self, scripts):
        try:
            for number, script in enumerate(scripts):
                agreement = self.coordinator.open(Terms(ends_must_agree=script.must_agree))
                result = self.run_pass(number, script, agreement)
                self.results.append(result)
                self.waited.append(agreement.waited)
                if result[1] == "lost":
                    return
        except (Killed, threading.BrokenBarrierError) as error:
            self.results.append((None, type(error).__name__, None))


def run_job(size, scripts, rng, *, timeout=HANG, barrier=False, pause=0.0, delay=0.0, kill=None, table=False):
    """Run passes on `size` simulated ranks, with a table or without; return the ranks. Nothing may hang."""
    world = World(size, rng, delay=delay, half_done=kill is not None)
    shared = threading.Barrier(size) if barrier else None
    pauses = [rng.choice([0, pause]) for _ in range(size)]
    ranks = [
        Rank(r, SimulatedGroup(world, r), random.Random(rng.random()), timeout, shared, pauses[r], table)
        for r in range(size)
    ]
    if kill is not None:
        ranks[kill[0]].kill_at = kill[1:]
    threads = [threading.Thread(target=rank.run, args=(scripts,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * HANG
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hung = [rank.rank for rank, thread in zip(ranks, threads, strict=True) if thread.is_alive()]
    assert not hung, f"ranks {hung} hang; {[rank.results for rank in ranks]}"
    for rank in ranks:
        end(rank.coordinator)
    return ranks
