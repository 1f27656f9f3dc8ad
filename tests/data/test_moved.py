"""The same files are the same data wherever they are kept: in another folder, on another rank, after a move."""

import itertools
import os
import shutil
from pathlib import Path

import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard.core.trees import map_leaves
from paddle_shard.data.stream import stage_of
from paddle_shard.errors import StateError
from tests.data.source_laws import FILE_KINDS, files
from tests.helpers import local

LAYOUTS = {
    "one file": ["7"],
    "one folder": list("01234567"),
    "folders": ["a/0", "a/1", "b/2", "b/3", "b/c/4", "5", "6", "7"],
}
"""Where in a common folder the eight files are; the last part of a name is the number of its content."""


@pytest.fixture(params=FILE_KINDS)
def kind(request):
    return FILE_KINDS[request.param]


def write(folder, layout, ending, content=None):
    content = content or files()
    for name in LAYOUTS[layout]:
        path = folder / f"{name}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[f"{name[-1]}.{ending}"])
    return [str(folder / f"{name}.{ending}") for name in LAYOUTS[layout]]


def spellings(paths, monkeypatch, root):
    """The same files, as different users name them."""
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.chdir(root)
    yield "absolute", paths
    yield "relative", [os.path.relpath(path) for path in paths]
    yield "dotted", [f"./{os.path.relpath(path)}" for path in paths]
    yield (
        "roundabout",
        [f"{root}/../{root.name}/{os.path.relpath(path)}" for path in paths],
    )
    yield "home", [f"~/{os.path.relpath(path)}" for path in paths]
    yield "file URL", [f"file://{path}" for path in paths]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_in_other_folders_are_the_same_data(
    kind, layout, tmp_path, monkeypatch
):
    ending, make = kind.ending, kind.stream
    here = write(tmp_path / "here", layout, ending)
    there = write(tmp_path / "some" / "where" / "else", layout, ending)

    found = {
        (place, spelling): stage_of(make(paths)).fingerprint()
        for place, copies in (("here", here), ("there", there))
        for spelling, paths in spellings(copies, monkeypatch, tmp_path)
    }

    assert all(one == two for one, two in itertools.pairwise(found.values())), (
        found
    )


def other_files():
    """Files of the same names, of which one holds more."""
    more = {
        f"7.{kind.ending}": kind.content(range(60))
        for kind in FILE_KINDS.values()
    }
    return {**files(), **more}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moved_files_with_another_name_or_content_are_refused(
    kind, layout, tmp_path
):
    ending, make = kind.ending, kind.stream
    before = stage_of(
        make(write(tmp_path / "before", layout, ending))
    ).fingerprint()
    renamed = write(tmp_path / "renamed", layout, ending)
    renamed[-1] = str(
        Path(renamed[-1]).rename(tmp_path / "renamed" / f"new.{ending}")
    )
    other = write(tmp_path / "other", layout, ending, other_files())

    assert stage_of(make(renamed)).fingerprint() != before
    assert stage_of(make(other)).fingerprint() != before


def test_run_is_resumed_from_moved_files_and_not_from_others(kind, tmp_path):
    ending, make = kind.ending, kind.stream
    mesh = dist.ProcessMesh([0], dim_names=["dp"])

    def loader(folder):
        paths = [
            str(folder / f"{name}.{ending}") for name in LAYOUTS["folders"]
        ]
        stream = make(paths).map(str)
        return paddle_shard.shard_dataloader(
            paddle.io.DataLoader(stream, batch_size=8),
            mesh,
            shard_dims="dp",
            seed=3,
        )

    write(tmp_path / "old", "folders", ending)
    begun = loader(tmp_path / "old")
    epoch = list(loader(tmp_path / "old"))
    next(iter(begun))
    state = begun.state_dict()
    shutil.move(tmp_path / "old", tmp_path / "new" / "place")

    moved = loader(tmp_path / "new" / "place")
    moved.load_state_dict(state)

    def rows(batches):  # a tar's samples say where they were read
        return [
            [
                row.replace(str(tmp_path / "old"), str(tmp_path / "new/place"))
                for row in batch
            ]
            for batch in batches
        ]

    assert rows(moved) == rows(epoch[1:])
    write(tmp_path / "others", "folders", ending, other_files())
    with pytest.raises(StateError, match="stream"):
        loader(tmp_path / "others").load_state_dict(state)


def without_its_path(sample):
    return (
        {key: value for key, value in sample.items() if key != "__url__"}
        if isinstance(sample, dict)
        else sample
    )


def values(batch):
    return map_leaves(
        batch,
        lambda leaf, _: (
            local(leaf) if isinstance(leaf, paddle.Tensor) else leaf
        ),
    )


def test_moved_files_are_refused_with_the_override_to_use(kind, tmp_path):
    """Nothing tells them from other files, but their order and numbers are the same, so that positions are."""
    mesh = dist.ProcessMesh([0], dim_names=["dp"])

    def made(layout):
        stream = (
            kind.stream(write(tmp_path / layout, layout, kind.ending))
            .map(without_its_path)
            .in_parts(1)
        )
        return paddle_shard.shard_dataloader(
            paddle.io.DataLoader(stream, batch_size=4), mesh, shard_dims="dp"
        )

    first = made("folders")
    batches = iter(first)
    next(batches)
    state, left = first.state_dict(), [values(batch) for batch in batches]
    moved = made("one folder")
    with pytest.raises(
        StateError,
        match=r"override=\['stream'\]",
    ):
        moved.load_state_dict(state)
    moved.load_state_dict(state, override=["stream"])

    assert [values(batch) for batch in moved] == left
