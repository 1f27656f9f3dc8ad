"""A simulated job: ranks whose threads, connections and clock move only when a schedule says so.

All of it is plain data, so that a state can be copied and compared. Each action is what the real threads do with the
lock of the agreement held, or one look without it.
"""

import json
import math

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks import protocol
from paddle_shard.ranks.decision import CLOSED, END, FAIL, OK
from paddle_shard.ranks.reports import AgreementConfig, loss_of
from tests.simulation.scripts import failure_of, note_of, result_of

TIMEOUT = 20.0
"""Seconds of a pass's timeout."""
FAR = 60
"""Steps; no script goes that far."""


class Memory:
    """What the ranks share, seen by one of them; until it is found, nobody posts."""

    def __init__(self, words, rank, size):
        self.words = words  # (number of a pass, rank) -> what is posted
        self.rank = rank
        self.size = size
        self.is_found = False

    def find(self, place):
        self.is_found = True

    def post(self, number, step, num_notes):
        if self.is_found:
            self.words[number, self.rank] = (step, num_notes)

    def least(self, number, heard):
        words = {
            rank: self.words.get((number, rank)) for rank in range(self.size)
        }
        if None in words.values() or not self.is_found:
            return -1
        if any(
            num_notes > heard.get(rank, 0)
            for rank, (_, num_notes) in words.items()
        ):
            return 0
        return min(step for step, _ in words.values())


