"""Training and evaluation loops as Paddle's suites write them, on two ranks, with Paddle's loader and under the patch.

Each loop is retyped small from the files of the suite that are named; the model is left out, except for `Model.fit`.
Each rank reports {"plain": {loop: what it has read}, "patched": the same, "loaders": {loop: how many are patched}}.
"""

import contextlib
import gc
from types import SimpleNamespace
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler
from paddle.io.dataloader.dataloader_iter import _DataLoaderIterBase

import paddle_shard
from paddle_shard.testing import report
from tests.suites import paddlenlp, paddleocr
from tests.suites.paddleclas import Labelled, MultiScale, PKSampler, Scaled

ROWS, BATCH = 11, 2


class Rows(Dataset):
    def __init__(self, length=ROWS, bad=None):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"row {index} cannot be read")
        return np.array([index]), np.float32(index)


def rows_of(batch):
    return batch[0].numpy().reshape(-1).tolist()


def loader_of(data, batch_size=BATCH, *, workers=0, options=None, **sampling):
    """A loader of Paddle's own sampler; `sampling` are arguments of the sampler, `options` of the loader."""
    sampler = DistributedBatchSampler(data, batch_size, **sampling)
    return DataLoader(
        data, batch_sampler=sampler, num_workers=workers, **(options or {})
    )


def clas_epochs(workers=0):
    """`ppcls/engine/engine.py`, `train/train.py`: a loader of `DistributedBatchSampler(shuffle, drop_last)`."""
    data = Rows()
    sampler = DistributedBatchSampler(data, BATCH, shuffle=True, drop_last=True)
    loader = DataLoader(
        data, batch_sampler=sampler, num_workers=workers, return_list=True
    )
    epochs = []
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        max_iter = len(loader)
        found = []
        for iter_id, batch in enumerate(loader):
            if iter_id >= max_iter:
                break
            found.append(rows_of(batch))
        epochs.append(found)
    return epochs


def clas_evaluation():
    """`ppcls/engine/evaluation/classification.py`: predictions are gathered, and the padding at the end is cut off."""
    data = Rows()
    loader = DataLoader(
        data,
        batch_sampler=DistributedBatchSampler(data, BATCH),
        return_list=True,
    )
    kept, num_kept = [], 0
    for batch in loader:
        parts = []
        dist.all_gather(parts, batch[0])
        rows = paddle.concat(parts).numpy().reshape(-1).tolist()
        num_kept += len(rows)
        if num_kept > len(data):
            rows = rows[: len(data) + len(rows) - num_kept]
        kept += rows
    return kept


def clas_iterator(bad=None, workers=0, drop_last=False):
    """`ppcls/engine/train/train.py`: one iterator is kept over all epochs, and made again after any exception."""
    loader = loader_of(
        Rows(bad=bad), workers=workers, shuffle=True, drop_last=drop_last
    )
    batches = iter(loader)
    epochs = []
    for _ in range(2):
        steps = []
        for _ in range(len(loader)):
            try:
                batch = next(batches)
            except Exception as error:
                if not isinstance(error, StopIteration):
                    steps.append("error")
                batches = iter(loader)
                batch = next(batches)
            steps.append(rows_of(batch))
        epochs.append(steps)
    return epochs


def clas_unreadable():
    """The same, with a row that cannot be read, without workers and with two."""
    return [
        clas_iterator(bad=UNREADABLE, workers=workers) for workers in (0, 2)
    ]


def clas_fixmatch():
    """`ppcls/engine/train/train_fixmatch.py`: two loaders of different lengths are read side by side."""
    loaders = [loader_of(Rows(length), shuffle=True) for length in (6, ROWS)]
    iterators = [iter(loader) for loader in loaders]
    steps = []
    for _ in range(7):
        for number, loader in enumerate(loaders):
            try:
                batch = next(iterators[number])
            except StopIteration:
                iterators[number] = iter(loader)
                batch = next(iterators[number])
            steps.append(rows_of(batch))
    return steps


def clas_scales():
    """`multi_scale_sampler.py`: a batch sampler that names its rank and the number of replicas, not `nranks`."""
    data = Scaled()
    sampler = MultiScale(data, 4)
    loader = DataLoader(data, batch_sampler=sampler)
    epochs = []
    for epoch in (5, 6):
        sampler.set_epoch(epoch)
        epochs.append([batch[0].numpy()[:, 0].tolist() for batch in loader])
    return [len(loader), epochs]


def clas_pk():
    """A sampler that draws identities for its own rank (`pk_sampler.py`)."""
    data = Labelled()
    loader = DataLoader(data, batch_sampler=PKSampler(data, 4))
    try:
        return [batch[0].numpy().reshape(-1).tolist() for batch in loader]
    except paddle_shard.errors.PaddleShardError as error:
        return str(error)


