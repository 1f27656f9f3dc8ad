"""What `help()` and `repr()` say of the public names."""

import dataclasses
import inspect

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.files.counts import file_source
from paddle_shard.data.files.parquet import parquet_source
from paddle_shard.data.files.shards import FileOptions
from paddle_shard.errors import PaddleShardError

ONE = dist.ProcessMesh([0], dim_names=["dp"])
CLASSES = [
    value
    for name in paddle_shard.__all__
    if isinstance(value := getattr(paddle_shard, name), type)
]


def methods():
    seen = set()
    for class_ in CLASSES:
        for base in class_.__mro__:
            if not base.__module__.startswith("paddle_shard"):
                continue
            for name, value in vars(base).items():
                function = (
                    value.__func__
                    if isinstance(value, classmethod | staticmethod)
                    else value
                )
                if (
                    inspect.isfunction(function)
                    and not name.startswith("_")
                    and (class_, name) not in seen
                ):
                    seen.add((class_, name))
                    yield f"{class_.__name__}.{name}", function


METHODS = dict(methods())


@pytest.mark.parametrize("method", list(METHODS.values()), ids=list(METHODS))
def test_help_of_public_methods_names_their_arguments(method):
    text = inspect.getdoc(method) or ""
    takes = [
        name
        for name in inspect.signature(method).parameters
        if name not in ("self", "cls", "args", "state")
    ]

    assert text
    if takes and not method.__name__.startswith("on_"):
        assert "Args:" in text, takes
        assert all(f"{name}:" in text for name in takes), takes


def test_help_of_a_dataclass_describes_each_field():
    for class_ in filter(dataclasses.is_dataclass, CLASSES):
        for field in dataclasses.fields(class_):
            if field.init:
                assert f"{field.name}: " in class_.__doc__, (class_, field.name)


def test_signature_of_shard_dataloader_has_types():
    parameters = inspect.signature(paddle_shard.shard_dataloader).parameters
    vague = [
        name for name in parameters if parameters[name].annotation == "Any"
    ]

    assert vague == []
    assert "ProcessMesh" in parameters["meshes"].annotation
    assert "Literal['pad'" in parameters["tail"].annotation


def test_help_of_stream_stages_has_examples():
    for name, method in METHODS.items():
        if (
            inspect.signature(method).return_annotation in ("Stream", "Self")
            and name != "Stream.unbatched"
        ):
            assert "Examples:" in method.__doc__, name


@pytest.mark.parametrize(
    "method",
    [Stream.csv, Stream.lines, Stream.jsonl, Stream.webdataset, Stream.parquet],
)
def test_file_streams_share_options_that_lines_describes(method):
    parameters = inspect.signature(method).parameters

    assert parameters["options"].annotation == "Unpack[FileOptions]"
    for option in FileOptions.__annotations__:
        assert f"`{option}`" in Stream.lines.__doc__
        assert option not in parameters
    with pytest.raises(TypeError, match="count_all"):
        method(["a"], count_all=True)


@pytest.mark.parametrize(
    ("method", "source"),
    [
        (Stream.webdataset, file_source),
        (Stream.parquet, parquet_source),
    ],
)
def test_file_streams_have_the_defaults_of_their_sources(method, source):
    of_stream, of_source = (
        dict(inspect.signature(one).parameters) for one in (method, source)
    )
    defaults = {
        name: of_source[name].default for name in FileOptions.__annotations__
    }

    assert "options" in of_stream
    assert defaults == {
        "shuffle_shards": True,
        "cache_dir": None,
    }


def test_help_of_a_stream_shows_its_public_methods_only():
    public = {name for name in dir(Stream) if not name.startswith("_")} - set(
        dir(paddle.io.IterableDataset)
    )

    assert public == {
        *(
            "of",
            "mixture",
            "csv",
            "jsonl",
            "lines",
            "parquet",
            "webdataset",
            "huggingface",
        ),
        *(
            "decode",
            "map",
            "filter",
            "shuffle",
            "batch",
            "unbatch",
            "repeat",
            "pack",
        ),
        *("sharding_filter", "in_parts"),
    }
    assert not [
        name for name in vars(Stream.of([1])) if not name.startswith("_")
    ]


def test_repr_of_public_objects_says_what_they_are(tmp_path):
    (tmp_path / "a.txt").write_text("1\n2\n")
    stream = Stream.lines(tmp_path / "a.txt").map(int).shuffle(4)
    assert repr(stream) == "Stream(ShardSource of 1 shards > Map > Shuffle)"
    assert repr(Stream.of([1]).batch(2)) == "Stream(IterableSource > Group)"
    mixed = Stream.mixture(
        {"web": stream, "code": Stream.of([1, 2])}, {"web": 3, "code": 1}
    )
    assert repr(mixed) == "Stream(Mix of web 0.75, code 0.25)"
    of_mixed = paddle_shard.shard_dataloader(
        mixed.batch(2), ONE, shard_dims="dp"
    )
    assert "Stream(Mix of web 0.75, code 0.25 > Group)" in repr(of_mixed)

    given = paddle.io.DataLoader(Numbers(), batch_size=2)
    loader = paddle_shard.shard_dataloader(given, ONE, shard_dims="dp")
    batches = iter(loader)
    next(batches)
    assert repr(loader()) == repr(loader)
    assert repr(batches) == "ShardIterator(epoch 0, step 1, open)"
    batches.close()
    assert "step 1, closed" in repr(batches)


class Numbers(paddle.io.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.array(index)


def test_test_extra_is_where_the_readme_says():
    from paddle_shard import testing
    from paddle_shard.testing.simulated import on_each_rank

    assert testing.on_each_rank is on_each_rank
    assert all(callable(getattr(testing, name)) for name in testing.__all__)


def test_errors_are_documented():
    for name, value in vars(paddle_shard.errors).items():
        if isinstance(value, type) and issubclass(value, PaddleShardError):
            assert value.__doc__, name
