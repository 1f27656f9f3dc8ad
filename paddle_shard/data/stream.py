"""Streams, as users build them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import paddle.io

from paddle_shard.core.checks import check_count
from paddle_shard.data.external import ExternalSource
from paddle_shard.data.files.counts import file_source
from paddle_shard.data.files.files import Path, Paths
from paddle_shard.data.files.huggingface import HuggingFaceSource
from paddle_shard.data.files.parquet import parquet_source
from paddle_shard.data.files.shards import FileOptions
from paddle_shard.data.files.text import (
    JSON_LINES,
    LINES,
    csv_format,
)
from paddle_shard.data.files.webdataset import decoder, webdataset_source
from paddle_shard.data.iterable import (
    IterableOrFunction,
    IterableSource,
    SelfSplit,
)
from paddle_shard.data.mixture import Weights, check_mixture
from paddle_shard.data.stages.cut import Stripe, cut, is_cut
from paddle_shard.data.stages.mix import Mix
from paddle_shard.data.stages.pack import Pack, PackedRows, check_long
from paddle_shard.data.stages.stage import Opening, Stage
from paddle_shard.data.stages.steps import (
    Filter,
    Group,
    Map,
    Repeat,
    Shuffle,
    Unbatch,
)
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.packing import MAX_WINDOW
from paddle_shard.plan.weights import schedule_of

if TYPE_CHECKING:
    import datasets  # type: ignore[import-untyped]
    from typing_extensions import Unpack


class Stream(paddle.io.IterableDataset):
    """A data set without an index: a source and the stages after it.

    Each method returns a new stream. Give the stream to a `paddle.io.DataLoader` with the global batch size and the
    number of workers. Give that DataLoader to `shard_dataloader`. The stages run in the workers.

    A stream is cut into parts, and one worker of one data rank reads each part. The cut is at the source if it can open
    a part by itself (files), or else at `sharding_filter()`, or else right after the source. Stages before the cut run
    in every reader for the whole stream. Stages after it run in a reader only for its own parts.

    Examples:
        >>> stream = Stream.of(range(10)).map(lambda x: x * x).filter(lambda x: x % 2 == 0)
        >>> list(stream)
        [0, 4, 16, 36, 64]
    """

    def __init__(self, source: Stage | IterableOrFunction) -> None:
        """Set up the stream.

        Args:
            source: A source stage, or anything that `of` accepts.

        Raises:
            ArgumentTypeError: The source cannot be iterated, or is a path, or is a stream already.
        """
        super().__init__()
        if isinstance(source, Stream):
            raise ArgumentTypeError(
                f"Stream: what is given is a {type(source).__name__} already. Use it as it is."
            )
        if isinstance(source, str | bytes | os.PathLike):
            raise ArgumentTypeError(
                f"Stream: {source!r} is one path or text, and not read as a stream. For files: Stream.csv(paths), "
                ".lines(paths), .jsonl(paths), .parquet(paths), .webdataset(urls)."
            )
        if not isinstance(source, Stage):
            source = IterableSource(source)
        self._stage = source
        """The last stage, as the user put the stream together."""
        self._num_parts: int | None = None
        """P, as the user has chosen it (`in_parts`)."""

    @classmethod
    def of(
        cls,
        iterable: IterableOrFunction,
        *,
        splits_itself: bool = False,
    ) -> Stream:
        """Return a stream of anything that can be iterated.

        Args:
            iterable: A list, a data set, or a function that returns a generator.
            splits_itself: If True, the iterable yields other samples for each `paddle.io.get_worker_info()`, or
                torch's. It is shown "worker p of P" for part p, and each sample is read once. If False, every reader
                reads all of it.

        Raises:
            ArgumentTypeError: The iterable cannot be iterated, or is a path.

        Examples:
            >>> list(Stream.of([3, 4]))
            [3, 4]
        """
        if isinstance(iterable, Stream):
            return iterable
        return cls(SelfSplit(iterable) if splits_itself else iterable)

    @classmethod
    def mixture(
        cls,
        sources: Mapping[str, Stream],
        weights: Weights | None = None,
        *,
        stop: Literal["first", "all"] = "first",
    ) -> Stream:
        """Return a stream that draws from several streams, from each as often as its weight says, at any moment.

        Part p of the mixture draws from part p of each source. After every prefix of a part, each of n sources was
        drawn within 1 - 1/(2n-2) samples of its share. A source that has ended is read again, in its next round; one
        that is shuffled, in another order.

        Args:
            sources: Name -> stream. Each is a source with its own stages; `batch` as a last stage comes after the
                mixture.
            weights: Name -> a number >= 0; they need not sum to 1. Weights that change are a list such as
                `[(0, {...}), (1_000_000, {...})]`: from which sample of each epoch each holds, to within a sample of a
                part. A source without a weight has the weight 0, so a source may join later. None: all the same.
            stop: "first": a part ends where it would read the first source again. "all": where it would read the last
                source again, so each has been read in full.

        Raises:
            ArgumentTypeError: A source is not a stream.
            ArgumentError: The weights do not fit, or a source cannot be mixed.

        Examples:
            >>> streams = {"a": Stream.of([1, 2, 3, 4]), "b": Stream.of([10, 20])}
            >>> list(Stream.mixture(streams, {"a": 2, "b": 1}))
            [1, 10, 2, 3, 20, 4]
        """
        check_mixture("Stream.mixture", sources, stop)
        stages = {
            name: _mixed_stage(name, stream) for name, stream in sources.items()
        }
        names = tuple(sources)
        schedule = schedule_of(
            "Stream.mixture",
            names,
            dict.fromkeys(names, 1) if weights is None else weights,
        )
        return cls(Mix(stages, schedule, stop))

    @classmethod
    def csv(
        cls,
        paths: Paths,
        header: bool = True,
        *,
        delimiter: str = ",",
        counts: bool | None = None,
        **options: Unpack[FileOptions],
    ) -> Stream:
        r"""Return a stream of the rows of CSV files (Python's `csv`, dialect "excel", strict). Empty lines are skipped.

        Args:
            paths: See `Stream.lines`.
            header: If True, the first row of each file names the fields, and samples are dicts. If False, samples are
                lists.
            delimiter: The character between two fields, such as "\t".
            counts: See `Stream.lines`.
            options: See `Stream.lines`.

        Raises:
            ArgumentError: There is no file, or none that matches a pattern.
            ShardReadError: A file cannot be read to count it.

        Examples:
            >>> stream = Stream.csv("data/*.csv").map(lambda row: float(row["x"]))  # doctest: +SKIP
        """
        form = csv_format(header=header, delimiter=delimiter)
        return cls(file_source(paths, form, counts=counts, **options))

    @classmethod
    def lines(
        cls,
        paths: Paths,
        *,
        counts: bool | None = None,
        **options: Unpack[FileOptions],
    ) -> Stream:
        r"""Return a stream of the lines of text files, as `str` without their ends ("\n" or "\r\n").

        Args:
            paths: One or more UTF-8 files, plain or compressed by gzip, bzip2 or xz: paths, patterns such as
                `data/*.txt`, whose files are sorted, or URLs that fsspec opens.
            counts: If True, count the lines now, which reads the files once. Then parts are equal and their lengths
                known. None: count if all files are local, none is compressed, and the stream has an end. The counts
                are kept in the user's cache directory for other ranks and later runs.
            options: The options of all streams of files:

                - `shuffle_shards` (bool, True): permute the files, in another order each epoch.
                - `cache_dir` (path, None): a folder in which copies of remote files are kept, for all ranks and
                  workers of the host: each file is downloaded once. A copy is not compared with its server again.

        Raises:
            ArgumentError: There is no file, or none that matches a pattern.
            ShardReadError: A file cannot be read to count it.

        Examples:
            >>> stream = Stream.lines(["a.txt", "b.txt.gz"]).shuffle(10_000)  # doctest: +SKIP
        """
        return cls(file_source(paths, LINES, counts=counts, **options))

    @classmethod
    def jsonl(
        cls,
        paths: Paths,
        *,
        counts: bool | None = None,
        **options: Unpack[FileOptions],
    ) -> Stream:
        """Return a stream of the values of JSON Lines files: one JSON value per line. Blank lines are skipped.

        Args:
            paths: See `Stream.lines`.
            counts: See `Stream.lines`.
            options: See `Stream.lines`.

        Raises:
            ArgumentError: There is no file, or none that matches a pattern.
            ShardReadError: A file cannot be read to count it.

        Examples:
            >>> stream = Stream.jsonl("data/*.jsonl").map(lambda value: value["text"])  # doctest: +SKIP
        """
        return cls(file_source(paths, JSON_LINES, counts=counts, **options))

    @classmethod
    def webdataset(
        cls,
        urls: Paths,
        *,
        index: Path | Literal[False] | None = None,
        **options: Unpack[FileOptions],
    ) -> Stream:
        """Return a stream of the raw samples of tars: dicts of bytes by file ending, with `__key__` and `__url__`.

        Args:
            urls: Paths, `http(s)://` URLs, or URLs that fsspec opens (`s3://`, ...). Braces (`{000..009}`) and patterns
                of local files are expanded.
            index: An index file, which `paddle-shard index` makes. With an index, parts are equal, their lengths are
                known, and a resume is cheap. None: count the tars now by their headers, if all are local and none is
                compressed. False: count nothing.
            options: See `Stream.lines`. Samples keep their order within a tar: add a `shuffle` stage to permute
                them, too.

        Raises:
            MissingDependencyError: webdataset is not installed; the text names the extra.
            ArgumentError: There is no tar, or the index does not know one.
            ShardReadError: A tar cannot be read to count it.

        Examples:
            >>> tars = Stream.webdataset("data/train-{000..099}.tar")  # doctest: +SKIP
            >>> stream = tars.shuffle(1000).decode("rgb8").map(lambda s: (s["jpg"], s["cls"]))  # doctest: +SKIP
        """
        return cls(webdataset_source(urls, index=index, **options))

    @classmethod
    def parquet(
        cls,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        allow_nulls: bool = False,
        **options: Unpack[FileOptions],
    ) -> Stream:
        """Return a stream of the rows of Parquet files: dicts by column; see `data.files.parquet.parquet_source`.

        Args:
            paths: One or more files, all with the same columns: paths, patterns such as `data/*.parquet`, whose files
                are sorted, or URLs that fsspec opens.
            columns: Top-level columns to read, in this order; None: all. No others are fetched.
            allow_nulls: If True, a null is None in the sample. If False, a null is an error that names the column and
                the row.
            options: The same as for `lines`, with row groups in place of files. Rows keep their order within a row
                group: add a `shuffle` stage to permute them, too. With `cache_dir`, files are downloaded whole.

        Raises:
            MissingDependencyError: pyarrow is not installed; the text names the extra.
            ArgumentError: There is no file or no row, or a file lacks a column or has it with another type.
            ShardReadError: A footer cannot be read.

        Examples:
            >>> stream = Stream.parquet("data/*.parquet", columns=["x", "y"]).shuffle(1000)  # doctest: +SKIP
        """
        source = parquet_source(
            paths, columns=columns, allow_nulls=allow_nulls, **options
        )
        return cls(source)

    @classmethod
    def huggingface(cls, dataset: datasets.IterableDataset) -> Stream:
        """Return a stream of a `datasets.IterableDataset`; see `data.files.huggingface.HuggingFaceSource`.

        Args:
            dataset: The data set. It may be mapped, filtered and shuffled (with a seed). It is not changed.

        Raises:
            MissingDependencyError: datasets is not installed; the text names the extra.
            ArgumentTypeError: `dataset` is not a `datasets.IterableDataset`.
            ArgumentError: The data set is shuffled without a seed, or has a state.
            SplitError: The data set was split by node already.

        Examples:
            >>> stream = Stream.huggingface(load_dataset("ag_news", split="train", streaming=True))  # doctest: +SKIP
        """
        return cls(HuggingFaceSource(dataset))

    # Stages

    def decode(
        self,
        *handlers: str | Callable[[str, bytes], Any],
        only: str | Sequence[str] | None = None,
    ) -> Stream:
        """Return the stream with raw WebDataset samples decoded, by WebDataset's own decoders.

        Args:
            handlers: Names of WebDataset's image decoders ("pil", "rgb8", ...), or functions of (file ending with a
                leading dot, bytes) that return None to leave a value to the next handler. After them, WebDataset's
                decoders for txt, cls, json, npy, ... are tried, except those that unpickle. A value that no handler
                takes stays bytes.
            only: File endings that are decoded; None: all.

        Raises:
            MissingDependencyError: webdataset is not installed.
            ValueError: WebDataset does not know one of the names.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.webdataset("data/*.tar").decode("rgb8", only=["jpg", "cls"])  # doctest: +SKIP
        """
        return self.map(decoder(*handlers, only=only))

    def map(self, function: Callable[[Any], Any]) -> Stream:
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

    def filter(self, predicate: Callable[[Any], bool]) -> Stream:
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

    def shuffle(self, window: int = 1000) -> Stream:
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
        window = check_count("shuffle: window", window)
        return self._then(Shuffle(self._stage, window))

    def batch(self, size: int) -> Stream:
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
        size = check_count("batch: size", size)
        return self._then(Group(self._stage, size))

    def unbatch(self) -> Stream:
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
        long: Literal["split", "drop"] = "split",
        labels: str | None = None,
        ignore_index: int = -100,
        pad_values: Mapping[str, float] | None = None,
    ) -> Stream:
        """Return the stream of rows of one length, into which the documents of each part are packed.

        The fields of a row are those of `paddle_shard.Packed`, but `cu_seqlens` has `length + 2` entries, since no
        length is known in advance. Fields without an entry for each token are left out. A resume reads the documents of
        the part again from its beginning.

        Args:
            length: Tokens of a row.
            window: Documents of a part that are held and packed together.
            key: Field of the tokens, in documents that are dicts; a document may be an array of tokens.
            long: What to do with a document that is longer than a row: "split" or "drop".
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
        check_long(long)
        rows = PackedRows(
            length=check_count("pack: length", length),
            most_pieces=length,
            key=key,
            labels=labels,
            ignore_index=ignore_index,
            pad_values=dict(pad_values or {}),
        )
        window = check_count("pack: window", window, most=MAX_WINDOW)
        return self._then(Pack(self._stage, rows, window, long))

    def repeat(self, times: int | None = None) -> Stream:
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
        if times is not None:
            times = check_count("repeat: times", times)
        return self._then(Repeat(self._stage, times))

    def sharding_filter(self) -> Stream:
        """Return the stream cut into parts here, in turns. A stream that is cut already, as files are, does not change.

        Stages before the cut run in every reader for the whole stream. Stages after it run in a reader only for its own
        parts. So put it after cheap stages that must see all samples, and before expensive ones.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.of(range(100)).shuffle(10).sharding_filter().map(lambda x: x * x)
        """
        return self if is_cut(self._stage) else self._then(Stripe(self._stage))

    def in_parts(self, num_parts: int) -> Stream:
        """Return the stream with P parts, whatever the batch size and the number of files. P is part of its order.

        It divides the rows of a micro-batch, and the number of data ranks divides it. Without `in_parts`, it is the
        largest divisor of the rows up to 64; for files that are not counted, at most their number, or fewer if one is
        much larger than the others. A saved state is bound to it.

        Args:
            num_parts: P.

        Raises:
            ArgumentError: The number is less than 1.

        Examples:
            >>> from paddle_shard import Stream
            >>> stream = Stream.of(range(100)).shuffle(10).in_parts(4)
        """
        stream = self._then(self._stage)
        stream._num_parts = check_count("num_parts", num_parts)
        return stream

    def _then(self, stage: Stage) -> Stream:
        """Return the stream with another last stage."""
        stream = copy.copy(self)
        stream._stage = stage
        return stream

    def __repr__(self) -> str:
        names = [stage.label for stage in self._stage.line()]
        num_shards = self._stage.source.num_shards
        if num_shards is not None:
            names[-1] += f" of {num_shards} shards"
        return f"{type(self).__name__}({' > '.join(reversed(names))})"

    def __bool__(self) -> bool:
        """Return True: only reading the stream shows whether it has a sample."""
        return True

    def __len__(self) -> int:
        # Raise a TypeError, so that list(stream) works. Paddle's `__len__` raises another error.
        raise ArgumentTypeError(
            "Stream: the length is unknown until the stream has been read. (In auto-DP mode, Paddle's DataLoader asks "
            "for it: pass the stream itself to shard_dataloader, with .batch(rows of the global batch) and a .map() "
            "that collates.)"
        )

    def __iter__(self) -> Iterator[Any]:
        """Read the stream without a loader. In a worker, read its part only: there are as many parts as workers."""
        info = paddle.io.get_worker_info()
        part, num_parts = (
            (0, 1) if info is None else (info.id, info.num_workers)
        )
        return stage_of(self).open(Opening(parts=(part,), num_parts=num_parts))[
            0
        ]


