import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.files.huggingface import HuggingFaceSource
from paddle_shard.data.stages.stage import Opening
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataReadError,
    MissingDependencyError,
    SplitError,
)
from tests.data.source_laws import check_laws, steps_of
from tests.helpers import SeededBy
from tests.optional import needs

datasets = needs("datasets")


def streamed(length=24, num_shards=4):
    return datasets.Dataset.from_dict(
        {"id": list(range(length))}
    ).to_iterable_dataset(num_shards=num_shards)


def read_all(source, num_parts=1, **what):
    opening = Opening(
        parts=tuple(range(num_parts)), num_parts=num_parts, **what
    )
    return [
        [sample["id"] for sample in items] for items in source.open(opening)
    ]


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        ("huggingface", 2),
        ("huggingface shuffled", 0),
        ("huggingface indexed", 2),
        *(
            pytest.param(source, workers, marks=pytest.mark.long)
            for source, workers in (
                ("huggingface", 0),
                ("huggingface shuffled", 2),
                ("huggingface indexed", 0),
            )
        ),
    ],
)
def test_huggingface_data_meets_the_laws(source, workers):
    check_laws(source, None, workers, stops=[1 if workers else 4])


@pytest.mark.parametrize("num_parts", [1, 3, 4])
@pytest.mark.parametrize("shuffled", [False, True])
def test_huggingface_parts_are_every_sample_once(num_parts, shuffled):
    dataset = (
        streamed().shuffle(seed=1, buffer_size=3) if shuffled else streamed()
    )
    source = HuggingFaceSource(dataset)
    epochs = [read_all(source, num_parts, epoch=epoch) for epoch in range(3)]

    assert all(
        sorted(i for part in epoch for i in part) == list(range(24))
        for epoch in epochs
    )
    assert read_all(source, num_parts, epoch=1, skip=2) == [
        part[2:] for part in epochs[1]
    ]
    assert len({str(epoch) for epoch in epochs}) == 3 or not shuffled
    assert dataset.epoch == 0, "the user's data set is not changed"


def test_huggingface_data_is_read_in_batches_or_one_by_one():
    class OneByOne(paddle.io.Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            return self.dataset[index]

    dataset = datasets.Dataset.from_dict(
        {"id": list(range(20)), "x": [[i, i] for i in range(20)]}
    )
    dataset = dataset.with_format("numpy")

    def batches(dataset, workers):
        given = paddle.io.DataLoader(dataset, batch_size=8, num_workers=workers)
        loader = paddle_shard.shard_dataloader(
            given, dist.ProcessMesh([0]), shard_dims=0, shuffle=True
        )
        return [
            {k: v._local_value().numpy().tolist() for k, v in batch.items()}
            for batch in loader
        ]

    found = batches(dataset, 0)
    assert sorted(i for batch in found for i in batch["id"]) == sorted(
        [*range(20)]
    )
    assert all(
        x == [i, i]
        for batch in found
        for i, x in zip(batch["id"], batch["x"], strict=True)
    )
    assert batches(dataset, 2) == batches(OneByOne(dataset), 0) == found


def test_huggingface_format_makes_arrays_of_lists():
    dataset = (
        datasets.Dataset.from_dict({"x": [[1, 2], [3, 4]]})
        .to_iterable_dataset()
        .with_format("numpy")
    )

    [items] = HuggingFaceSource(dataset).open(Opening(parts=(0,), num_parts=1))

    assert [item["x"].tolist() for item in items] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("streams", [False, True])
def test_huggingface_column_that_no_tensor_holds_is_named(streams):
    images = needs("PIL.Image")
    rows = {
        "id": range(8),
        "image": [images.fromarray(np.zeros((2, 2), np.uint8))] * 8,
        "labels": [*"abcdefgh"],
    }
    dataset = datasets.Dataset.from_dict(rows).cast_column(
        "image", datasets.Image()
    )
    given = (
        Stream.huggingface(dataset.to_iterable_dataset())
        if streams
        else dataset
    )
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(given, batch_size=4), dist.ProcessMesh([0])
    )

    with pytest.raises(
        DataReadError,
        match=r"cannot stack PngImageFile at field \['image'\].*leave the field out",
    ):
        next(iter(loader))
    texts = paddle.io.DataLoader(dataset.remove_columns("image"), batch_size=4)
    (first, _) = paddle_shard.shard_dataloader(texts, dist.ProcessMesh([0]))
    assert first["labels"] == ["a", "b", "c", "d"]