def seg_iterations():
    """`paddleseg/core/train.py`: iterations over `iter(loader)`, made again at its end."""
    data = Rows()
    sampler = DistributedBatchSampler(data, BATCH, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler, return_list=True)
    found = []
    iterations, iteration = 6, 0
    while iteration < iterations:
        for batch in loader:
            iteration += 1
            if iteration > iterations:
                break
            found.append(rows_of(batch))
    return found


def seg_training_with_evaluation():
    """The same with workers, whose function seeds them, and with an evaluation by a new loader in mid-epoch."""
    options = {"worker_init_fn": lambda worker: np.random.seed(worker)}
    loader = loader_of(
        Rows(), workers=2, shuffle=True, drop_last=True, options=options
    )
    found = []
    iteration = 0
    while iteration < 5:
        for batch in loader:
            iteration += 1
            if iteration > 5:
                break
            found.append(rows_of(batch))
            if iteration in (3, 5):
                found.append(seg_evaluation(workers=1))
    return found


def seg_resumed():
    """A loop that keeps the position of its data: what follows after a resume in the second epoch."""
    kept = []
    with paddle_shard.patch_paddle(on_loader=kept.append):
        loader = loader_of(Rows(), shuffle=True)
        list(loader)
        batches = iter(loader)
        next(batches)
        state = kept[0].state_dict()
        rest = [rows_of(batch) for batch in batches]
    with paddle_shard.patch_paddle() as patch:
        loader = loader_of(Rows(), shuffle=True)
        position = patch.loader_of(loader)
        position.load_state_dict(state)
        resumed = [rows_of(batch) for batch in loader]
    return [rest, resumed]


def seg_evaluation(workers=0):
    """`paddleseg/core/val.py`: all ranks evaluate; those that got a row twice leave it out by its number."""
    data = Rows()
    loader = loader_of(data, 1, workers=workers)
    found = []
    total = len(loader)
    for number, batch in enumerate(loader):
        parts = []
        dist.all_gather(parts, batch[0])
        for part_number, part in enumerate(parts):
            if number * len(parts) + part_number < len(data):
                found += part.numpy().reshape(-1).tolist()
    return [total, found]


class DetectionBatches(DistributedBatchSampler):
    """`ppdet/data/reader.py`: Paddle's own sampler under another name."""


def detection_epochs():
    """`ppdet/engine/trainer.py`: `for batch in loader` with `set_epoch`; the reader's loader is called."""
    data = Rows()
    sampler = DetectionBatches(data, BATCH, shuffle=True, drop_last=False)
    loader = DataLoader(dataset=data, batch_sampler=sampler)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([rows_of(batch) for batch in loader()])
    return epochs


class Reader:
    """`ppdet/data/reader.py`: holds an iterator from the beginning, and makes the next one at the end of each epoch."""

    def __init__(self, loader):
        self.loader = loader
        self.batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            raise


def detection_reader(workers=0):
    """`ppdet/engine/trainer.py` over such a reader; the sampler moves on by itself."""
    reader = Reader(loader_of(Rows(), workers=workers, shuffle=True))
    return [[rows_of(batch) for batch in reader] for _ in range(3)]


def ocr_rebuilt():
    """`tools/program.py`: each epoch has a loader of its own."""
    epochs = []
    for _ in range(3):
        loader = loader_of(Rows(), shuffle=True, drop_last=True)
        num_steps = len(loader)
        steps = []
        for step, batch in enumerate(loader):
            if step >= num_steps:
                break
            steps.append(rows_of(batch))
        epochs.append(steps)
    return epochs


def ocr_scales():
    """`ppocr/data/multi_scale_sampler.py`, which shuffles its list of batches in place, epoch by epoch."""
    data = paddleocr.MultiScaleDataSet()
    loader = DataLoader(data, batch_sampler=paddleocr.MultiScaleSampler(data))
    return [[batch[1].numpy().tolist() for batch in loader] for _ in range(2)]


def ocr_evaluation_on_rank_0():
    """`tools/program.py`: training on all ranks, and after some steps an evaluation on rank 0 alone."""
    data, evaluated = Rows(), []
    sampler = DistributedBatchSampler(data, BATCH, shuffle=True)
    loader = DataLoader(data, batch_sampler=sampler)
    to_evaluate = DataLoader(
        data, batch_sampler=BatchSampler(data, batch_size=4), num_workers=0
    )
    found = []
    for step, batch in enumerate(loader):
        found.append(rows_of(batch))
        if step == 1 and dist.get_rank() == 0:
            evaluated = [rows_of(one) for one in to_evaluate]
        dist.barrier()
    return [found, evaluated]


