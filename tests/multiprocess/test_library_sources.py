"""Data of other libraries, on files and over S3, read by real ranks; the oracle is one process without workers."""

import json
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks
from tests.sources.laws import ON_RANKS, TOTAL, files, ids_of, joined, make, steps_of
from tests.sources.s3_server import BUCKET, serving_s3

pytestmark = pytest.mark.multiprocess
STOPS = (1, 4)
"""The sources take them in turn; before the one, workers read, and behind the other."""


@pytest.mark.parametrize("num_ranks", [2])
def test_every_rank_and_worker_gets_its_rows_of_the_batches_of_one_process(num_ranks, tmp_path):
    local = tmp_path / "files"
    local.mkdir()
    content = files()
    for name, data in content.items():
        (local / name).write_bytes(data)
    cases = [(source, str(local), STOPS[number % 2]) for number, source in enumerate(ON_RANKS)]
    s3 = all(map(find_spec, ("s3fs", "moto", "flask")))
    cases += [("webdataset", f"s3://{BUCKET}", 0)] * (s3 and "webdataset" in ON_RANKS)

    with serving_s3(content) if s3 else nullcontext({}) as environment:
        args = [json.dumps(cases)]
        worker = Path(__file__).with_name("library_worker.py")
        reports = run_ranks(worker, num_ranks, tmp_path / "run", args=args, env=environment, timeout=4 * HANG)

    def of_run(name):
        of_ranks = [report[name] for report in reports]
        assert len({len(steps) for steps in of_ranks}) == 1, f"equal steps: {name}"
        return joined(of_ranks)

    for source, folder, stop in cases:
        name, loader = f"{source} {folder}", make(source, str(local), 0)
        alone = [steps_of(loader) for _ in range(2)]
        for epoch in range(2):
            assert sorted(ids_of(alone[epoch])) == list(range(TOTAL)), f"each sample exactly once: {name}"
        assert alone[0] != alone[1], "two epochs differ"
        assert of_run(name) == alone[0], name
        if stop:
            assert of_run(f"{name} later") == alone[1], name
            assert of_run(f"{name} resumed") == alone[0], name
