import datetime
import decimal
import io

import numpy as np
import pytest

from paddle_shard import Stream
from paddle_shard.data.files import files as files_module
from paddle_shard.data.files.parquet import parquet_source
from paddle_shard.data.stages.stage import Opening
from paddle_shard.errors import (
    ArgumentError,
    MissingDependencyError,
    ShardReadError,
)
from tests.data.http_server import serving
from tests.data.source_laws import (
    FILE_KINDS,
    LENGTHS,
    TOTAL,
    check_laws,
    files,
    names,
    pieces,
)
from tests.optional import needs

pa, pq = needs("pyarrow"), needs("pyarrow.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    for name, content in files().items():
        (folder / name).write_bytes(content)
    return folder


def opening(num_parts=1, **what):
    return Opening(parts=tuple(range(num_parts)), num_parts=num_parts, **what)


def read_all(source, num_parts=1, **what):
    return [list(items) for items in source.open(opening(num_parts, **what))]


def ids(source):
    return [row["id"] for rows in read_all(source) for row in rows]


def write(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_parquet_meets_the_laws_with_workers(folder):
    check_laws("parquet", folder, 2, stops=[1])


@pytest.mark.parametrize("num_parts", [1, 3, 8, 60])
def test_parquet_parts_are_equal_and_cut_row_groups(folder, num_parts):
    source = parquet_source(names(folder, "parquet"))
    parts = read_all(source, num_parts, epoch=2)

    assert sorted(row["id"] for part in parts for row in part) == list(
        range(TOTAL)
    )
    assert {len(part) for part in parts} <= {
        TOTAL // num_parts,
        TOTAL // num_parts + 1,
    }
    assert source.lengths(opening(num_parts)) == [len(part) for part in parts]
    assert source.num_shards == sum(-(-length // 5) for length in LENGTHS)


def test_parquet_opened_after_s_rows_drops_s(folder):
    source = parquet_source(names(folder, "parquet"), columns=["id"])
    straight = read_all(source, 3)

    for skip in range(19):
        assert read_all(source, 3, skip=skip) == [
            part[skip:] for part in straight
        ]


def test_parquet_fetches_only_the_groups_and_columns_needed(
    tmp_path, monkeypatch
):
    fetched, opened = [], []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            fetched.append(found := super().readinto(buffer))
            return found

        def read(self, size=-1):
            fetched.append(len(found := super().read(size)))
            return found

    rng = np.random.default_rng(0)
    path = write(
        tmp_path / "a.parquet",
        {
            "wide": [rng.bytes(2000) for _ in range(1000)],
            "narrow": np.arange(1000),
        },
        row_group_size=100,
        use_dictionary=False,
    )
    source = parquet_source(path, columns=["narrow"], shuffle_shards=False)

    parquet_file = pq.ParquetFile

    def counting(file, **options):
        opened.append(Counting(file.name))
        return parquet_file(opened[-1], **options)

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", counting)

    assert [row["narrow"] for row in read_all(source, skip=950)[0]] == list(
        range(950, 1000)
    )
    assert 0 < sum(fetched) < 80_000, (
        "of 2 MB: the footer, and a column of a row group"
    )
    for file in opened:
        file.close()


def test_parquet_types_become_what_is_promised(tmp_path):
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5)
    east = moment.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    square = pa.array(
        [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        pa.list_(pa.list_(pa.int16(), 2), 2),
    )
    tensor_type = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    tensor = pa.ExtensionArray.from_storage(
        tensor_type,
        pa.array([[0.0, 1, 2, 3, 4, 5]] * 2, pa.list_(pa.float32(), 6)),
    )
    path = write(
        tmp_path / "a.parquet",
        {
            "int": pa.array([1, 2], pa.uint8()),
            "float": pa.array([0.5, 1.5], pa.float32()),
            "half": pa.array(np.array([0.5, 1.5], np.float16)),
            "bool": [True, False],
            "date": pa.array([moment.date()] * 2),
            "time": pa.array([moment.time()] * 2),
            "timestamp": pa.array([moment] * 2, pa.timestamp("us")),
            "zoned": pa.array([east] * 2, pa.timestamp("us", tz="+02:00")),
            "text": ["ü", ""],
            "bytes": [b"\0", b""],
            "named": pa.array(["x", "y"]).dictionary_encode(),
            "decimal": [decimal.Decimal("1.50")] * 2,
            "list": [[1, 2, 3], []],
            "pairs": pa.array(
                [[[1, 2], [3, 4]], []], pa.list_(pa.list_(pa.int64(), 2))
            ),
            "square": square,
            "tensor": tensor,
            "texts": [["a", "b"], []],
            "ragged": [[[1.0], [2.0, 3.0]], [[]]],
            "struct": [{"a": 1, "b": {"c": [1, 2]}}, {"a": 2, "b": {"c": []}}],
            "structs": [[{"a": 1}], []],
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
        },
    )

    [[first, second]] = read_all(parquet_source(path))

    kinds = {
        name: getattr(value, "dtype", type(value))
        for name, value in first.items()
    }
    assert kinds == {
        **{
            "int": np.uint8,
            "float": np.float32,
            "half": np.float16,
            "bool": np.bool_,
            "date": np.dtype("<M8[D]"),
        },
        **{
            "time": datetime.time,
            "timestamp": np.dtype("<M8[us]"),
            "zoned": np.dtype("<M8[us]"),
            "text": str,
        },
        **{
            "bytes": bytes,
            "named": str,
            "decimal": decimal.Decimal,
            "list": np.int64,
            "pairs": np.int64,
        },
        **{
            "square": np.int16,
            "tensor": np.float32,
            "texts": list,
            "ragged": list,
            "struct": dict,
        },
        **{"structs": list, "map": list},
    }
    assert isinstance(first["int"], np.uint8)
    assert first["zoned"] == np.datetime64(moment) - np.timedelta64(2, "h")
    assert (first["list"].tolist(), second["list"].shape) == ([1, 2, 3], (0,))
    assert (first["pairs"].tolist(), second["pairs"].shape) == (
        [[1, 2], [3, 4]],
        (0, 2),
    )
    assert second["square"].tolist() == [[5, 6], [7, 8]]
    assert second["tensor"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (first["texts"], second["texts"]) == (["a", "b"], [])
    assert first["ragged"] == [[1.0], [2.0, 3.0]]
    assert first["struct"]["b"]["c"] == [1, 2]
    assert (first["structs"], first["map"]) == ([{"a": 1}], [("k", 1)])
    for value in (first["square"], first["list"]):
        value += 1  # each sample's own
    assert second["square"].tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_times_in_int96_keep_their_year(unit, tmp_path):
    """Spark writes them; in nanoseconds, the year 9999 would be 1816."""
    days = ["0001-01-01", "1066-10-14", "2026-11-28", "9999-12-31"]
    times = pa.array(np.array(days, "M8[s]"), pa.timestamp(unit))
    columns = {
        "time": times,
        "times": pa.array(
            [[time] for time in times], pa.list_(pa.timestamp(unit))
        ),
    }
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table(columns), path, use_deprecated_int96_timestamps=True
    )

    rows = list(Stream.parquet(str(path), shuffle_shards=False))

    assert [str(row["time"])[:10] for row in rows] == days
    assert [str(row["times"][0])[:10] for row in rows] == days


def test_columns_come_in_the_order_that_is_asked_for(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": [1], "b": [2], "c": [3]})

    assert [
        list(row)
        for row in read_all(parquet_source(path, columns=["c", "a"]))[0]
    ] == [["c", "a"]]


def test_parquet_null_is_an_error_or_none_if_allowed(tmp_path):
    columns = {
        "id": range(20),
        "age": [None if i in (13, 17) else i for i in range(20)],
        "place": [
            None if i == 12 else {"x": None if i == 15 else i}
            for i in range(20)
        ],
    }
    path = write(
        tmp_path / "a.parquet",
        {**columns, "id": list(range(20))},
        row_group_size=10,
    )

    with pytest.raises(
        ShardReadError,
        match="row group 1 of .*: column 'age': a value is null.*allow_nulls",
    ):
        read_all(parquet_source(path, columns=["id", "age"]))
    with pytest.raises(ShardReadError, match="column 'place': a value is null"):
        read_all(
            parquet_source(path, columns=["place"], shuffle_shards=False),
            skip=11,
        )
    assert len(read_all(parquet_source(path, columns=["id"]))[0]) == 20
    [rows] = read_all(
        parquet_source(path, allow_nulls=True, shuffle_shards=False)
    )
    assert [row["age"] for row in rows] == columns["age"]
    assert [row["place"] for row in rows] == columns["place"]
    assert isinstance(rows[0]["age"], np.int64)


@pytest.mark.parametrize(
    "kind", ["list_", "large_list", "list_view", "large_list_view"]
)
def test_parquet_lists_of_any_kind_are_arrays(kind, tmp_path):
    if not hasattr(pa, kind):
        pytest.skip("this pyarrow has no such lists")
    column = pa.array([[1, 2], [], [3]], getattr(pa, kind)(pa.int64()))
    path = write(tmp_path / "a.parquet", {"list": column})

    [rows] = read_all(parquet_source(path))
    assert [row["list"].tolist() for row in rows] == [[1, 2], [], [3]]


def test_parquet_null_inside_a_list_is_an_error(tmp_path):
    path = write(tmp_path / "a.parquet", {"list": [[1], [], None, [2, None]]})

    with pytest.raises(
        ShardReadError,
        match=r"column 'list': a list has a null inside.*\(columns=\)\.$",
    ):
        read_all(parquet_source(path, allow_nulls=True))


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (["id", "Age"], "a.parquet has .*'age': .* to read are .*'Age': None"),
        ("id", "to read are {'i': None, 'd': None}"),
        (None, "b.parquet has the columns {'id': 'int64'}, .* 'age': 'int64'}"),
        (
            ["id"],
            "c.parquet has the columns {'id': 'string'}, .* {'id': 'int64'}",
        ),
    ],
)
def test_columns_that_are_not_in_all_files_alike_are_refused(
    columns, match, tmp_path
):
    first = write(tmp_path / "a.parquet", {"id": [1], "age": [1]})
    second = write(tmp_path / "b.parquet", {"id": [1]})
    third = write(tmp_path / "c.parquet", {"id": ["1"]})

    with pytest.raises(ArgumentError, match=match):
        parquet_source(
            [first, third] if columns == ["id"] else [first, second],
            columns=columns,
        )


def test_arguments_that_cannot_serve_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"id": [1]})

    with pytest.raises(ArgumentError, match="more than once"):
        parquet_source([path, path])
    with pytest.raises(ArgumentError, match="at least one file"):
        parquet_source([])
    with pytest.raises(
        ShardReadError,
        match="missing.parquet: reading its footer failed: FileNotFoundError",
    ):
        parquet_source(tmp_path / "missing.parquet")


def test_parquet_file_that_changed_or_is_damaged_is_an_error(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        {"id": list(range(50))},
        compression="none",
        use_dictionary=False,
    )
    source = parquet_source(path)
    write(path, {"id": list(range(40))})
    with pytest.raises(
        ShardReadError,
        match="row group 0 of .*a.parquet.* changed since its footer was read",
    ):
        read_all(source)
    content = write(path, {"id": list(range(50))}).read_bytes()
    source = parquet_source(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        ShardReadError, match="row group 0 of .*a.parquet: reading"
    ):
        read_all(source)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(files_module, "PAUSES", (0.01,) * 3)
    monkeypatch.setattr(files_module, "TIMEOUT", 0.5)


def contents():
    return {
        f"{number}.parquet": content
        for number, content in enumerate(
            map(FILE_KINDS["parquet"].content, pieces())
        )
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"statuses": [503] * 3},
        {"drops": [100, 1 << 20, 300]},
        {"statuses": [200, 500, 429]},
        {"stalls": [100, 300]},
    ],
)
def test_parquet_asks_again_for_what_a_server_fails_to_send(quick, bad):
    needs("aiohttp")
    with serving(contents()) as server:
        urls = [f"{server.url}/{name}" for name in server.files]
        alone = ids(parquet_source(urls, columns=["id"]))
        server.statuses += bad.get("statuses", [])
        server.drops += bad.get("drops", [])
        server.stalls += bad.get("stalls", [])

        source = parquet_source(urls, columns=["id"])

        assert ids(source) == alone
        assert sorted(alone) == sorted(i for piece in pieces() for i in piece)
        assert not server.statuses
        assert not server.drops + server.stalls
        server.statuses += bad.get("statuses", [])
        server.drops += bad.get("drops", [])
        server.stalls += bad.get("stalls", [])
        assert ids(source) == alone, "not only where footers are read"


