"""How fast are batches delivered, beside other loaders and beside what the machine can do?

    python benchmarks/loader.py [throughput] [price] [limits] [steps]

On one process and on two ranks under `paddle.distributed.launch`, on the CPU. Every figure stands beside that of a
peer which did the same work in turns with it, in the same processes; of two ranks, the slower one counts. Peers that
cannot run are left out, and it says why. `dist.shard_dataloader` needs numpy < 2.4: run it in such an environment.
"""

import inspect
import sys
import tempfile
import time
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
from common import (
    busy,
    machine,
    print_table,
    print_target,
    ratio_of,
    seconds,
    time_of,
)
from peers import (
    BATCHED,
    OURS,
    PADDLE,
    PEERS,
    batch_sampler,
    end_pass,
    first_numbers,
    open_pass,
    sharded,
    why_not,
)
from workloads import SMALL_64, SMALL_256, TOKENS, WORKLOADS, Rows, write_files

PARTS = ("throughput", "price", "limits", "steps")
RANKS, WORKERS, ROUNDS = (1, 2), (0, 2), 5
PER_SAMPLE, IN_BATCHES, PRICE, GATHERED, DELIVERED, STEP = (
    1.0,
    3.0,
    60e-6,
    2.2,
    3.5,
    1.05,
)
STRETCH = 40
"""Steps whose mean is one value of the price; it divides the steps of each workload that has one."""
COMPUTE, READ, STEPS, STEP_BATCH = 0.010, 0.008, 50, 8
PAUSE, PAUSE_EVERY, PAUSED_STEPS = 0.08, 120, 150
"""Seconds that one sample in so many takes longer, and steps for that."""
PAUSES = f"sleep; one sample in {PAUSE_EVERY} takes {PAUSE * 1e3:g} ms more"
STEP_KINDS = (
    ("sleep", 0),
    ("sleep", 2),
    (PAUSES, 2),
    ("matmul", 0),
    ("matmul", 2),
)
"""(the step, workers)"""


# In the ranks


class Rank:
    """This process, its mesh and the files."""

    def __init__(self, folder):
        import paddle.distributed as dist

        self.folder = folder
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.mesh = dist.ProcessMesh(
            np.arange(self.num_ranks), dim_names=["dp"]
        )
        self.options = inspect.signature(
            __import__("paddle_shard").shard_dataloader
        ).parameters

    def rows(self, work):
        return Rows(work.path(self.folder), work.mapped)

    def in_turns(self, measures, rounds=ROUNDS, *, warm=True):
        """Values of several rounds, each of which takes every measure once, all ranks at the same time.

        One more goes before them, if they should be `warm`.
        """
        import paddle.distributed as dist

        taken = {name: [] for name in measures}
        for number in range(rounds + warm):
            for name, measure in measures.items():
                if self.num_ranks > 1:
                    dist.barrier()
                value = measure()
                taken[name] += [value] if number >= warm else []
        return taken

    def only(self, **options):
        """Those options that this version of `shard_dataloader` has."""
        return {
            name: value
            for name, value in options.items()
            if name in self.options
        }


def throughput(here):
    """Seconds a step: {"workload|workers": {peer: rounds}}."""
    found = {}
    for work in WORKLOADS:
        rows = here.rows(work)
        for workers in WORKERS:
            passes = {
                peer: APass(here, peer, work, rows, workers)
                for peer in PEERS
                if why_not(peer, workers) is None
            }
            found[f"{WORKLOADS.index(work)}|{workers}"] = here.in_turns(
                passes, warm=False
            )
            for peer in (OURS, BATCHED):
                same = (passes[peer].first == passes[PADDLE].first).all()
                assert same, f"{peer} has not the rows that Paddle's loader has"
            assert all(
                len(one.first) == work.batch_size // here.num_ranks
                for one in passes.values()
            )
    return found


class APass:
    """A pass that is open alone, since the workers of others would go on reading ahead; its seconds a step."""

    def __init__(self, here, peer, work, rows, workers):
        self.args, self.work = (
            (peer, work, rows, workers, here.mesh, here.rank, here.num_ranks),
            work,
        )
        self.first = None
        """Of the rows of its first batch, the first numbers."""

    def __call__(self):
        iterator = open_pass(*self.args)
        self.first = first_numbers(next(iterator))
        advance(iterator, self.work.passed)
        took = (
            seconds(lambda: advance(iterator, self.work.steps))
            / self.work.steps
        )
        end_pass(iterator)
        return took