def test_huggingface_map_draws_by_part_and_sample_alone():
    source = HuggingFaceSource(
        streamed().map(lambda sample: {"noise": np.random.rand()})
    )

    def read(seed):
        opening = Opening(
            parts=(0, 1),
            num_parts=2,
            seed=seed,
            rng=SeededBy(lambda s, n=0: np.random.seed((s + n) % 2**32)),
        )
        return [
            [sample["noise"] for sample in items]
            for items in source.open(opening)
        ]

    assert read(1) == read(1) != read(2)


def test_fewer_shards_than_parts_are_refused_with_what_works():
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    stream = Stream.huggingface(streamed(num_shards=3))
    loader = paddle.io.DataLoader(stream, batch_size=8)

    with pytest.raises(
        ArgumentError,
        match=r"in_parts\(4\): 3 shards .* at most 3; .*reshard.*; .*Stream\.of",
    ):
        cut = paddle.io.DataLoader(stream.in_parts(4), batch_size=8)
        for _ in paddle_shard.shard_dataloader(cut, mesh, shard_dims="dp"):
            pass
    fitting = paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp")
    assert fitting.state_dict()["fingerprint"]["num_parts"] == 2


def test_huggingface_stream_of_one_shard_may_stay_whole():
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    stream = Stream.of(streamed(num_shards=1)).map(
        lambda sample: (sample["id"], 0.0)
    )
    loader = paddle.io.DataLoader(
        stream.in_parts(4), batch_size=8, num_workers=2
    )

    steps = steps_of(
        paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp")
    )

    assert [[i for i, _ in step] for step in steps] == [
        list(range(0, 8)),
        list(range(8, 16)),
        list(range(16, 24)),
    ]


def test_huggingface_data_that_would_lose_samples_is_rejected():
    with pytest.raises(
        SplitError, match=r"split_dataset_by_node \(rank 1 of 2\)"
    ):
        HuggingFaceSource(
            needs("datasets.distributed").split_dataset_by_node(
                streamed(), rank=1, world_size=2
            )
        )
    with pytest.raises(ArgumentError, match="shuffled without a seed"):
        HuggingFaceSource(
            streamed().shuffle(buffer_size=3).map(lambda sample: sample)
        )
    with pytest.raises(
        ArgumentTypeError,
        match=r"got Dataset\. .*give data with an index to paddle\.io",
    ):
        HuggingFaceSource(datasets.Dataset.from_dict({"id": [1]}))
    with pytest.raises(
        ArgumentTypeError, match="got IterableDatasetDict. Choose a split"
    ):
        HuggingFaceSource(datasets.IterableDatasetDict({"train": streamed()}))
    begun = streamed()
    begun.load_state_dict(begun.state_dict())
    with pytest.raises(ArgumentError, match="has a state"):
        HuggingFaceSource(begun)


def test_huggingface_shuffle_seed_is_in_the_fingerprint():
    prints = [
        HuggingFaceSource(streamed().shuffle(seed=seed)).fingerprint()
        for seed in (1, 1, 2)
    ]

    assert prints[0] == prints[1] != prints[2]


def test_huggingface_names_the_extra_it_needs(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)

    with pytest.raises(
        MissingDependencyError, match=r"paddle_shard\[huggingface\]"
    ):
        HuggingFaceSource(None)


def test_huggingface_shards_must_suit_the_ranks(caplog):
    def made(num_shards, size, ranks):
        stream = Stream.huggingface(streamed(45, num_shards)).map(
            lambda sample: sample["id"]
        )
        mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["dp"])
        return paddle_shard.shard_dataloader(
            paddle.io.DataLoader(stream, batch_size=size), mesh, shard_dims="dp"
        )

    with pytest.raises(
        ArgumentError, match=r"in_parts\(1\): .* of the 2 data ranks\."
    ):
        made(1, 8, 2)
    with pytest.raises(
        ArgumentError,
        match=r"in_parts\(3\): .* of the 2 data ranks\. .* work: 2, 6\.",
    ):
        made(4, 6, 2)


def test_huggingface_padding_names_shards_as_its_cause(caplog):
    def rows(sizes):
        for size in sizes:
            yield from ({"id": number} for number in range(size))

    dataset = datasets.IterableDataset.from_generator(
        rows, gen_kwargs={"sizes": [40, 3, 5, 9]}
    )
    given = paddle.io.DataLoader(
        Stream.huggingface(dataset).in_parts(4), batch_size=8
    )
    loader = paddle_shard.shard_dataloader(
        given, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp"
    )
    for _ in loader:
        pass

    [said] = [
        record.getMessage()
        for record in caplog.records
        if "rows were padding" in record.getMessage()
    ]
    assert "many shards of one size" in said
