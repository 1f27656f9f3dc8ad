"""Every setting on which an order may depend, changed in turn between a saved state and the run that loads it.

What is left of the run is the same then, or the state is refused: at once, or at the first batch.
"""

import functools
import inspect
import json
import re
from importlib.util import find_spec

import numpy as np
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Blocks, BucketBatchSampler, Mixture, Packed, Stream
from paddle_shard.data.files.shards import FileOptions
from paddle_shard.errors import PaddleShardError
from tests.data.source_laws import (
    csv_bytes,
    jsonl_bytes,
    parquet_bytes,
    pieces,
    tar_bytes,
    text_bytes,
)
from tests.helpers import ONE, Made, sharded

LENGTHS = np.random.default_rng(0).integers(1, 20, 46)
DOCUMENTS = [np.arange(100 * i, 100 * i + n) for i, n in enumerate(LENGTHS)]


def index(
    *,
    length=46,
    batch_size=4,
    shuffle=True,
    workers=0,
    order=None,
    sizes=None,
    **options,
):
    options |= {"shuffle": order} if order else {}
    options |= {"batch_size": sizes} if sizes else {}
    return sharded(
        DataLoader(
            Made(length=length),
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=workers,
        ),
        ONE,
        **options,
    )


def blocks(*, size=8, window=2):
    return index(order=Blocks(size=size, window=window))


def buckets(*, lengths=LENGTHS, batch_size=4, **settings):
    if "max_tokens" in settings:
        batch_size = None
    sampler = BucketBatchSampler(
        lengths, batch_size, **{"window": 16, **settings}
    )
    return sharded(
        DataLoader(Made(length=len(lengths)), batch_sampler=sampler), ONE
    )


def packed(*, length=16, documents=DOCUMENTS, **settings):
    rows = Packed(documents, length, **settings)
    return sharded(DataLoader(rows, batch_size=2, shuffle=True), ONE)


def mixture(
    *,
    weights=(1, 2),
    names=("a", "b"),
    lengths=(30, 40),
    schedule=None,
    **settings,
):
    sources = {
        name: Made(lambda i, at=at: np.array(1000 * at + i), n)
        for at, (name, n) in enumerate(zip(names, lengths, strict=True))
    }
    given = dict(zip(names, weights, strict=True))
    given = (
        given
        if schedule is None
        else [
            (0, given),
            (schedule, dict(zip(names, weights[::-1], strict=True))),
        ]
    )
    data = Mixture(sources, given, **settings)
    return sharded(DataLoader(data, batch_size=4), ONE)


def stream(
    *,
    length=46,
    parts=2,
    window=8,
    batch_size=4,
    even=False,
    repeat=None,
    groups=0,
    mapped=0,
    **options,
):
    found = (
        Stream.of(range(length)).shuffle(window)
        if window
        else Stream.of(range(length))
    )
    found = found.filter(lambda i: i % 5) if even else found
    found = found.map(lambda i: i) if mapped else found
    found = found.batch(groups).unbatch() if groups else found
    found = found.repeat(repeat) if repeat else found
    return sharded(
        DataLoader(
            found.sharding_filter().in_parts(parts), batch_size=batch_size
        ),
        ONE,
        **options,
    )


def packed_stream(*, length=16, **settings):
    found = (
        Stream.of([{"input_ids": one} for one in DOCUMENTS])
        .sharding_filter()
        .in_parts(2)
    )
    return sharded(
        DataLoader(
            found.pack(length, **{"window": 8, **settings}), batch_size=2
        ),
        ONE,
    )


def stream_mixture(
    *, weights=(1, 2), names=("a", "b"), lengths=(30, 40), **settings
):
    sources = {
        n: Stream.of(range(1000 * at, 1000 * at + size))
        for at, (n, size) in enumerate(zip(names, lengths, strict=True))
    }
    found = Stream.mixture(
        sources, dict(zip(names, weights, strict=True)), **settings
    )
    return sharded(
        DataLoader(found.sharding_filter().in_parts(2), batch_size=4), ONE
    )


