"""Coordinators of one process, whose nodes exchange messages through queues, or over TCP."""

import random
import threading
import time

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.agreement import Coordinator
from paddle_shard.ranks.network import Route, TcpNetwork
from paddle_shard.ranks.protocol import Hub, Member, Node, encoded
from paddle_shard.ranks.verdict import Terms
from tests.deadlines import HANG


class LocalNetwork:
    """One rank's connections; rank 0 has the hub."""

    def __init__(self, networks, rank, delay):
        self.networks, self.rank, self.delay = networks, rank, delay
        self.changed = threading.Condition()
        self.inbox, self.is_woken, self.is_closed, self.num_sent = [], False, False, 0

    def others(self):
        return self.networks[1:] if self.rank == 0 else self.networks[:1]

    def connect(self):
        pass

    def put(self, message):
        with self.changed:
            self.inbox.append(message)
            self.changed.notify_all()

    def receive(self, seconds):
        if self.delay:
            time.sleep(random.random() * self.delay)
        with self.changed:
            self.changed.wait_for(
                lambda: self.inbox or self.is_woken or self.is_closed, seconds
            )
            if self.is_closed:
                raise PeerLostError.of("This rank has left the group.", [self.rank])
            found, self.inbox, self.is_woken = self.inbox, [], False
        return found

    def send(self, messages):
        for message in messages:
            assert encoded(message)
            self.num_sent += 1
            for other in self.others():
                other.put(message)

    def wake(self):
        with self.changed:
            self.is_woken = True
            self.changed.notify_all()

    def interrupt(self):
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def close(self, lost):
        for other in self.others():
            other.put(["gone", [0] if self.rank == 0 else self.rank, "died"])


def coordinators(size, timeout=HANG, delay=0.0, end_process=lambda rank: None):
    """Return the coordinators of some ranks."""
    networks, made = [], []
    for rank in range(size):
        networks.append(LocalNetwork(networks, rank, delay))
        member = Member(
            rank, hub=0, relay=None, introduction=f"rank {rank}", timeout=timeout
        )
        node = Node(member, Hub(range(size), {}) if rank == 0 else None)
        made.append(
            Coordinator(
                node, networks[rank], end_process=lambda rank=rank: end_process(rank)
            )
        )
    return made


def end(coordinator):
    """End the thread of a coordinator, as if its process had been killed."""
    coordinator._leaves = True
    coordinator._network.interrupt()
    if coordinator._thread is not None:
        coordinator._thread.join(HANG)


def tcp_coordinator(rank, ranks, store, hosts, timeout=HANG):
    """Return the coordinator of one of some ranks of this process that meet at a store, and connect over TCP."""
    route, relays = Route.of(ranks, rank, hosts)
    network = TcpNetwork(route, hosts, "test", lambda wanted: store)
    member = Member(
        rank,
        hub=ranks[0],
        relay=relays.get(rank),
        introduction=f"rank {rank}",
        timeout=timeout,
    )
    hub = Hub(ranks, relays) if route.up is None else None
    return Coordinator(Node(member, hub), network, end_process=lambda: None)


class Store:
    """A store of one process."""

    def __init__(self):
        self.values, self.counts, self._lock = {}, {}, threading.Lock()

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, number):
        with self._lock:
            self.counts[key] = self.counts.get(key, 0) + number
            return self.counts[key]


class Meeting:
    """Ranks of this process that meet at a store; each starts with an exchange, in a thread of its own."""

    def __init__(self, ranks, host="127.0.0.1", hosts=None):
        self.store = Store()
        hosts = hosts or dict.fromkeys(ranks, host)
        self.coordinators = {
            rank: tcp_coordinator(rank, ranks, self.store, hosts) for rank in ranks
        }
        self._threads = []

    def start(self, rank):
        """Return a list that gets what the rank's exchange returns, or its error."""
        found = []

        def exchange():
            try:
                found.append(
                    self.coordinators[rank].open(Terms()).exchange(f"from {rank}")
                )
            except PeerLostError as error:
                found.append(error)

        self._threads.append(threading.Thread(target=exchange))
        self._threads[-1].start()
        return found

    def join(self):
        for thread in self._threads:
            thread.join(HANG)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for coordinator in self.coordinators.values():
            coordinator.close()
        self.join()
