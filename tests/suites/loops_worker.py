"""Training and evaluation loops as Paddle's suites write them, on two ranks: `loops_worker.py plain|patched`.

Each loop is retyped small from the files of the suite that are named; the model is left out. Each rank reports
{loop: what it has read}.
"""

import contextlib
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler

import paddle_shard
from paddle_shard.testing import report
from tests.suites.paddleclas import Labelled, PKSampler

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
        data, batch_sampler=DistributedBatchSampler(data, BATCH), return_list=True
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


def seg_evaluation():
    """`paddleseg/core/val.py`: all ranks evaluate; those that got a row twice leave it out by its number."""
    data = Rows()
    loader = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 1))
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


def failing():
    """A row that cannot be read; one rank reads it."""
    data = Rows(bad=6)
    loader = DataLoader(data, batch_sampler=DistributedBatchSampler(data, BATCH))
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
    "clas, evaluation": clas_evaluation,
    "seg": seg_iterations,
    "seg, evaluation": seg_evaluation,
    "detection": detection_epochs,
    "ocr": ocr_evaluation_on_rank_0,
    "mix": mix_accumulation,
}


def main(how):
    dist.init_parallel_env()
    found = {}
    patch = contextlib.nullcontext()
    if how == "patched":
        patch = paddle_shard.patch_paddle()
    with patch:
        for name, loop in LOOPS.items():
            found[name] = loop()
            dist.barrier()
        if how == "patched":
            found["clas, pk"] = clas_pk()
            found["failing"] = failing()
    report(found)


if __name__ == "__main__":
    main(sys.argv[1])
