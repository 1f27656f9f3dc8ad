"""What a loader adds to a step of training, beside Paddle's two loaders, and samples per second in a bare loop.

    python benchmarks/price.py [--busy] [--only TEXT] [--seconds S] [--json FILE]

*Price*: between two batches a loop touches memory and computes, as training does, so that a loader runs with cold
caches. All loaders of a row run in turns in the same processes, two epochs each a round. The price of a loader is its
loop minus the loop without a loader, of the same round; of two ranks, the slower one counts.
*Bare*: the loop does nothing but take batches.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import busy, machine, print_table, print_target, ratio_of, seconds

NONE, LOCAL, SHARDED, OURS = (
    "no loader",
    "paddle.io.DataLoader",
    "dist.shard_dataloader",
    "paddle_shard",
)
COMPUTE_SECONDS = 2e-3
SKIPPED_STEPS, COUNTED_STEPS, LAST_STEPS = 14, 32, 6
"""Of an epoch: workers start in the first, and nothing is left to read ahead in the last."""
EPOCHS = 2
SAMPLE_SHAPE = (28, 28)
MEGABYTE = 1 << 20
AT_MOST_SHARDED, AT_MOST_LOCAL, BARE_AT_LEAST, BARE_256_WORKERS_AT_LEAST = (
    1.0,
    1.5,
    1.0,
    1.5,
)
SMALLEST_PRICE = 20e-6
"""Seconds; a ratio to less than this is noise."""
BARE_ROWS = {
    "map data set": 256 * 160,
    "arrays": 256 * 400,
    "iterable": 256 * 80,
    "Stream.of.map": 256 * 80,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table."""

    kind: str
    """What the step computes; for the bare part, the kind of data."""
    batch_size: int
    """Of the global batch."""
    num_workers: int
    num_ranks: int
    is_bare: bool = False

    @property
    def name(self):
        part = "bare" if self.is_bare else "price"
        return f"{part}, {self.kind}, {self.batch_size} rows, {self.num_workers} workers, {self.num_ranks} ranks"


STEP_KINDS = ("matmul", "python", "sleep", "24 MB")
BARE_KINDS = ("map data set", "arrays", "iterable", "Stream.of.map")


def all_rows():
    for num_ranks, kind, num_workers, batch_size in itertools.product(
        (1, 2), STEP_KINDS, (0, 2), (64, 256)
    ):
        yield Row(
            kind=kind,
            batch_size=batch_size,
            num_workers=num_workers,
            num_ranks=num_ranks,
        )
    for kind, num_workers, batch_size in itertools.product(
        BARE_KINDS, (0, 2), (64, 256)
    ):
        yield Row(
            kind=kind,
            batch_size=batch_size,
            num_workers=num_workers,
            num_ranks=1,
            is_bare=True,
        )


# In the ranks


def make_arrays(num_rows):
    rng = np.random.default_rng(0)
    return rng.integers(
        0, 256, (num_rows, *SAMPLE_SHAPE), dtype=np.uint8
    ), rng.integers(0, 10, num_rows)


def make_digits(num_rows):
    import paddle

    class Digits(paddle.io.Dataset):
        def __init__(self):
            self.images, self.labels = make_arrays(num_rows)

        def __len__(self):
            return num_rows

        def __getitem__(self, index):
            return self.images[index], self.labels[index]

    return Digits()


def make_iterable(num_rows):
    """Digits as a stream; its workers divide them, as Paddle's documentation shows."""
    import paddle

    digits = make_digits(num_rows)

    class DigitStream(paddle.io.IterableDataset):
        def __iter__(self):
            info = paddle.io.get_worker_info()
            worker, num_workers = (
                (info.id, info.num_workers) if info else (0, 1)
            )
            for index in range(worker, num_rows, num_workers):
                yield digits[index]

    return DigitStream()


