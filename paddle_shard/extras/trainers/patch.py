"""`patch_paddle`: this library in place of Paddle's loaders, in trainers that cannot be edited."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import paddle.distributed as dist
import paddle.io
from paddle.distributed import auto_parallel

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError
from paddle_shard.extras.trainers.callback import (
    DefaultTrainerCallback,
    TrainerCallback,
)
from paddle_shard.extras.trainers.paddle_patch import PaddlePatch, active_patch
from paddle_shard.extras.trainers.rank_loader import PACKAGES
from paddle_shard.loader.api import shard_dataloader
from paddle_shard.loader.arguments import check_arguments
from paddle_shard.loader.compat import mend_process_mesh
from paddle_shard.loader.loader import ShardDataloader


def patch_paddle(
    *,
    callback: bool | TrainerCallback = True,
    on_loader: Callable[[ShardDataloader], Any] | None = None,
    **options: Any,
) -> PaddlePatch:
    """Put this library in place of Paddle's loaders, so that a trainer need not be edited.

    Call it after the trainer is imported, before its arguments and the trainer are made. It has three effects:

    - `paddle.distributed.shard_dataloader` is this library's, also in modules that have imported it by name.
    - A `paddle.io.DataLoader` that is cut for data ranks, by a `DistributedBatchSampler` or another sampler that knows
      its rank, or by PaddleFormers' `IterableDatasetShard`, is read by this library. It stays a DataLoader, and its
      batches stay local tensors. In auto-DP mode it is left to Paddle. A warning names each loader that is taken, and
      each that is not.

    - Trainers of PaddleNLP and PaddleFormers get a `TrainerCallback`, so that they resume with the next sample.

    Where a `collate_fn` has a `label_pad_token_id`, the `labels` of padding rows are that number.

    Args:
        callback: True: a `TrainerCallback()` for each trainer. A `TrainerCallback` of your own: this one. False: none;
            the trainer counts its position by steps.
        on_loader: Called with each `ShardDataloader` that is made, so that you can hold on to those that a trainer
            makes: for `state_dict`, `stats`, `certificate`.
        options: Keyword-only arguments of `shard_dataloader`, such as `tail="fill"`: the defaults of every loader. An
            argument that the trainer passes itself takes precedence. A loader that does not support an option is made
            without it, with a line in the log. A kind of shuffle (`shuffle="blocks"`) applies to loaders that shuffle.

    Returns:
        The patch; `patch.undo()` takes it back, and so does the end of `with patch_paddle(): ...`.

    Raises:
        ArgumentError: Paddle is patched already, or a value cannot be used.
        TypeError: An option is unknown.

    Examples:
        >>> from paddleformers.trainer import Trainer  # doctest: +SKIP
        >>> paddle_shard.patch_paddle()  # doctest: +SKIP
        >>> trainer = Trainer(...)  # doctest: +SKIP
    """
    mend_process_mesh()  # trainers ask the meshes before they make a loader
    if active_patch() is not None:
        raise ArgumentError(
            "patch_paddle: paddle is patched already; undo() the first patch."
        )
    inspect.signature(shard_dataloader).bind_partial(**options)
    check_arguments(**options)

    patch = PaddlePatch(options, on_loader)
    _replace_shard_dataloader(patch)
    _replace_iteration(patch)
    _replace_distributed_dataloader(patch)
    if callback:
        _add_callback(patch, callback)
    return patch


def _replace_shard_dataloader(patch: PaddlePatch) -> None:
    original = dist.shard_dataloader

    @functools.wraps(shard_dataloader)
    def replacement(*args: Any, **kwargs: Any) -> ShardDataloader:
        loader = patch.shard(*args, **kwargs)
        patch.add_loader(loader)
        return loader

    owners = {dist, auto_parallel, auto_parallel.api, *sys.modules.values()}
    for module in owners:
        if getattr(module, "__dict__", {}).get("shard_dataloader") is original:
            patch.enter_context(
                mock.patch.object(module, "shard_dataloader", replacement)
            )


def _replace_iteration(patch: PaddlePatch) -> None:
    """Read DataLoaders that are cut for data ranks, and say which are read and which are not."""
    loader_class = paddle.io.DataLoader
    paddle_iter = loader_class.__iter__
    paddle_len = loader_class.__len__

    def iterate(loader: paddle.io.DataLoader) -> Any:
        rank_loader = patch.rank_loader(loader)
        name = f"the DataLoader of {type(loader.dataset).__name__}"
        if rank_loader is not None:
            warn_once(
                f"patch_paddle: {name} is read by paddle_shard, {rank_loader}."
            )
            return iter(rank_loader)
        if dist.get_world_size() > 1:
            warn_once(
                f"patch_paddle: {name} is read by Paddle: its {type(loader.batch_sampler).__name__} does not split the "
                "data over ranks, or the warning above says why."
            )
        return paddle_iter(loader)

    def length(loader: paddle.io.DataLoader) -> int:
        is_stream = isinstance(loader.dataset, paddle.io.IterableDataset)
        rank_loader = None if is_stream else patch.rank_loader(loader)
        return (
            int(paddle_len(loader)) if rank_loader is None else len(rank_loader)
        )

    patch.enter_context(mock.patch.object(loader_class, "__iter__", iterate))
    patch.enter_context(mock.patch.object(loader_class, "__len__", length))


def _add_callback(patch: PaddlePatch, callback: Any) -> None:
    """Give the trainers that are made from now on a callback that saves the position of the data."""
    if callback is True:
        callback = DefaultTrainerCallback
    for module in _trainer_modules("trainer"):
        callbacks = [*module.DEFAULT_CALLBACKS, callback]
        patch.enter_context(
            mock.patch.object(module, "DEFAULT_CALLBACKS", callbacks)
        )


def _replace_distributed_dataloader(patch: PaddlePatch) -> None:
    """Have trainers make a loader on each rank: one that only some ranks read cannot end alike on all of them."""

    def ignore(_: Any, value: bool) -> None:
        if value:
            warn_once(
                "patch_paddle: distributed_dataloader=True is read as False, so every rank has the data set. With "
                "patch_paddle(replicas='leader'), one rank of a host reads for those that hold the same rows."
            )

    for module in _trainer_modules("training_args"):
        patch.enter_context(
            mock.patch.object(
                module.TrainingArguments,
                "distributed_dataloader",
                property(lambda _: False, ignore),
                create=True,
            )
        )


def _trainer_modules(name: str) -> list[Any]:
    """Return a module of the trainer of each package that is imported; some import it when it is first used."""
    return [
        import_module(f"{package}.trainer.{name}")
        for package in PACKAGES
        if package in sys.modules
    ]
