"""Simulate checkpoints and the record on a disk that crashes: random jobs, schedules and faults, each from its seed.

    python -m tests.simulation.disk --seeds 10000 [--first 0] [--seconds 600] [--defect NAME]
    python -m tests.simulation.disk --seed 4711 [--trace]
    python -m tests.simulation.disk --every 2 --seeds 20

The ranks of some jobs run `Checkpoints` as it is, each in a thread of which one moves at a time, from one call of the
operating system to another. Jobs are killed, frozen, and started while others still run; calls fail; the host crashes.
After each crash, and for many moments as if it had crashed then, the newest checkpoint that was acknowledged is loaded.
`--every` crashes two saves of so many ranks at each call, in all ways but for torn writes; a seed is a schedule.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import random
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from paddle_shard.errors import (
    ArgumentError,
    CheckpointError,
    PaddleShardError,
    PeerLostError,
    TakenOverError,
)
from paddle_shard.extras import checkpoint_folder, checkpoint_parts, checkpoints
from paddle_shard.extras.checkpoint_folder import CheckpointFolder
from paddle_shard.extras.checkpoints import Checkpoints
from paddle_shard.run import record_lines as lines
from tests.simulation import disk_defects, seeds
from tests.simulation.files import Chance, Disk, Every, Folder, signature
from tests.simulation.seeds import Failed

RECORD = "/run/record.jsonl"
MOST_CALLS = 20_000
BUSY = 50
"""Calls for which a record may be locked until who waits for it gives up."""
FAILING = {
    "EIO": (
        "open",
        "create",
        "read",
        "write",
        "fsync",
        "last fsync",
        "listdir",
        "stat",
        "mkdir",
        "unlink",
        "rmdir",
    ),
    "EIO of names": ("listdir", "stat"),
    "EIO at last": ("last fsync",),
    "ENOSPC": ("create", "mkdir", "write", "fsync", "last fsync"),
}
"""Name of an error -> the calls that may fail with it. A file that is cut is changed in memory only."""
ACTS = (
    *(
        "crash",
        "crash",
        "kill job",
        "kill rank",
        "kill rank",
        "freeze job",
        "freeze rank",
    ),
    *(
        "take over",
        "take over",
        "take over",
        "start",
        "start two",
        "fault",
        "fault",
        "fault",
        "fault",
    ),
)


class Killed(BaseException):
    """Ends a simulated process: nothing that would tidy up may run for it."""


@dataclass
class Act:
    """What happens at some moment."""

    at: int
    """Number of calls before it."""
    kind: str
    draw: float
    """Chooses whom it happens to."""
    length: int = 0
    """Calls until it is over."""
    error: str = ""
    odds: float = 1.0


@dataclass
class Plan:
    """A job: it loads, and saves a few times."""

    size: int
    keep: int
    saves: int
    speed: int = 10
    """How often its ranks move."""


@dataclass
class Trial:
    """Jobs that are started one after another, each when none lives or when an act starts it."""

    seed: str
    kind: str
    """"twins": two jobs start at once. "reader": a slow job starts while another one saves. "random": neither."""
    folder: str
    splits: bool
    """Whether there are loaders of data that is split already: all jobs have as many ranks."""
    shards: bool
    """Whether there is a tensor that is split over all ranks."""
    jobs: list
    acts: list


def trial_of(seed):
    rng = random.Random(seed)
    splits = rng.random() < 0.3
    sizes = [rng.choice([1, 2, 2, 3])] if splits else [1, 2, 2, 3]
    jobs = [
        Plan(rng.choice(sizes), rng.choice([2, 2, 3]), rng.randint(1, 5))
        for _ in range(rng.randint(2, 4))
    ]
    acts = []
    at = 0
    for _ in range(rng.randint(2, 8)):
        at += rng.choice([1, rng.randint(1, 150), rng.randint(1, 150)])
        act = Act(
            at, rng.choice(ACTS), rng.random(), rng.choice([1, 1, 10, 100, 400])
        )
        if act.kind == "fault":
            act.error = rng.choice(sorted(FAILING))
            act.odds = rng.choice([1.0, 0.2])
            if act.error == "EIO at last":
                act.length = 600
        acts.append(act)
    kind = rng.choice(["random", "random", "random", "twins", "reader"])
    if kind == "twins":
        acts.insert(0, Act(1, "start", 0.0))
    elif kind == "reader":
        jobs[0].saves = 6
        jobs[0].keep = 2
        jobs[1].speed = 1
        acts.insert(0, Act(rng.randint(100, 300), "start", 0.0))
        acts[1:] = [replace(act, at=act.at + 600) for act in acts[1:]]
    folder = rng.choice(["/run/saved", "/run/deep/saved"])
    return Trial(
        str(seed), kind, folder, splits, rng.random() < 0.6, jobs, acts
    )


# What is saved


class Whole:
    """A placement that splits the only dim."""

    def is_partial(self):
        return False

    def is_shard(self, dim=0):
        return dim == 0


class Tensor:
    """A distributed tensor of one dim."""

    def __init__(self, ranks, length):
        self.shape = [length]
        self.dtype = "paddle.int64"
        self.process_mesh = SimpleNamespace(
            process_ids=ranks, shape=[len(ranks)]
        )
        self.placements = [Whole()]
        self.values = None

    def is_dist(self):
        return True

    def _local_value(self):
        return self

    def set_value(self, values):
        self.values = values


class Holder:
    """An optimizer: two tensors that one rank holds, perhaps one that all ranks hold a part of, and a number."""

    def __init__(self, ranks, *, shards):
        self.tensors = {
            "first": Tensor(ranks[:1], 2),
            "last": Tensor(ranks[-1:], 2),
        }
        if shards:
            self.tensors["all"] = Tensor(ranks, 5)
        self.number = None
        self.loaded = {}

    def state_dict(self):
        return {**self.tensors, "number": self.number}

    def set_state_dict(self, state):
        self.loaded = state

    def fill(self, token):
        self.number = token
        for tensor in self.tensors.values():
            part = checkpoint_parts.part_of(tensor)
            tensor.values = None if part is None else np.full(part.shape, token)

    def found(self):
        """Return the values that were loaded on this rank."""
        values = [self.loaded.get("number")]
        for name, tensor in self.tensors.items():
            if name not in self.loaded:
                values.append(f"no {name}")
            elif checkpoint_parts.part_of(tensor) is not None:
                values += tensor.values.tolist()
        return values


class Loader:
    """A loader of data that is split already: each rank has its own state."""

    is_dataset_splitted = True

    def __init__(self, rank):
        self.state = {"rank": rank, "token": None}

    def certificate(self):
        return None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if state["rank"] != self.state["rank"]:
            raise Failed(
                f"rank {self.state['rank']} gets the state of rank {state['rank']}"
            )
        self.state = state


class Objects:
    """What a rank saves and loads."""

    def __init__(self, rank, size, *, splits, shards):
        self.holder = Holder(list(range(size)), shards=shards)
        self.extra = {"token": None}
        self.what = {"optimizer": self.holder, "extra": self.extra}
        if splits:
            self.loader = self.what["data"] = Loader(rank)

    def fill(self, token):
        self.holder.fill(token)
        self.extra["token"] = token
        if "data" in self.what:
            self.loader.state = {**self.loader.state, "token": token}

    def found(self):
        values = {*self.holder.found(), self.extra["token"]}
        if "data" in self.what:
            values.add(self.loader.state["token"])
        return values


# Who runs


class Actor:
    """One rank of a job, in a thread that moves when it is given the baton."""

    def __init__(self, world, job, rank):
        self.world = world
        self.job = job
        self.rank = rank
        self.baton = threading.Lock()
        self.baton.acquire()
        self.budget = 0
        self.num_gathers = 0
        self.waits_for = None
        self.frozen_until = 0
        self.speed = job.plan.speed * world.rng.choice([1, 1, 5])
        self.is_killed = self.is_done = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __str__(self):
        return f"job {self.job.number} rank {self.rank}"

    def _run(self):
        self.baton.acquire()
        try:
            if not self.is_killed:
                self.world.live(self)
        except Killed:
            pass
        except BaseException as error:
            self.world.failure = self.world.failure or error
        self.is_done = True
        self.world.baton.release()

    def pause(self):
        """Let others run, if it is time."""
        if self.is_killed:
            raise Killed
        self.budget -= 1
        if self.budget < 0:
            self.world.baton.release()
            self.baton.acquire()
            if self.is_killed:
                raise Killed

    def may_run(self):
        if self.is_done or self.frozen_until > self.world.count:
            return False
        return self.waits_for is None or self.job.is_met(self.waits_for)


class Job:
    """The ranks of a job."""

    def __init__(self, world, number, plan):
        self.number = number
        self.plan = plan
        self.rounds = {}  # number of a gather -> rank -> what it says
        self.num_faults = 0
        self.gives_up_at = math.inf
        self.loaded = {}  # rank -> step
        self.returned = {}  # token -> ranks on which `save` has returned
        self.failed = {}  # token or "load" -> ranks on which it has failed
        # token -> counts of calls and faults when the first rank has begun to save it
        self.at_save = {}
        self.required = None
        self.checkpoints = None
        self.records = True
        self.actors = [Actor(world, self, rank) for rank in range(plan.size)]
        self.world = world

    @property
    def generation(self):
        return self.checkpoints._folder.generation or 0

    def is_met(self, number):
        """Return whether all ranks take part in a gather, or one of them never will."""
        return len(self.rounds[number]) == self.plan.size or bool(
            self.lost(number)
        )

    def lost(self, number):
        missing = [
            actor
            for actor in self.actors
            if actor.rank not in self.rounds[number]
        ]
        has_given_up = self.world.count >= self.gives_up_at
        return [
            actor.rank for actor in missing if actor.is_done or has_given_up
        ]


class World:
    """A disk, the jobs that use it, and what they were promised."""

    def __init__(self, trial, digest, trace=None):
        self.trial = trial
        self.digest = digest
        self.trace = trace
        self.rng = Chance(f"schedule of {trial.seed}")
        self.stickiness = self.rng.choice([1, 3, 30])
        if trial.kind != "random":
            self.stickiness = 1
        self.count = 0
        self.current = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self.failure = None
        self.jobs = []
        self.faults = []
        self.orders = {}  # token -> (job, number of the attempt)
        self.acknowledged = None
        self.claims = {}  # generation -> count of calls when it was claimed
        self.num_manifests = 0
        self.lines = []  # numbers of lines of the record that were acknowledged
        self.num_crashes = self.num_probes = 0
        run = Folder()
        self.disk = Disk(Folder({"run": run}), self.touch)

    def say(self, text):
        self.digest.update(text.encode())
        if self.trace:
            self.trace(f"{self.count:5d} {text}")

    # What the library calls

    def touch(self, call, path):
        """Count a call; let others run before it, or let it fail."""
        actor = self.current
        if actor is None:
            return
        actor.pause()
        self.count += 1
        name = str(path)
        for act in self.faults:
            is_due = (
                act.at <= self.count < act.at + act.length
                and call in FAILING[act.error]
            )
            if is_due and self.rng.random() < act.odds:
                self.say(f"{actor}: {call} {name}: {act.error}")
                actor.job.num_faults += 1
                if name == RECORD:
                    # it takes the line off before it can be killed
                    actor.budget = max(actor.budget, 1)
                raise OSError(
                    getattr(errno, act.error.split()[0]), act.error, name
                )
        self.say(f"{actor}: {call} {name}")
        last = name.rpartition("/")[2]
        if call == "create" and last.startswith("generation-"):
            self.claims.setdefault(
                int(last.removeprefix("generation-")), self.count
            )
        if last == "manifest.json" and call in ("create", "replace"):
            self.num_manifests += 1

    def get_rank(self):
        return 0 if self.current is None else self.current.rank

    def get_size(self):
        return 1 if self.current is None else self.current.job.plan.size

    def gather(self, value, ranks, timeout, call):
        """Exchange something between the ranks of a job; each of them may miss the end of it if one has died."""
        actor = self.current
        payload = json.dumps(value)
        if len(ranks) == 1:
            return [json.loads(payload)]
        job = actor.job
        number = actor.num_gathers
        actor.num_gathers += 1
        texts = job.rounds.setdefault(number, {})
        texts[actor.rank] = payload
        actor.waits_for = number
        actor.budget = 0
        actor.pause()
        actor.waits_for = None
        lost = job.lost(number) or [
            other.rank
            for other in job.actors
            if other.is_killed and self.rng.random() < 0.5
        ]
        if lost:
            raise PeerLostError.of("has ended or was killed", lost)
        return [json.loads(texts[rank]) for rank in ranks]

    def save_file(self, content, path):
        with self.disk.open(path, "wb") as file:
            file.write(
                json.dumps(
                    content, default=lambda tensor: tensor.values.tolist()
                ).encode()
            )

    def load_file(self, path, **_):
        with self.disk.open(path, "rb") as file:
            return json.loads(file.read())

    def lock(self, file):
        for _ in range(BUSY):
            if file.node.holder is None or file.node.holder.owner.is_done:
                file.node.holder = file
                file.owner = self.current or SimpleNamespace(is_done=False)
                return
            self.touch("lock", file.path)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    @contextlib.contextmanager
    def patched(self):
        """Run the library on this disk."""
        paddle = SimpleNamespace(
            save=self.save_file,
            load=self.load_file,
            Tensor=Tensor,
            nn=SimpleNamespace(Layer=Killed),
        )
        dist = SimpleNamespace(get_rank=self.get_rank, Replicate=Whole)
        fixed = SimpleNamespace(strftime=lambda _: "2026-01-01 00:00:00 +0000")
        with contextlib.ExitStack() as stack:
            for module, names in (
                (
                    checkpoint_folder,
                    {
                        "os": self.disk.os,
                        "open": self.disk.open,
                        "shutil": self.disk.shutil,
                    },
                ),
                (
                    checkpoint_folder,
                    {
                        "paddle": paddle,
                        "time": fixed,
                        "socket": SimpleNamespace(gethostname=lambda: "host"),
                    },
                ),
                (checkpoint_parts, {"paddle": paddle, "dist": dist}),
                (
                    checkpoints,
                    {
                        "paddle": paddle,
                        "dist": dist,
                        "num_ranks": self.get_size,
                        "gathered": self.gather,
                    },
                ),
                (
                    lines,
                    {
                        "os": self.disk.os,
                        "open": self.disk.open,
                        "_lock": self.lock,
                    },
                ),
            ):
                for name, value in names.items():
                    stack.enter_context(
                        mock.patch.object(
                            module, name, value, create=name == "open"
                        )
                    )
            yield

    # What a rank does

    def live(self, actor):
        """Load, and save a few times."""
        job = actor.job
        mine = Checkpoints(self.trial.folder, keep=job.plan.keep)
        if actor.rank == 0:
            job.checkpoints = mine
            self.append(job, "begin", 100 * job.number)
        objects = Objects(
            actor.rank,
            job.plan.size,
            splits=self.trial.splits,
            shards=self.trial.shards,
        )
        if not self.load(actor, mine, objects):
            return
        for attempt in range(1, job.plan.saves + 1):
            token = 100 * job.number + attempt
            if not self.save(actor, mine, objects, token):
                return
            if actor.rank == 0:
                self.append(job, "checkpoint", token)

    def load(self, actor, mine, objects):
        job = actor.job
        if actor.rank == 0:
            job.required = self.acknowledged
            job.at_load = job.num_faults, self.num_manifests
        try:
            step = mine.load(**objects.what)
        except PeerLostError:
            return False
        except PaddleShardError as error:
            self.say(f"{actor}: load raises {error!r}")
            faults, manifests = job.at_load
            if job.num_faults == faults and self.num_manifests < manifests + 2:
                raise Failed(
                    f"{actor}: load raises, and nothing was wrong: {error!r}"
                ) from error
            job.failed["load"] = True
            return False
        self.say(f"{actor}: loaded {step}")
        self.check_found(f"{actor}", step, objects, job.required)
        job.loaded[actor.rank] = step
        others = [
            other
            for other in self.jobs
            if other is not job and other.checkpoints is not None
        ]
        if any(other.generation == mine._folder.generation for other in others):
            raise Failed(
                f"job {job.number} and another have claimed generation {mine._folder.generation}"
            )
        if len(set(job.loaded.values())) > 1 or "load" in job.failed:
            raise Failed(
                f"the ranks of job {job.number} load {job.loaded}, failed: {job.failed}"
            )
        return True

    def check_found(self, who, step, objects, required):
        """Check what was loaded: it is whole, and no older than what was acknowledged."""
        if step is None:
            if required is not None:
                raise Failed(
                    f"{who} finds nothing, and {required} was acknowledged"
                )
            return
        found = objects.found()
        if found != {step}:
            raise Failed(
                f"{who} finds checkpoint {step} with values of {found}"
            )
        if required is not None and self.order(step) < self.order(required):
            raise Failed(f"{who} finds {step}, and {required} was acknowledged")

    def order(self, token):
        job, attempt = self.orders[token]
        return job.generation, attempt

    def later_claim(self, job, when=math.inf):
        return any(
            number > job.generation and at < when
            for number, at in self.claims.items()
        )

    def save(self, actor, mine, objects, token):
        job = actor.job
        if actor.rank == 0:
            self.orders[token] = job, token % 100
            job.at_save[token] = self.count, job.num_faults
        objects.fill(token)
        try:
            mine.save(token, **objects.what)
        except PeerLostError:
            return False
        except TakenOverError as error:
            if not self.later_claim(job):
                raise Failed(f"{actor}: {error!r}, and nobody has") from error
            return False
        except CheckpointError as error:
            self.say(f"{actor}: save raises {error!r}")
            # by others, who have cleaned up behind it
            is_left = any(other.is_done for other in job.actors)
            if (
                job.num_faults == job.at_save[token][1]
                and not is_left
                and not self.later_claim(job)
            ):
                raise Failed(
                    f"{actor}: save raises, and nothing was wrong: {error!r}"
                ) from error
            job.failed[token] = True
            if token in job.returned:
                raise Failed(
                    f"{token} has failed on {actor}, and not on {job.returned[token]}"
                ) from error
            return True
        self.say(f"{actor}: saved {token}")
        job.returned.setdefault(token, set()).add(actor.rank)
        if job.failed.get(token):
            raise Failed(
                f"{token} is saved on {job.returned[token]}, and has failed on others"
            )
        if self.later_claim(job, when=job.at_save[token][0]):
            raise Failed(
                f"{actor}: {token} is saved, and job {job.number} was overtaken before it began"
            )
        is_newest = self.acknowledged is None or self.order(token) > self.order(
            self.acknowledged
        )
        if (
            len(job.returned[token]) == job.plan.size
            and is_newest
            and not self.later_claim(job)
        ):
            self.acknowledged = token
        return True

    def append(self, job, kind, number):
        """Append a line to the record, as a `Recorder` does: no more after one that has failed."""
        if not job.records:
            return
        faults = job.num_faults
        try:
            lines.append(
                RECORD, {"line": kind, "format": lines.FORMAT, "n": number}
            )
        except OSError as error:
            job.records = False
            if job.num_faults == faults and not isinstance(
                error, BlockingIOError | FileNotFoundError
            ):
                raise Failed(
                    f"job {job.number} cannot append to the record: {error!r}"
                ) from error
            return
        self.lines.append(number)
        self.say(f"job {job.number}: noted {number}")

    # What happens to them

    def run(self):
        """Run the trial, and crash at its end. Raises Failed."""
        with self.patched():
            try:
                self._run()
            finally:
                self.end(self.actors)

    def _run(self):
        plans = list(self.trial.jobs)
        acts = list(self.trial.acts)
        while plans or acts or self.alive:
            while acts and acts[0].at <= self.count:
                act = acts.pop(0)
                self.act(act, plans)
            if not self.alive and plans:
                self.start(plans.pop(0))
            actors = [actor for actor in self.alive if actor.may_run()]
            if actors:
                speeds = [actor.speed for actor in actors]
                self.move(self.rng.choices(actors, speeds)[0], acts)
            else:
                times = [
                    actor.frozen_until
                    for actor in self.alive
                    if actor.frozen_until > self.count
                ]
                times += [
                    job.gives_up_at
                    for job in self.jobs
                    if job.gives_up_at > self.count
                ]
                times += [act.at for act in acts[:1]]
                self.count = max(
                    self.count,
                    min(
                        (at for at in times if at < math.inf),
                        default=self.count,
                    ),
                )
                if not times and self.alive:
                    raise Failed(
                        f"wait for ever: {[str(actor) for actor in self.alive]}"
                    )
            if self.looks():
                self.probe()
            if self.count > MOST_CALLS:
                raise Failed("goes on for ever")
        self.probe()
        self.crash()
        self.faults = []
        self.start(replace(self.trial.jobs[-1], saves=1))
        while self.alive:
            self.move(
                self.rng.choice(
                    [actor for actor in self.alive if actor.may_run()]
                ),
                [],
            )
        self.probe()
        self.check_left(self.trial.jobs[-1].keep)

    def check_left(self, keep):
        """Check that only complete checkpoints are left, and not more than are to be kept."""
        left = CheckpointFolder(Path(self.trial.folder)).problems()
        if any(left.values()) or len(left) > keep:
            raise Failed(f"{left} are left, and {keep} are to be kept")

    @property
    def actors(self):
        return [actor for job in self.jobs for actor in job.actors]

    @property
    def alive(self):
        return [actor for actor in self.actors if not actor.is_done]

    def move(self, actor, acts):
        """Have a rank make some calls."""
        budget = self.budget()
        if acts:
            budget = min(budget, max(0, acts[0].at - self.count - 1))
        self.resume(actor, budget)
        if self.failure is not None:
            raise self.failure

    def budget(self):
        """Return how many calls a rank makes, besides one, before another may move."""
        return int(self.rng.expovariate(1 / self.stickiness))

    def looks(self):
        """Return whether to look what a crash would leave now."""
        return self.rng.random() < 0.02 * self.stickiness

    def resume(self, actor, budget):
        self.current = actor
        actor.budget = budget
        actor.baton.release()
        self.baton.acquire()
        self.current = None

    def start(self, plan):
        self.say(f"start {plan}")
        self.jobs.append(Job(self, len(self.jobs) + 1, plan))

    def end(self, actors):
        """Kill processes."""
        for actor in actors:
            if not actor.is_done:
                actor.is_killed = True
                self.resume(actor, 0)

    def act(self, act, plans):
        """Have something happen."""
        self.say(str(act))
        alive = self.alive
        if act.kind == "fault":
            self.faults.append(replace(act, at=self.count))
        elif act.kind == "crash":
            self.probe()
            self.crash()
        elif alive and not act.kind.startswith("start"):
            self.strike(act, alive[int(act.draw * len(alive))])
        if act.kind in ("start", "start two", "take over"):
            number = 2 if act.kind == "start two" else 1
            for plan in plans[:number]:
                self.start(plan)
            del plans[:number]

    def strike(self, act, actor):
        """Kill or freeze a rank, or its job."""
        is_alone = act.kind.endswith("rank")
        ranks = [actor] if is_alone else actor.job.actors
        if act.kind.startswith("kill"):
            self.end(ranks)
            return
        for one in ranks:
            one.frozen_until = self.count + act.length
        if is_alone and act.length > 50:
            actor.job.gives_up_at = self.count + act.length // 2

    # After a crash

    def crash(self):
        """Lose what was not synced, and end all processes."""
        self.say("crash")
        self.end(self.alive)
        self.num_crashes += 1
        self.disk.root = self.crashed(self.rng.choice([0.0, 0.3, 0.7, 1.0]))
        self.disk.descriptors.clear()
        self.claims = {}

    def crashed(self, odds):
        self.rng.odds = odds
        return self.disk.root.after_crash(self.rng, {})

    def probe(self):
        """Check what a job would find if the host crashed now."""
        self.num_probes += 1
        found = self.disk.root, self.claims
        self.disk.root = self.crashed(
            self.rng.choice([0.0, 0.0, 0.2, 0.5, 0.8, 1.0])
        )
        try:
            self.check_disk()
        finally:
            self.disk.root, self.claims = found

    def check_disk(self):
        objects = Objects(0, 1, splits=False, shards=self.trial.shards)
        try:
            step = Checkpoints(self.trial.folder).load(**objects.what)
        except PaddleShardError as error:
            raise Failed(
                f"a crash leaves what cannot be loaded: {error!r}"
            ) from error
        self.check_found("a crash", step, objects, self.acknowledged)
        self.check_record()

    def check_record(self):
        try:
            found, problems = lines.read_record(RECORD)
        except ArgumentError as error:
            if self.lines:
                raise Failed(
                    f"lines {self.lines} of the record are gone: {error}"
                ) from error
            return
        numbers = [one["n"] for one in found]
        if [number for number in numbers if number in self.lines] != self.lines:
            raise Failed(
                f"the record has lines {numbers}, and {self.lines} were acknowledged"
            )
        sound = {one["number"] for one in found if one["n"] in self.lines}
        # a line that was torn while it was written is none that was acknowledged
        for problem in problems:
            if int(problem.split()[1]) in sound:
                raise Failed(f"the record has lines {numbers}, and {problem}")


class EveryCrash(World):
    """Looks, after each call, at every state in which a crash may leave the disk."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = set()

    def budget(self):
        return 0

    def looks(self):
        return True

    def probe(self):
        every = Every()
        found = self.disk.root, self.claims
        is_more = True
        while is_more:
            self.disk.root = found[0].after_crash(every, {})
            state = (
                signature(self.disk.root),
                self.acknowledged,
                len(self.lines),
            )
            try:
                if state not in self.seen:
                    self.num_probes += 1
                    self.check_disk()
            finally:
                self.disk.root, self.claims = found
            self.seen.add(state)
            is_more = every.turn()


