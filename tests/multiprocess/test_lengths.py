"""Rows that a collate_fn pads to the longest it sees are padded to the longest of the global batch."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks
from tests.multiprocess.lengths_cases import (
    BY_POSITION,
    CASES,
    LENGTHS,
    VALUES,
    document,
    padded,
)

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent
REFUSED = {
    "too long": (
        2,
        [
            "the longest row of field ['ids'] has 11",
            "the largest size in pad_to is 8",
        ],
    ),
    "no value": (
        0,
        [
            "pad_to={field: ('longest', value)}",
            "['labels']: int64[3] on global rank 0",
        ],
    ),
    "no such field": (
        0,
        [
            "pad_to names ['id']",
            "delivered are ['ids', 'labels', 'mask', 'weights']",
        ],
    ),
    "no number": (
        0,
        ["dtype int64, as field ['ids'] has them, cannot hold 0.5"],
    ),
    "none on a rank": (
        2,
        [
            "['weights']: float32 of 1 dims on global rank 0, nothing on global rank 1",
        ],
    ),
    "texts on a rank": (
        2,
        [
            "['weights']: float32 of 1 dims on global rank 0, nothing on global rank 1",
        ],
    ),
    "not padded": (
        0,
        ["pad_to={field: ('longest', value)}", ".batch(B).map(collate_fn)"],
    ),
    "not padded, workers": (
        0,
        [
            "['ids']: int64[3] on global rank 0",
            "pad_to={field: ('longest', value)}",
        ],
    ),
    "not padded, stream": (
        0,
        [
            "['ids']: int64[3] on global rank 0",
            "pad_to={field: ('longest', value)}",
        ],
    ),
}
"""Case -> (steps that are delivered before it is refused, what the error says)."""


def num_ranks(case):
    return 2 if case == "static" else int(np.prod(CASES[case]["mesh"][0]))


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    found = {}

    def reports(case):
        size = num_ranks(case)
        if size not in found:
            names, folder = (
                [name for name in CASES if num_ranks(name) == size],
                tmp_path_factory.mktemp("lengths"),
            )
            names += ["static"] * (size == 2)
            environment = {"PYTHONPATH": str(HERE.parents[1])}
            found[size] = run_ranks(
                HERE / "lengths_worker.py",
                size,
                folder,
                args=[json.dumps(names)],
                env=environment,
                timeout=4 * HANG,
            )
        return [report[case] for report in found[size]]

    return reports


def expected(case):
    """The global batches of one process, with its own longest row, or the least size that holds it."""
    options = CASES[case]
    size, sizes = options.get("size", 4), options["pad_to"]
    for first in range(0, len(LENGTHS), size):
        numbers = list(range(first, min(first + size, len(LENGTHS))))
        real = len(numbers)
        if options.get("tail") == "fill" and real < size:
            numbers += range(size - real)  # the first samples of the epoch
        batch = padded([document(number) for number in numbers])
        if sizes != "longest":
            longest = batch["ids"].shape[1]
            wanted = min(
                one for one in np.atleast_1d(sizes).tolist() if one >= longest
            )
            for key, value in VALUES.items():
                widths = [
                    (0, 0),
                    (0, wanted - longest),
                    *[(0, 0)] * (batch[key].ndim - 2),
                ]
                batch[key] = np.pad(batch[key], widths, constant_values=value)
        yield batch, real


def joined(parts, mesh, split, balanced):
    """What the ranks of a mesh hold, as one array."""
    shape, names = mesh
    grid = np.arange(len(parts)).reshape(shape)
    rows = []
    for data_rank in range(shape[names.index("dp")]):
        ranks = (
            np.take(grid, data_rank, axis=names.index("dp"))
            .reshape(-1)
            .tolist()
        )
        pieces = [np.array(parts[rank]) for rank in ranks]
        if not split:
            assert all((piece == pieces[0]).all() for piece in pieces), (
                "replicas agree"
            )
            rows.append(pieces[0])
        elif balanced:  # rank r holds chunks r and 2c-1-r
            halves = [np.split(piece, 2, axis=1) for piece in pieces]
            rows.append(
                np.concatenate(
                    [h[0] for h in halves] + [h[1] for h in halves[::-1]],
                    axis=1,
                )
            )
        else:
            rows.append(np.concatenate(pieces, axis=1))
    return np.concatenate(rows)


GOOD = [case for case in CASES if case not in REFUSED]


@pytest.mark.parametrize("case", GOOD)
def test_global_batches_are_those_of_one_process(of_ranks, case):
    reports, wanted = of_ranks(case), list(expected(case))
    names = {"list": BY_POSITION, "tensor": {0: 0}}.get(
        CASES[case].get("form"), VALUES
    )
    for start, key in ((0, "straight"), (1, "resumed"), (2, "resumed")):
        of_each = [
            report[key] if key == "straight" else report[key][start - 1]
            for report in reports
        ]
        assert {len(steps) for steps in of_each} == {len(wanted) - start}
        for step, (batch, real) in enumerate(wanted[start:]):
            taken = [steps[step] for steps in of_each]
            for name, (field, values) in zip(
                names, batch.items(), strict=False
            ):
                split = field in ("ids", "labels") and (
                    "sep" in CASES[case] or "balanced" in CASES[case]
                )
                found = joined(
                    [fields[str(name)][1] for fields, _ in taken],
                    CASES[case]["mesh"],
                    split,
                    "balanced" in CASES[case],
                )
                assert found[:real].tolist() == values[:real].tolist(), (
                    step,
                    field,
                )
                assert found.shape[1:] == values.shape[1:]
                assert all(
                    fields[str(name)][0] == list(found.shape)
                    for fields, _ in taken
                ), "the global shape"
            valid = joined(
                [rows for _, rows in taken], CASES[case]["mesh"], False, False
            )
            assert valid[:real].all()
            assert not valid[real:].any()


@pytest.mark.parametrize("case", REFUSED)
def test_pad_to_errors_are_raised_on_all_ranks_at_one_step(of_ranks, case):
    steps, texts = REFUSED[case]
    for report in of_ranks(case):
        *delivered, failure = report["straight"]
        assert len(delivered) == steps
        for text in texts:
            assert text in failure


def test_static_model_trains_on_rows_of_one_length(of_ranks):
    scale, wanted = np.full([16, 1], 0.1), []
    for first in range(0, len(LENGTHS) - 3, 4):
        samples = [document(number) for number in range(first, first + 4)]
        weights = padded(samples)["weights"] / 100
        weights = np.pad(
            weights, [(0, 0), (0, 16 - weights.shape[1])], constant_values=0.005
        ).astype("float64")
        error = weights @ scale - [[len(sample["ids"])] for sample in samples]
        wanted.append((error**2).mean())
        scale -= 1e-3 * 2 * weights.T @ error / len(error)
    for losses in of_ranks("static"):
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
