"""`TrainerCallback`: saves the position of a trainer's data in its checkpoints, and resumes from it."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.framework import core

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.extras.trainers.paddle_patch import active_patch
from paddle_shard.loader.iteration import ShardIterator
from paddle_shard.loader.loader import ShardDataloader

FILE = "paddle_shard.json"
"""In a checkpoint's folder. Where each rank has data of its own, the others' names hold the rank, too."""


class TrainerCallback:
    """Saves the position of the training data with each checkpoint of a trainer, and resumes from it.

    It is for the trainers of PaddleNLP and PaddleFormers. By themselves, they find their position by counting steps of
    the present batch size, and some read the first steps of an epoch again, always in the order of epoch 0. With this
    callback they skip nothing. `patch_paddle()` gives it to each trainer that is made from then on.

    Examples:
        >>> from paddleformers.trainer import Trainer  # doctest: +SKIP
        >>> callback = paddle_shard.TrainerCallback(checkpoint="other/checkpoint-100")  # doctest: +SKIP
        >>> paddle_shard.patch_paddle(callback=callback)  # doctest: +SKIP
        >>> trainer = Trainer(...)  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """

    is_optional = False
    """True if a trainer whose data Paddle reads may train all the same, and resume without this callback."""

    def __init__(
        self, checkpoint: str | os.PathLike[str] | None = None
    ) -> None:
        """Set up the callback.

        Args:
            checkpoint: The folder from which the trainer resumes. None: `args.resume_from_checkpoint` if that is a
                path, or else the folder in `args.output_dir` that has the trainer's global step.
        """
        self._checkpoint = checkpoint
        self._saved: Path | None = None
        """The file of the position that the first epoch will load."""
        self._skips = False
        """The trainer's own `ignore_data_skip`."""
        self._is_off = False
        """True if Paddle reads the data, and so the trainer counts its position."""

    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Have the trainer skip no data.

        Raises:
            ArgumentError: Only some ranks would read.
        """
        self._skips = args.ignore_data_skip
        args.ignore_data_skip = True
        if getattr(args, "distributed_dataloader", False):
            raise ArgumentError(
                "TrainerCallback: with distributed_dataloader=True only some ranks read, and Paddle's loader ends "
                "after one epoch. Call paddle_shard.patch_paddle() after importing the trainer and before making its "
                "arguments; or set distributed_dataloader=False."
            )

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        *_: Any,
        train_dataloader: Any = None,
        **__: Any,
    ) -> None:
        """Find the position in the checkpoint from which the trainer resumes.

        Raises:
            StateError: The checkpoint holds none.
            ArgumentError: The trainer's loader is not this library's, or the trainer will skip data by itself.
        """
        self._saved = None
        is_auto = getattr(args, "enable_auto_parallel", False)
        if isinstance(train_dataloader, paddle.io.DataLoader) and not is_auto:
            try:
                self._take_over(args, train_dataloader)
            except ArgumentError as error:
                if state.global_step or not self.is_optional:
                    raise
                args.ignore_data_skip = self._skips
                self._is_off = True
                warn_once(
                    "The position of the data is not saved. %s", str(error)
                )
        if not state.global_step:
            return
        folder = self._checkpoint or _folder_of(args, state.global_step)
        paths = [Path(folder, name) for name in (_name(dist.get_rank()), FILE)]
        self._saved = next(filter(Path.is_file, paths), None)
        if self._saved is None:
            raise StateError(
                f"{folder} holds no {FILE}, so it is not known where the data stood at global step "
                f"{state.global_step}. Give TrainerCallback(checkpoint=...) the folder from which the trainer resumes; "
                "or, if that was made without it, use patch_paddle(callback=False) and no TrainerCallback: the trainer "
                "then counts its position by steps."
            )
        if not args.ignore_data_skip:
            raise ArgumentError(
                "TrainerCallback puts the data where it stood, and this trainer would then skip as much again: call "
                "patch_paddle() before the trainer is made, or set ignore_data_skip=True."
            )

    @staticmethod
    def _take_over(args: Any, dataloader: paddle.io.DataLoader) -> None:
        """Have this library read a DataLoader of a trainer that does not call `shard_dataloader`."""
        patch = active_patch()
        rank_loader = None
        reason = "paddle_shard.patch_paddle() was not called"
        if patch is not None:
            is_whole = getattr(args, "dataset_world_size", None) == 1
            rank_loader = patch.rank_loader(dataloader, is_whole=is_whole)
            reason = "its sampler does not split it over ranks, or the warning above says why"
        if rank_loader is None:
            raise ArgumentError(
                f"TrainerCallback: the training data is read by Paddle's own DataLoader ({reason}), whose position "
                "nobody knows. Call patch_paddle() before the trainer is made, or without a TrainerCallback: "
                "patch_paddle(callback=False)."
            )
        # A trainer that finds its own sampler would set the position, and random generators in each epoch.
        dataloader.batch_sampler = rank_loader.sharded.batch_sampler
        rank_loader.follows_sampler = False

    def on_epoch_begin(
        self,
        args: Any,
        state: Any,
        *_: Any,
        train_dataloader: Any = None,
        **__: Any,
    ) -> None:
        """Move the loader to the loaded position."""
        if self._saved is None:
            return
        position = json.loads(self._saved.read_text())
        num_trained = _epochs_counted(args, state, train_dataloader)
        # All of them: none has delivered a batch yet, so the one to be trained on is not known.
        for loader in _loaders_of(train_dataloader):
            if loader._wrap is not None:
                continue  # the trainer has two of these callbacks
            loader.load_state_dict(position)
            loader.set_epoch(position["epoch"] + position["ended"])
            num_more = max(0, num_trained - loader.epoch)
            loader._wrap = partial(_ResumedEpochs, loader, num_more)
        _load_generators(self._saved.parent)
        self._saved = None

    def on_save(
        self,
        args: Any,
        state: Any,
        *_: Any,
        train_dataloader: Any = None,
        **__: Any,
    ) -> None:
        """Write the position into the checkpoint, `{output_dir}/checkpoint-{step}`; on all ranks, at the same step."""
        if self._is_off:
            return
        loader = _loader_of(train_dataloader)
        # of streams, whose samples have no number
        with suppress(ArgumentError):
            # so that what all ranks have delivered is in the state
            loader.certificate()
        if dist.get_rank() and not loader.is_dataset_splitted:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _name(dist.get_rank())
        # Replaced at once: a job that is killed here leaves no half of a state.
        new = path.with_suffix(".new")
        new.write_text(json.dumps(loader.state_dict()))
        new.replace(path)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            # an event that does not matter here
            return lambda *args, **others: None
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class DefaultTrainerCallback(TrainerCallback):
    """The callback that `patch_paddle` gives to each trainer."""

    is_optional = True


@dataclass(eq=False)
class _ResumedEpochs:
    """The first loop of a resumed trainer: the rest of an epoch, and the epochs that the trainer takes for finished.

    Trainers count whole optimizer steps. Micro-batches that are left over at the end of an epoch make them count
    further than the data, and at the end of a stream no batch is left of an epoch that they have not finished.
    """

    loader: ShardDataloader
    """The trainer's loader."""
    num_more: int
    """Further epochs to read."""
    iterator: ShardIterator
    """Over the rest of the first one, then over the others."""
    is_empty: bool = True
    """True if nothing was read yet."""

    def __iter__(self) -> _ResumedEpochs:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                return next(self.iterator)
            except StopIteration:
                if self.num_more == 0 and not self.is_empty:
                    raise
                self.num_more = max(0, self.num_more - 1)
                self.iterator = iter(self.loader)
            finally:
                self.is_empty = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)