class Rank:
    """One process: a training thread, a thread that reads ahead or none, and the driver's thread."""

    def __init__(self, world, rank, is_threaded, words):
        self.world = world
        self.rank = rank
        self.is_threaded = is_threaded
        hub = None if rank else protocol.Hub(tuple(range(world.size)))
        memory = None if words is None else Memory(words, rank, world.size)
        self.member = protocol.Member(rank, hub_rank=0, hub=hub, table=memory)
        self.results = []
        self.phase = "open"
        self.state = None
        self.opened = {}  # number of a pass -> its iteration
        self.step = 0
        self.allowed = 0
        self.deadline = self.finished_at = 0.0
        self.is_awake = self.is_notified = False
        self.is_connected = False
        self.turned_at = 0.0
        self.frozen_until = 0.0
        self.is_dead = False
        # the step at which it waits in a collective, and none of its threads runs
        self.meets = None

    @property
    def script(self):
        return self.world.scripts[len(self.results)]

    @property
    def is_done(self):
        return self.is_dead or self.phase == "done"

    @property
    def is_decided(self):
        state = self.state
        return (
            state.is_closed
            or state.decision is not None
            or self.member.loss is not None
        )

    # The training thread

    def may_train(self):
        if self.phase == "wait":
            is_over = self.is_notified or self.world.now >= self.deadline
            return is_over or self.state._announced_by_all() > self.step
        return self.phase != "done"

    def train(self):
        getattr(self, f"_{self.phase}")()

    def _open(self):
        script = self.script
        terms = AgreementConfig(
            label={"loader": script.labels.get(self.rank, "")},
            timeout=TIMEOUT,
            ends_must_agree=script.must_agree,
            same_data=script.same_data,
        )
        self.state = protocol.Iteration(self.member, terms)
        self.opened[self.state.number] = self.state
        self.is_awake = True
        self.step, self.allowed, self.phase = 0, 0, "next"

    def _next(self):
        if self.step in (
            self.script.break_at,
            self.script.leaves.get(self.rank),
        ):
            self._finish((self.step, "left", None))
            return
        self.allowed = max(
            self.allowed,
            self.step + self.script.prefetch,
            self.state.wanted(self.step),
        )
        self.phase = "ask" if self.is_threaded else "read"

    def _read(self):
        if self.may_read():
            self.read()
        else:
            self.phase = "ask"

    def _ask(self):
        if self.state.may_deliver(self.step):  # without the lock
            self._deliver()
            return
        self.state.waits_since = self.world.now
        self._wait()

    def _wait(self):
        self.phase = "wait"
        state, now = self.state, self.world.now
        found = state.may_deliver(self.step)
        if found is None:
            self.is_notified = False
            try:
                self.deadline = now + state.patience(self.step, now)
            except PeerLostError as error:
                self.is_awake = True
                self._finish(result_of(self.step, error))
            self.is_awake = (
                self.is_awake or state.is_due or bool(self.member.outbox)
            )
            return
        state.waits_since = None
        if found:
            self._deliver()
            return
        error = state.error()
        if state.decision.kind == FAIL:
            failed = [
                rank
                for rank, one in state.ranks.items()
                if one.kind == FAIL and one.step == self.step
            ]
            is_right = str(error).endswith(f"report of {failed[0]}")
            self._finish(
                (self.step, "failed" if is_right else str(error), failed)
            )
            return
        self._finish(
            (self.step, "ended", None)
            if error is None
            else result_of(self.step, error)
        )

    def _deliver(self):
        slow = self.is_ahead_of()
        if slow is not None:
            what = f"wrongly delivered: rank {slow} has not announced it"
            self._finish((self.step, what, None))
            return
        self.state.progress.delivered += 1
        received = dict(self.state.take_notes(self.step))
        notes = {
            rank: note_of(rank, self.step, self.script)
            for rank in range(self.world.size)
        }
        if received != {
            rank: note for rank, note in notes.items() if note is not None
        }:
            self._finish((self.step, f"wrong notes: {received}", None))
            return
        self.step += 1
        self.phase = "next" if self.step < FAR else "done"
        if self.world.meets:
            self.meets = len(self.results), self.step

    def is_ahead_of(self):
        """Return a rank that has not announced the step that this one asks for; None if all have."""
        for other in self.world.ranks:
            state = other.opened.get(self.state.number)
            if state is None or state.progress.step <= self.step:
                return other.rank
        return None

    def is_held(self):
        """Whether it waits in a collective for ranks that were not delivered its step."""
        if self.meets is not None:
            others = ((len(one.results), one.step) for one in self.world.ranks)
            if min(others) >= self.meets:
                self.meets = None
        return self.meets is not None

    def _finish(self, result):
        self.state.waits_since = None
        self.state.close()
        self.is_awake = True
        self.results.append(result)
        self.finished_at = self.world.now
        is_over = result[1] in ("lost", "deserted") or result[1].startswith(
            "wrong"
        )
        is_over = is_over or len(self.results) == len(self.world.scripts)
        self.phase = "done" if is_over else "open"

    # What reads: the training thread, or one of its own

    def may_read(self):
        state = self.state
        if (
            self.phase in ("open", "done")
            or state.progress.kind != OK
            or state.decision is not None
        ):
            return False
        return state.progress.step < self.allowed

    def read(self):
        state, script = self.state, self.script
        step = state.progress.step
        differs = script.differs.get(self.rank, FAR) <= step
        read = {
            "note": note_of(self.rank, step, script),
            "digest": 7 * step + differs if script.same_data else None,
        }
        if self._has_stopped():
            state.announce_unread()
        elif script.fails.get(self.rank) == step:
            state.announce(FAIL, report=failure_of(self.rank))
        elif script.ends.get(self.rank) == step:
            state.announce(END)
        elif script.exhausted.get(self.rank, step + 1) <= step:
            state.announce(exhausted=True, **read)
        else:
            state.announce(**read)
        self.is_awake = self.is_awake or state.is_due

    def _has_stopped(self):
        """Whether the rank that reads for this one has left; what it has sent can still be taken."""
        if self.rank not in self.script.leaders:
            return False
        leader = self.world.ranks[self.script.leaders[self.rank]].opened.get(
            self.state.number
        )
        has_left = leader is not None and leader.progress.kind == CLOSED
        return self.is_decided or (
            has_left and leader.progress.step <= self.state.progress.step
        )

    # The driver's thread

    def may_turn(self):
        beat = self.world.now >= self.turned_at + protocol.HEARTBEAT
        return self.member.loss is None and (
            self.is_awake or beat or not self.is_connected
        )

    def turn(self, received):
        world = self.world
        if not self.is_connected:
            self.is_connected = True
            hub = world.ranks[0]
            if self.rank and (hub.is_dead or hub.member.loss is not None):
                # It cannot be reached, or has left word why it has given up.
                loss = hub.member.loss or ("cannot be reached", [0], None)
                self.member.receive(["lost", *loss])
                self.is_notified = True
                self._give_up()
                return
        self.is_awake = False
        self.turned_at = world.now
        for message in self.member.turn(received, world.now):
            for other in world.peers(self.rank):
                world.send(self.rank, other, message)
        self.is_notified = True
        if self.member.loss is not None:
            self._give_up()

    def _give_up(self):
        self.world.cut(self.rank)

    # What may happen next

    def actions(self):
        """Return what this rank may do now without a message."""
        found = []
        if self.may_train():
            found.append(("train", self.rank, None))
        if self.is_threaded and self.state is not None and self.may_read():
            found.append(("read", self.rank, None))
        if self.may_turn():
            found.append(("drive", self.rank, None))
        return found

    def may_take(self):
        """Whether its driver takes messages."""
        return (
            self.is_connected and not self.is_dead and self.member.loss is None
        )

    def next_time(self):
        """Return when it may do something, if nothing happens before."""
        now, times = self.world.now, []
        if self.is_dead:
            return math.inf
        if self.frozen_until > now:
            return self.frozen_until
        if self.phase == "wait":
            times.append(self.deadline)
        if self.member.loss is None and self.is_connected:
            times.append(self.turned_at + protocol.HEARTBEAT)
        return min((time for time in times if time > now), default=math.inf)