def test_parquet_gives_up_on_a_server_that_goes_on_to_fail(
    quick,
):
    needs("aiohttp")
    with serving(contents()) as server:
        with pytest.raises(
            ShardReadError,
            match="no.parquet: reading its footer failed: FileNotFoundError",
        ):
            parquet_source(f"{server.url}/no.parquet")
        assert len(server.asked) == 1, "HEAD is not noted"
        server.statuses += [503] * 100
        with pytest.raises(
            ShardReadError,
            match=r"0.parquet: reading its footer failed: .*given up after 3 retries.*503",
        ):
            parquet_source(f"{server.url}/0.parquet")


def test_parquet_file_that_changes_at_its_server_is_an_error():
    needs("aiohttp")
    with serving(contents()) as server:
        urls = [f"{server.url}/{name}" for name in server.files]
        source = parquet_source(urls, columns=["id"])
        server.files["0.parquet"] = FILE_KINDS["parquet"].content(
            [i + 1000 for i in pieces()[0]]
        )
        with pytest.raises(
            ShardReadError,
            match=r"row group . of .*0.parquet.* changed since its footer was read",
        ):
            read_all(source)


def test_parquet_names_the_extra_it_needs(tmp_path, monkeypatch):
    import sys

    path = write(tmp_path / "a.parquet", {"id": [1]})
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # which another test has used
    monkeypatch.delitem(needs("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(
        MissingDependencyError, match=r"s3fs.*paddle_shard\[sources\]"
    ):
        parquet_source("s3://another-bucket/a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        MissingDependencyError, match=r"paddle_shard\[parquet\]"
    ):
        parquet_source(path)