def mix_accumulation():
    """PaddleMIX's loops: a loader that is left in mid-epoch, and begun again with the next epoch."""
    data = Rows()
    sampler = DistributedBatchSampler(data, BATCH, shuffle=True)
    loader = DataLoader(data, batch_sampler=sampler)
    found = []
    for _ in range(2):
        for step, batch in enumerate(loader):
            found.append(rows_of(batch))
            if step == 1:
                break
    return found


def mix_resumed():
    """`ppdiffusers/examples/text_to_image`: a resumed loop reads and drops the steps of its first epoch."""
    loader = loader_of(Rows(), shuffle=True)
    found = []
    for epoch in range(1, 3):
        for step, batch in enumerate(loader):
            if epoch == 1 and step < 2:
                continue
            found.append(rows_of(batch))
    return found


class Files(paddle.io.IterableDataset):
    """`ppdiffusers/examples/stable_diffusion/sd/text_image_pair_dataset.py`: files, of which each worker takes some."""

    def __init__(self):
        self.files = list(range(8))

    def __iter__(self):
        return (
            np.array([10 * file + row]) for file in self.files for row in (0, 1)
        )


def take_files(_):
    info = paddle.io.get_worker_info()
    first = dist.get_rank() * info.num_workers + info.id
    info.dataset.files = info.dataset.files[first :: 2 * info.num_workers]


def mix_files():
    """A stream that the workers cut by their function is left to Paddle."""
    # so that Paddle's workers inherit no reader, whose end would wait for threads that they do not have
    gc.collect()
    loader = DataLoader(
        Files(), batch_size=2, num_workers=2, worker_init_fn=take_files
    )
    return [batch.numpy().reshape(-1).tolist() for batch in loader]


def mix_persistent():
    """Workers that are kept, and a loop that is left in mid-epoch: Paddle's next loop fails."""
    loader = loader_of(
        Rows(), workers=1, shuffle=True, options={"persistent_workers": True}
    )
    next(iter(loader))
    return [[rows_of(batch) for batch in loader] for _ in range(2)]


def nlp_epochs(sampler_class):
    """`paddlenlp/trainer/trainer.py` with the sampler of its pretraining: what is left over goes to all ranks."""
    data = Rows()
    sampler = sampler_class(data, BATCH, num_replicas=2, rank=dist.get_rank())
    loader = DataLoader(data, batch_sampler=sampler)
    return [[rows_of(batch) for batch in loader] for _ in range(2)]


def nlp_evaluation():
    """`llm/run_pretrain.py`: a called loader is kept, and each evaluation reads the next batches of it."""
    loader = loader_of(Rows(24))
    kept = loader()
    evaluations = []
    for dataloader in (loader, kept, kept):
        if isinstance(dataloader, _DataLoaderIterBase):
            batch_size = dataloader._batch_sampler.batch_size
            dataloader.dataset = dataloader._dataset
        elif isinstance(dataloader, DataLoader):
            batch_size = dataloader.batch_sampler.batch_size
        else:
            raise ValueError("Only paddle.io.DataLoader can be evaluated.")
        steps = []
        for step, batch in enumerate(dataloader):
            steps.append(rows_of(batch))
            if step == 1:
                break
        evaluations.append(
            [batch_size, len(dataloader), len(dataloader.dataset), steps]
        )
    return evaluations


class EndlessSampler(BatchSampler):
    """ERNIE's `pretraining_trainer.py`: it has no length, goes through epoch after epoch, and knows where it began."""

    def __init__(self, dataset, batch_size):
        self.dataset, self.batch_size = dataset, batch_size
        self.nranks, self.local_rank = dist.get_world_size(), dist.get_rank()
        self.set_epoch()

    def set_epoch(self, epoch=0, consumed_samples=0):
        self.epoch, self.consumed_samples = (
            epoch,
            consumed_samples // self.nranks,
        )

    def __len__(self):
        raise TypeError("the sampler has no end")

    def __iter__(self):
        while True:
            order = np.random.RandomState(self.epoch).permutation(
                len(self.dataset)
            )
            rows = order[self.local_rank :: self.nranks][
                self.consumed_samples :
            ]
            for first in range(0, len(rows), self.batch_size):
                yield rows[first : first + self.batch_size].tolist()
            self.consumed_samples = 0
            self.epoch += 1


def ernie_steps(workers=0, consumed_samples=0):
    """A trainer without a length of its data, which stops after `max_steps`."""
    data = Rows(12)
    sampler = EndlessSampler(data, BATCH)
    sampler.set_epoch(0, consumed_samples)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    found = []
    try:
        found.append(len(loader))
    except TypeError:
        found.append("no length")
    for step, batch in enumerate(loader):
        if step == 8:
            break
        found.append(rows_of(batch))
    return found


