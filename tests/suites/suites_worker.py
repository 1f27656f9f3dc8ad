"""Two data ranks read with what Paddle's suites give to their loaders: `suites_worker.py CASE...`.

Each rank reports {case: {"steps": [[field, ...] of each step], "error": ""}}.
"""

import sys
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, DistributedBatchSampler

import paddle_shard
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing import report
from tests.suites import paddleclas as clas
from tests.suites import paddledetection as det
from tests.suites import paddleocr as ocr
from tests.suites import paddlespeech as speech

RANK = dist.get_rank()
DP2 = dist.ProcessMesh([0, 1], dim_names=["dp"])


def values_of(leaf):
    if isinstance(leaf, list) and leaf and isinstance(leaf[0], paddle.Tensor):
        return [values_of(item) for item in leaf]
    if isinstance(leaf, paddle.Tensor):
        return (
            (leaf._local_value() if leaf.is_dist() else leaf).numpy().tolist()
        )
    return leaf.tolist() if isinstance(leaf, np.ndarray) else leaf


def read(loader, epochs=1):
    """The fields of each step, and the error, if there is one."""
    steps, error = [], ""
    try:
        for _ in range(epochs):
            for batch in loader:
                fields = batch.values() if isinstance(batch, dict) else batch
                fields = [batch] if isinstance(batch, paddle.Tensor) else fields
                steps.append([values_of(leaf) for leaf in fields])
    except PaddleShardError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"steps": steps, "error": error}


def sharded(given, **options):
    return paddle_shard.shard_dataloader(
        given, DP2, **{"shard_dims": "dp", **options}
    )


for kind in (clas.PKSampler, clas.RandomIdentities, clas.RepeatedAugmentation):
    kind.draws_for_rank = True


def sampled(sampler, data=None, workers=0, **options):
    data = data or clas.Labelled()
    return sharded(
        DataLoader(data, batch_sampler=sampler(data, 4), num_workers=workers),
        **options,
    )


def refused(make):
    """What is said where a loader is made that is refused."""
    try:
        make()
    except PaddleShardError as error:
        return {"steps": [], "error": f"{type(error).__name__}: {error}"}


def resumed(sampler):
    """The steps behind the second of the second epoch, of a straight run and of one that is resumed there."""
    straight = sampled(sampler)
    list(straight)
    batches = iter(straight)
    next(batches), next(batches)
    state = straight.state_dict()
    rest = read(batches)
    again = sampled(sampler)
    again.load_state_dict(state)
    return [rest, read(again)]


class Stream(paddle.io.IterableDataset):
    def __iter__(self):
        data = det.Boxes()
        return (data[index] for index in range(len(data)))


class Range(paddle.io.IterableDataset):
    """Follows example 2 of Paddle's page on `IterableDataset`: `worker_init_fn` gives each worker its share."""

    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        return (np.array([row]) for row in range(self.start, self.end))