def advance(iterator, steps):
    assert sum(1 for _ in islice(iterator, steps)) == steps


def price(here):
    """Seconds a batch, without workers: {"workload|per sample or batched": {what: rounds}}."""
    import paddle

    import paddle_shard
    from paddle_shard.data.generators import generators_of
    from paddle_shard.plan.step import Step
    from paddle_shard.reading.reader import HowToRead, IdReader

    found = {}
    for work in (SMALL_64, SMALL_256, TOKENS):
        rows = here.rows(work)
        for kind, dataset in (
            ("per sample", rows),
            ("batched", paddle_shard.ArrayDataset(rows.rows)),
        ):
            loader = sharded(
                dataset, work.batch_size, 0, here.mesh, **here.only(prefetch=0)
            )
            steps = work.steps + work.passed
            lists = [
                loader.plan.indices(
                    epoch=0, step=s, data_rank=here.rank
                ).tolist()
                for s in range(steps)
            ]
            how = HowToRead(
                generators=generators_of(None), compared=here.num_ranks > 1
            )
            place, reader = paddle.CPUPlace(), IdReader(dataset, None, how)

            def bare(indices, dataset=dataset, kind=kind, place=place):
                if kind == "batched":
                    return paddle.to_tensor(
                        dataset.__getitems__(indices), place=place
                    )
                return paddle.to_tensor(
                    np.stack([dataset[index] for index in indices]), place=place
                )

            def by_reader(
                indices, reader=reader, place=place, size=work.batch_size
            ):
                step = Step(
                    epoch=0,
                    number=0,
                    num_rows=size,
                    micro_size=size,
                    num_positions=size,
                    ids=indices,
                )
                return paddle.to_tensor(
                    reader.read(step, None).value, place=place
                )

            measures = {
                "loader": lambda loader=loader, work=work: one_pass(
                    loader, work
                ),
                "bare": lambda bare=bare, lists=lists, work=work: one_pass(
                    map(bare, lists), work
                ),
                "reader": lambda by=by_reader, lists=lists, work=work: one_pass(
                    map(by, lists), work
                ),
            }
            found[f"{WORKLOADS.index(work)}|{kind}"] = here.in_turns(
                measures, 9
            )
    return found


def one_pass(batches, work):
    """Seconds a step of a pass of its own: the median over stretches, since all is done on this thread and others want
    the core."""
    iterator, times = iter(batches), [time.perf_counter()]
    for _ in islice(iterator, work.passed + work.steps):
        times.append(time.perf_counter())
    end_pass(iterator)
    steps = np.diff(times)[work.passed :]
    return float(np.median(steps.reshape(-1, STRETCH).mean(axis=1)))


def limits(here):
    """Seconds a byte: {what: rounds}. Rows in random order, each once a round."""
    import paddle_shard

    rows = here.rows(TOKENS)
    dataset = paddle_shard.ArrayDataset(rows.rows)
    size = rows.rows.nbytes
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    loader = sharded(dataset, TOKENS.batch_size, 0, here.mesh)
    steps = TOKENS.num_rows // TOKENS.batch_size
    numbers = [
        loader.plan.indices(epoch=0, step=step, data_rank=0).tolist()
        for step in range(steps)
    ]

    def gather():
        for some in numbers:
            dataset.__getitems__(some)

    measures = {
        "copy": lambda: seconds(lambda: np.copyto(target, source)) / size,
        "gather": lambda: seconds(gather) / size,
        "deliver": lambda: seconds(lambda: advance(iter(loader), steps)) / size,
    }
    return here.in_turns(measures)


