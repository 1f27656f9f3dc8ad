"""Coordinators of one process, whose members exchange messages through queues, or over TCP."""

import json
import random
import threading
import time

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.agreement import Coordinator
from paddle_shard.ranks.network import TcpNetwork
from paddle_shard.ranks.protocol import Hub, Member
from paddle_shard.ranks.reports import AgreementConfig, loss_of
from tests.deadlines import HANG


class LocalNetwork:
    """One rank's connections; rank 0 has the hub."""

    def __init__(self, networks, rank, delay):
        self.networks, self.rank, self.delay = networks, rank, delay
        self.changed = threading.Condition()
        self.inbox, self.is_woken, self.is_closed, self.num_sent = (
            [],
            False,
            False,
            0,
        )

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
                raise PeerLostError.of(
                    "This rank has left the group.", [self.rank]
                )
            found, self.inbox, self.is_woken = self.inbox, [], False
        return found

    def send(self, messages):
        for message in messages:
            assert json.dumps(message)
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

    def close(self, loss):
        for other in self.others():
            other.put(["lost", *loss_of([self.rank], "died")])


def coordinator(rank, ranks, network, end_process=None):
    """Return the coordinator of one of some ranks."""
    hub = Hub(ranks) if rank == ranks[0] else None
    member = Member(rank, hub_rank=ranks[0], hub=hub)
    return Coordinator(
        "test", member, network, end_process=end_process or (lambda: None)
    )


def coordinators(size, delay=0.0, end_process=lambda rank: None):
    """Return the coordinators of some ranks."""
    networks, made = [], []
    for rank in range(size):
        networks.append(LocalNetwork(networks, rank, delay))
        made.append(
            coordinator(
                rank,
                range(size),
                networks[rank],
                end_process=lambda rank=rank: end_process(rank),
            )
        )
    return made


def end(coordinator):
    """End the thread of a coordinator, as if its process had been killed."""
    coordinator.network.interrupt()
    if coordinator._thread is not None:
        coordinator._thread.join(HANG)


class Store:
    """A store of one process."""

    def __init__(self):
        self.values, self.counts, self._lock = {}, {}, threading.Lock()
        self.num_requests = 0

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, number):
        with self._lock:
            self.num_requests += 1
            self.counts[key] = self.counts.get(key, 0) + number
            return self.counts[key]


class Meeting:
    """Ranks of this process that meet at a store; each starts with an exchange, in a thread of its own."""

    def __init__(self, ranks, host="127.0.0.1"):
        self.store = Store()
        self.coordinators = {
            rank: coordinator(
                rank, ranks, TcpNetwork(rank, ranks, host, "test", self.store)
            )
            for rank in ranks
        }
        self._threads = []

    def start(self, rank, timeout=HANG):
        """Return a list that gets what the rank's exchange returns, or its error."""
        found = []

        def exchange():
            try:
                found.append(
                    self.coordinators[rank]
                    .open(AgreementConfig(timeout=timeout))
                    .exchange(f"from {rank}")
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
