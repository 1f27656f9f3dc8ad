"""What does the order of a run cost: the first batch, an index, a resume?

    python benchmarks/order.py

Every figure stands beside that of a peer which did the same work in the same run; what a machine's absolute times are
worth is for the reader to say, so nothing here fails. Peers that are not installed are left out, and it says so.
"""

import json
import subprocess
import sys
import time
import tracemalloc
import warnings

import numpy as np
from common import (
    busy,
    bytes_of,
    in_turns,
    machine,
    package_version,
    print_table,
    print_target,
    ratio_of,
    samples_of_step,
    seconds,
    time_of,
)

DATA_RANKS, BATCH_SIZE = 8, 1024
PER_RANK = BATCH_SIZE // DATA_RANKS
MILLION, TABLE_LARGEST, BILLION = 10**6, 5 * 10**7, 10**9
BLOCK = 65_536
OURS, PADDLE, NUMPY = (
    "paddle_shard",
    "paddle DistributedBatchSampler",
    "numpy Generator.permutation",
)
TORCH, GRAIN = "torch DistributedSampler", "grain index_shuffle"
GRAIN_ROUNDS = 4
"""What grain's own `shuffle` passes."""
FLAT = 2.0
"""Called flat: the largest is at most so many times the smallest. Small times vary by 1.5 from run to run here."""


class Numbers:
    """A data set of numbers: as little work a sample as there can be."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.float32(index)


def missing(peer):
    package = {TORCH: "torch", GRAIN: "grain"}.get(peer)
    return package is not None and package_version(package) is None


# 1. The first batch, each time in a fresh process


def first_batch_of(peer, num_samples):
    """Import what is needed; return a function that makes the indices of data rank 0's first shuffled batch."""
    if peer == OURS:
        from paddle_shard import ShardPlan

        return lambda: samples_of_step(
            ShardPlan(
                num_samples=num_samples,
                batch_size=BATCH_SIZE,
                num_data_ranks=DATA_RANKS,
                shuffle=True,
            ),
            0,
        )
    if peer == PADDLE:
        from paddle.io import DistributedBatchSampler

        numbers = Numbers(num_samples)
        return lambda: next(
            iter(
                DistributedBatchSampler(
                    numbers, PER_RANK, DATA_RANKS, 0, shuffle=True
                )
            )
        )
    if peer == NUMPY:
        generator = np.random.default_rng(0)
        return lambda: generator.permutation(num_samples)[:PER_RANK].copy()
    if peer == TORCH:
        from itertools import islice

        from torch.utils.data import DistributedSampler

        numbers = Numbers(num_samples)
        return lambda: list(
            islice(
                DistributedSampler(numbers, DATA_RANKS, 0, shuffle=True),
                PER_RANK,
            )
        )
    from grain.experimental import index_shuffle

    return lambda: [
        index_shuffle(i, max_index=num_samples - 1, seed=0, rounds=GRAIN_ROUNDS)
        for i in range(PER_RANK)
    ]


def peak_memory(reset=False):
    """The peak of resident memory, set back to what is resident now if asked. NaN where that is not Linux's."""
    try:
        if reset:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            return next(
                int(line.split()[1]) * 1024
                for line in file
                if line.startswith("VmHWM")
            )
    except OSError:
        return float("nan")


