from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks
from tests.multiprocess import stream_cases
from tests.multiprocess.stream_cases import (
    RESUMED,
    SAMPLES,
    cases,
    make,
    resumes,
    steps_of,
)

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "STREAM_CASES_FOLDER", str(tmp_path_factory.mktemp("files"))
        )
        stream_cases.write_files()
        yield


@cache
def alone(source, tail):
    """Two epochs of a stream read by one process without workers."""
    loader = make(source, [0], ["dp"], 0, tail)
    return [steps_of(loader), steps_of(loader)]


def joined(reports, name, epoch, ids, names):
    """The steps of a case over all data ranks in row order, replicas compared; epoch None: there is one."""
    mesh = np.array(ids)
    by_data_rank = np.moveaxis(mesh, names.index("dp"), 0).reshape(
        mesh.shape[names.index("dp")], -1
    )
    passes = []
    for replicas in by_data_rank:
        of_each = [
            reports[rank][name] if epoch is None else reports[rank][name][epoch]
            for rank in replicas
        ]
        assert all(one == of_each[0] for one in of_each), (
            f"replicas agree: {name}"
        )
        passes.append(of_each[0])
    assert len({len(steps) for steps in passes}) == 1, f"equal steps: {name}"
    return [
        [[x for part in step for x in part[field]] for field in range(3)]
        for step in zip(*passes, strict=True)
    ]


def real(steps):
    """The real rows of each step: [[(id, noise), ...], ...]"""
    return [
        [(i, n) for i, n, v in zip(*step, strict=True) if v] for step in steps
    ]


def check_coverage(source, tail, steps):
    delivered = [i for step in real(steps) for i, _ in step]
    # of which some samples are drawn several times
    if source.startswith("mixture"):
        assert set(delivered) <= set(SAMPLES[source])
        assert (
            "counted" in source
            or tail == "drop"
            or set(delivered) == set(SAMPLES[source])
        )
    elif tail == "pad":
        assert sorted(delivered) == SAMPLES[source]
    elif tail == "drop":
        assert len(set(delivered)) == len(delivered)
        assert set(delivered) <= set(SAMPLES[source])
        assert all(all(step[2]) for step in steps)
    else:
        assert set(delivered) == set(SAMPLES[source])
        assert all(all(step[2]) for step in steps)


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.long), 4]
)
def test_ranks_and_workers_read_the_batches_of_one_process(num_ranks, tmp_path):
    reports = run_ranks(
        HERE / "stream_worker.py", num_ranks, tmp_path, timeout=4 * HANG
    )

    for name, source, ids, names, _, tail in cases(num_ranks):
        epochs = [
            joined(reports, name, epoch, ids, names) for epoch in range(2)
        ]
        for epoch, steps in enumerate(epochs):
            assert real(steps) == real(alone(source, tail)[epoch]), name
            check_coverage(source, tail, steps)
        assert epochs[0] != epochs[1], "two epochs differ"
    for name, source, *_ in resumes(num_ranks):
        steps = joined(reports, name, None, *RESUMED[num_ranks])
        assert real(steps) == real(alone(source, "pad")[0]), name