def _folder_of(args: Any, global_step: int) -> Path:
    """Return the checkpoint from which a trainer has resumed.

    The DPO of PaddleFormers 1.2.0 resumes from the last one of its `output_dir`, whatever `resume_from_checkpoint` is.
    """
    name = f"checkpoint-{global_step}"
    folder = getattr(args, "resume_from_checkpoint", None)
    if isinstance(folder, str | os.PathLike):
        folder = Path(folder)
        if folder.name == name or not re.fullmatch(
            r"checkpoint-\d+", folder.name
        ):
            return folder
    return Path(args.output_dir, name)


def _epochs_counted(args: Any, state: Any, dataloader: Any) -> int:
    """Return how many epochs a resumed trainer takes for finished; 0 if it does not count them."""
    try:
        num_batches = len(dataloader)
    except (TypeError, ValueError, RuntimeError):  # of a stream
        return 0
    num_steps = num_batches // getattr(args, "gradient_accumulation_steps", 1)
    return int(state.global_step) // max(1, num_steps)


def _load_generators(folder: Path) -> None:
    """Set the random generators as the trainer has saved them, which it does itself only where it skips data."""
    path = folder / f"rng_state_{dist.get_rank()}.pth"
    if not path.is_file():
        return
    saved = paddle.load(str(path), return_numpy=True)
    # One file may hold the states of all ranks, and have the number of ranks in its name.
    if (
        isinstance(saved, list)
        or saved.get("world_size") != dist.get_world_size()
    ):
        return
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    core.default_cpu_generator().set_state(saved["cpu"])
    paddle.set_rng_state(saved["cuda"])
    tracked = saved.get("hybrid_parallel_rng_state_tracker")
    if tracked:
        fleet.meta_parallel.get_rng_state_tracker().set_states_tracker(tracked)


def _loaders_of(dataloader: Any) -> list[ShardDataloader]:
    """Return the loaders of the trainer's DataLoader.

    A static model's trainer makes two, and one that trains again makes another.
    """
    if isinstance(dataloader, ShardDataloader):
        return [dataloader]
    patch = active_patch()
    loaders = []
    if patch is not None:
        loaders = patch.loaders
        if isinstance(dataloader, paddle.io.DataLoader):
            rank_loader = patch.rank_loader(dataloader)
            if rank_loader is not None:
                return [rank_loader.sharded]
    if dataloader is not None:
        loaders = [loader for loader in loaders if loader.given is dataloader]
    num_given = len({id(loader.given) for loader in loaders})
    if num_given == 0:
        raise ArgumentError(
            "TrainerCallback: the trainer's data is not read by this library. Call paddle_shard.patch_paddle() before "
            "the trainer is made, and undo it after training."
        )
    if num_given > 1:
        raise ArgumentError(
            f"TrainerCallback: the trainer has made loaders of {num_given} DataLoaders, and does not say which one it "
            "trains on (train_dataloader=)."
        )
    return loaders


def _loader_of(dataloader: Any) -> ShardDataloader:
    """Return the loader that is trained on: of those, the one that delivered most recently."""
    loaders = _loaders_of(dataloader)
    return max(loaders, key=lambda loader: loader._run.delivered_at)


def _name(rank: int) -> str:
    return f"paddle_shard-{rank}.json" if rank else FILE