def step_time(here):
    """Seconds a step: {"compute|workers": {peer: rounds}}."""
    import paddle

    local = STEP_BATCH // here.num_ranks

    class Slow:
        def __init__(self, pauses):
            self.pauses = pauses

        def __len__(self):
            return (PAUSED_STEPS if self.pauses else STEPS) * STEP_BATCH

        def __getitem__(self, index):
            time.sleep(
                READ / local
                + (PAUSE if self.pauses and index % PAUSE_EVERY == 0 else 0)
            )
            return np.full(256, index, "float32")

    left, steps = np.ones((400, 400), "float32"), {}
    once = min(seconds(lambda: left @ left) for _ in range(20))
    repeats = max(1, round(COMPUTE / once))

    def busily():
        for _ in range(repeats):
            np.matmul(left, left)

    for compute, workers in STEP_KINDS:
        work = busily if compute == "matmul" else lambda: time.sleep(COMPUTE)
        slow = Slow(compute == PAUSES)
        ours = sharded(
            slow,
            STEP_BATCH,
            workers,
            here.mesh,
            **({} if slow.pauses else here.only(prefetch=2)),
        )
        given = batch_sampler(ours.plan, here.rank, len(slow) // STEP_BATCH)
        paddles = paddle.io.DataLoader(
            slow, batch_sampler=given, num_workers=workers
        )
        measures = {
            OURS: lambda loader=ours, work=work: mean_step(loader, work),
            PADDLE: lambda loader=paddles, work=work: mean_step(loader, work),
            "the step alone": lambda work=work: mean_step(range(STEPS), work),
        }
        steps[f"{compute}|{workers}"] = here.in_turns(measures, 3)
    return steps


def mean_step(batches, work):
    times = []
    for _ in batches:
        work()
        times.append(time.perf_counter())
    return float(np.mean(np.diff(times)[5:]))


def rank(folder, parts):
    import paddle.distributed as dist

    from paddle_shard.testing import report

    warnings.filterwarnings("ignore", message=".*not writable.*")
    dist.init_parallel_env()
    here = Rank(folder)
    measures = {
        "throughput": throughput,
        "price": price,
        "limits": limits,
        "steps": step_time,
    }
    found = {}
    for part in parts:
        found[part] = measures[part](here)
    report(found)
    if here.num_ranks > 1:
        dist.barrier()


# In the parent


def medians(reports, part, key=None):
    """{what: median over the rounds of the slower rank}."""
    found = [
        report[part] if key is None else report[part][key] for report in reports
    ]
    return {
        what: float(np.median(np.max([one[what] for one in found], axis=0)))
        for what in found[0]
    }


def processes(num_ranks):
    return "one process" if num_ranks == 1 else f"{num_ranks} ranks"


def print_throughput(reports, num_ranks):
    rows, ratios = [], {}
    for number, work in enumerate(WORKLOADS):
        for workers in WORKERS:
            took = medians(reports, "throughput", f"{number}|{workers}")
            cells = []
            for peer in PEERS:
                if peer not in took:
                    cells.append("")
                    continue
                ratio = took[PADDLE] / took[peer]
                ratios[work.name, work.batch_size, workers, peer] = ratio
                cells.append(
                    f"{work.batch_size / took[peer]:,.0f} ({ratio_of(ratio)})"
                )
            rows.append((work.name, str(work.batch_size), str(workers), *cells))
    reasons = {peer: why_not(peer) for peer in PEERS}
    heads = [
        peer if reasons[peer] is None else f"{peer}: {reasons[peer]}"
        for peer in PEERS
    ]
    print_table(
        f"1. Samples per second of all ranks, {processes(num_ranks)}, random order, and (how many times {PADDLE})",
        ("samples", "global batch", "workers", *heads),
        rows,
    )
    for peer, least in ((OURS, PER_SAMPLE), (BATCHED, IN_BATCHES)):
        for workers in WORKERS:
            seen = [
                ratios[work.name, work.batch_size, workers, peer]
                for work in WORKLOADS
                if work.name == SMALL_64.name
            ]
            print_target(
                f"1 KB samples, {workers} workers, {processes(num_ranks)}: {peer}, at least {least:g} x {PADDLE}",
                ", ".join(map(ratio_of, seen)),
                min(seen) >= least,
            )


def print_price(reports, num_ranks):
    rows, prices = [], {}
    for work in (SMALL_64, SMALL_256, TOKENS):
        for kind in ("per sample", "batched"):
            key = f"{WORKLOADS.index(work)}|{kind}"
            took = medians(reports, "price", key)
            found = [report["price"][key] for report in reports]
            apart = {  # by round, since they were taken in turns
                what: float(
                    np.max(
                        [
                            np.median(np.subtract(one["loader"], one[what]))
                            for one in found
                        ]
                    )
                )
                for what in ("bare", "reader")
            }
            prices[work.name, work.batch_size, kind] = apart["bare"]
            shown = (
                time_of(took["loader"]),
                time_of(took["bare"]),
                time_of(took["reader"]),
            )
            differences = (f"{value * 1e6:.0f} us" for value in apart.values())
            rows.append(
                (work.name, str(work.batch_size), kind, *shown, *differences)
            )
    print_table(
        f"2. The price of sharding and placing a batch, {processes(num_ranks)}, no workers",
        (
            "samples",
            "global batch",
            "read",
            "our loader",
            "bare",
            "IdReader",
            "price",
            "loader - IdReader",
        ),
        rows,
    )
    print(
        "Bare: np.stack([dataset[i] for i in indices]), or dataset.__getitems__(indices), and paddle.to_tensor, of the"
        "\nsame batches, whose indices are at hand. IdReader: this library's reader (which watches the random"
        "\ngenerators) and paddle.to_tensor. The price is our loader - bare: medians of steps, and of rounds."
    )
    worst = max(prices, key=prices.get)
    print_target(
        f"price under {PRICE * 1e6:.0f} us a batch, {processes(num_ranks)}",
        f"at most {prices[worst] * 1e6:.0f} us ({worst[0]}, {worst[1]} a batch, {worst[2]})",
        prices[worst] < PRICE,
    )


def print_limits(reports):
    took = medians(reports, "limits")
    size = TOKENS.num_rows * TOKENS.row_bytes
    names = {
        "copy": "np.copyto of as many bytes",
        "gather": "ArrayDataset",
        "deliver": "our loader, as tensors",
    }
    print_table(
        f"3. {TOKENS.num_rows:,} rows of 8 KB from a memmap in random order, {size / 2**20:.0f} MB, in the page cache, "
        f"batches of {TOKENS.batch_size}, one process, no workers",
        ("what", "time", "GB/s", "times the copy"),
        [
            (
                name,
                time_of(took[key] * size),
                f"{1e-9 / took[key]:.1f}",
                ratio_of(took[key] / took["copy"]),
            )
            for key, name in names.items()
        ],
    )
    for key, most in (("gather", GATHERED), ("deliver", DELIVERED)):
        ratio = took[key] / took["copy"]
        print_target(
            f"{names[key]}: at most {most:g} x a streaming copy",
            ratio_of(ratio),
            ratio <= most,
        )


def print_steps(reports, num_ranks):
    rows, targets = [], []
    for compute, workers in STEP_KINDS:
        took = medians(reports, "steps", f"{compute}|{workers}")
        alone = took["the step alone"]
        larger = max(alone, READ)
        cells = [
            f"{took[who] * 1e3:.2f} ms ({took[who] / larger:.3f} x)"
            for who in (OURS, PADDLE)
        ]
        rows.append((compute, str(workers), f"{alone * 1e3:.2f} ms", *cells))
        # a matmul wants a core that readers and other processes want, too
        if compute == "sleep":
            targets.append((compute, workers, took[OURS] / larger))
    print_table(
        f"4. A step of about {COMPUTE * 1e3:g} ms with reads of {READ * 1e3:g} ms, {processes(num_ranks)}, and (to the "
        "larger of the two)",
        ("the step", "workers", "the step alone", f"{OURS}", PADDLE),
        rows,
    )
    for compute, workers, ratio in targets:
        print_target(
            f"{compute}, {workers} workers: at most {STEP:g} x the larger of step and read",
            f"{ratio:.3f} x",
            ratio <= STEP,
        )


def run(parts, num_ranks, folder):
    from paddle_shard.testing import run_ranks

    with tempfile.TemporaryDirectory() as logs:
        arguments = ["rank", folder, *parts]
        return run_ranks(
            Path(__file__), num_ranks, Path(logs), args=arguments, timeout=600
        )


def main():
    parts = sys.argv[1:] or list(PARTS)
    start = time.perf_counter()
    print(machine())
    print(busy())
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder)
        alone = [part for part in parts if part != "steps"]
        together = [part for part in parts if part != "limits"]
        reports = {
            1: run(alone, 1, folder) if alone else [],
            2: run(together, 2, folder) if together else [],
        }
    for num_ranks in RANKS:
        if "throughput" in parts:
            print_throughput(reports[num_ranks], num_ranks)
    for num_ranks in RANKS:
        if "price" in parts:
            print_price(reports[num_ranks], num_ranks)
    if "limits" in parts:
        print_limits(reports[1])
    if "steps" in parts:
        print_steps(reports[2], 2)
    print(busy())
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    rank(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["rank"] else main()