def make_work(kind):
    """Return a function that touches memory and computes for `COMPUTE_SECONDS`, always as much work."""
    memory = np.ones((24 if kind == "24 MB" else 8) * MEGABYTE // 4, np.float32)
    matrix = np.ones((160, 160), np.float32)
    product = np.empty_like(matrix)

    def multiply():
        np.matmul(matrix, matrix, out=product)

    def count():
        total = 0
        for number in range(500):
            total += number

    piece = count if kind == "python" else multiply
    repeats = max(
        1, round(COMPUTE_SECONDS / min(seconds(piece) for _ in range(200)))
    )

    def work():
        np.add(memory, 1.0, out=memory)
        if kind == "sleep":
            time.sleep(COMPUTE_SECONDS)
            return
        for _ in range(repeats):
            piece()

    return work


def make_loaders(row, mesh):
    """Return {name: an iterable of one epoch} over the same digits."""
    import paddle
    import paddle.distributed as dist

    import paddle_shard

    num_steps = SKIPPED_STEPS + COUNTED_STEPS + LAST_STEPS
    digits = make_digits(num_steps * row.batch_size)

    def given():
        return paddle.io.DataLoader(
            digits,
            batch_size=row.batch_size,
            shuffle=True,
            num_workers=row.num_workers,
        )

    local_sampler = paddle.io.DistributedBatchSampler(
        digits, row.batch_size // row.num_ranks, shuffle=True
    )
    local = paddle.io.DataLoader(
        digits, batch_sampler=local_sampler, num_workers=row.num_workers
    )
    batch = next(iter(paddle.io.DataLoader(digits, batch_size=row.batch_size)))
    return {
        NONE: [batch] * num_steps,
        LOCAL: local,
        SHARDED: dist.shard_dataloader(given(), mesh, shard_dims="dp"),
        OURS: paddle_shard.shard_dataloader(given(), mesh, shard_dims="dp"),
    }


def time_step(loader, work):
    """Return seconds a step, the mean over the counted steps of two epochs."""
    spent = 0.0
    for _ in range(EPOCHS):
        for number, _batch in enumerate(loader):
            if number == SKIPPED_STEPS:
                start = time.perf_counter()
            if number == SKIPPED_STEPS + COUNTED_STEPS:
                spent += time.perf_counter() - start
            if number < SKIPPED_STEPS + COUNTED_STEPS:
                work()
    return spent / (EPOCHS * COUNTED_STEPS)


def make_gathering_loader(row):
    """Paddle's loader as it reads arrays fastest: an item is a whole batch, gathered by an array of indices."""
    import paddle

    num_rows = BARE_ROWS["arrays"]
    digits = make_digits(num_rows)

    class ShuffledBatches(paddle.io.BatchSampler):
        def __init__(self):
            self.batch_size = 1
            self.drop_last = False

        def __len__(self):
            return num_rows // row.batch_size

        def __iter__(self):
            order = np.random.default_rng(0).permutation(num_rows)
            return ([indices] for indices in order.reshape(-1, row.batch_size))

    return paddle.io.DataLoader(
        digits,
        batch_sampler=ShuffledBatches(),
        collate_fn=lambda items: items[0],
        num_workers=row.num_workers,
    )


def make_bare(row, mesh):
    """Return {name: an iterable of one epoch} for the bare part."""
    import paddle

    import paddle_shard

    num_rows = BARE_ROWS[row.kind]
    options = {"batch_size": row.batch_size, "num_workers": row.num_workers}
    if row.kind == "map data set":
        for_paddle = for_ours = make_digits(num_rows)
        options["shuffle"] = True
    elif row.kind == "arrays":
        for_ours = paddle_shard.ArrayDataset(*make_arrays(num_rows))
        given = paddle.io.DataLoader(for_ours, shuffle=True, **options)
        return {
            LOCAL: make_gathering_loader(row),
            OURS: paddle_shard.shard_dataloader(given, mesh, shard_dims="dp"),
        }
    elif row.kind == "iterable":
        for_paddle = make_iterable(num_rows)
        for_ours = (
            paddle_shard.Stream.of(for_paddle, splits_itself=True)
            if row.num_workers
            else for_paddle
        )
    else:
        for_paddle = make_iterable(num_rows)
        for_ours = paddle_shard.Stream.of(range(num_rows)).map(
            make_digits(num_rows).__getitem__
        )
    return {
        LOCAL: paddle.io.DataLoader(for_paddle, **options),
        OURS: paddle_shard.shard_dataloader(
            paddle.io.DataLoader(for_ours, **options), mesh, shard_dims="dp"
        ),
    }


def time_samples(loader, batch_size):
    """Return seconds a sample, past the first steps of an epoch and before its workers end."""
    batches = iter(loader)
    for _ in itertools.islice(batches, SKIPPED_STEPS):
        pass
    num_batches = 0
    start = time.perf_counter()
    for _ in batches:
        num_batches += 1
        end = time.perf_counter()
    return (end - start) / (num_batches * batch_size)


def run_rank(rows, row_seconds):
    import paddle.distributed as dist

    from paddle_shard.loader.compat import mend_process_mesh
    from paddle_shard.testing import report

    mend_process_mesh()  # `dist.shard_dataloader` needs it with numpy >= 2.4
    dist.init_parallel_env()
    num_ranks = dist.get_world_size()
    mesh = dist.ProcessMesh(np.arange(num_ranks), dim_names=["dp"])
    taken = {}
    for row in rows:
        if row.is_bare:
            measures = {
                name: lambda loader=loader, row=row: time_samples(
                    loader, row.batch_size
                )
                for name, loader in make_bare(row, mesh).items()
            }
            num_rounds = max(3, round(row_seconds / 2))
        else:
            work = make_work(row.kind)
            measures = {
                name: lambda loader=loader, work=work: time_step(loader, work)
                for name, loader in make_loaders(row, mesh).items()
            }
            num_rounds = max(3, round(row_seconds / 1.2))
        taken[row.name] = {name: [] for name in measures}
        for round_number in range(num_rounds + 1):  # the first one warms up
            for name, measure in measures.items():
                if num_ranks > 1:
                    dist.barrier()
                value = measure()
                if round_number:
                    taken[row.name][name].append(value)
    report(taken)
    if num_ranks > 1:
        dist.barrier()


# In the parent


@contextlib.contextmanager
def busy_processes(num_processes):
    code = "while True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-c", code])
        for _ in range(num_processes)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def prices(reports, row):
    """Return {loader: median over rounds of what it adds to a step on the slower rank}, and the bare loop's step."""
    taken = [
        {name: np.array(values) for name, values in report[row.name].items()}
        for report in reports
    ]
    added = {
        name: float(
            np.median(
                np.max([rank[name] - rank[NONE] for rank in taken], axis=0)
            )
        )
        for name in (LOCAL, SHARDED, OURS)
    }
    return added, float(
        np.median(np.max([rank[NONE] for rank in taken], axis=0))
    )


