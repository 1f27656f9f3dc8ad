"""`TrainerCallback` in a loop like a trainer's; the real ones are tried by `make test-trainers`."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.extras.trainers import callback
from paddle_shard.extras.trainers.callback import DefaultTrainerCallback

EPOCH = 5
"""Steps of an epoch."""


class Ids(paddle.io.Dataset):
    def __len__(self):
        return 4 * EPOCH

    def __getitem__(self, index):
        return np.array(index)


def sharded(given):
    return dist.shard_dataloader(given, dist.ProcessMesh([0]), shard_dims=0)


def arguments(folder, **others):
    return SimpleNamespace(
        output_dir=str(folder),
        ignore_data_skip=False,
        resume_from_checkpoint=None,
        enable_auto_parallel=True,
        **others,
    )


def trained(
    folder,
    position,
    *,
    stop=None,
    global_step=0,
    epochs=3,
    static=False,
    rows=4,
    accumulation=1,
):
    """The rows of each step of a trainer that saves at each, up to a step; it goes on from a global step."""
    given = paddle.io.DataLoader(Ids(), batch_size=rows, shuffle=True)
    args = arguments(folder, gradient_accumulation_steps=accumulation)
    state = SimpleNamespace(global_step=global_step)
    told = (args, state, SimpleNamespace())
    position.on_init_end(*told)
    assert args.ignore_data_skip
    with paddle_shard.patch_paddle():
        position.on_train_begin(*told, train_dataloader=given)
        sharded(paddle.io.DataLoader(Ids(), batch_size=2))  # to evaluate
        loader = sharded(given)
        if static:  # to describe the inputs of a static program
            next(sharded(given)())
        batches, found = loader(), []
        num_micro = 0
        for _ in range(global_step // (EPOCH // accumulation), epochs):
            position.on_epoch_begin(*told, train_dataloader=given)
            for batch in batches:
                found.append(batch._local_value().numpy().tolist())
                num_micro += 1
                if num_micro % accumulation:
                    continue
                state.global_step += 1
                position.on_step_end(*told, train_dataloader=given)
                position.on_save(*told, train_dataloader=given)
                if state.global_step == stop:
                    return found
        return found


@pytest.mark.parametrize("static", [False, True])
def test_run_goes_on_at_any_step_in_the_order_of_its_epoch(static, tmp_path):
    straight = trained(
        tmp_path / "straight", paddle_shard.TrainerCallback(), static=static
    )
    for first in range(0, 3 * EPOCH, EPOCH):
        assert sorted(
            row for step in straight[first : first + EPOCH] for row in step
        ) == list(range(4 * EPOCH))
    assert straight[:EPOCH] != straight[EPOCH : 2 * EPOCH]

    for stop in (1, EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH, 3 * EPOCH - 2):
        folder = tmp_path / str(stop)
        begun = trained(
            folder, paddle_shard.TrainerCallback(), stop=stop, static=static
        )
        position = paddle_shard.TrainerCallback()
        rest = trained(folder, position, global_step=stop, static=static)

        assert begun + rest == straight, f"stopped at step {stop}"


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("static", [False, True])
def test_trainer_that_trains_again_goes_on_where_it_was(
    passed, static, tmp_path
):
    given, position = (
        paddle.io.DataLoader(Ids(), batch_size=4),
        paddle_shard.TrainerCallback(),
    )
    args = arguments(tmp_path)
    state, named = (
        SimpleNamespace(global_step=0),
        {"train_dataloader": given} if passed else {},
    )
    position.on_init_end(args, state, None)

    def train(upto):
        with paddle_shard.patch_paddle():
            loader = sharded(given)
            if static:
                next(sharded(given)())
            position.on_train_begin(args, state, None, **named)
            position.on_epoch_begin(args, state, None, **named)
            found = []
            for batch in loader:
                found += batch._local_value().numpy().tolist()
                state.global_step += 1
                position.on_save(args, state, None, **named)
                if state.global_step == upto:
                    break
            return found

    assert [train(1), train(3), train(EPOCH)] == [
        [0, 1, 2, 3],
        list(range(4, 12)),
        list(range(12, 20)),
    ]


def test_trainer_callback_asks_which_of_two_loaders_trains(tmp_path):
    position = paddle_shard.TrainerCallback()
    with paddle_shard.patch_paddle():
        for _ in range(2):
            sharded(paddle.io.DataLoader(Ids(), batch_size=4))
        with pytest.raises(
            ArgumentError,
            match=r"loaders of 2 DataLoaders, .* \(train_dataloader=\)",
        ):
            position.on_save(
                arguments(tmp_path), SimpleNamespace(global_step=1), None
            )


def test_trainer_callback_refuses_a_checkpoint_without_position(
    tmp_path,
):
    trained(tmp_path / "old", paddle_shard.TrainerCallback(), stop=2)

    with pytest.raises(
        StateError,
        match=r"holds no paddle_shard.json, .* global step 2\. Give TrainerCallback\(ch",
    ):
        trained(tmp_path / "new", paddle_shard.TrainerCallback(), global_step=2)
    position = paddle_shard.TrainerCallback(tmp_path / "old" / "checkpoint-2")
    assert (
        len(trained(tmp_path / "new", position, global_step=2)) == 3 * EPOCH - 2
    )


def test_trainer_callback_rejects_paddles_loader_at_once(tmp_path):
    given = paddle.io.DataLoader(Ids(), batch_size=4)
    args = arguments(tmp_path)
    state = SimpleNamespace(global_step=0)
    position = paddle_shard.TrainerCallback()
    with pytest.raises(ArgumentError, match="not read by this library"):
        position.on_save(args, state, None, train_dataloader=given)
    args.enable_auto_parallel = False
    with pytest.raises(ArgumentError, match=r"patch_paddle\(\) was not called"):
        position.on_train_begin(args, state, None, train_dataloader=given)
    with (
        paddle_shard.patch_paddle(),
        pytest.raises(ArgumentError, match="does not split it over ranks"),
    ):
        position.on_train_begin(args, state, None, train_dataloader=given)
    args.distributed_dataloader = True
    with pytest.raises(ArgumentError, match="distributed_dataloader=True"):
        position.on_init_end(args, state, None)
    with pytest.raises(AttributeError, match="no attribute 'of_no_event'"):
        _ = position.of_no_event


def test_default_trainer_callback_lets_paddles_loader_train(tmp_path):
    """`patch_paddle()` breaks no training that works without it; only a resume has to be told."""
    given = paddle.io.DataLoader(Ids(), batch_size=4)
    args = arguments(tmp_path)
    args.enable_auto_parallel = False
    position = DefaultTrainerCallback()
    position.on_init_end(args, SimpleNamespace(), None)
    told = {"train_dataloader": given}
    with paddle_shard.patch_paddle():
        position.on_train_begin(
            args, SimpleNamespace(global_step=0), None, **told
        )
        assert args.ignore_data_skip is False
        position.on_epoch_begin(
            args, SimpleNamespace(global_step=0), None, **told
        )
        position.on_save(args, SimpleNamespace(global_step=3), None, **told)
        with pytest.raises(
            ArgumentError, match=r"patch_paddle\(callback=False\)"
        ):
            position.on_train_begin(
                args, SimpleNamespace(global_step=3), None, **told
            )
    assert not [*tmp_path.iterdir()]


def test_trainer_callback_reads_the_checkpoint_that_was_loaded(tmp_path):
    """1.2.0's DPO resumes from the last checkpoint of `output_dir`, whatever `resume_from_checkpoint` says."""
    args = arguments(tmp_path)
    for told, step, folder in [
        (None, 7, tmp_path / "checkpoint-7"),
        ("other/checkpoint-7", 7, Path("other/checkpoint-7")),
        ("other/checkpoint-5", 7, tmp_path / "checkpoint-7"),
        ("other/best", 7, Path("other/best")),
    ]:
        args.resume_from_checkpoint = told
        assert callback._folder_of(args, step) == folder


