"""Runs the Python blocks of a page, one after the other, with what such a page takes for granted."""

import contextlib
import io
import re
import sys
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report


class Rows(paddle.io.Dataset):
    def __init__(self, length=100):
        self.length = length

    def __getitem__(self, index):
        return np.full(8, index, "float32"), np.int64(index % 4)

    def __len__(self):
        return self.length


class Texts(paddle.io.Dataset):
    def __init__(self, length=None):
        self.length = length

    def __getitem__(self, index):
        return [1 + index] * (self.length or 1 + index % 7)

    def __len__(self):
        return 32


class Sequences(Texts):
    def __getitem__(self, index):
        return np.arange(8) + index


class Tokenized(Sequences):
    def __getitem__(self, index):
        return {"input_ids": super().__getitem__(index)}


def write_tars(folder):
    from PIL import Image

    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for number in range(20):
                picture = io.BytesIO()
                Image.new("RGB", (4, 4), (shard, number, 0)).save(
                    picture, "PNG"
                )
                for suffix, content in (
                    ("png", picture.getvalue()),
                    ("cls", str(number % 4).encode()),
                ):
                    member = tarfile.TarInfo(
                        f"{shard:03d}{number:03d}.{suffix}"
                    )
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def tokens():
    return [np.arange(1, 20 + at * 37 % 300) for at in range(60)]


def taken_for_granted(ranks):
    text_file = Path(f"lines-{dist.get_rank()}.txt")
    text_file.write_text("a line\n" * 20)
    mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["dp"])
    weight = dist.shard_tensor(paddle.ones([8, 4]), mesh, [dist.Replicate()])
    return {
        "np": np,
        "paddle": paddle,
        "dist": dist,
        "paddle_shard": paddle_shard,
        "mesh": mesh,
        "dataset": Rows(),
        "loader": paddle_shard.shard_dataloader(
            paddle.io.DataLoader(Rows(), batch_size=16), mesh, shard_dims="dp"
        ),
        "model": type(
            "Model",
            (),
            {
                "__call__": lambda self, x: x @ weight,
                "state_dict": lambda self: {},
                "set_state_dict": lambda self, state: None,
            },
        )(),
        "optimizer": paddle.optimizer.SGD(parameters=[weight]),
        "texts": Texts(),
        "language_model": lambda ids: (
            paddle.nn.functional.one_hot(ids, 64)
            @ dist.shard_tensor(paddle.ones([64, 64]), mesh, [dist.Replicate()])
        ),
        "texts_of_8": Sequences(),
        "tokenized": Tokenized(),
        **{
            name: Rows(length)
            for name, length in (
                ("web", 100),
                ("code", 40),
                ("chat", 9),
                ("books", 7),
            )
        },
        "more_web": Rows(130),
        **{name: tokens() for name in ("documents", "web_texts", "code_texts")},
        "files": [str(text_file)],
        "images": np.zeros([100, 8], "float32"),
        "classes": np.zeros(100, "int64"),
    }


def main(page, folder):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks > 1:
        dist.init_parallel_env()
    text = Path(page).read_text()
    if "train-{000..003}.tar" in text and rank == 0:
        write_tars(Path(folder, "shards"))
    if ranks > 1:
        dist.barrier()
    import os

    os.chdir(folder)
    sys.path.append(str(Path(__file__).parents[2] / "demos"))  # recipes to copy
    names, printed = taken_for_granted(ranks), io.StringIO()
    blocks = re.findall(
        r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL
    )
    with contextlib.redirect_stdout(printed):
        for number, block in enumerate(blocks):
            exec(
                compile(
                    textwrap.dedent(block),
                    # Paddle cuts at commas
                    f"{Path(page).name}: Python block {number + 1}",
                    "exec",
                ),
                names,
            )
    report({"blocks": len(blocks), "printed": printed.getvalue()})


if __name__ == "__main__":
    main(*sys.argv[1:])