def price_ratio(ours, peer):
    return max(ours, 0.0) / peer if peer >= SMALLEST_PRICE else float("nan")


def print_prices(rows, reports, result):
    lines = []
    for row in rows:
        added, alone = prices(reports[row.num_ranks], row)
        to_sharded, to_local = (
            price_ratio(added[OURS], added[peer]) for peer in (SHARDED, LOCAL)
        )
        result[row.name] = {
            "alone": alone,
            **added,
            "ours/sharded": to_sharded,
            "ours/local": to_local,
        }
        cells = [f"{added[name] * 1e6:,.0f}" for name in (LOCAL, SHARDED, OURS)]
        ratios = [
            "-" if np.isnan(ratio) else ratio_of(ratio)
            for ratio in (to_sharded, to_local)
        ]
        counts = [str(row.batch_size), str(row.num_workers), str(row.num_ranks)]
        lines.append(
            [row.kind, *counts, f"{alone * 1e3:.2f} ms", *cells, *ratios]
        )
    head = [
        "step",
        "batch",
        "workers",
        "ranks",
        "alone",
        LOCAL,
        SHARDED,
        OURS,
        "ours/sharded",
        "ours/local",
    ]
    print_table("Microseconds that a loader adds to a step", head, lines)
    for key, peer, limit in (
        ("ours/sharded", SHARDED, AT_MOST_SHARDED),
        ("ours/local", LOCAL, AT_MOST_LOCAL),
    ):
        ratios = [
            result[row.name][key]
            for row in rows
            if not np.isnan(result[row.name][key])
        ]
        if ratios:
            num_reached = sum(ratio <= limit for ratio in ratios)
            seen = f"{num_reached} of {len(ratios)} rows, median {np.median(ratios):.2f} x, worst {max(ratios):.2f} x"
            print_target(
                f"at most {limit:g} x {peer}", seen, num_reached == len(ratios)
            )


