"""Sources over a mock S3 server, and over HTTP by fsspec."""

import importlib
import time

import pytest

from paddle_shard import Stream
from paddle_shard.data.files import files as files_module
from paddle_shard.data.files.parquet import parquet_source
from paddle_shard.data.stages.stage import Opening
from paddle_shard.data.stream import last_stage
from paddle_shard.errors import ShardReadError
from tests.data.s3_server import BUCKET, serving_s3
from tests.data.source_laws import (
    FILE_KINDS,
    SOURCES,
    TOTAL,
    check_laws,
    files,
    make,
    names,
    steps_of,
)
from tests.optional import needs

fsspec = needs("fsspec", "s3fs", "moto", "flask", "webdataset", "pyarrow")

FOLDER = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def server():
    with (
        serving_s3(files()) as environment,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment["AWS_ENDPOINT_URL"]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The same files on disk: what a store must deliver, too."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in files().items():
        (folder / name).write_bytes(content)
    return str(folder)


# Each worker connects anew, which takes a second.
@pytest.mark.parametrize(
    "source",
    [
        "webdataset",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("lines", "parquet")
        ),
    ],
)
def test_s3_files_meet_the_laws(server, local, source):
    check_laws(source, FOLDER, 0, stops=[3], oracle=local, workers_later=0)


def test_http_files_by_fsspec_meet_the_laws(server, local):
    check_laws(
        "lines",
        f"{server}/{BUCKET}",
        0,
        stops=[3],
        oracle=local,
        workers_later=1,
    )


def test_s3_stream_leaves_workers_no_connection(server):
    class_ = fsspec.get_filesystem_class("s3")
    class_.clear_instance_cache()

    stream = Stream.parquet(names(FOLDER, "parquet"))

    assert len(list(stream)) == TOTAL
    assert not class_._cache


@pytest.mark.parametrize(
    "source",
    [
        "parquet",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("lines", "webdataset")
        ),
    ],
)
def test_s3_files_of_a_bucket_share_one_client(server, source, monkeypatch):
    made = []
    class_ = fsspec.get_filesystem_class("s3")
    connect = class_.set_session

    async def counted(self, *args, **options):
        made.append(self)
        return await connect(self, *args, **options)

    def slowly(*args, made_by=fsspec.core.url_to_fs, **options):
        # as the first one does, which imports a library: all threads that ask meanwhile wait
        time.sleep(0.05)
        return made_by(*args, **options)

    monkeypatch.setattr(class_, "set_session", counted)
    monkeypatch.setattr(fsspec.core, "url_to_fs", slowly)
    files_module._file_system.cache_clear()

    steps_of(make(source, FOLDER, 0))

    assert len({id(system) for system in made}) == 1


def test_s3_file_that_is_missing_or_replaced_is_an_error(server):
    with pytest.raises(
        ShardReadError,
        match=r"s3://bucket/nine.parquet: reading its footer failed: FileNotFoundError",
    ):
        parquet_source(f"{FOLDER}/nine.parquet")
    source = parquet_source(names(FOLDER, "parquet"))
    with fsspec.open(
        f"{FOLDER}/0.parquet", "rb", skip_instance_cache=True
    ) as file:
        content = file.read()
    system, path = fsspec.core.url_to_fs(
        f"{FOLDER}/0.parquet", skip_instance_cache=True
    )
    system.pipe_file(path, content[:60])
    try:
        with pytest.raises(
            ShardReadError,
            match=r"row group \d of s3://bucket/0.parquet: reading sample 0 failed",
        ):
            [
                list(items)
                for items in source.open(Opening(parts=(0,), num_parts=1))
            ]
    finally:
        system.pipe_file(path, content)


@pytest.mark.parametrize("kind", ["lines"])
def test_files_identity_changes_with_the_tag_of_an_s3_file(server, kind):
    ending, content_of = FILE_KINDS[kind].ending, FILE_KINDS[kind].content
    system = fsspec.filesystem("s3", skip_instance_cache=True)

    def identity(first):
        for number in range(8):
            ids = range(first + 5 * number, first + 5 * number + 5)
            system.pipe_file(
                f"{BUCKET}/anew/{number}.{ending}", content_of(ids)
            )
        return last_stage(SOURCES[kind](f"{FOLDER}/anew"))[
            0
        ].source.files_identity()

    first = identity(1000)
    assert [name for name, _, _ in first] == [
        f"{number}.{ending}" for number in range(8)
    ]
    assert all(size > 0 and tag for _, size, tag in first)
    assert identity(1000) == first, "the same content has the same tag"
    other = identity(5000)
    assert all(
        now[2] != before[2] for now, before in zip(other, first, strict=True)
    )


def test_s3_read_that_times_out_is_repeated(monkeypatch, server):
    """It looks for the text of an error that has none (2026.9.0)."""
    monkeypatch.setattr(files_module, "PAUSES", (0.01,) * 3)
    failures = iter(range(2))
    fetch = importlib.import_module("s3fs.core").S3File._fetch_range

    def times_out(self, *args):
        if next(failures, None) is not None:
            try:
                raise TimeoutError
            except TimeoutError as error:
                error.args[0]
        return fetch(self, *args)

    stream = Stream.parquet(names(FOLDER, "parquet"))
    monkeypatch.setattr(
        importlib.import_module("s3fs.core").S3File, "_fetch_range", times_out
    )
    assert len(list(stream)) == TOTAL
    assert next(failures, None) is None
