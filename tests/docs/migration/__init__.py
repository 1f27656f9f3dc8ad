"""What the tests of the lines of docs/from_paddle.md and docs/migration.md have in common."""

import json
import re

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, DistributedBatchSampler

import paddle_shard
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.test_docs import ROOT
from tests.helpers import DP2, Made, local, sharded

DATA = Made(length=24)
ODD = Made(length=21)
"""Of a length that two ranks cannot share."""
NAMES = {
    "paddle": paddle,
    "dist": dist,
    "paddle_shard": paddle_shard,
    "mesh": DP2,
    "data": DATA,
    "b": 4,
    "B": 8,
}
NAMES |= {name: getattr(paddle_shard, name) for name in paddle_shard.__all__}
NAMES |= {"DataLoader": DataLoader, "np": np}
IDS = list(range(24))


def launched(data, batch_size, **options):
    """Paddle's sampler as it is on a rank of two. It takes their number from the launcher's variables."""
    return DistributedBatchSampler(
        data, batch_size, num_replicas=2, rank=dist.get_rank(), **options
    )


NAMES |= {"DistributedBatchSampler": launched}


GUIDES = [ROOT / "docs/from_paddle.md", ROOT / "docs/migration.md"]


def lines():
    """(section, old, new) of each line of each table that says what one gets."""
    found, section, head = [], "", ""
    for line in "\n".join(page.read_text() for page in GUIDES).splitlines():
        if line.startswith("## "):
            section = line[3:].replace("`", "")
        if not line.startswith("|"):
            head = ""
        elif not head:
            head = line
        elif head == "| old | new | you get |" and line.startswith("| "):
            old, new, promise = line.strip("| ").split(" | ")
            assert promise
            found.append((section, old, new))
    return found


class Side:
    """What stands on one side of a line. Its pieces of code can be run."""

    def __init__(self, cell):
        self.codes = re.findall(r"`([^`]+)`", cell)

    def __call__(self, number=0, **names):
        """Return the value of a piece of code, or the options that it is."""
        code = self.codes[number]
        return eval(
            f"dict({code})" if re.match(r"\w+=[^=]", code) else code,
            {**NAMES, **names},
        )


CASES = {}


def case(section, old):
    """The test of the line of a section whose old side begins like this."""

    def keep(function):
        assert (section, old) not in CASES
        CASES[section, old] = function
        return function

    return keep


def cases_of(line):
    section, old, _ = line
    return [
        key
        for key in CASES
        if section == key[0]
        and re.match(re.escape(key[1]) + r"(\W|$)", old.replace("`", ""))
    ]


def steps(make, ranks=(0, 1)):
    """The global batches of an epoch: the rows of both ranks, one after the other. Alone: those of one rank."""
    per_rank = on_each_rank(ranks, lambda: [local(batch) for batch in make()])
    return [flat(rows) for rows in zip(*per_rank.values(), strict=True)]


def flat(batches):
    return [row for batch in batches for row in batch]


def real(loader, epochs=1):
    """The rows of each step of a rank that are `valid`; of several epochs, one after the other."""
    found = []
    for _ in range(epochs):
        batches = iter(loader)
        for batch in batches:
            good = local(batches.valid)
            found.append(
                [
                    row
                    for row, valid in zip(local(batch), good, strict=True)
                    if valid
                ]
            )
    return found


def cut(rows, size=8):
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def shuffled(meshes=DP2, workers=0, data=DATA, **options):
    return sharded(
        DataLoader(data, batch_size=8, shuffle=True, num_workers=workers),
        meshes,
        **options,
    )


def stopped(after=1, make=shuffled):
    """The state after some steps of each rank, and the global batches up to there."""

    def run():
        loader = make()
        batches = iter(loader)
        rows = [local(next(batches)) for _ in range(after)]
        batches.close()
        return rows, json.loads(json.dumps(loader.state_dict()))

    found = on_each_rank((0, 1), run)
    return found[0][1], [
        one + two for one, two in zip(found[0][0], found[1][0], strict=True)
    ]


def of_each_rank(given, **options):
    return on_each_rank(
        (0, 1), lambda: [local(batch) for batch in sharded(given(), **options)]
    )