def print_bare(rows, reports, result):
    lines, misses = [], 0
    for row in rows:
        took = {
            name: float(np.median(values))
            for name, values in reports[row.num_ranks][0][row.name].items()
        }
        ratio = took[LOCAL] / took[OURS]
        result[row.name] = {name: 1 / value for name, value in took.items()} | {
            "ratio": ratio
        }
        limit = (
            BARE_256_WORKERS_AT_LEAST
            if row.num_workers and row.batch_size == 256
            else BARE_AT_LEAST
        )
        misses += ratio < limit
        speeds = [f"{1 / took[name]:,.0f}" for name in (LOCAL, OURS)]
        lines.append(
            [
                row.kind,
                str(row.batch_size),
                str(row.num_workers),
                *speeds,
                ratio_of(ratio),
                f"{limit:g} x",
            ]
        )
    print_table(
        "Samples per second in a bare loop, one process",
        ["data", "batch", "workers", LOCAL, OURS, "ours/local", "at least"],
        lines,
    )
    print_target(
        "samples per second", f"{misses} of {len(rows)} rows below", not misses
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--busy", action="store_true", help="beside two busy processes"
    )
    parser.add_argument(
        "--only",
        default="",
        help="rows whose name contains this text, such as 'price, matmul'",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.6,
        help="about as long a row, without starting workers",
    )
    parser.add_argument(
        "--json", type=Path, help="write all values, with those of each round"
    )
    options = parser.parse_args()
    rows = [row for row in all_rows() if options.only in row.name]
    if not rows:
        parser.error(
            f"--only {options.only!r} selects no row; rows are {[row.name for row in all_rows()]}"
        )
    start = time.perf_counter()
    print(
        f"{machine()}; {busy()}{'; beside two busy processes' if options.busy else ''}",
        flush=True,
    )
    from paddle_shard.testing import run_ranks

    reports = {}
    with (
        busy_processes(2 if options.busy else 0),
        tempfile.TemporaryDirectory() as folder,
    ):
        for num_ranks in sorted({row.num_ranks for row in rows}):
            arguments = [
                "rank",
                str(num_ranks),
                options.only,
                str(options.seconds),
            ]
            logs = Path(folder, str(num_ranks))
            reports[num_ranks] = run_ranks(
                Path(__file__), num_ranks, logs, args=arguments, timeout=1800
            )
    result = {}
    if price_rows := [row for row in rows if not row.is_bare]:
        print_prices(price_rows, reports, result)
    if bare_rows := [row for row in rows if row.is_bare]:
        print_bare(bare_rows, reports, result)
    print(f"{busy()}\n{time.perf_counter() - start:.0f} s in all")
    if options.json:
        options.json.write_text(
            json.dumps({"rows": result, "rounds": reports}, indent=1)
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _, _, ranks, text, row_seconds = sys.argv
        run_rank(
            [
                row
                for row in all_rows()
                if text in row.name and row.num_ranks == int(ranks)
            ],
            float(row_seconds),
        )
    else:
        main()