CONTENTS = {
    "lines": text_bytes,
    "csv": csv_bytes,
    "jsonl": jsonl_bytes,
    "webdataset": tar_bytes,
    "parquet": parquet_bytes,
}
FILES = {}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("files")
    needs = {"webdataset": "webdataset", "parquet": "pyarrow"}
    for kind, made in CONTENTS.items():
        if find_spec(needs.get(kind, "os")):
            FILES[kind] = [
                found / f"{number}.{kind}" for number in range(len(pieces()))
            ]
            for path, ids in zip(FILES[kind], pieces(), strict=True):
                path.write_bytes(made(ids))


def id_of(sample):
    """The id of a row, a line, or a sample of a tar; -1 for the names of the columns."""
    if isinstance(sample, dict):
        sample = sample["txt"] if "txt" in sample else sample["id"]
    elif isinstance(sample, list):
        sample = sample[0] if sample[0] != "id" else -1
    return int(sample)


def files(kind, *, order=1, **settings):
    found = getattr(Stream, kind)(
        [*map(str, FILES[kind][::order])], **settings
    ).map(id_of)
    return sharded(
        DataLoader(found.in_parts(2), batch_size=4), ONE, num_batches=20
    )


def lines(**settings):
    return files("lines", **settings)


def csv(**settings):
    return files("csv", **settings)


def jsonl(**settings):
    return files("jsonl", **settings)


def webdataset(**settings):
    return files("webdataset", **settings)


def parquet(**settings):
    return files("parquet", **settings)


def costs(ids):
    return [int(LENGTHS[i]) for i in ids]


CHANGES = {
    index: [
        {"seed": 1},
        {"shuffle": False},
        {"order": Blocks(size=8)},
        {"length": 47},
        {"batch_size": 8},
        {"workers": 2},
        {"tail": "drop"},
        {"tail": "fill"},
        {"prefetch": 3},
        {"verify": None},
        {"verify": 2},
        {"batch_size": 6},
        {"sizes": [(0, 4), (20, 8)]},
        {"balance": costs},
        {"on_error": "skip"},
        {"skip_steps": [(2, 4)]},
        {"on_lost": "exit"},
        {"replicas": "leader"},
        {"timeout": 60.0},
    ],
    blocks: [{"size": 4}, {"window": 3}],
    buckets: [
        {"batch_size": 6},
        {"max_tokens": 60},
        {"window": 32},
        {"multiple_of": 2},
        {"seed": 1},
        {"drop_last": True},
        {"lengths": LENGTHS[::-1].copy()},
        {"lengths": LENGTHS[:-1].copy()},
    ],
    packed: [
        {"length": 32},
        {"long": "drop"},
        {"window": 8},
        {"max_pieces": 2},
        {"labels": "labels"},
        {"pad_values": {"input_ids": 7}},
        {"ignore_index": -1},
        {"documents": DOCUMENTS[::-1]},
        {"documents": DOCUMENTS[:-1]},
        {"documents": [*DOCUMENTS[1:], DOCUMENTS[0]]},
    ],
    mixture: [
        {"weights": (2, 1)},
        {"names": ("a", "c")},
        {"names": ("b", "a")},
        {"lengths": (31, 40)},
        {"num_samples": 50},
        {"stop": "all"},
        {"schedule": 20},
        {"schedule": 4},
    ],
    stream: [
        {"length": 47},
        {"parts": 4},
        {"window": 16},
        {"window": 0},
        {"batch_size": 8},
        {"even": True},
        {"repeat": 2},
        {"seed": 1},
        {"tail": "drop"},
        {"num_batches": 20},
        {"groups": 3},
        {"mapped": 1},
    ],
    packed_stream: [
        {"length": 32},
        {"window": 16},
        {"long": "drop"},
        {"labels": "labels"},
        {"ignore_index": -1},
        {"pad_values": {"input_ids": 7}},
    ],
    stream_mixture: [
        {"weights": (2, 1)},
        {"names": ("b", "a")},
        {"names": ("a", "c")},
        {"stop": "all"},
        {"lengths": (31, 40)},
    ],
    lines: [
        {"order": -1},
        {"counts": False},
        {"shuffle_shards": False},
    ],
    csv: [
        {"header": False},
        {"order": -1},
        {"counts": False},
        {"shuffle_shards": False},
    ],
    jsonl: [
        {"order": -1},
        {"counts": False},
        {"shuffle_shards": False},
    ],
    webdataset: [
        {"order": -1},
        {"index": False},
        {"shuffle_shards": False},
    ],
    parquet: [
        {"order": -1},
        {"columns": ["unused", "id"]},
        {"allow_nulls": True},
        {"shuffle_shards": False},
    ],
}


