import sys
import types

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard.errors import ArgumentError

ORIGINAL = dist.shard_dataloader


class Ids(paddle.io.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.array(index)


def trainer(**options):
    """Calls Paddle's function as a trainer does that nobody can edit."""
    loader = dist.shard_dataloader(
        dataloader=paddle.io.DataLoader(Ids(), batch_size=4), meshes=[dist.ProcessMesh([0])], shard_dims=0, **options
    )
    return type(loader), [batch.shape[0] for batch in loader]


def test_a_trainer_gets_our_loader_until_it_is_undone():
    patch = paddle_shard.patch_paddle(tail="fill")
    try:
        assert trainer() == (paddle_shard.ShardDataloader, [4, 4])
        assert trainer(is_dataset_splitted=True) == (paddle_shard.ShardDataloader, [4, 4])
        assert dist.auto_parallel.api.shard_dataloader is dist.shard_dataloader
    finally:
        patch.undo()
    patch.undo()

    assert dist.shard_dataloader is ORIGINAL
    assert dist.auto_parallel.api.shard_dataloader is ORIGINAL


def test_it_is_undone_at_the_end_of_a_with_block_also_by_an_error():
    with pytest.raises(ZeroDivisionError), paddle_shard.patch_paddle():
        assert dist.shard_dataloader is not ORIGINAL
        _ = 1 / 0

    assert dist.shard_dataloader is ORIGINAL


def test_patching_twice_is_refused():
    with paddle_shard.patch_paddle(), pytest.raises(ArgumentError, match="patched already"):
        paddle_shard.patch_paddle()


def test_modules_that_took_the_name_before_are_named(monkeypatch):
    module = types.ModuleType("a_trainer")
    module.shard_dataloader = ORIGINAL
    monkeypatch.setitem(sys.modules, "a_trainer", module)

    with pytest.warns(UserWarning, match="still have Paddle's own: a_trainer"):
        patch = paddle_shard.patch_paddle()
    patch.undo()


def test_the_signatures_begin_as_paddles():
    import inspect

    theirs = list(inspect.signature(ORIGINAL).parameters.values())
    ours = list(inspect.signature(paddle_shard.shard_dataloader).parameters.values())

    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}
