"""What the hub of the step agreement costs the process of the first rank, from 8 ranks to thousands.

    python benchmarks/hub.py [--ranks 8 64 256 1024]

One process is the first rank, with the library's own coordinator, sockets and hub, and nothing else to do. Another one
plays all other ranks, as if each were on a host of its own: no shared memory. A step takes 200 ms, and the ranks
announce it at random moments of its first half. Prints the processor time of the first process a step, and the seconds
until all have met. With `pad_to`, each rank also sends the length of its rows with each step, and all ranks get it.
There is no peer: other loaders do not agree on steps.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import socket
import time

from common import busy, machine, print_table, print_target

STEP, STEPS, WARM_UP = 0.2, 20, 5
"""Seconds of a step; steps that are counted; steps before them."""
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

    return AgreementConfig(label={}, timeout=60.0, same_data=False)


def make_note(index, step):
    """Return what a rank sends with a step if `pad_to` pads its rows to one of 16 lengths."""
    length = 64 * (1 + (index + step) % 16)
    return f'{{"shapes": {{"input_ids": ["int64", [{length}]]}}}}'


def run_hub(num_ranks, has_notes, pipe):
    """Be the first rank; send the seconds until all have met, and those of the processor a step."""
    from paddle_shard.ranks.agreement import Coordinator
    from paddle_shard.ranks.network import TcpNetwork
    from paddle_shard.ranks.protocol import Hub

    ranks = range(num_ranks)
    port = pipe.recv()
    network = TcpNetwork(
        0, ranks, "127.0.0.1", KEY, open_store(port, is_owner=False)
    )
    member = make_member(0, Hub(ranks))
    coordinator = Coordinator(KEY, member, network, end_process=os.abort)
    start = time.perf_counter()
    agreement = coordinator.open(make_config())
    pipe.send("ready")
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            spent = time.process_time()
        agreement.announce(note=make_note(0, step) if has_notes else None)
        agreement.deliver(step)
        agreement.take_notes(step)
        if step == 0:
            pipe.send(time.perf_counter() - start)
        time.sleep(STEP)
    pipe.send((time.process_time() - spent) / STEPS)
    pipe.recv()


def play_ranks(num_ranks, has_notes, pipe):
    """Be all ranks but the first, as far as the hub can see; send the seconds of a step."""
    from paddle_shard.ranks.protocol import Iteration

    store = open_store(pipe.recv(), is_owner=False)
    port, token = json.loads(store.get(f"{KEY}/1"))
    ranks = range(num_ranks)
    members = [make_member(rank) for rank in ranks[1:]]
    iterations = [Iteration(member, make_config()) for member in members]
    peers = []
    for rank in ranks[1:]:
        peers.append(socket.create_connection(("127.0.0.1", port)))
        peers[-1].sendall(f"{token} {rank}\n".encode())

    def announce(index, step):
        note = make_note(index, step) if has_notes else None
        iterations[index].announce(note=note)
        messages = members[index].turn([], time.monotonic())
        lines = "".join(f"{json.dumps(message)}\n" for message in messages)
        peers[index].sendall(lines.encode())
        with contextlib.suppress(BlockingIOError):
            while (
                len(peers[index].recv(1 << 20, socket.MSG_DONTWAIT)) == 1 << 20
            ):
                pass

    for index in range(num_ranks - 1):
        announce(index, 0)
    pipe.recv()
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
            announce(index, step + 1)
    pipe.send((time.monotonic() - start) / num_steps)
    pipe.recv()


def measure(num_ranks, *, has_notes):
    """Return the seconds until all have met, those of the processor a step, and those of a step of the other ranks."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = open_store(port, is_owner=True)
    pipes, processes = [], []
    for target in (run_hub, play_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=target, args=(num_ranks, has_notes, theirs), daemon=True
        )
        process.start()
        ours.send(port)
        if target is run_hub:
            ours.recv()
        pipes.append(ours)
        processes.append(process)
    met = pipes[0].recv()
    pipes[1].send("go")
    spent, step = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    del store
    return met, spent, step


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[8, 64, 256, 1024]
    )
    options = parser.parse_args()
    print(machine(), busy(), sep="; ")
    rows, worst = [], 0.0
    for num_ranks in options.ranks:
        met, spent, _ = measure(num_ranks, has_notes=False)
        _, with_notes, step = measure(num_ranks, has_notes=True)
        worst = max(worst, spent / STEP)
        rows.append(
            [
                f"{num_ranks:,}",
                f"{met:.2f}",
                f"{spent * 1e3:.2f}",
                f"{spent / STEP:.1%}",
                f"{with_notes * 1e3:.2f}",
                f"{step * 1e3:.0f}",
            ]
        )
    print_table(
        f"The hub, at steps of {STEP * 1e3:g} ms",
        [
            "ranks",
            "all have met, s",
            "processor ms a step",
            "of a core",
            "with pad_to",
            "its step, ms",
        ],
        rows,
    )
    print_target(
        f"at most {AT_MOST:.0%} of a core", f"{worst:.1%}", worst <= AT_MOST
    )
    print(busy())


if __name__ == "__main__":
    main()
