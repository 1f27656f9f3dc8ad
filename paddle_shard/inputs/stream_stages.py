"""What can be done to the samples of a stream?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import paddle.io

from paddle_shard.errors import ArgumentTypeError
from paddle_shard.plan.parts import check_count
from paddle_shard.say_once import say_once
from paddle_shard.sources.webdataset import Decode
from paddle_shard.stages import Batch, Filter, Map, Pack, Repeat, Shuffle, Stripe, Unbatch
from paddle_shard.stages.cut import is_cut
from paddle_shard.stages.pack import PackedRows
from paddle_shard.stages.stage import Stage

if TYPE_CHECKING:
    from typing_extensions import Self


class StreamStages(paddle.io.IterableDataset):
    """The stages of a `Stream`. Each method returns a new stream."""

    _stage: Stage
    """The last stage, as the user put the stream together."""
    _num_parts: int | None = None
    """P, as the user has chosen it (`in_parts`)."""

    def decode(self, *handlers: str | Callable[[str, bytes], Any], only: str | Sequence[str] | None = None) -> Self:
        """Return the stream with raw WebDataset samples decoded, by WebDataset's own `decode`.

        Args:
            handlers: Names of WebDataset's image decoders ("pil", "rgb8", ...), or functions of (file ending with a
                leading dot, bytes) that return None to leave a value to the next handler. After them, WebDataset's
                decoders for txt, cls, json, npy, ... are tried. A value that no handler takes stays bytes.
            only: File endings that are decoded; None: all.

        Raises:
            MissingDependencyError: webdataset is not installed.
            ArgumentError: WebDataset does not know one of the names.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.webdataset("data/*.tar").decode("rgb8", only=["jpg", "cls"])  # doctest: +SKIP
        """
        return self.map(Decode(*handlers, only=only))

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Return the stream with a function applied to each sample.

        Args:
            function: Called with a sample, in the workers. numpy's and Python's generators are seeded for each sample.

        Raises:
            ArgumentTypeError: The function cannot be called.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of(range(3)).map(lambda x: 10 * x))
            [0, 10, 20]
        """
        _check_function("map", function)
        return self._then(Map(self._stage, function))

    def filter(self, predicate: Callable[[Any], bool]) -> Self:
        """Return the stream of the samples for which a function is true.

        After the cut, a filter may leave more samples in some parts than in others: see `tail=` of `shard_dataloader`.

        Args:
            predicate: Called with a sample; True keeps it.

        Raises:
            ArgumentTypeError: The predicate cannot be called.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of(range(6)).filter(lambda x: x % 2))
            [1, 3, 5]
        """
        _check_function("filter", predicate)
        return self._then(Filter(self._stage, predicate))

    def shuffle(self, window: int = 1000) -> Self:
        """Return the stream with the samples of each part permuted in windows, in another order each epoch.

        The order of the samples in a window is a function of the loader's seed, the epoch and the part. So it does not
        depend on the reader, and a run can be resumed anywhere.

        Args:
            window: Number of samples of each part that are held in memory and permuted.

        Raises:
            ArgumentError: The window is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> sorted(Stream.of(range(5)).shuffle(3))
            [0, 1, 2, 3, 4]
        """
        return self._then(Shuffle(self._stage, window))

    def batch(self, size: int) -> Self:
        """Return the stream of lists of samples.

        Args:
            size: Number of samples in a list; the last list of a part may be shorter. If this is the last stage of a
                stream that is given to `shard_dataloader` itself, it is the global batch size.

        Raises:
            ArgumentError: The size is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of(range(5)).batch(2))
            [[0, 1], [2, 3], [4]]
        """
        return self._then(Batch(self._stage, size))

    def unbatch(self) -> Self:
        """Return the stream of the items of its samples.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of([[0, 1], [2]]).unbatch())
            [0, 1, 2]
        """
        return self._then(Unbatch(self._stage))

    def pack(
        self,
        length: int,
        *,
        window: int = 1024,
        key: str = "input_ids",
        long: str = "split",
        labels: str | None = None,
        ignore_index: int = -100,
        pad_values: Mapping[str, float] | None = None,
    ) -> Self:
        """Return the stream of rows of one length, into which the documents of each part are packed.

        The fields of a row are those of `paddle_shard.Packed`, but `cu_seqlens` has `length + 2` entries, since no
        length is known in advance. Fields without an entry for each token are left out. A resume reads the documents of
        the part again from its beginning.

        Args:
            length: Tokens of a row.
            window: Documents of a part that are held and packed together.
            key: Field of the tokens, in documents that are dicts; a document may be an array of tokens.
            long: What to do with a document that is longer than a row: "split", "drop" or "error".
            labels: Name of a field to add with the next token of each token. None: no such field.
            ignore_index: Label where there is no next token.
            pad_values: For each field, the number that fills the end of a row; 0 for fields that are not named.

        Raises:
            ArgumentError: An argument is out of range.

        Examples:
            >>> from paddle_shard import Stream
            >>> [row["input_ids"].tolist() for row in Stream.of([[1, 2, 3], [4, 5, 6, 7], [8]]).pack(4)]
            [[1, 2, 3, 8], [4, 5, 6, 7]]
        """
        check_count("length", length)
        rows = PackedRows(
            length=length,
            most_pieces=length,
            key=key,
            labels=labels,
            ignore_index=ignore_index,
            pad_values=dict(pad_values or {}),
        )
        return self._then(Pack(self._stage, rows, window, long))

    def repeat(self, times: int | None = None) -> Self:
        """Return the stream read several times within an epoch, in another order each time if it is shuffled.

        Args:
            times: Number of times; None: forever, for use with `num_batches=`.

        Raises:
            ArgumentError: The number is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> list(Stream.of([1, 2]).repeat(2))
            [1, 2, 1, 2]
        """
        return self._then(Repeat(self._stage, times))

    def sharding_filter(self) -> Self:
        """Return the stream cut into parts here, in turns. A stream that is cut already, as files are, does not change.

        Stages before the cut run in every reader for the whole stream. Stages after it run in a reader only for its own
        parts. So put it after cheap stages that must see all samples, and before expensive ones.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.of(range(100)).shuffle(10).sharding_filter().map(lambda x: x * x)
        """
        if is_cut(self._stage):
            say_once(
                "sharding_filter: the stream is cut into parts already, by its source (files are) or an earlier stage. "
                "Nothing is left to filter, so it can be left out."
            )
            return self
        return self._then(Stripe(self._stage))

    def in_parts(self, num_parts: int) -> Self:
        """Return the stream with P parts, whatever the batch size and the number of files. P is part of its order.

        It divides the rows of a micro-batch, and the number of data ranks divides it. Without `in_parts`, it is the
        largest divisor of the rows up to 64; for files that are not counted, at most their number, or what their sizes
        allow to be balanced. A saved state is bound to it.

        Args:
            num_parts: P.

        Raises:
            ArgumentError: The number is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.of(range(100)).shuffle(10).in_parts(4)
        """
        made = self._then(self._stage)
        made._num_parts = check_count("num_parts", num_parts)
        return made

    def _then(self, stage: Stage) -> Self:
        """Return the stream with another last stage."""
        made = copy.copy(self)
        made._stage = stage
        return made


def _check_function(stage: str, function: object) -> None:
    if not callable(function):
        raise ArgumentTypeError(f"{stage}: give a function of a sample, got {function!r}.")
