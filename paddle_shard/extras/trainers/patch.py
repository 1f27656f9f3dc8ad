"""`patch_paddle`: this library in place of Paddle's loaders, in trainers that cannot be edited."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest import mock

import paddle.distributed as dist
import paddle.io
from paddle.distributed import auto_parallel

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError, PaddleShardError
from paddle_shard.extras.trainers.rank_loader import (
    PACKAGES,
    RankLoader,
    read_rank_loader,
)
from paddle_shard.loader.api import shard_dataloader
from paddle_shard.loader.compat import in_auto_dp_mode, mend_process_mesh
from paddle_shard.loader.loader import ShardDataloader

_RANK_LOADER = "_paddle_shard"
"""Attribute of a DataLoader: the `RankLoader` that reads in its place; None if Paddle reads."""
_patches: list[PaddlePatch] = []
"""The patch, while there is one."""


class PaddlePatch(ExitStack):
    """This library in place of Paddle's loaders, until `undo()` or the end of a `with` block.

    Attributes:
        loaders: The loaders that `paddle.distributed.shard_dataloader` has returned since.
    """

    undo = ExitStack.close
    """Put Paddle's own functions back; safe to call again."""

    def __init__(
        self,
        options: dict[str, Any],
        on_loader: Callable[[ShardDataloader], Any] | None,
    ) -> None:
        """See `patch_paddle`."""
        super().__init__()
        self.loaders: list[ShardDataloader] = []
        self._options = options
        self._on_loader = on_loader

    def shard(self, *args: Any, **given: Any) -> ShardDataloader:
        """Return a loader with the given arguments, and with those default options that it supports."""
        dataloader = args[0] if args else given.get("dataloader")
        sampler = getattr(dataloader, "batch_sampler", None)
        options = dict(self._options)
        shuffles = isinstance(
            getattr(sampler, "sampler", None), paddle.io.RandomSampler
        )
        if not shuffles and not isinstance(options.get("shuffle"), bool):
            options.pop("shuffle", None)  # it chooses how to shuffle, not whether
        if getattr(sampler, "drop_last", False):
            options.pop("tail", None)  # the loader has chosen
        loader = _shard_with(args, given, options)
        if self._on_loader is not None:
            self._on_loader(loader)
        return loader

    def rank_loader(
        self, dataloader: paddle.io.DataLoader, *, is_whole: bool = False
    ) -> RankLoader | None:
        """Return what reads in the place of a DataLoader; None if Paddle reads it.

        Args:
            dataloader: The trainer's.
            is_whole: True if all ranks read all of the data, and their position is to be saved.
        """
        attributes = dataloader.__dict__
        rank_loader: RankLoader | None = attributes.get(_RANK_LOADER)
        if rank_loader is None and (is_whole or _RANK_LOADER not in attributes):
            rank_loader = self._make_rank_loader(dataloader, is_whole=is_whole)
            attributes[_RANK_LOADER] = rank_loader
        return rank_loader

    def _make_rank_loader(
        self, dataloader: paddle.io.DataLoader, *, is_whole: bool
    ) -> RankLoader | None:
        if in_auto_dp_mode() or (dist.get_world_size() == 1 and not is_whole):
            return None
        name = f"the DataLoader of {type(dataloader.dataset).__name__}"
        try:
            return read_rank_loader(dataloader, self.shard, is_whole=is_whole)
        except PaddleShardError as error:
            warn_once(f"patch_paddle: {name} cannot be sharded: {error}")
            return None


def active_patch() -> PaddlePatch | None:
    """Return the patch that is in place; None if there is none."""
    return _patches[0] if _patches else None


def _shard_with(
    args: tuple[Any, ...], given: dict[str, Any], options: dict[str, Any]
) -> ShardDataloader:
    """Return a loader; leave out, with a warning, each option that it does not support."""
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
    *,
    callback: Any = True,
    on_loader: Callable[[ShardDataloader], Any] | None = None,
    **options: Any,
) -> PaddlePatch:
    """Put this library in place of Paddle's loaders, so that a trainer need not be edited.

    Call it after the trainer is imported and before it is made. It has three effects:

    - `paddle.distributed.shard_dataloader` is this library's, also in modules that have imported it by name.
    - A `paddle.io.DataLoader` that is cut for data ranks, by a `DistributedBatchSampler` or another sampler that knows
      its rank, or by PaddleFormers' `IterableDatasetShard`, is read by this library. It stays a DataLoader, and its
      batches stay local tensors. In auto-DP mode it is left to Paddle. A warning names each loader that is taken, and
      each that is not.

    - Trainers of PaddleNLP and PaddleFormers get a `TrainerCallback`, so that they resume with the next sample.

    Where a `collate_fn` has a `label_pad_token_id`, the `labels` of padding rows are that number.

    Args:
        callback: True: a `TrainerCallback()` for each trainer. A `TrainerCallback` of your own: that one. False: none;
            the trainer counts its position by steps.
        on_loader: Is called with each `ShardDataloader` that is made, so that you can hold on to those that a trainer
            makes: for `state_dict`, `stats`, `certificate`.
        options: Keyword-only arguments of `shard_dataloader`, such as `tail="fill"`: the defaults of every loader. What
            the trainer gives itself stands. A loader that cannot have one is made without it, with a line in
            the log; a kind of shuffle (`shuffle="blocks"`) is for those that shuffle.

    Returns:
        The patch; `patch.undo()` takes it back, and so does the end of `with patch_paddle(): ...`.

    Raises:
        ArgumentError: Paddle is patched already, or an option is unknown.

    Examples:
        >>> from paddleformers.trainer import Trainer  # doctest: +SKIP
        >>> paddle_shard.patch_paddle()  # doctest: +SKIP
        >>> trainer = Trainer(...)  # doctest: +SKIP
    """
    mend_process_mesh()  # trainers ask the meshes before they make a loader
    if _patches:
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

    patch = PaddlePatch(options, on_loader)
    _patches.append(patch)
    patch.callback(_patches.remove, patch)
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
        patch.loaders.append(loader)
        if isinstance(loader.given, paddle.io.DataLoader):
            loader.given.__dict__[_RANK_LOADER] = (
                None  # it is read through this loader only
            )
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
            warn_once(f"patch_paddle: {name} is read by paddle_shard, {rank_loader}.")
            return iter(rank_loader)
        if dist.get_world_size() > 1:
            sampler = type(loader.batch_sampler).__name__
            warn_once(
                f"patch_paddle: {name} is read by Paddle: its {sampler} does not split the data over ranks, or the "
                "warning above says why."
            )
        return paddle_iter(loader)

    def length(loader: paddle.io.DataLoader) -> int:
        rank_loader = None
        if not isinstance(loader.dataset, paddle.io.IterableDataset):
            rank_loader = patch.rank_loader(loader)
        return paddle_len(loader) if rank_loader is None else len(rank_loader.sharded)

    patch.enter_context(mock.patch.object(loader_class, "__iter__", iterate))
    patch.enter_context(mock.patch.object(loader_class, "__len__", length))


def _add_callback(patch: PaddlePatch, callback: Any) -> None:
    """Give the trainers that are made from now on a callback that saves the position of the data."""
    from paddle_shard.extras.trainers.callback import TrainerCallback

    if callback is True:
        callback = TrainerCallback
    for module in _trainer_modules("trainer"):
        callbacks = [*module.DEFAULT_CALLBACKS, callback]
        patch.enter_context(mock.patch.object(module, "DEFAULT_CALLBACKS", callbacks))


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
    packages = [package for package in PACKAGES if package in sys.modules]
    return [import_module(f"{package}.trainer.{name}") for package in packages]