def _check_function(stage: str, function: object) -> None:
    if not callable(function):
        raise ArgumentTypeError(
            f"{stage}: the argument must be a function of a sample, got {function!r}."
        )


def _mixed_stage(name: str, stream: Stream) -> Stage:
    """Return the stage that opens the parts of a source of a mixture.

    Raises:
        ArgumentTypeError: The source is not a stream.
        ArgumentError: The source cannot be mixed.
    """
    if not isinstance(stream, Stream):
        raise ArgumentTypeError(
            f"Stream.mixture: source {name!r} must be a Stream (Stream.of(iterable), Stream.huggingface(it), ...), got "
            f"{stream!r}. Data sets with an index are mixed by paddle_shard.Mixture."
        )
    source = stream._stage.source
    why = None
    if stream._num_parts is not None:
        why = (
            "has in_parts(); all have the mixture's parts: "
            f"Stream.mixture(...).in_parts({stream._num_parts})."
        )
    elif isinstance(source, ExternalSource):
        why = (
            "cannot be mixed: a library that reads for itself (ExternalLoader) mixes "
            "its own sources."
        )
    elif source.once:
        why = (
            "can be opened only once, but a source that has ended is opened again. "
            "Give a function that returns a new iterator."
        )
    if why is not None:
        raise ArgumentError(f"Stream.mixture: source {name!r} {why}")
    return stage_of(stream)


def stage_of(stream: Stream) -> Stage:
    """Return the stage that opens the parts of a stream."""
    return cut(stream._stage)


def last_stage(stream: Stream) -> tuple[Stage, int | None]:
    """Return the last stage of a stream, as the user put it together, and the number of parts that was chosen."""
    return stream._stage, stream._num_parts
