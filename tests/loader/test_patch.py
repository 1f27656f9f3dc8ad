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
        dataloader=paddle.io.DataLoader(Ids(), batch_size=4),
        meshes=[dist.ProcessMesh([0])],
        shard_dims=0,
        **options,
    )
    return type(loader), [batch.shape[0] for batch in loader]


def test_trainer_gets_our_loader_until_it_is_undone():
    patch = paddle_shard.patch_paddle(tail="fill")
    try:
        assert trainer() == (paddle_shard.ShardDataloader, [4, 4])
        assert trainer(is_dataset_splitted=True) == (
            paddle_shard.ShardDataloader,
            [4, 4],
        )
        assert dist.auto_parallel.api.shard_dataloader is dist.shard_dataloader
    finally:
        patch.undo()
    patch.undo()

    assert dist.shard_dataloader is ORIGINAL
    assert dist.auto_parallel.api.shard_dataloader is ORIGINAL


def made(given, **options):
    return dist.shard_dataloader(
        given, [dist.ProcessMesh([0])], shard_dims=0, **options
    )


class Halves(paddle.io.BatchSampler):
    """Batches of two, the last one dropped, as a trainer's own sampler may."""

    def __init__(self):
        self.batch_size, self.drop_last = 2, True

    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


OTHERS = {
    "drop_last": lambda: paddle.io.DataLoader(
        Ids(), batch_size=4, drop_last=True
    ),
    "a sampler of its own": lambda: paddle.io.DataLoader(
        Ids(), batch_sampler=Halves()
    ),
    "Paddle's sampler": lambda: paddle.io.DataLoader(
        Ids(),
        batch_sampler=paddle.io.DistributedBatchSampler(
            Ids(), 2, num_replicas=1, rank=0, drop_last=True
        ),
    ),
    "a stream": lambda: paddle.io.DataLoader(
        paddle_shard.Stream.of(range(6)), batch_size=4, num_workers=0
    ),
    "shuffled": lambda: paddle.io.DataLoader(Ids(), batch_size=4, shuffle=True),
    "global batches": lambda: [np.arange(4), np.arange(4)],
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(
    "options",
    [
        *(
            {"tail": "fill"},
            {"tail": "repeat"},
            {"shuffle": "blocks"},
            {"num_batches": 3},
            {"prefetch": 2, "tail": "fill"},
        ),
        # of which a set can hold none
        *(
            {"pad_to": {"x": ("short", 0)}},
            {"balance": [1, 2]},
        ),
    ],
)
def test_patch_options_are_defaults_that_break_no_loader(kind, options):
    plain = [
        batch.shape
        for batch in paddle_shard.shard_dataloader(
            OTHERS[kind](), dist.ProcessMesh([0]), shard_dims=0
        )
    ]
    with paddle_shard.patch_paddle(**options):
        shapes = [batch.shape for batch in made(OTHERS[kind]())]

    assert len(shapes) == (
        3
        if "num_batches" in options and kind in ("a stream", "global batches")
        else len(plain)
    )
    assert shapes[0] == plain[0]


def test_patch_paddle_leaves_out_and_names_an_option(caplog, monkeypatch):
    monkeypatch.setattr("paddle_shard.core.warn_once._WARNED", set())
    with paddle_shard.patch_paddle(tail="repeat", seed=11):
        loader = made(OTHERS["shuffled"]())

    assert loader.seed == 11
    (record,) = caplog.records
    assert (
        "patch_paddle(tail='repeat') is left out for a loader that cannot have it: tail"
        in record.getMessage()
    )


def test_kind_of_shuffle_is_for_those_that_shuffle():
    with paddle_shard.patch_paddle(shuffle="paddle"):
        assert [
            b._local_value().numpy().tolist()
            for b in made(paddle.io.DataLoader(Ids(), batch_size=6))
        ] == [[0, 1, 2, 3, 4, 5]]
        assert next(
            iter(made(OTHERS["shuffled"]()))
        )._local_value().numpy().tolist() != [0, 1, 2, 3]


def test_patch_keeps_the_trainers_arguments_and_errors():
    with paddle_shard.patch_paddle(seed=3):
        assert made(OTHERS["shuffled"](), seed=4).seed == 4
        with pytest.raises(ArgumentError, match="needs shard_dims"):
            dist.shard_dataloader(
                OTHERS["shuffled"](),
                dist.ProcessMesh([0]),
                is_dataset_splitted=True,
            )


def test_patch_gives_access_to_each_loader_of_a_trainer():
    seen = []
    with paddle_shard.patch_paddle(on_loader=seen.append):
        loaders = [made(OTHERS["shuffled"]()), made(OTHERS["drop_last"]())]
    assert seen == loaders


def test_patch_has_the_position_of_a_dataloader_on_one_process():
    def loop(state=None):
        sampler = paddle.io.DistributedBatchSampler(Ids(), 2, shuffle=True)
        dataloader = paddle.io.DataLoader(Ids(), batch_sampler=sampler)
        with paddle_shard.patch_paddle() as patch:
            position = patch.loader_of(dataloader)
            if state is not None:
                position.load_state_dict(state)
            for batch in dataloader:
                yield batch.tolist(), position.state_dict()

    whole = list(loop())
    _, state = whole[0]
    assert [rows for rows, _ in loop(state)] == [rows for rows, _ in whole[1:]]


def test_patch_is_undone_at_the_end_of_a_with_block():
    with pytest.raises(ZeroDivisionError), paddle_shard.patch_paddle():
        assert dist.shard_dataloader is not ORIGINAL
        _ = 1 / 0

    assert dist.shard_dataloader is ORIGINAL


def test_patching_twice_is_refused():
    with (
        paddle_shard.patch_paddle(),
        pytest.raises(ArgumentError, match="patched already"),
    ):
        paddle_shard.patch_paddle()


def test_patch_paddle_reaches_modules_that_imported_the_name(monkeypatch):
    module = types.ModuleType("a_trainer")
    module.shard_dataloader = ORIGINAL
    monkeypatch.setitem(sys.modules, "a_trainer", module)

    with paddle_shard.patch_paddle():
        assert module.shard_dataloader is dist.shard_dataloader
    assert module.shard_dataloader is ORIGINAL


def test_signatures_begin_as_paddles():
    import inspect

    theirs = list(inspect.signature(ORIGINAL).parameters.values())
    ours = list(
        inspect.signature(paddle_shard.shard_dataloader).parameters.values()
    )

    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    assert {p.kind for p in ours[len(theirs) :]} == {
        inspect.Parameter.KEYWORD_ONLY
    }


def test_patch_paddle_reaches_trainers_of_packages(monkeypatch):
    class Arguments:
        distributed_dataloader = False

        def __init__(self, *, distributed_dataloader):
            self.distributed_dataloader = distributed_dataloader

    trainer = types.ModuleType("paddlefleet.trainer.trainer")
    trainer.DEFAULT_CALLBACKS = [object]
    arguments = types.ModuleType("paddlefleet.trainer.training_args")
    arguments.TrainingArguments = Arguments
    modules = [types.ModuleType("paddlefleet"), trainer, arguments]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)

    with paddle_shard.patch_paddle():
        assert trainer.DEFAULT_CALLBACKS[1:].__len__() == 1
        assert not Arguments(distributed_dataloader=True).distributed_dataloader
    own = paddle_shard.TrainerCallback()
    with paddle_shard.patch_paddle(callback=own):
        assert trainer.DEFAULT_CALLBACKS[1:] == [own]
    with paddle_shard.patch_paddle(callback=False):
        assert not trainer.DEFAULT_CALLBACKS[1:]
    assert Arguments(distributed_dataloader=True).distributed_dataloader