def rows_of(loader):
    """What is real in the next two epochs, in order."""
    found = []
    for _ in range(2):
        batches = iter(loader)
        for batch in batches:
            valid = batches.valid._local_value().numpy()
            if isinstance(batch, dict):  # what pads a row may be another number
                tokens, pieces = (
                    batch[key]._local_value().numpy()[valid]
                    for key in ("input_ids", "segment_ids")
                )
                found += np.where(pieces > 0, tokens, 0).tolist()
            else:
                found += batch._local_value().numpy()[valid].tolist()
    return found


@functools.cache
def stopped(made, steps):
    """The state after some steps, as JSON, and what is left of the run."""
    loader = made()
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    state = json.dumps(loader.state_dict())
    same = made()
    same.load_state_dict(json.loads(state))
    return state, rows_of(same)


@pytest.mark.parametrize(
    ("made", "change", "steps"),
    [
        (made, change, 3 + i % 2 * 4)
        for made, changes in CHANGES.items()
        for i, change in enumerate(changes)
    ],
    ids=[
        f"{made.__name__}, {name}={i}"
        for made, changes in CHANGES.items()
        for i, c in enumerate(changes)
        for name in c
    ],
)
def test_setting_that_differs_is_the_same_run_or_is_refused(
    made, change, steps
):
    if made.__name__ in CONTENTS and made.__name__ not in FILES:
        pytest.skip("a library is not installed")
    state, expected = stopped(made, steps)

    refused = None
    try:
        other = made(**change)
        other.load_state_dict(json.loads(state))
        found = rows_of(other)
    except PaddleShardError as error:
        refused = str(error)
    if refused is not None:
        assert not re.search("[0-9a-f]{16}", refused), (
            "a digest tells a user nothing"
        )
        return
    # The parts of a stream take turns in each batch, so that their samples meet in another order in larger batches.
    regrouped = made is stream and "batch_size" in change
    assert (
        (sorted(found) == sorted(expected)) if regrouped else found == expected
    )


