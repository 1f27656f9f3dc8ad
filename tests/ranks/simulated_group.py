"""Groups of threads: a Group without a network, whose members can be delayed and killed."""

import random
import threading
import time

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.group import PASSES, ProgressTable
from tests.deadlines import HANG


class World:
    """What the members of one group share."""

    def __init__(self, size, rng, *, names=None, delay=0.0, half_done=False):
        self.names = list(range(size)) if names is None else list(names)
        self.size, self.delay, self.half_done = size, delay, half_done
        self.changed = threading.Condition()
        self.calls = [0] * size  # made by each member
        self.rounds = {}  # call number -> {member: value}
        self.dead = set()
        self.gave_up = {}  # member that has heard of a death and takes part no more: whose death
        self.words = [0] * (PASSES * size)
        self.opened = {}  # (pass, member) -> its agreement
        self.rngs = [random.Random(rng.random()) for _ in range(size)]

    def kill(self, member):
        with self.changed:
            self.dead.add(member)
            self.changed.notify_all()

    def check_alive(self, member):
        if member in self.dead:
            raise PeerLostError.of("This member is dead itself.", [self.names[member]])

    def lost(self, member, gone):
        self.gave_up[member] = gone
        self.changed.notify_all()
        names = [self.names[m] for m in gone]
        return PeerLostError.of(f"Global ranks {names} died.", names)

    def exchange(self, member, kind, value):
        """Return all members' values, in order."""
        if self.delay:
            time.sleep(self.rngs[member].random() * self.delay)
        with self.changed:
            self.check_alive(member)
            number = self.calls[member]
            self.calls[member] += 1
            values = self.rounds.setdefault(number, {})
            values[member] = (kind, value)
            self.changed.notify_all()
            while len(values) < self.size:
                self.check_alive(member)
                gone = sorted(self.dead - set(values))
                gone = gone or next((who for m, who in self.gave_up.items() if m not in values), [])
                if gone:
                    raise self.lost(member, gone)
                self.changed.wait()
            self.check_alive(member)
            # A real network may have lost the answer on its way to some members only.
            if self.half_done and self.dead and self.rngs[member].random() < 0.5:
                raise self.lost(member, sorted(self.dead))
            self.rounds.pop(number - 2, None)  # everybody is past it
        kinds = {k for k, _ in values.values()}
        assert len(kinds) == 1, f"members made different calls: {kinds}"
        return [values[m][1] for m in range(self.size)]


class SimulatedGroup:
    """One member's view of a World."""

    def __init__(self, world, rank):
        self.world, self.rank, self.size, self.names = world, rank, world.size, world.names
        self.rounds, self.timeout = 0, 0.0

    def absent(self):
        return []

    def minimum(self, values):
        self.rounds += 1
        columns = zip(*self.world.exchange(self.rank, f"minimum of {len(values)}", list(values)), strict=True)
        return [min(column) for column in columns]

    def gather(self, payload):
        assert isinstance(payload, bytes)
        return self.world.exchange(self.rank, "gather", payload)

    def meet(self):
        return ProgressTable(self.world.words, self.rank, self.size), {}

    def close(self, why=None):
        if self.rank not in self.world.gave_up:
            self.world.kill(self.rank)


def end(coordinator):
    """End the background thread of a coordinator: its group is closed, and it takes part in one more round."""
    coordinator.group.close()
    with coordinator.changed:
        coordinator._asking, coordinator._answer = True, None
        coordinator.changed.notify_all()
    if coordinator._thread is not None:
        coordinator._thread.join(HANG)