@pytest.mark.parametrize("accumulation", [2, 3])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_trainer_callback_resumes_amid_micro_batches(
    accumulation, stop, tmp_path
):
    """Trainers take an epoch for finished before its last micro-batches are read; none of them is lost."""
    how = {"accumulation": accumulation, "epochs": 4}
    straight = trained(
        tmp_path / "straight", paddle_shard.TrainerCallback(), **how
    )

    begun = trained(tmp_path, paddle_shard.TrainerCallback(), stop=stop, **how)
    rest = trained(
        tmp_path, paddle_shard.TrainerCallback(), global_step=stop, **how
    )
    assert begun + rest == straight


def test_trainer_that_is_about_to_skip_by_reading_is_refused(tmp_path):
    trained(tmp_path, paddle_shard.TrainerCallback(), stop=2)
    args = arguments(tmp_path)  # as of a callback that was added later

    with pytest.raises(ArgumentError, match="ignore_data_skip=True"):
        paddle_shard.TrainerCallback().on_train_begin(
            args, SimpleNamespace(global_step=2), None
        )


def test_trainer_callback_may_log_the_statistics():
    given = paddle.io.DataLoader(Ids(), batch_size=4)
    loaders, written = [], {}

    class Callback(paddle_shard.TrainerCallback):
        def on_log(self, args, state, *_, **__):
            trained = max(
                loaders, key=lambda loader: loader.stats.total.batches
            )
            for name, value in trained.stats.scalars().items():
                written[name, state.global_step] = value

    callback = Callback()
    with paddle_shard.patch_paddle(callback=callback, on_loader=loaders.append):
        loader = sharded(given)
        list(loader)
        callback.on_log(
            None,
            SimpleNamespace(global_step=7),
            None,
            train_dataloader=given,
            logs={},
        )

    assert written == {
        (name, 7): value for name, value in loader.stats.scalars().items()
    }
    assert written["data/batches", 7] == EPOCH
