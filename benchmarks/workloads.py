"""What do the loaders of the comparison read?"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Samples of one shape in a file, and how they are read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_rows: int
    batch_size: int
    """Of the global batch."""
    mapped: bool
    """Rows of an `np.memmap`; else of a plain array (which lies in the page cache, so that processes share it)."""
    steps: int
    """Measured in a round."""
    passed: int
    """Passed over at the beginning of a pass: then the workers run, and as much is ready as ever will be."""

    @property
    def row_bytes(self):
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def file_name(self):
        return f"{self.row_bytes}-{self.dtype}.npy"

    def path(self, folder):
        return Path(folder, self.file_name)


SMALL = {
    "name": "1 KB",
    "shape": (256,),
    "dtype": "float32",
    "num_rows": 262_144,
    "mapped": False,
}
SMALL_64 = Workload(**SMALL, batch_size=64, steps=600, passed=60)
SMALL_256 = Workload(**SMALL, batch_size=256, steps=200, passed=60)
SMALL_1024 = Workload(**SMALL, batch_size=1024, steps=80, passed=40)
IMAGES = Workload(
    name="150 KB images",
    shape=(224, 224, 3),
    dtype="uint8",
    num_rows=3584,
    batch_size=32,
    mapped=False,
    steps=60,
    passed=20,
)
TOKENS = Workload(
    name="8 KB tokens of a memmap",
    shape=(1024,),
    dtype="int64",
    num_rows=65_536,
    batch_size=64,
    mapped=True,
    steps=200,
    passed=60,
)
WORKLOADS = (SMALL_64, SMALL_256, SMALL_1024, IMAGES, TOKENS)


class Rows:
    """Rows of a file, one by one: the data set that every loader is given. A spawned worker opens the file anew."""

    def __init__(self, path, mapped):
        self.path, self.mapped = str(path), mapped
        rows = np.load(self.path, mmap_mode="r")
        self.rows = rows if mapped else np.asarray(rows)

    def __reduce__(self):
        return type(self), (self.path, self.mapped)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def write_files(folder):
    """Write the rows of every workload; the first number of a row is its index (its last digits, for bytes)."""
    for work in {work.file_name: work for work in WORKLOADS}.values():
        rows = np.lib.format.open_memmap(
            work.path(folder), "w+", work.dtype, (work.num_rows, *work.shape)
        )
        flat, step = (
            rows.reshape(work.num_rows, -1),
            max(1, 2**24 // work.row_bytes),
        )
        for first in range(0, work.num_rows, step):
            flat[first : first + step] = np.arange(flat.shape[1]) % 251
            numbers = np.arange(first, min(first + step, work.num_rows))
            flat[first : first + step, 0] = (
                numbers % 256 if work.dtype == "uint8" else numbers
            )
        rows.flush()
