"""Trainers that cannot be edited: a callback that saves the data position, and a patch of Paddle's loader."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import paddle.distributed as dist
import paddle.io
from paddle.distributed import auto_parallel

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError, PaddleShardError, StateError
from paddle_shard.loader.api import shard_dataloader
from paddle_shard.loader.compat import mend_process_mesh
from paddle_shard.loader.loader import ShardDataloader

FILE = "paddle_shard.json"
"""In a checkpoint's folder. Where each rank has data of its own, the others' names hold the rank, too."""


class TrainerCallback:
    """Saves the position of the training data with each checkpoint of a trainer, and resumes from it.

    It is for the trainers of PaddleNLP and PaddleFormers. By themselves, they read the first steps of an epoch again to
    get to the step where they stopped, always in the order of epoch 0. With this callback they skip nothing. Give it to
    the trainer, and let it see the loaders that the trainer makes.

    Examples:
        >>> position = paddle_shard.TrainerCallback()  # doctest: +SKIP
        >>> paddle_shard.patch_paddle(on_loader=position.add)  # doctest: +SKIP
        >>> from paddleformers.trainer import Trainer  # doctest: +SKIP
        >>> trainer = Trainer(..., callbacks=[position])  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str] | None = None, *, writer: Any = None
    ) -> None:
        """Prepare; `add` gives it loaders.

        Args:
            checkpoint: The folder from which the trainer resumes. None: `args.resume_from_checkpoint` if that is a
                path, or else the folder in `args.output_dir` that has the trainer's global step.
            writer: VisualDL's `LogWriter`, or anything with `add_scalar(name, value, step)`. Whenever the trainer logs,
                it is given `loader.stats.scalars()` of this rank.
        """
        self._checkpoint = checkpoint
        self._writer = writer
        self._loaders: list[ShardDataloader] = []
        self._loaded: dict[str, Any] | None = None

    def add(self, loader: ShardDataloader) -> None:
        """Register a loader that a trainer has made; for `patch_paddle(on_loader=...)`.

        Args:
            loader: A loader that `shard_dataloader` has returned to the trainer.
        """
        self._loaders.append(loader)

    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Have the trainer skip no data."""
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Read the position of the checkpoint from which the trainer resumes.

        Raises:
            StateError: The checkpoint holds none.
            ArgumentError: The trainer will read the data again up to there.
        """
        self._loaded = None
        if not state.global_step:
            return
        folder = self._checkpoint or getattr(args, "resume_from_checkpoint", None)
        if not isinstance(folder, str | os.PathLike):
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        paths = [Path(folder, name) for name in (_name(dist.get_rank()), FILE)]
        path = next(filter(Path.is_file, paths), None)
        if path is None:
            raise StateError(
                f"{folder} holds no {FILE}, so it is not known where the data stood at global step "
                f"{state.global_step}. Give TrainerCallback(checkpoint=...) the folder from which the trainer resumes; "
                "or leave the callback out, if that was made without it: the trainer then reads the data again up to "
                "there."
            )
        self._loaded = json.loads(path.read_text())
        if not args.ignore_data_skip:
            raise ArgumentError(
                "TrainerCallback puts the data where it stood, and this trainer would then skip as much again: give "
                "the callback to the trainer when it is made (callbacks=[...]), or set ignore_data_skip=True."
            )

    def on_epoch_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """Move the loader to the loaded position."""
        if self._loaded is None:
            return
        # All of them: none has delivered a batch yet, so the one to be trained on is not known.
        for loader in self._loaders_of(train_dataloader):
            loader.load_state_dict(self._loaded)
            loader.set_epoch(self._loaded["epoch"] + self._loaded["ended"])
        self._loaded = None

    def on_log(
        self,
        _: Any,
        state: Any,
        *__: Any,
        train_dataloader: Any = None,
        **___: Any,
    ) -> None:
        """Give the statistics of the data to the writer."""
        if self._writer is not None:
            scalars = self._loader(train_dataloader).stats.scalars()
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, state.global_step)

    def on_save(
        self,
        args: Any,
        state: Any,
        *_: Any,
        train_dataloader: Any = None,
        **__: Any,
    ) -> None:
        """Write the position into the checkpoint, `{output_dir}/checkpoint-{step}`; on all ranks, at the same step."""
        loader = self._loader(train_dataloader)
        with suppress(ArgumentError):  # of streams, whose samples have no number
            loader.certificate()  # so that what all ranks have delivered is in the state
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
            return lambda *args, **others: None  # an event that does not matter here
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _loaders_of(self, dataloader: Any) -> list[ShardDataloader]:
        """Return the loaders of the trainer's DataLoader.

        A static model's trainer makes two, and one that trains again makes another.
        """
        if isinstance(dataloader, ShardDataloader):
            return [dataloader]
        loaders = self._loaders
        if dataloader is not None:
            loaders = [loader for loader in loaders if loader.given is dataloader]
        num_given = len({id(loader.given) for loader in loaders})
        if num_given == 0:
            raise ArgumentError(
                "TrainerCallback has not seen the loader that the trainer trains on. Give its `add` to the patch, "
                "before the trainer is imported: paddle_shard.patch_paddle(on_loader=callback.add)."
            )
        if num_given > 1:
            raise ArgumentError(
                f"TrainerCallback has seen loaders of {num_given} DataLoaders, and "
                "the trainer does not say which one it trains on (train_dataloader=). Give `add` that one's only."
            )
        return loaders

    def _loader(self, dataloader: Any) -> ShardDataloader:
        """Return the loader that is trained on: of those, the one that delivered most recently."""
        loaders = self._loaders_of(dataloader)
        return max(loaders, key=lambda loader: loader._run.delivered_at)


