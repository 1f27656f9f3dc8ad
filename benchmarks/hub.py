"""What the hub of the step agreement costs the process of the first rank, from 8 ranks to thousands.

    python benchmarks/hub.py [--ranks 8 64 256 1024]

One process is the first rank, with the library's own coordinator, sockets and hub, and nothing else to do. Another one
plays all other ranks, as if each were on a host of its own: no shared memory. A step takes 200 ms, and the ranks
announce it at random moments of its first half. Prints the processor time of the first process a step, and the seconds
until all have met. There is no peer: other loaders do not agree on steps.
"""

import argparse
import multiprocessing
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from common import busy, machine, print_table, print_target

STEP, STEPS, WARM_UP = 0.2, 20, 5
"""Seconds of a step; steps that are counted; steps before them."""
THREADS = 16
"""Threads that connect the other ranks."""
AT_MOST = 0.1
"""Largest share of one core that the hub may take."""
KEY = "benchmark"


def open_store(port, *, is_owner):
    from paddle.framework import core

    return core.TCPStore("127.0.0.1", port, is_owner, 1, 60)


def make_member(rank, hub=None):
    from paddle_shard.ranks.protocol import Member

    return Member(rank, hub_rank=0, hub=hub)


def make_config():
    from paddle_shard.ranks.reports import AgreementConfig

    return AgreementConfig(
        label={}, timeout=60.0, ends_must_agree=False, same_data=False
    )


def run_hub(num_ranks, pipe):
    """Be the first rank; send the seconds until all have met, and those of the processor a step."""
    from paddle_shard.ranks.agreement import Coordinator
    from paddle_shard.ranks.network import TcpNetwork
    from paddle_shard.ranks.protocol import Hub

    ranks = range(num_ranks)
    port = pipe.recv()
    network = TcpNetwork(0, ranks, "127.0.0.1", KEY, open_store(port, is_owner=False))
    member = make_member(0, Hub(ranks))
    coordinator = Coordinator(KEY, member, network, end_process=os.abort)
    start = time.perf_counter()
    agreement = coordinator.open(make_config())
    pipe.send("ready")
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            spent = time.process_time()
        agreement.announce()
        agreement.deliver(step)
        if step == 0:
            met = time.perf_counter() - start
        time.sleep(STEP)
    pipe.send((met, (time.process_time() - spent) / STEPS))
    pipe.recv()


def play_ranks(num_ranks, pipe):
    """Be all ranks but the first; send the seconds of a step."""
    from paddle_shard.ranks.network import TcpNetwork
    from paddle_shard.ranks.protocol import Iteration

    port = pipe.recv()
    # A client of the store serves one thread.
    stores = [open_store(port, is_owner=False) for _ in range(THREADS)]
    ranks = range(num_ranks)
    networks = [
        TcpNetwork(rank, ranks, "127.0.0.1", KEY, stores[rank % THREADS])
        for rank in ranks[1:]
    ]
    groups = [networks[first::THREADS] for first in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as threads:
        list(
            threads.map(lambda group: [network.connect() for network in group], groups)
        )
    members = [make_member(rank) for rank in ranks[1:]]
    iterations = [Iteration(member, make_config()) for member in members]
    rng = random.Random(0)
    start = time.monotonic()
    num_steps = WARM_UP + STEPS + 4
    for step in range(num_steps):
        moments = [
            (start + STEP * step + rng.uniform(0, STEP / 2), index)
            for index in range(num_ranks - 1)
        ]
        for moment, index in sorted(moments):
            time.sleep(max(0.0, moment - time.monotonic()))
            iterations[index].announce()
            received = networks[index].receive(0)
            networks[index].send(members[index].turn(received, time.monotonic()))
    pipe.send((time.monotonic() - start) / num_steps)
    pipe.recv()


def measure(num_ranks):
    """Return the seconds until all have met, those of the processor a step, and those of a step of the other ranks."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = open_store(port, is_owner=True)
    pipes, processes = [], []
    for target in (run_hub, play_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(num_ranks, theirs), daemon=True)
        process.start()
        ours.send(port)
        if target is run_hub:
            ours.recv()
        pipes.append(ours)
        processes.append(process)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    del store
    return *results[0], results[1]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    options = parser.parse_args()
    print(machine(), busy(), sep="; ")
    rows, worst = [], 0.0
    for num_ranks in options.ranks:
        met, spent, step = measure(num_ranks)
        worst = max(worst, spent / STEP)
        rows.append(
            [
                f"{num_ranks:,}",
                f"{met:.2f}",
                f"{spent * 1e3:.2f}",
                f"{spent / STEP:.1%}",
                f"{step * 1e3:.0f}",
            ]
        )
    print_table(
        f"The hub, at steps of {STEP * 1e3:g} ms",
        ["ranks", "all have met, s", "processor ms a step", "of a core", "step, ms"],
        rows,
    )
    print_target(f"at most {AT_MOST:.0%} of a core", f"{worst:.1%}", worst <= AT_MOST)
    print(busy())


if __name__ == "__main__":
    main()
