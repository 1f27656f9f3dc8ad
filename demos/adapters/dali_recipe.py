"""A recipe: an NVIDIA DALI pipeline, on the CPU or on a GPU, as an `ExternalLoader`.

Copy this file and `shares.py` beside your training script. DALI says only by a private attribute whether a pipeline has
checkpoints: pip install 'nvidia-dali-cuda130>=2.4'. `make test-adapters ADAPTERS=dali` runs its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import shares

from paddle_shard import ExternalLoader, ShardOptions
from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError

_OURS = (
    "batch_size",
    "shard_id",
    "num_shards",
    "seed",
    "enable_checkpointing",
    "checkpoint",
)


def dali_pipeline(
    build_pipeline: Callable[..., Any],
    *,
    batch_size: int,
    fields: Sequence[str] | None = None,
    **options: Any,
) -> ExternalLoader:
    """Return a pipeline that each process builds for its data rank, and that reads each sample exactly once.

    Each pass has its own pipeline, with a different seed for each epoch and data rank, and stops when the reader has
    read its shard. So `pad_last_batch` and `stick_to_shard` can have any value, and `shuffle_after_epoch` has no effect
    (use `random_shuffle`). A pass resumes by DALI's checkpoint. CPU outputs become arrays, which usually view DALI's
    memory. GPU outputs stay on the GPU and are passed by DLPack. Only a short last batch goes through the CPU.

    Args:
        build_pipeline: Called with `shard_id`, `num_shards`, `batch_size`, `seed`, `enable_checkpointing`,
            `checkpoint` and the options; returns the pipeline. It can be a function with `@pipeline_def` that takes
            `shard_id` and `num_shards`. It must give both to each of its readers.
        batch_size: The global batch size; the data ranks must divide it.
        fields: Names of the pipeline's outputs. If given, batches are dicts; None: batches are lists.
        options: Options of the pipeline: `num_threads`, `device_id` (None: CPU only), and arguments of the function.

    Raises:
        MissingDependencyError: DALI is not installed.
        ArgumentError: An option is given that this function sets itself.

    Examples:
        >>> @pipeline_def  # doctest: +SKIP
        ... def images(shard_id, num_shards):
        ...     jpegs, labels = fn.readers.file(file_root=root, shard_id=shard_id, num_shards=num_shards,
        ...                                     random_shuffle=True)
        ...     return fn.resize(fn.decoders.image(jpegs), size=(224, 224)), labels
        >>> source = dali_pipeline(images, batch_size=256, num_threads=4, device_id=None)  # doctest: +SKIP
    """
    for name in sorted(options.keys() & set(_OURS)):
        raise ArgumentError(
            f"dali_pipeline: leave {name} out: it is given for each data rank and epoch."
        )
    with shares.needs("nvidia-dali-cuda130"):
        import nvidia.dali  # noqa: F401

    named = None if fields is None else list(fields)
    return ExternalLoader(
        lambda share: _Pass(
            partial(build_pipeline, **options), share, batch_size, named
        ),
        name="dali",
        save=_Pass.state,
        repeatable=True,
    )


class _Pass:
    """One pass over a share."""

    def __init__(
        self,
        build_pipeline: Callable[..., Any],
        share: ShardOptions,
        batch_size: int,
        fields: list[str] | None,
    ) -> None:
        self._fields, self._rows = fields, shares.local_rows(batch_size, share)
        shares.check_same(share, batch_size=batch_size)
        state = share.state or {"delivered": 0, "checkpoint": None}
        self._delivered = state["delivered"]
        self._pipeline = build_pipeline(
            shard_id=share.shard,
            num_shards=share.num_shards,
            batch_size=self._rows,
            seed=shares.seed_of(share, share.shard),
            enable_checkpointing=True,
            checkpoint=shares.from_json(state["checkpoint"]),
        )
        self._length = _checked(self._pipeline, share, self._rows)
        self._same = {"batch_size": batch_size, "samples": self._length}
        shares.check_same(share, **self._same)

    def __iter__(self) -> Iterator[Any]:
        while self._delivered < self._length:
            rows = min(self._rows, self._length - self._delivered)
            outputs = [
                self._array(output, rows) for output in self._pipeline.run()
            ]
            self._delivered += rows
            if self._fields is None:
                yield outputs
                continue
            if len(self._fields) != len(outputs):
                raise ArgumentError(
                    f"dali_pipeline: fields={self._fields} names {len(self._fields)} outputs, but the pipeline has "
                    f"{len(outputs)}. Name each, in the order in which it returns them."
                )
            yield dict(zip(self._fields, outputs, strict=True))

    def _array(self, output: Any, rows: int) -> Any:
        """Return the first rows of an output as an array, or as a tensor on the GPU."""
        if not output.is_dense_tensor():
            raise ArgumentTypeError(
                f"dali_pipeline: an output's samples differ in shape ({output.shape()[:3]} ..), and a tensor cannot "
                "hold them. Make them equal in the pipeline, for instance with fn.resize, fn.crop or fn.pad."
            )
        if type(output).__name__ == "TensorListGPU":
            if not self._pipeline.exec_dynamic:
                raise ArgumentError(
                    "dali_pipeline: with exec_dynamic=False DALI uses an output's GPU memory again while the batch is "
                    "in use. Leave it at True."
                )
            if rows == self._rows:
                return output.as_tensor()
            output = output.as_cpu()
        array = np.from_dlpack(output.as_tensor())[:rows]
        # else DALI writes to its buffers again
        return array if self._pipeline.exec_dynamic else array.copy()

    def state(self) -> dict[str, Any]:
        """Return the state after the last batch that was taken."""
        return {
            "delivered": self._delivered,
            "checkpoint": shares.to_json(self._pipeline.checkpoint()),
            **self._same,
        }


def _checked(pipeline: Any, share: ShardOptions, rows: int) -> int:
    """Check the pipeline and return how many samples its readers have for this data rank.

    Raises:
        ArgumentTypeError: It is not a pipeline.
        ArgumentError: It has no checkpoints or no reader, or its readers have different numbers of samples.
        SplitError: It has another batch size than it was given, or a reader reads another shard.
    """
    from nvidia.dali import Pipeline

    if not isinstance(pipeline, Pipeline):
        raise ArgumentTypeError(
            f"dali_pipeline: build_pipeline must return a Pipeline, got {type(pipeline).__name__}."
        )
    if pipeline.max_batch_size != rows:
        raise SplitError(
            f"dali_pipeline: the pipeline has batch_size={pipeline.max_batch_size}, but this data rank's is {rows}. "
            "Give the pipeline the batch_size that build_pipeline is called with."
        )
    if not pipeline._enable_checkpointing:
        raise ArgumentError(
            "dali_pipeline: give the pipeline the enable_checkpointing= and checkpoint= of the call."
        )
    readers = pipeline.reader_meta()
    if not readers:
        raise ArgumentError(
            "dali_pipeline: the pipeline has no reader, so that neither its split nor its end can be known. (An "
            "external source loses a short last batch.) Use a reader of fn.readers."
        )
    for name, meta in readers.items():
        found = {
            "shard_id": meta["shard_id"],
            "num_shards": meta["number_of_shards"],
        }
        fix = "Give the reader the shard_id and num_shards that build_pipeline is called with."
        shares.check_share(found, share, f"dali: the reader {name!r}", fix)
    sizes = {name: meta["epoch_size"] for name, meta in readers.items()}
    if len(set(sizes.values())) > 1:
        raise ArgumentError(
            f"dali_pipeline: the readers differ in their number of samples: {sizes}."
        )
    # DALI cuts like this: [size * shard // shards, size * (shard + 1) // shards).
    size = next(iter(sizes.values()))
    return int(
        size * (share.shard + 1) // share.num_shards
        - size * share.shard // share.num_shards
    )