def _name(rank: int) -> str:
    return f"paddle_shard-{rank}.json" if rank else FILE


class PaddlePatch(ExitStack):
    """`paddle_shard.shard_dataloader` in place of Paddle's, until `undo()` or the end of a `with` block."""

    undo = ExitStack.close
    """Put Paddle's own function back; safe to call again."""


def _shard_with_defaults(
    args: tuple[Any, ...], given: dict[str, Any], options: dict[str, Any]
) -> ShardDataloader:
    """Return a loader with the arguments that were given, and with those default options that it supports."""
    dataloader = args[0] if args else given.get("dataloader")
    sampler = getattr(dataloader, "batch_sampler", None)
    options = dict(options)
    shuffles = isinstance(getattr(sampler, "sampler", None), paddle.io.RandomSampler)
    if not shuffles and not isinstance(options.get("shuffle"), bool):
        options.pop("shuffle", None)  # it chooses how to shuffle, not whether
    if getattr(sampler, "drop_last", False):
        options.pop("tail", None)  # the loader has chosen
    while True:
        try:
            return shard_dataloader(*args, **{**options, **given})
        except PaddleShardError as error:
            words = re.findall(r"\w+", str(error))
            name = next((name for name in options if name in words), None)
            if name is None or name in given:
                raise
            warn_once(
                "patch_paddle(%s=%s) is left out for a loader that cannot have it: %s",
                name,
                repr(options.pop(name)),
                str(error),
            )


def patch_paddle(
    *, on_loader: Callable[[ShardDataloader], Any] | None = None, **options: Any
) -> PaddlePatch:
    """Put this library in place of `paddle.distributed.shard_dataloader`, so that a trainer need not be edited.

    Call it before the trainer is imported: a name that a module has taken with
    `from paddle.distributed import shard_dataloader` is not reached, and a warning names such modules.

    Args:
        on_loader: Is called with each `ShardDataloader` that is made, so that you can hold on to those that a trainer
            makes: for `state_dict`, `stats`, `certificate`.
        options: Keyword-only arguments of `shard_dataloader`, such as `tail="fill"`: the defaults of every loader. What
            the trainer gives itself stands. A loader that cannot have one is made without it, with a line in
            the log; a kind of shuffle (`shuffle="blocks"`) is for those that shuffle.

    Returns:
        The patch; `patch.undo()` takes it back, and so does the end of `with patch_paddle(): ...`.

    Raises:
        ArgumentError: Paddle is patched already, or an option is unknown.
    """
    mend_process_mesh()  # trainers ask the meshes before they make a loader
    original = dist.shard_dataloader
    if getattr(original, "__wrapped__", None) is shard_dataloader:
        raise ArgumentError(
            "patch_paddle: paddle is patched already; undo() the first patch."
        )

    known = inspect.unwrap(shard_dataloader).__kwdefaults__
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ArgumentError(
            f"patch_paddle: unknown options {unknown}; there are {sorted(known)}."
        )
    if on_loader is not None and not callable(on_loader):
        raise ArgumentError(
            f"on_loader must be a function that takes a loader, got {on_loader!r}."
        )

    @functools.wraps(shard_dataloader)
    def ours(*args: Any, **kwargs: Any) -> ShardDataloader:
        loader = _shard_with_defaults(args, kwargs, options)
        if on_loader is not None:
            on_loader(loader)
        return loader

    patch = PaddlePatch()
    for module in (dist, auto_parallel, auto_parallel.api):
        if getattr(module, "shard_dataloader", None) is original:
            patch.enter_context(mock.patch.object(module, "shard_dataloader", ours))
    missed = [
        name
        for name, module in sys.modules.items()
        if not name.startswith("paddle.")
        and getattr(module, "__dict__", {}).get("shard_dataloader") is original
    ]
    if missed:
        warnings.warn(
            f"patch_paddle: these modules took shard_dataloader with `from ... import` before and still have "
            f"Paddle's own: {', '.join(sorted(missed))}. Patch before importing them.",
            stacklevel=2,
        )
    return patch
