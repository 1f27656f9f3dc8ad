"""Data of other libraries, on files and over S3, read by real ranks; the oracle is one process without workers."""

import json
from pathlib import Path

import pytest

from tests.data.s3_server import BUCKET, serving_s3
from tests.data.source_laws import (
    ON_RANKS,
    TOTAL,
    files,
    ids_of,
    joined,
    make,
    steps_of,
)
from tests.deadlines import HANG
from tests.jobs import preload, run_ranks
from tests.optional import needs

pytestmark = pytest.mark.multiprocess
STOPS = (1, 4)
"""The sources take them in turn; before the one, workers read, and behind the other."""


@pytest.fixture
def local(tmp_path):
    """The folder with the files."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name, data in files().items():
        (folder / name).write_bytes(data)
    return str(folder)


def test_ranks_and_workers_read_the_batches_of_one_process(local, tmp_path):
    check(
        [
            (source, local, STOPS[number % 2])
            for number, source in enumerate(ON_RANKS)
        ],
        local,
        tmp_path,
    )


@pytest.mark.long
def test_ranks_read_files_of_a_store_as_those_of_a_disk(local, tmp_path):
    needs("s3fs", "moto", "flask", "webdataset")
    with serving_s3(files()) as environment:
        check(
            [("webdataset", f"s3://{BUCKET}", 0)], local, tmp_path, environment
        )


def check(cases, local, tmp_path, environment=None):
    """Check what two ranks read of (source, folder, step at which they stop), by what one process reads of files."""
    preload("datasets", "grain", "pyarrow.parquet", "webdataset")
    args, worker = (
        [json.dumps(cases)],
        Path(__file__).with_name("library_worker.py"),
    )
    reports = run_ranks(
        worker,
        2,
        tmp_path / "run",
        args=args,
        env=environment,
        timeout=4 * HANG,
    )

    def of_run(name):
        of_ranks = [report[name] for report in reports]
        assert len({len(steps) for steps in of_ranks}) == 1, (
            f"equal steps: {name}"
        )
        return joined(of_ranks)

    for source, folder, stop in cases:
        name, loader = f"{source} {folder}", make(source, local, 0)
        alone = [steps_of(loader) for _ in range(2)]
        for epoch in range(2):
            assert sorted(ids_of(alone[epoch])) == list(range(TOTAL)), (
                f"each sample exactly once: {name}"
            )
        assert alone[0] != alone[1], "two epochs differ"
        assert of_run(name) == alone[0], name
        if stop:
            assert of_run(f"{name} later") == alone[1], name
            assert of_run(f"{name} resumed") == alone[0], name