def ernie_length():
    """The length of such data while a callback of a trainer keeps its position."""
    data = Rows(12)
    loader = DataLoader(data, batch_sampler=EndlessSampler(data, BATCH))
    arguments = SimpleNamespace(ignore_data_skip=False)
    callback = paddle_shard.TrainerCallback()
    callback.on_init_end(arguments)
    state = SimpleNamespace(global_step=0)
    callback.on_train_begin(arguments, state, train_dataloader=loader)
    try:
        return len(loader)
    except TypeError as error:
        return str(error)


def fit():
    """`paddle.Model.fit`, which makes its loaders by itself and evaluates after each epoch."""
    steps = []

    class Line(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.linear = paddle.nn.Linear(1, 1)

        def forward(self, rows):
            steps.append([self.training, rows.numpy().reshape(-1).tolist()])
            return self.linear(rows.astype("float32"))

    network = Line()
    model = paddle.Model(network)
    optimizer = paddle.optimizer.SGD(0.0, parameters=network.parameters())
    model.prepare(optimizer, paddle.nn.MSELoss())
    model.fit(Rows(), Rows(), batch_size=BATCH, epochs=2, verbose=0)
    return steps


def failing():
    """A row that cannot be read; one rank reads it."""
    data = Rows(bad=6)
    loader = DataLoader(
        data, batch_sampler=DistributedBatchSampler(data, BATCH)
    )
    found = []
    try:
        for batch in loader:
            found.append(rows_of(batch))
    except paddle_shard.errors.DataReadError as error:
        return [found, str(error).partition("\n")[0]]
    raise AssertionError("row 6 cannot be read")


LOOPS = {
    "clas": clas_epochs,
    "clas, workers": lambda: clas_epochs(workers=2),
    "clas, iterator": clas_iterator,
    "clas, iterator, workers": lambda: clas_iterator(workers=2, drop_last=True),
    "clas, fixmatch": clas_fixmatch,
    "clas, scales": clas_scales,
    "clas, evaluation": clas_evaluation,
    "seg": seg_iterations,
    "seg, with evaluation": seg_training_with_evaluation,
    "seg, evaluation": seg_evaluation,
    "detection": detection_epochs,
    "detection, reader": detection_reader,
    "detection, reader, workers": lambda: detection_reader(workers=2),
    "ocr": ocr_evaluation_on_rank_0,
    "ocr, rebuilt": ocr_rebuilt,
    "ocr, scales": ocr_scales,
    "mix": mix_accumulation,
    "mix, resumed": mix_resumed,
    "mix, files": mix_files,
    "nlp, evaluation": nlp_evaluation,
    "ernie": ernie_steps,
    "ernie, workers, resumed": lambda: ernie_steps(
        workers=2, consumed_samples=8
    ),
    "fit": fit,
}
"""Loops that read the same rows under the patch."""
UNREADABLE = 8
"""A row that comes in no first step of an epoch, after which a loop would have nothing to go on with."""
GAINS = {"nlp": lambda: nlp_epochs(paddlenlp.LeftoversToAll)}
"""Loops that lose rows with Paddle's loader."""
PATCHED = {
    "clas, unreadable": clas_unreadable,
    "ernie, length": ernie_length,
    "clas, pk": clas_pk,
    "failing": failing,
    "mix, persistent": mix_persistent,
}
"""Loops in which Paddle's loader hangs, or fails on one rank at any step; or that are of this library alone."""


def run(loops, loaders=()):
    """What each loop has read, and how many of the loaders it made are in this list."""
    found = {}
    num_loaders = {}
    for name, loop in loops.items():
        num_before = len(loaders)
        found[name] = loop()
        num_loaders[name] = len(loaders) - num_before
        dist.barrier()
    return found, num_loaders


@contextlib.contextmanager
def without_workers():
    """Paddle's loader reads the same rows without workers, which hang in one of a hundred runs of these loops."""
    init = DataLoader.__init__

    def init_without_workers(self, dataset, **options):
        if options.get("worker_init_fn") is not take_files:
            options["num_workers"] = 0
        init(self, dataset, **options)

    with mock.patch.object(DataLoader, "__init__", init_without_workers):
        yield


def main():
    dist.init_parallel_env()
    with without_workers():
        plain, _ = run({**LOOPS, **GAINS})
    loaders = []
    with paddle_shard.patch_paddle(on_loader=loaders.append):
        patched, num_loaders = run({**LOOPS, **GAINS, **PATCHED}, loaders)
    patched["seg, resumed"] = seg_resumed()
    report({"plain": plain, "patched": patched, "loaders": num_loaders})


if __name__ == "__main__":
    main()
