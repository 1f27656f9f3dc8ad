"""Lines for those who come from WebDataset."""

import gc
import io
import tarfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard import Stream
from paddle_shard.errors import DataReadError
from paddle_shard.testing.simulated import on_each_rank
from tests.data.http_server import serving
from tests.docs.migration import IDS, case, cut, flat, real, steps
from tests.docs.migration.claims import epochs_differ, resumes
from tests.helpers import DP2, ONE, local, sharded

WEBDATASET = "From WebDataset"
URLS = "{000..002}.tar"


def tars():
    """Three shards of eight samples, written to where the test runs: 0.txt and 0.cls of the sample 0, and so on."""
    pytest.importorskip("webdataset")  # which reads them, here as there
    for shard, ids in enumerate(cut(IDS)):
        with tarfile.open(f"{shard:03d}.tar", "w") as tar:
            for i in ids:
                for name, number in (("txt", i), ("cls", i % 4)):
                    content = str(number).encode()
                    member = tarfile.TarInfo(f"{i:06d}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return URLS


def id_of(sample):
    return np.array(int(sample["txt"]))


def theirs(old, **names):
    """What the other library makes of the left side: its samples. `dataset` there reads the shards."""
    wds = pytest.importorskip("webdataset")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it leaves files open
        dataset = wds.WebDataset(URLS, shardshuffle=False)
        found = list(old(wds=wds, urls=URLS, dataset=dataset, **names))
        del dataset
        gc.collect()
    return found


def of_tars(**how):
    return Stream.webdataset(tars(), **how).map(id_of)


@case(
    WEBDATASET,
    "wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=100)",
)
def each_once(new, old):
    stream = new(urls=tars()).map(id_of)
    epochs_differ(lambda: DataLoader(stream, batch_size=8))
    assert sorted(int(id_of(sample)) for sample in theirs(old)) == IDS


@case(WEBDATASET, "wds.WebDataset(urls, shardshuffle=False)")
def order_of_the_list(new, old):
    stream = new(urls=tars())
    assert [sample["__key__"] for sample in stream] == [
        sample["__key__"] for sample in theirs(old)
    ]
    given = DataLoader(stream.in_parts(1).map(id_of), batch_size=8)
    loader = sharded(given, ONE)
    assert (
        [local(batch) for batch in loader]
        == [local(batch) for batch in loader]
        == cut(IDS)
    )


@case(WEBDATASET, "wds.WebDataset(urls, resampled=True).with_epoch(n)")
def steps_of_equal_number(new, old):
    given = DataLoader(new(urls=tars()).map(id_of), batch_size=8)
    found = on_each_rank(
        (0, 1), lambda: real(sharded(given, **new(1)), epochs=2)
    )
    assert all(len(batches) == 2 * 5 for batches in found.values())
    assert all(
        len(batch) == 4 for batches in found.values() for batch in batches
    )
    assert set(Counter(flat(found[0] + found[1])).values()) <= {1, 2, 3, 4, 5}
    assert len(theirs(old, n=10)) == 10


@case(WEBDATASET, "dataset.shuffle(1000)")
def windows(new, old):
    stream = new(stream=of_tars())
    epochs_differ(lambda: DataLoader(stream, batch_size=8))
    alone = steps(lambda: sharded(DataLoader(stream, batch_size=8)))
    assert (
        steps(lambda: sharded(DataLoader(stream, batch_size=8, num_workers=2)))
        == alone
    )
    assert (
        steps(lambda: sharded(DataLoader(stream, batch_size=8), ONE), (0,))
        == alone
    )


@case(WEBDATASET, 'dataset.decode("rgb8")')
def their_decoders(new, old):
    autodecode = pytest.importorskip("webdataset.autodecode")
    stream = new(
        stream=Stream.webdataset(tars(), shuffle_shards=False),
        Decoder=autodecode.Decoder,
        imagehandler=autodecode.imagehandler,
    )
    for ours, other in zip(stream, theirs(old), strict=True):
        assert {key: ours[key] for key in ("txt", "cls")} == {
            key: other[key] for key in ("txt", "cls")
        }
        assert isinstance(ours["cls"], int)


@case(WEBDATASET, 'dataset.to_tuple("txt", "cls")')
def their_tuples(new, old):
    stream = new(stream=Stream.webdataset(tars(), shuffle_shards=False))
    assert list(stream) == theirs(old)


@case(WEBDATASET, "dataset.select(keep)")
def what_is_kept(new, old):
    def keep(sample):
        return int(sample["txt"]) % 3 == 0

    kept = [
        sample["__key__"]
        for sample in new(
            stream=Stream.webdataset(tars(), shuffle_shards=False), keep=keep
        )
    ]
    assert kept == [sample["__key__"] for sample in theirs(old, keep=keep)]
    assert len(kept) == 8


@case(
    WEBDATASET,
    "wds.WebLoader(dataset.batched(b), batch_size=None, num_workers=2)",
)
def global_batches(new, old):
    stream = of_tars()
    found = steps(lambda: sharded(new(stream=stream)))
    assert [len(batch) for batch in found] == [8, 8, 8]
    assert found == steps(lambda: sharded(DataLoader(stream, batch_size=8)))


def fails_at_5(sample):
    if sample["txt"] == b"5":
        raise ValueError("cannot be mapped")
    return id_of(sample)


@case(WEBDATASET, "handler=wds.warn_and_continue")
def bad_samples(new, old):
    stream = Stream.webdataset(tars(), index=False).in_parts(1).map(fails_at_5)
    given = DataLoader(stream, batch_size=8)
    found = real(sharded(given, ONE, **new()))
    assert sorted(flat(found)) == [i for i in IDS if i != 5]
    assert sorted(map(len, found)) == [7, 8, 8]
    Path("001.tar").write_bytes(Path("001.tar").read_bytes()[:3000])
    with pytest.raises(DataReadError, match="001.tar"):
        real(sharded(given, ONE, **new()))


@case(WEBDATASET, "wds.RandomMix([web, code], [0.75, 0.25])")
def exact_shares(new, old):
    web, code = Stream.of(range(100)), Stream.of(range(1000, 1050))
    loader = sharded(
        DataLoader(new(web=web, code=code).in_parts(1), batch_size=8), ONE
    )
    rows = flat(real(loader))
    for end in range(1, 101):
        assert abs(
            sum(row >= 1000 for row in rows[:end]) - end / 4
        ) <= 1 - 1 / (2 * 2 - 2)
    assert set(theirs(old, web=[1], code=[2])) <= {1, 2}


@case(WEBDATASET, 'wds.WebDataset(urls, cache_dir="cache")')
def one_copy(new, old):
    tars()
    names = [f"{shard:03d}.tar" for shard in range(3)]
    with serving({name: Path(name).read_bytes() for name in names}) as server:
        stream = new(urls=f"{server.url}/{URLS}").map(id_of)
        found = on_each_rank(
            (0, 1),
            lambda: flat(
                real(sharded(DataLoader(stream.in_parts(2), batch_size=8)), 2)
            ),
        )
        assert sorted(found[0] + found[1]) == sorted(IDS * 2)
        assert Counter(name for name, _ in server.asked) == dict.fromkeys(
            names, 1
        )


@case(WEBDATASET, "a run that begins its epoch again after a stop")
def resumes_on_another_mesh(new, old):
    stream = of_tars().shuffle(3)

    def make(meshes=DP2, workers=0):
        return sharded(
            DataLoader(stream, batch_size=8, num_workers=workers), meshes
        )

    resumes(new, make=make)
    resumes(new, make=make, workers=2)