def explore(size, saves, seed=0):
    """Crash a job at each of its calls, in each way; return the numbers of calls and of states. Raises Failed."""
    trial = Trial(
        str(seed),
        "random",
        "/run/saved",
        splits=False,
        shards=True,
        jobs=[Plan(size, 2, saves)],
        acts=[],
    )
    world = EveryCrash(trial, hashlib.sha256())
    world.run()
    return world.count, world.num_probes


def run_trial(trial, digest, trace=None):
    """Run a trial; return the world as it is in the end. Raises Failed."""
    world = World(trial, digest, trace)
    world.run()
    return world


def run(seed, trace=None):
    """Run the trial of a seed; return (digest of all that has happened, calls, crashes, probes). Raises Failed."""
    digest = hashlib.sha256()
    trial = trial_of(seed)
    if trace:
        trace(trial)
    world = run_trial(trial, digest, trace)
    return digest.hexdigest(), world.count, world.num_crashes, world.num_probes


def shrunk(seed):
    """Return a smaller trial that fails too, and how."""
    return seeds.shrunk(
        [trial_of(seed)],
        lambda trial: run_trial(trial, hashlib.sha256()),
        smaller_trials,
    )


def smaller_trials(trial):
    """Yield trials with one thing less."""
    for name in ("acts", "jobs"):
        things = getattr(trial, name)
        for number in range(
            len(things) if len(things) > (name == "jobs") else 0
        ):
            yield replace(
                trial, **{name: things[:number] + things[number + 1 :]}
            )
    for number, plan in enumerate(trial.jobs):
        fewer = [{"size": 1}] if plan.size > 1 and not trial.splits else []
        fewer += [{"saves": plan.saves - 1}] if plan.saves else []
        for change in fewer:
            yield replace(
                trial,
                jobs=[
                    *trial.jobs[:number],
                    replace(plan, **change),
                    *trial.jobs[number + 1 :],
                ],
            )
    for change in ({"splits": False}, {"kind": "random"}):
        if replace(trial, **change) != trial:
            yield replace(trial, **change)


def main():
    module = sys.modules[__name__]
    parser = seeds.parser_of(module, disk_defects.DEFECTS)
    parser.add_argument(
        "--every",
        type=int,
        help="number of ranks of a job that crashes at each call, in all ways",
    )
    options = parser.parse_args()
    if options.every is None:
        seeds.main(
            options,
            module,
            disk_defects.DEFECTS,
            ("calls", "crashes", "more states looked at"),
        )
        return
    logging.getLogger("paddle_shard").setLevel(logging.CRITICAL)
    with seeds.planted(disk_defects.DEFECTS, options.defect):
        found = [
            explore(options.every, 2, seed)
            for seed in range(options.first, options.first + options.seeds)
        ]
    print("{} calls, {} states: no failure".format(*np.sum(found, 0)))


if __name__ == "__main__":
    main()