MESHES, HELD = "the laws of meshes", "what a batch holds, not which samples"
OPTIONS = {
    "shard_dataloader": {
        "dataloader": (index, "length"),
        "meshes": MESHES,
        "input_keys": HELD,
        "shard_dims": MESHES,
        "is_dataset_splitted": "each data rank has a run of its own",
        "dense_tensor_idx": HELD,
        "local": HELD,
        "shuffle": (index, "order"),
        "seed": (index, "seed"),
        "tail": (index, "tail"),
        "batch_size": (index, "sizes"),
        "skip_steps": (index, "skip_steps"),
        "balance": (index, "balance"),
        "num_batches": (stream, "num_batches"),
        "placements": HELD,
        "pad_to": HELD,
        "verify": (index, "verify"),
        "replicas": (index, "replicas"),
        "timeout": (index, "timeout"),
        "prefetch": (index, "prefetch"),
        "readers": "tests/adapters/ray",
        "on_error": (index, "on_error"),
        "on_lost": (index, "on_lost"),
        "record": "a file that is written beside the run",
    },
    "Blocks": {"size": (blocks, "size"), "window": (blocks, "window")},
    "BucketBatchSampler": {
        name: (buckets, name)
        for name in (
            "lengths",
            "batch_size",
            "max_tokens",
            "window",
            "multiple_of",
            "seed",
            "drop_last",
        )
    },
    "Mixture": {
        "sources": (mixture, "lengths"),
        "weights": (mixture, "schedule"),
        "num_samples": (mixture, "num_samples"),
        "stop": (mixture, "stop"),
    },
    "Packed": {
        **{
            name: (packed, name)
            for name in (
                "documents",
                "length",
                "long",
                "labels",
                "pad_values",
                "window",
            )
        },
        "max_pieces": (packed, "max_pieces"),
        "lengths": "that of the documents",
        "key": HELD,
        "ignore_index": (packed, "ignore_index"),
    },
    "ArrayDataset": {
        "arrays": (index, "length"),
        "block_size": (blocks, "size"),
        "named": HELD,
    },
    "ExternalLoader": dict.fromkeys(
        ("build", "name", "save", "repeatable"),
        "the library's own: tests/adapters",
    ),
    "Threads": {"num": "it changes no batch"},
    "SharedList": {"items": "the user's data set holds it"},
    "RayReaders": dict.fromkeys(("num", "runtime_env"), "tests/adapters/ray"),
    "Stream.of": {
        "iterable": (stream, "length"),
        "splits_itself": "the data set's own parts",
    },
    "Stream.mixture": {
        "sources": (stream_mixture, "names"),
        "weights": (stream_mixture, "weights"),
        "stop": (stream_mixture, "stop"),
    },
    "Stream.lines": {
        "paths": (lines, "order"),
        **{name: (lines, name) for name in ("counts", "shuffle_shards")},
        "cache_dir": "where files are kept",
    },
    "Stream.csv": {
        "paths": (csv, "order"),
        "header": (csv, "header"),
        "delimiter": "how a row is read, as a function of map()",
        **{name: (csv, name) for name in ("counts", "shuffle_shards")},
        "cache_dir": "where files are kept",
    },
    "Stream.jsonl": {
        "paths": (jsonl, "order"),
        **{name: (jsonl, name) for name in ("counts", "shuffle_shards")},
        "cache_dir": "where files are kept",
    },
    "Stream.webdataset": {
        "urls": (webdataset, "order"),
        **{name: (webdataset, name) for name in ("shuffle_shards", "index")},
        "cache_dir": "where files are kept",
    },
    "Stream.parquet": {
        "paths": (parquet, "order"),
        **{
            name: (parquet, name)
            for name in ("columns", "allow_nulls", "shuffle_shards")
        },
        "cache_dir": "where files are kept",
    },
    "Stream.huggingface": {"dataset": "tests/data/test_huggingface.py"},
    "Stream.decode": {"handlers": HELD, "only": HELD},
    "Stream.map": {"function": (stream, "mapped")},
    "Stream.filter": {"predicate": (stream, "even")},
    "Stream.shuffle": {"window": (stream, "window")},
    "Stream.batch": {"size": (stream, "groups")},
    "Stream.pack": {
        **{
            name: (packed_stream, name)
            for name in (
                "length",
                "window",
                "long",
                "labels",
                "ignore_index",
                "pad_values",
            )
        },
        "key": HELD,
    },
    "Stream.repeat": {"times": (stream, "repeat")},
    "Stream.in_parts": {"num_parts": (stream, "parts")},
}
"""Each option of what a user builds a run with: where it is changed above, or why it need not be."""
BUILDS_NO_RUN = {
    "MeshLayout",
    "ShardPlan",
    "Balanced",
    "ShardDataloader",
    "ShardIterator",
    "ShardOptions",
    "Stream",
}
BUILDS_NO_RUN |= {
    "Checkpoints",
    "TrainerCallback",
    "gather_valid",
    "patch_paddle",
    "state_from_tensor",
    "state_to_tensor",
    "errors",
}


def options_of(one):
    names = set(inspect.signature(one).parameters) - {"self", "cls"}
    if "options" in names:
        names = names - {"options"} | set(FileOptions.__annotations__)
    return names


def test_settings_of_this_test_are_complete():
    """A new option is tried above, or it says why its change cannot be another run."""
    public = {
        name: getattr(paddle_shard, name)
        for name in set(paddle_shard.__all__) - BUILDS_NO_RUN - {"__version__"}
    }
    public |= {
        f"Stream.{name}": one
        for name in vars(Stream)
        if not name.startswith("_")
        and callable(one := getattr(Stream, name))
        and options_of(one)
    }

    assert {name: options_of(one) for name, one in public.items()} == {
        name: set(of) for name, of in OPTIONS.items()
    }
    tried = {
        (made, name)
        for made, changes in CHANGES.items()
        for change in changes
        for name in change
    }
    asked = {
        where
        for of in OPTIONS.values()
        for where in of.values()
        if not isinstance(where, str)
    }
    assert asked <= tried