def child(peer, num_samples, trace):
    """Measure in this process, and print what came out as JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first_batch = first_batch_of(peer, num_samples)
    if trace:
        tracemalloc.start()
        first_batch()
        print(json.dumps({"allocated": tracemalloc.get_traced_memory()[1]}))
        return
    before, start = peak_memory(reset=True), time.perf_counter()
    indices = first_batch()
    took = time.perf_counter() - start
    grown = peak_memory() - before
    assert len(indices) == PER_RANK
    print(json.dumps({"time": took, "grown": grown}))


def in_fresh_process(peer, num_samples, trace=False):
    command = [
        sys.executable,
        __file__,
        "child",
        peer,
        str(num_samples),
        "1" if trace else "",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{peer} at {num_samples:,} samples ended with {done.returncode}:\n{done.stderr}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def first_batch():
    found, why_not = {}, {}
    tables = (PADDLE, NUMPY, TORCH)
    for num_samples, rounds in ((MILLION, 7), (BILLION, 7), (TABLE_LARGEST, 3)):
        peers = [peer for peer in (OURS, GRAIN, *tables) if not missing(peer)]
        if num_samples > TABLE_LARGEST:
            peers = [peer for peer in peers if peer not in tables]
        taken = {peer: [] for peer in peers}
        for _ in range(rounds):
            for peer in peers:
                taken[peer].append(in_fresh_process(peer, num_samples))
        for peer in peers:
            found[peer, num_samples] = {
                name: float(np.median([one[name] for one in taken[peer]]))
                for name in ("time", "grown")
            }
            if peer not in tables or num_samples == MILLION:
                found[peer, num_samples].update(
                    in_fresh_process(peer, num_samples, trace=True)
                )
    for peer in tables:
        if not missing(peer):
            need = found[peer, TABLE_LARGEST]["grown"] * BILLION / TABLE_LARGEST
            why_not[peer, BILLION] = (
                f"skipped: its table would need {need / 1e9:,.0f} GB"
            )
    rows = []
    for num_samples in (MILLION, TABLE_LARGEST, BILLION):
        ours = found[OURS, num_samples]
        for peer in (OURS, PADDLE, TORCH, GRAIN, NUMPY):
            one, name = found.get((peer, num_samples)), f"{num_samples:,}"
            if one is None:
                rows.append(
                    (
                        name,
                        peer,
                        why_not.get(
                            (peer, num_samples), "skipped: not installed"
                        ),
                        "",
                        "",
                        "",
                        "",
                    )
                )
                continue
            rows.append(
                (
                    name,
                    peer,
                    time_of(one["time"]),
                    ratio_of(one["time"] / ours["time"]),
                    bytes_of(one["grown"]),
                    ratio_of(one["grown"] / max(ours["grown"], 4096)),
                    bytes_of(one["allocated"]) if "allocated" in one else "",
                )
            )
    print_table(
        f"1. The first shuffled batch of one data rank of {DATA_RANKS}, global batch {BATCH_SIZE}",
        (
            "samples",
            "who",
            "time",
            "to ours",
            "resident memory grew by",
            "to ours",
            "allocated (tracemalloc)",
        ),
        rows,
    )
    small, large = found[OURS, MILLION], found[OURS, BILLION]
    print_target(
        "first batch at 1e9 under 5 ms",
        time_of(large["time"]),
        large["time"] < 5e-3,
    )
    for name, one in (("1e9", large), ("1e6", small)):
        print_target(
            f"and under 1 MB of extra memory at {name}",
            bytes_of(one["grown"]),
            one["grown"] < 1e6,
        )
    steep = large["time"] / small["time"]
    print_target(
        f"flat (at most {FLAT:g} x): 1e9 to 1e6", ratio_of(steep), steep <= FLAT
    )


# 2. An index


def block_cost(num_samples, calls=15):
    from paddle_shard import ShardPlan

    plan = ShardPlan(
        num_samples=num_samples,
        batch_size=BLOCK,
        num_data_ranks=1,
        shuffle=True,
        tail="drop",
    )
    steps = [plan.num_steps * number // calls for number in range(calls)]

    def measure():
        # the measure before may have emptied the caches
        samples_of_step(plan, 0)
        return seconds(
            lambda: [samples_of_step(plan, step) for step in steps]
        ) / (calls * BLOCK)

    return measure


def shuffle_cost(num_samples, calls=15):
    from paddle_shard.plan.shuffle import permutation

    shuffle = permutation(num_samples, "order", 0, 0)
    starts = [
        (num_samples - BLOCK) // calls * number for number in range(calls)
    ]

    def measure():
        shuffle.between(0, BLOCK)
        return seconds(
            lambda: [shuffle.between(start, start + BLOCK) for start in starts]
        ) / (calls * BLOCK)

    return measure


def small_batch_cost(num_samples, data_ranks, calls=512):
    from paddle_shard import ShardPlan

    plan = ShardPlan(
        num_samples=num_samples,
        batch_size=32 * data_ranks,
        num_data_ranks=data_ranks,
        shuffle=True,
    )
    steps = [
        (plan.num_steps // 3 + number) % plan.num_steps
        for number in range(calls)
    ]

    def measure():
        return seconds(
            lambda: [samples_of_step(plan, step) for step in steps]
        ) / (calls * 32)

    return measure


def numpy_cost(num_samples):
    generator = np.random.default_rng(0)
    return lambda: (
        seconds(lambda: generator.permutation(num_samples)) / num_samples
    )


def grain_cost(num_samples, calls=8192):
    from grain.experimental import index_shuffle

    def run():
        for i in range(calls):
            index_shuffle(
                i, max_index=num_samples - 1, seed=0, rounds=GRAIN_ROUNDS
            )

    return lambda: seconds(run) / calls


def per_index():
    sizes = {
        "1e6": MILLION,
        "5e7": TABLE_LARGEST,
        "2^30": 2**30,
        "2^30+1": 2**30 + 1,
        "1e9": BILLION,
        "2^62": 2**62,
    }
    small_ranks = (1, 8, 128)
    measures, of_5e7 = {("1e6", NUMPY): numpy_cost(MILLION)}, {}
    for name, size in sizes.items():
        row = of_5e7 if name == "5e7" else measures
        row[name, "block"], row[name, "shuffle"] = (
            block_cost(size),
            shuffle_cost(size),
        )
        if name in ("1e6", "1e9"):
            row.update(
                {
                    (name, ranks): small_batch_cost(size, ranks)
                    for ranks in small_ranks
                }
            )
        if not missing(GRAIN):
            row[name, GRAIN] = grain_cost(size)
    of_5e7["5e7", NUMPY] = numpy_cost(TABLE_LARGEST)
    best = {}
    # numpy's of 5e7 takes seconds: fewer turns
    cost = {
        **in_turns(measures, 11, best),
        **in_turns(of_5e7, 5, best),
    }
    rows = []
    for name in sizes:
        ours = cost[name, "block"]

        def ns(key, name=name, ours=ours):
            value = cost.get((name, key))
            if value is None:
                return ""
            return f"{value * 1e9:,.1f} ns" + (
                ""
                if key in ("block", "shuffle")
                else f" ({ratio_of(value / ours)})"
            )

        rows.append(
            (
                name,
                ns("block"),
                ns("shuffle"),
                ns(NUMPY),
                *(ns(ranks) for ranks in small_ranks),
                ns(GRAIN),
            )
        )
    print_table(
        f"2. An index: ours by plan.indices in blocks of {BLOCK:,}, and (how many times that) others",
        (
            "samples",
            "ours, in blocks",
            "the shuffle in it",
            "numpy permutation of all",
            *(
                f"ours, 32 of a batch of {32 * ranks:,}"
                for ranks in small_ranks
            ),
            "grain, one by one"
            if not missing(GRAIN)
            else "grain: not installed",
        ),
        rows,
    )
    worst = max(sizes, key=lambda name: cost[name, "block"])
    for what, name in (
        ("at most 40 ns an index in blocks, at every size", worst),
        ("the same at 2^30+1", "2^30+1"),
    ):
        median, least = cost[name, "block"], best[name, "block"]
        seen = f"{median * 1e9:.1f} ns{' at ' + name if name == worst else ''} ({least * 1e9:.1f} in the best round)"
        print_target(what, seen, median <= 40e-9)
    print(f"- {busy()}")


# 3. A resume


STEPS, RESUME_BATCH, REPLAYED = 100_000, 8, 10_000


def resume():
    import paddle
    import paddle.distributed as dist

    import paddle_shard
    from paddle_shard.plan.state import sealed

    class Data(Numbers, paddle.io.Dataset):
        pass

    data = Data(STEPS * RESUME_BATCH)
    mesh = dist.ProcessMesh([0], dim_names=["dp"])

    def given():
        return paddle.io.DataLoader(data, batch_size=RESUME_BATCH, shuffle=True)

    loader = paddle_shard.shard_dataloader(given(), mesh, shard_dims="dp")
    positions = {
        f"{percent} %": STEPS * percent // 100 for percent in (1, 50, 99)
    }

    # A state from a loader that was iterated, and that it continues with the batch which comes next there.
    iterator = iter(loader)
    for _ in range(positions["1 %"]):
        next(iterator)
    saved = json.loads(json.dumps(loader.state_dict()))
    straight = next(iterator).numpy()
    iterator.close()
    loader.load_state_dict(saved)
    assert (next(iter(loader)).numpy() == straight).all()

    epochs = iter(range(1, 1_000_000))

    def state_at(step):
        # Each in an epoch of its own, so that no order and no block is still there from the time before.
        state = {
            **saved,
            "epoch": next(epochs),
            "steps": step,
            "samples": step * RESUME_BATCH,
            "certificate": [],
        }
        return sealed(state)

    def resume_at(step):
        def measure():
            state = state_at(step)

            def go_on():
                loader.load_state_dict(state)
                with iter(loader) as iterator:
                    found.append(next(iterator))

            found = []
            took = seconds(go_on)
            wanted = loader.plan.indices(
                epoch=state["epoch"], step=step, data_rank=0
            )
            assert (found[0].numpy() == wanted.astype(np.float32)).all()
            return took

        return measure

    def steps_of(iterable):
        def measure():
            iterator = iter(iterable)
            # what is done once is left out, in favour of the replay
            next(iterator)
            return (
                seconds(lambda: [next(iterator) for _ in range(REPLAYED)])
                / REPLAYED
                * STEPS
            )

        return measure

    fresh = paddle_shard.shard_dataloader(given(), mesh, shard_dims="dp")
    sampler = paddle.io.DistributedBatchSampler(
        data, RESUME_BATCH, num_replicas=1, rank=0, shuffle=True
    )
    resumes = in_turns(
        {name: resume_at(step) for name, step in positions.items()}, 41
    )
    replays = in_turns(
        {
            "paddle_shard loader": steps_of(fresh),
            "paddle.io.DataLoader": steps_of(given()),
            "indices only, no sample read: paddle DistributedBatchSampler": steps_of(
                sampler
            ),
        },
        3,
    )
    slowest = max(resumes.values())
    rows = [
        (f"resume at {name}", time_of(took), ratio_of(took / resumes["1 %"]))
        for name, took in resumes.items()
    ]
    print_table(
        f"3. A saved position to its next batch: an epoch of {STEPS:,} steps of {RESUME_BATCH} samples, no workers",
        ("what", "time", "to the resume at 1 %"),
        rows,
    )
    print_table(
        f"Replaying {STEPS:,} steps ({REPLAYED:,} were measured, times {STEPS // REPLAYED})",
        ("what", "time", "to the slowest resume"),
        [
            (name, time_of(took), ratio_of(took / slowest))
            for name, took in replays.items()
        ],
    )
    for name in ("paddle_shard loader", "paddle.io.DataLoader"):
        ratio = replays[name] / slowest
        print_target(
            f"resume at least 1,000 x faster than replaying {STEPS:,} steps of the {name}",
            ratio_of(ratio),
            ratio >= 1000,
        )
    steep = slowest / min(resumes.values())
    print_target(
        f"flat in the position (at most {FLAT:g} x): slowest to fastest",
        ratio_of(steep),
        steep <= FLAT,
    )


def main():
    if sys.argv[1:2] == ["child"]:
        peer, num_samples, trace = sys.argv[2:5]
        child(peer, int(num_samples), bool(trace))
        return
    warnings.filterwarnings("ignore", message="No ccache found")
    start = time.perf_counter()
    print(machine())
    print(busy())
    for peer in (TORCH, GRAIN):
        if missing(peer):
            print(f"{peer}: not installed, skipped")
    first_batch()
    per_index()
    resume()
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
