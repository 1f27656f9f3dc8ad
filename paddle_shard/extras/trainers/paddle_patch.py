"""`PaddlePatch`: this library in place of Paddle's loaders, while it is active."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import paddle.distributed as dist
import paddle.io

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError, PaddleShardError
from paddle_shard.extras.trainers.rank_loader import (
    RankLoader,
    read_rank_loader,
)
from paddle_shard.loader.api import shard_dataloader
from paddle_shard.loader.compat import in_auto_dp_mode
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
        _patches.append(self)
        self.callback(_patches.remove, self)

    def shard(self, *args: Any, **given: Any) -> ShardDataloader:
        """Return a loader with the given arguments, and with those default options that it supports."""
        dataloader = args[0] if args else given.get("dataloader")
        sampler = getattr(dataloader, "batch_sampler", None)
        options = dict(self._options)
        shuffles = isinstance(
            getattr(sampler, "sampler", None), paddle.io.RandomSampler
        )
        if not shuffles and not isinstance(options.get("shuffle"), bool):
            # it chooses how to shuffle, not whether
            options.pop("shuffle", None)
        if getattr(sampler, "drop_last", False):
            options.pop("tail", None)  # the loader has chosen
        loader = _shard_with(args, given, options)
        if self._on_loader is not None:
            self._on_loader(loader)
        return loader

    def add_loader(self, loader: ShardDataloader) -> None:
        """Register a loader that `paddle.distributed.shard_dataloader` returns."""
        self.loaders.append(loader)
        if isinstance(loader.given, paddle.io.DataLoader):
            # It is read through this loader only.
            loader.given.__dict__[_RANK_LOADER] = None

    def loader_of(self, dataloader: paddle.io.DataLoader) -> ShardDataloader:
        """Return the loader that reads in the place of a DataLoader: it has the position, `valid` and the certificate.

        Args:
            dataloader: A DataLoader of your own loop, or of a trainer.

        Raises:
            ArgumentError: Paddle reads this DataLoader.
        """
        rank_loader = self.rank_loader(dataloader, is_whole=True)
        if rank_loader is None:
            raise ArgumentError(
                "loader_of: Paddle reads this DataLoader; the log says why."
            )
        return rank_loader.sharded

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
