"""What can be done to the samples of a stream?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import paddle.io

from paddle_shard.errors import ArgumentTypeError
from paddle_shard.inputs.recipe import Recipe
from paddle_shard.plan.parts import check_count
from paddle_shard.say_once import say_once
from paddle_shard.sources.webdataset import decode
from paddle_shard.stages import Batch, Filter, Map, Repeat, RoundRobin, Shuffle, Stripe, Unbatch

if TYPE_CHECKING:
    from typing_extensions import Self


class StreamStages(paddle.io.IterableDataset):
    """The stages of a `Stream`. Each method returns a new stream."""

    _recipe: Recipe

    def decode(self, *handlers: str | Callable[[str, bytes], Any], only: str | Sequence[str] | None = None) -> Self:
        """Return the stream with raw WebDataset samples decoded, by WebDataset's own `decode`.

        Args:
            handlers: Names of WebDataset's image decoders ("pil", "rgb8", ...), or functions of (file ending with a
                leading dot, bytes) that return None for what they leave to the next. Behind them its decoders for
                txt, cls, json, npy, ... are tried; what none takes stays bytes.
            only: File endings that are decoded; None: all.

        Raises:
            MissingDependencyError: webdataset is not installed.
            ArgumentError: A name that WebDataset does not know.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.webdataset("data/*.tar").decode("rgb8", only=["jpg", "cls"])  # doctest: +SKIP
        """
        return self.map(decode(*handlers, only=only))

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Return the stream with a function applied to each sample.

        Args:
            function: Of a sample; runs in the workers. numpy's and Python's generators are seeded for each sample.

        Raises:
            ArgumentTypeError: It cannot be called.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of(range(3)).map(lambda x: 10 * x))
            [0, 10, 20]
        """
        _check_function("map", function)
        return self._made(self._recipe.then(lambda stage: Map(stage, function), one_by_one=True))

    def filter(self, predicate: Callable[[Any], bool]) -> Self:
        """Return the stream of the samples for which a function is true.

        Behind the cut it may leave more of some parts than of others: see `tail=` of `shard_dataloader`.

        Args:
            predicate: Of a sample.

        Raises:
            ArgumentTypeError: It cannot be called.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of(range(6)).filter(lambda x: x % 2))
            [1, 3, 5]
        """
        _check_function("filter", predicate)
        return self._made(self._recipe.then(lambda stage: Filter(stage, predicate)))

    def shuffle(self, window: int = 1000) -> Self:
        """Return the stream with the samples of each part permuted in windows, anew in each epoch.

        A window is read, and its samples are yielded in an order that follows from the loader's seed, the epoch and the
        part; so the order does not depend on the reader, and can be resumed anywhere.

        Args:
            window: Samples that are held, of each part.

        Raises:
            ArgumentError: It is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> sorted(Stream.of(range(5)).shuffle(3))
            [0, 1, 2, 3, 4]
        """
        return self._made(self._recipe.then(lambda stage: Shuffle(stage, window)))

    def batch(self, size: int) -> Self:
        """Return the stream of lists of samples.

        Args:
            size: Samples of a list; the last of a part may be shorter. As the last stage of a stream that is given
                to `shard_dataloader` itself, it is the global batch.

        Raises:
            ArgumentError: It is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of(range(5)).batch(2))
            [[0, 1], [2, 3], [4]]
        """
        return self._made(self._recipe.then(lambda stage: Batch(stage, size), one_by_one=True, batched=size))

    def unbatch(self) -> Self:
        """Return the stream of the items of its samples.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of([[0, 1], [2]]).unbatch())
            [0, 1, 2]
        """
        return self._made(self._recipe.then(Unbatch))

    def repeat(self, times: int | None = None) -> Self:
        """Return the stream read several times within an epoch, in another order each time where it is shuffled.

        Args:
            times: How often; None: without an end, for `num_batches=`.

        Raises:
            ArgumentError: It is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of([1, 2]).repeat(2))
            [1, 2, 1, 2]
        """
        return self._made(self._recipe.then(lambda stage: Repeat(stage, times)))

    def sharding_filter(self) -> Self:
        """Return the stream cut into parts here, by turns; one that is cut already, as files are, is left as it is.

        What stands before it is done by every reader for the whole stream; what stands behind it, only for its own
        parts. So put it behind what is cheap and must see all, and in front of what is dear.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.of(range(100)).shuffle(10).sharding_filter().map(lambda x: x * x)
        """
        if self._recipe.is_cut:
            say_once(
                "sharding_filter: the stream is cut into parts already, by its source (files are) or an earlier stage. "
                "Nothing is left to filter, so it can be left out."
            )
            return self
        return self._made(self._recipe.then(Stripe))

    def round_robin(self) -> Self:
        """Return the stream read by the main process of each data rank alone, which dispatches it to its workers.

        For what cannot be opened by every worker, or is too dear to be. What stands before it runs in the main
        process; only `map` may follow, and runs in the workers.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.of(range(4)).round_robin().map(lambda x: -x)
            >>> list(stream)
            [0, -1, -2, -3]
        """
        return self._made(self._recipe.cut().then(RoundRobin))

    def local_shuffle(self, batches: int) -> Self:
        """Return the stream with the rows of each so many batches mixed, by each rank among its own.

        In the main process, behind the batching, so it reaches over the parts that a rank holds, which a
        `shuffle` does not. The batches depend on the number of data ranks then: a run is bound to it, and to its
        batch size, which its saved state says. It is the last stage.

        Args:
            batches: How many are mixed, and held.

        Raises:
            ArgumentError: It is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.of(range(100)).shuffle(10).local_shuffle(4)
        """
        check_count("batches", batches)
        return self._made(replace(self._recipe, mixed=batches))

    def _made(self, recipe: Recipe) -> Self:
        made = copy.copy(self)
        made._recipe = recipe
        return made


def _check_function(stage: str, function: object) -> None:
    if not callable(function):
        raise ArgumentTypeError(f"{stage}: give a function of a sample, got {function!r}.")
