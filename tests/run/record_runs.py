"""Runs with a record, made by real ranks, and what each of these was given."""

import contextlib
import io
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from paddle_shard.extras.cli.main import main
from paddle_shard.testing import RanksFailed
from tests.deadlines import HANG
from tests.jobs import run_ranks

WORKER = Path(__file__).with_name("record_worker.py")


class Given:
    """The jobs of a run; `rows[job]` has (epoch, step) -> {global rank: (ids, valid)}, in the order of delivery."""

    def __init__(self, folder):
        self.folder, self.record, self.rows = folder, folder / "run.jsonl", []

    def job(self, mesh, names, dims, batch_size, *does, data="mixture", **more):
        number, ranks = len(self.rows) + 1, int(np.max(mesh)) + 1
        path = self.folder / f"job-{number}.json"
        job = {
            "mesh": mesh,
            "names": names,
            "dims": dims,
            "batch_size": batch_size,
            "does": does,
            "data": data,
        }
        path.write_text(json.dumps({**job, "record": str(self.record), **more}))
        try:
            folder, env = (
                self.folder / f"ranks-{number}",
                {"PYTHONPATH": str(WORKER.parents[2])},
            )
            reports = run_ranks(
                WORKER, ranks, folder, args=[path], env=env, timeout=HANG
            )
        except RanksFailed:
            if not any(action == "kill" for action, _ in does):
                raise
            reports = None
        found = []
        for rank in range(ranks):
            lines = Path(f"{path}.rank-{rank}.jsonl").read_text().splitlines()
            for at, (epoch, step, ids, valid) in enumerate(
                map(json.loads, lines)
            ):
                if at == len(found):
                    found.append(((epoch, step), {}))
                assert found[at][0] == (epoch, step)
                found[at][1][rank] = ids, valid
        self.rows.append(found)
        return reports


COUNTED = {1: 5, 2: 6, 3: None}
"""How many of the steps of each job of `whole_run` count."""


def whole_run(folder):
    """A kill, two resumes on other meshes and batch sizes, weights that change, skips; an epoch has 96 samples."""
    given = Given(folder)
    given.job(
        *([[0, 1], [2, 3]], ["mp", "dp"], "dp", 8),
        *[["take", 5], ["save", "a"], ["take", 2], ["kill", None]],
    )
    does = ["load", "a"], ["take", 6], ["save", "b"], ["take", 1], ["save", "x"]
    given.job([1, 0], ["dp"], "dp", 4, *does, certificates=True)
    given.job(
        *([[0, 2], [1, 3]], ["dp", "sharding"], ["dp", "sharding"], 16),
        *[["load", "b"], ["take", 99], ["take", 2], ["save", "c"]],
        options={"skip_steps": [(11, 12)]},
    )
    return given


def asked(*arguments, code=0):
    """What `paddle-shard` prints; as JSON if that is asked for."""
    as_json = "--json" in arguments
    printed, found = io.StringIO(), None
    # how far a command is, is not part of what a program reads
    errors = io.StringIO() if as_json else printed
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        try:
            found = main([*map(str, arguments)])
        except SystemExit as left:  # argparse's
            found = left.code
    assert found == code, (found, printed.getvalue(), errors.getvalue())
    return json.loads(printed.getvalue()) if as_json else printed.getvalue()


WITHOUT_PADDLE = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "paddle":
            raise ImportError("no paddle")
sys.meta_path.insert(0, Missing())
sys.argv = ["paddle-shard", *sys.argv[1:]]
runpy.run_module("paddle_shard", run_name="__main__")
"""


def asked_elsewhere(*arguments, code=0):
    """What `python -m paddle_shard` prints, as JSON, in a process of its own that has no Paddle."""
    command = [
        sys.executable,
        "-c",
        WITHOUT_PADDLE,
        *map(str, arguments),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def deliveries(rows, data_ranks):
    """sample -> [(job, epoch, step, rank, row of the rank)] of some steps, each data rank by one of its ranks.

    Args:
        rows: [(job, (epoch, step), {rank: (ids, valid)})]
        data_ranks: job -> a global rank of each data rank.
    """
    found = defaultdict(list)
    for job, (epoch, step), of_ranks in rows:
        for rank in data_ranks[job]:
            for row, (sample, valid) in enumerate(
                zip(*of_ranks[rank], strict=True)
            ):
                if valid:
                    found[sample].append((job, epoch, step, rank, row))
    return found