def share(worker_id, info=None):
    info = info or paddle.io.get_worker_info()
    data, size = (
        info.dataset,
        -(-(info.dataset.end - info.dataset.start) // info.num_workers),
    )
    data.start += info.id * size
    data.end = min(data.start + size, data.end)


def half(worker_id):
    """The same, for two workers, whatever is said of them."""
    share(
        worker_id,
        SimpleNamespace(
            dataset=paddle.io.get_worker_info().dataset,
            num_workers=2,
            id=worker_id,
        ),
    )


class BaseDataLoader:
    """Follows `ppdet/data/reader.py`: a reader that is no DataLoader, over a DataLoader of this rank's rows."""

    def __init__(self, data, batch_size):
        self.dataloader = DataLoader(
            data, batch_sampler=DistributedBatchSampler(data, batch_size)
        )
        self.loader = iter(self.dataloader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.loader)
        except StopIteration:
            self.loader = iter(self.dataloader)
            raise


LOCAL = [[], [0, 1]]
"""`dense_tensor_idx` of images, and of a list of boxes for each of two rows."""


def detected(*steps, data=None, workers=0, lists=False, epochs=1, **options):
    collate = det.BatchCompose(*steps, lists=lists)
    given = DataLoader(
        det.Boxes() if data is None else data,
        batch_size=4,
        collate_fn=collate,
        num_workers=workers,
    )
    return read(sharded(given, **options), epochs)


def lined(workers=0):
    data = ocr.SimpleDataSet()
    data.uses_rng = True  # its first batch draws nothing
    return read(
        sharded(
            DataLoader(
                data,
                batch_size=4,
                collate_fn=ocr.DictCollator(),
                num_workers=workers,
            )
        )
    )


def rotated(**options):
    return read(
        sharded(
            DataLoader(
                ocr.Rotations(), batch_size=4, collate_fn=ocr.SSLRotateCollate()
            ),
            **options,
        )
    )


def spoken(sampler, size, **options):
    data = speech.Manifest()
    given = DataLoader(
        data,
        batch_sampler=sampler(data, size),
        collate_fn=speech.SpeechCollator(),
    )
    return read(sharded(given, **options), epochs=2)


RESIZE, PADDED = (
    (det.BatchRandomResize([2, 3, 4, 5, 7]), det.PadBatch(boxes=True)),
    det.PadBatch(boxes=True),
)


def scaled(epochs_drawn=0, state=None):
    """A loader of PaddleOCR's sampler of several scales, which has drawn some epochs, with a state."""
    data = ocr.MultiScaleDataSet()
    sampler = ocr.MultiScaleSampler(data)
    for epoch in range(epochs_drawn):
        sampler.set_epoch(epoch)
        list(sampler)
    loader = sharded(
        DataLoader(data, batch_sampler=sampler), is_dataset_splitted=True
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


def rescaled(epoch):
    """What a straight run reads behind step 2 of an epoch and in the next one; the same resumed, once with history."""
    straight = scaled()
    for _ in range(epoch):
        list(straight)
    batches = iter(straight)
    next(batches), next(batches)
    state = straight.state_dict()
    expected = [read(batches), read(straight)]
    again, drawn = scaled(0, state), scaled(epoch, state)
    return [expected, read(again), [read(drawn), read(drawn)]]


SPOKEN = {1: ("longest", 0), 3: ("longest", -1)}
LONGEST = {"image": ("longest", 0), "gt_bbox": ([8], -1)}

CASES = {
    "resize": lambda: detected(
        RESIZE[0], lists=True, dense_tensor_idx=LOCAL, epochs=2
    ),
    "resize, workers": lambda: detected(
        RESIZE[0], lists=True, dense_tensor_idx=LOCAL, epochs=2, workers=2
    ),
    "resize, at once": lambda: detected(
        RESIZE[0],
        lists=True,
        dense_tensor_idx=LOCAL,
        epochs=2,
        data=det.ManyBoxes(),
    ),
    "resize, stream": lambda: detected(
        RESIZE[0], lists=True, dense_tensor_idx=LOCAL, epochs=2, data=Stream()
    ),
    "stride": lambda: detected(
        det.PadBatch(stride=8), lists=True, dense_tensor_idx=LOCAL
    ),
    "padded": lambda: detected(
        PADDED, data=det.Boxes(sizes=(6,) * 9 + (3,) * 7)
    ),
    "shapes, resumed": lambda: rescaled(0),
    "shapes, resumed later": lambda: rescaled(1),
    "lines": lambda: lined(),
    "lines, workers": lambda: lined(workers=2),
    "rotations": lambda: rotated(placements={0: "as read", 1: "as read"}),
    "rotations, unsaid": lambda: rotated(),
    "shares": lambda: read(
        sharded(
            DataLoader(
                Range(0, 16), batch_size=4, num_workers=2, worker_init_fn=share
            )
        )
    ),
    "halves": lambda: read(
        sharded(
            DataLoader(
                Range(0, 16), batch_size=4, num_workers=2, worker_init_fn=half
            )
        )
    ),
    "reader": lambda: read(sharded(BaseDataLoader(clas.Labelled(), 4))),
    "reader, split": lambda: read(
        sharded(BaseDataLoader(clas.Labelled(), 4), is_dataset_splitted=True)
    ),
    "speech": lambda: spoken(speech.SortagradBatchSampler, 4),
    "speech, padded": lambda: spoken(
        speech.SortagradBatchSampler, 4, pad_to=SPOKEN
    ),
    "speech, distributed": lambda: spoken(
        speech.SortagradDistributedBatchSampler, 2, pad_to=SPOKEN
    ),
    "minibatches": lambda: read(sharded(speech.BatchDataLoader())),
    "minibatches, split": lambda: read(
        sharded(
            speech.BatchDataLoader(distributed=True), is_dataset_splitted=True
        )
    ),
    "minibatches, inside": lambda: refused(
        lambda: sharded(speech.BatchDataLoader().dataloader)
    ),
    "minibatches, whole": lambda: read(
        sharded(
            DataLoader(speech.TransformDataset(), batch_size=None), shuffle=True
        )
    ),
    "padded, further": lambda: detected(PADDED, pad_to=LONGEST),
    "pk": lambda: read(sampled(clas.PKSampler), epochs=2),
    "pk, split, each step": lambda: read(
        sampled(clas.PKSampler, is_dataset_splitted=True, verify=1), epochs=2
    ),
    "pk, resumed": lambda: resumed(clas.PKSampler),
    "identities": lambda: read(sampled(clas.RandomIdentities), epochs=2),
    "identities, resumed": lambda: resumed(clas.RandomIdentities),
    "mixed": lambda: read(sampled(clas.MixSampler)),
    "augmented": lambda: read(sampled(clas.RepeatedAugmentation)),
    "augmented, workers": lambda: read(
        sampled(clas.RepeatedAugmentation, workers=1)
    ),
    "one order": lambda: read(
        sampled(clas.OneOrderCut, is_dataset_splitted=True), epochs=2
    ),
    "scales": lambda: refused(
        lambda: sampled(clas.MultiScale, data=clas.Scaled())
    ),
    "scales, split": lambda: read(
        sampled(clas.MultiScale, data=clas.Scaled(), is_dataset_splitted=True)
    ),
}


if __name__ == "__main__":
    report({name: CASES[name]() for name in sys.argv[1:]})