class World:
    """All ranks, and what is on its way between them."""

    def __init__(self, size, scripts, *, threaded=(), sharing=(), meets=False):
        self.size = size
        self.scripts = scripts
        self.meets = meets
        self.now = self.struck_at = 0.0
        self.channels = {}  # (from, to) -> messages on their way
        self.ended = set()  # channels that lose what is sent
        words = {}
        self.ranks = [
            Rank(
                self,
                rank,
                rank in threaded,
                words if rank in sharing else None,
            )
            for rank in range(size)
        ]

    def peers(self, rank):
        """Return the ranks to which one has a connection."""
        if rank:
            return [0] if self.ranks[rank].is_connected else []
        return [one.rank for one in self.ranks[1:] if one.is_connected]

    def send(self, source, target, message):
        if (source, target) not in self.ended:
            self.channels.setdefault((source, target), []).append(
                json.loads(json.dumps(message))
            )

    def cut(self, rank, *, loses=False):
        """End the connections of a rank; what is on its way arrives, unless it is lost."""
        for other in self.peers(rank):
            for source, target in ((rank, other), (other, rank)):
                if (source, target) in self.ended:
                    continue
                if loses:
                    self.channels.pop((source, target), None)
                loss = loss_of([source], "has ended or was killed")
                self.send(source, target, ["lost", *loss])
                self.ended.add((source, target))

    def kill(self, rank):
        self.cut(rank)
        self.ranks[rank].is_dead = True

    def fall_silent(self, rank):
        """Lose all that is sent to a rank or by it, without a word."""
        for other in range(self.size):
            for channel in ((rank, other), (other, rank)):
                self.ended.add(channel)
                self.channels.pop(channel, None)

    # What may happen next

    def actions(self):
        """Return what may happen now: (thread, rank) or (driver, rank, from which rank it takes a message)."""
        able = [
            one
            for one in self.ranks
            if not (one.is_dead or one.frozen_until > self.now or one.is_held())
        ]
        found = [action for one in able for action in one.actions()]
        for (source, target), messages in self.channels.items():
            one = self.ranks[target]
            if messages and one in able and one.may_take():
                found.append(("drive", target, source))
        return found

    def apply(self, action, count=1):
        """Do it.

        Args:
            action: One of `actions`.
            count: Most messages that the driver takes.
        """
        kind, rank, source = action
        one = self.ranks[rank]
        if kind == "train":
            one.train()
        elif kind == "read":
            one.read()
        else:
            messages = self.channels.get((source, rank), [])
            taken, messages[:] = messages[:count], messages[count:]
            one.turn(taken)

    def next_time(self):
        """Return when something may happen, if nothing may now."""
        return min(one.next_time() for one in self.ranks)

    @property
    def is_done(self):
        return all(one.is_done for one in self.ranks)
