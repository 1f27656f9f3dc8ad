"""How much of packed rows is padding, and how fast are they made?

    python benchmarks/packing.py

The same documents, of log-normal lengths, are packed into rows of 4,096 tokens by each peer in the same run. The time
includes reading all rows, in one process. Peers that are not installed are left out, and it says so.
"""

import importlib.util
import logging
import sys
from bisect import bisect_left, insort

import numpy as np
from common import busy, in_turns, machine, print_table, print_target, seconds

from paddle_shard import Packed
from paddle_shard.plan.packing import Packing, fitted

logging.disable(logging.WARNING)  # Grain's, about jax

LENGTH, WINDOW, DOCUMENTS = 4096, 4096, 8192
OURS, STREAM, GREEDY = (
    "paddle_shard Packed",
    "paddle_shard Stream.pack",
    "greedy concatenation (cuts documents)",
)
FIRST, BEST = "grain FirstFitPackIterDataset", "grain BestFitPackIterDataset"
BINS = 64
"""Rows that Grain's packers keep open."""


def log_normal(num, seed=0):
    drawn = np.random.default_rng(seed)
    return np.clip(
        np.exp(drawn.normal(np.log(400), 1, num)).astype(np.int64), 1, LENGTH
    )


def best_fit(lengths):
    """The rows of best fit decreasing, document by document."""
    spaces, rows = [], 0
    for size in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(spaces, size)
        if at == len(spaces):
            rows, left = rows + 1, LENGTH - size
        else:
            left = spaces.pop(at) - size
        if left:
            insort(spaces, left)
    return rows


def by_ours(documents, lengths):
    packed = Packed(documents, LENGTH, lengths=lengths, window=WINDOW)
    for row in range(len(packed)):
        packed[row]
    return len(packed)


def by_stream(documents, lengths):
    from paddle_shard import Stream

    return sum(1 for _ in Stream.of(documents).pack(LENGTH, window=WINDOW))


def by_grain(kind):
    def rows(documents, lengths):
        import grain

        source = grain.MapDataset.source(
            [{"input_ids": tokens} for tokens in documents]
        ).to_iter_dataset()
        packer = getattr(grain.experimental, kind)
        return sum(
            1
            for _ in packer(
                source,
                length_struct={"input_ids": LENGTH},
                num_packing_bins=BINS,
            )
        )

    return rows


def by_greedy(documents, lengths):
    whole = np.concatenate(documents)
    rows = -(-len(whole) // LENGTH)
    np.pad(whole, (0, rows * LENGTH - len(whole))).reshape(rows, LENGTH).copy()
    return rows


PEERS = {
    OURS: by_ours,
    STREAM: by_stream,
    FIRST: by_grain("FirstFitPackIterDataset"),
    BEST: by_grain("BestFitPackIterDataset"),
    GREEDY: by_greedy,
}


def main():
    print(machine(), busy(), sep="\n")
    peers = dict(PEERS)
    if importlib.util.find_spec("grain") is None:
        print("grain is not installed and left out.")
        peers = {
            name: rows
            for name, rows in peers.items()
            if name not in (FIRST, BEST)
        }
    lengths = log_normal(DOCUMENTS)
    documents = [np.arange(n) for n in lengths.tolist()]
    num_rows: dict = {}

    def measured(name):
        def measure():
            def run():
                num_rows[name] = peers[name](documents, lengths)

            return DOCUMENTS / seconds(run)

        return measure

    found = in_turns({name: measured(name) for name in peers}, 5)
    padding = {
        name: 1 - lengths.sum() / (rows * LENGTH)
        for name, rows in num_rows.items()
    }
    print_table(
        f"{DOCUMENTS} documents, log-normal (median 400, sigma 1), rows of {LENGTH}",
        ["", "padding", "documents a second", "to ours"],
        [
            [
                name,
                f"{padding[name]:.2%}",
                f"{found[name]:,.0f}",
                f"{found[name] / found[OURS]:.2f}",
            ]
            for name in peers
        ],
    )
    plan = log_normal(50 * WINDOW, 1)
    windows = [plan[at : at + WINDOW] for at in range(0, len(plan), WINDOW)]
    times = in_turns(
        {
            "in rounds (ours)": lambda: seconds(
                lambda: [fitted(window, LENGTH) for window in windows]
            ),
            "best fit decreasing, one by one": lambda: seconds(
                lambda: [best_fit(window) for window in windows]
            ),
            "all of Packing": lambda: seconds(
                lambda: Packing(plan, LENGTH, WINDOW)
            ),
        },
        5,
    )
    ours = sum(fitted(window, LENGTH)[1] for window in windows)
    theirs = sum(best_fit(window) for window in windows)
    tokens = int(plan.sum())
    print_table(
        f"Planning {len(plan):,} documents, windows of {WINDOW}",
        ["", "us a document", "padding"],
        [
            [
                name,
                f"{times[name] / len(plan) * 1e6:.3f}",
                f"{1 - tokens / (rows * LENGTH):.3%}",
            ]
            for name, rows in zip(
                times,
                (ours, theirs, Packing(plan, LENGTH, WINDOW).num_rows),
                strict=True,
            )
        ],
    )
    seen = 1 - tokens / (ours * LENGTH)
    print_target("padding at most 0.3 %", f"{seen:.3%}", seen <= 0.003)
    cost = times["in rounds (ours)"] / len(plan) * 1e6
    print_target(
        "at most 0.3 us a document to plan", f"{cost:.3f} us", cost <= 0.3
    )


if __name__ == "__main__":
    sys.exit(main())
