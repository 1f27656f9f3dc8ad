"""Batches of a language model whose sequences are split over ranks, and its outputs in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.distributed as dist

from paddle_shard.core.checks import check_count
from paddle_shard.core.collate import collate
from paddle_shard.errors import ArgumentError, AxisError, BatchStructureError
from paddle_shard.placement.field import from_local
from paddle_shard.placement.lengths import padded
from paddle_shard.plan.sequence import balanced_order

LAYOUTS = ("plain", "balanced", "documents")
_OF_ROWS = ("cu_seqlens", "max_seqlen")
"""Fields that `Packed` makes for a whole row; the size of one may happen to be the length of the rows."""

Arrays = dict[str, npt.NDArray[Any]]


class SequenceSplit:
    """Splits the tokens of each row over an axis of the mesh, for context parallelism.

    Everything that a rank cannot do for its part alone is done for the whole row before it is split: labels are
    shifted, positions are counted, and lengths that cannot be split evenly are padded.

    - `collate()` makes the `collate_fn` of the DataLoader: it prepares a batch, and puts its tokens in the order in
      which the ranks hold them.
    - `placements()` makes the `placements=` of `shard_dataloader`.
    - `unsplit()` puts outputs back in the order of the rows.

    Layouts: "plain" gives each rank one stretch of the row. "balanced" gives it two, one from either end, so that
    causal attention costs all ranks the same (Paddle's `shard_seq_load_balance`). "documents" does that inside each
    document of a packed row, so that attention inside documents costs all ranks about the same: in each document, the
    ranks' numbers of (query, key) pairs differ by less than two for each token of it.

    Examples:
        >>> split = SequenceSplit("sep", 2, layout="balanced", labels="labels")
        >>> batch = split.collate()([{"input_ids": np.arange(8)}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist()
        ([[0, 1, 6, 7, 2, 3, 4, 5]], [[1, 2, 7, -100, 3, 4, 5, 6]], [[0, 1, 6, 7, 2, 3, 4, 5]])
    """

    def __init__(
        self,
        axis: str,
        num_ranks: int,
        *,
        layout: str = "plain",
        key: str = "input_ids",
        labels: str | None = None,
        ignore_index: int = -100,
        pad_values: Mapping[str, float] | None = None,
    ) -> None:
        """Choose the layout.

        Args:
            axis: The axis of the mesh, such as "sep".
            num_ranks: Its size.
            layout: "plain", "balanced" or "documents".
            key: Field of the tokens, `[rows, length]`. Fields whose first two dims are the same are split as well.
            labels: Field of labels to shift: each token gets the label of the next one in its document, and
                `ignore_index` where there is none. If the batch has no such field, it is made of the tokens. None:
                there are none, or they are shifted already, as those of `Packed`.
            ignore_index: Label where there is no next token, and in padding; also of a field "labels" if `labels` is
                None.
            pad_values: For each field, the number that fills rows up to a length that can be split; 0 for others.

        Raises:
            ArgumentError: An argument is out of range.
        """
        if layout not in LAYOUTS:
            raise ArgumentError(
                f"SequenceSplit: layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}."
            )
        self.axis = axis
        self.num_ranks = check_count("SequenceSplit: num_ranks", num_ranks)
        self.layout = layout
        self.key = key
        self.unit = self.num_ranks * (2 if layout == "balanced" else 1)
        """Lengths are padded to a multiple of this number."""
        self._labels = labels
        self._ignore_index = ignore_index
        # Without labels= they are shifted already, and have the name that `Packed` and most models give them.
        self._pads = {labels or "labels": ignore_index, **(pad_values or {})}

    def collate(
        self, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> Callable[[list[Any]], Arrays]:
        """Return a `collate_fn` that prepares batches and puts their tokens in order.

        The batch gets, beside the labels, the fields `position_ids` (unless it has one: the place of each token in its
        row) and `token_index`: the place in the row of each token, int64 `[rows, length]`, for masks and `unsplit`.

        Args:
            collate_fn: Makes a dict of arrays or tensors of some samples, with rows of one length; None: they are
                stacked.
        """
        return partial(self._collate, collate_fn or collate)  # workers can have it

    def _collate(
        self, collate_fn: Callable[[list[Any]], Any], samples: list[Any]
    ) -> Arrays:
        return self.prepare(collate_fn(samples))

    def prepare(self, batch: Any) -> Arrays:
        """Return a batch with labels shifted, positions counted, padded, and its tokens in order.

        Args:
            batch: A dict of arrays; fields `segment_ids` or `cu_seqlens`, as of `Packed`, separate the documents.

        Raises:
            BatchStructureError: It has no field of tokens, or no documents for layout="documents"; `segment_ids` begin
                at 0, which is padding; or labels that are to be shifted are shifted already.
        """
        if not isinstance(batch, Mapping) or self.key not in batch:
            raise BatchStructureError(
                f"SequenceSplit: a batch must be a dict with the field {self.key!r}, [rows, length], got "
                f"{list(batch) if isinstance(batch, Mapping) else type(batch).__name__}."
            )
        fields = {
            name: value.numpy() if hasattr(value, "numpy") else value
            for name, value in batch.items()
        }
        tokens = np.asarray(fields[self.key])
        if tokens.ndim < 2:
            raise BatchStructureError(
                f"SequenceSplit: {self.key!r} must be [rows, length], got {list(tokens.shape)}."
            )
        length = tokens.shape[1]
        segments = self._segments(fields, tokens.shape[:2])
        if self._labels is not None:
            labels = np.asarray(fields.get(self._labels, tokens))
            fields[self._labels] = self._shifted(labels, tokens, segments)
        positions = np.broadcast_to(np.arange(length), tokens.shape[:2])
        fields.setdefault("position_ids", positions)

        # Pad all fields of tokens to a length that can be split, and put them in order.
        padded_length = -(-length // self.unit) * self.unit
        documents = padded(segments, [padded_length], 0)
        fields["token_index"] = order = np.stack(list(map(self._order, documents)))
        for name, value in fields.items():
            is_split = getattr(value, "shape", ())[:2] == tokens.shape[:2]
            if is_split and name not in (*_OF_ROWS, "token_index"):
                shape = [padded_length, *value.shape[2:]]
                values = padded(value, shape, self._pads.get(name, 0))
                index = order.reshape(*order.shape, *[1] * (value.ndim - 2))
                fields[name] = np.take_along_axis(values, index, axis=1)
        if "cu_seqlens" in fields:
            fields |= self._padded_lengths(fields, length, padded_length)
        return fields

    def _shifted(
        self,
        labels: npt.NDArray[Any],
        tokens: npt.NDArray[Any],
        segments: npt.NDArray[np.int64],
    ) -> npt.NDArray[Any]:
        """Return for each token the label of the next one in its document.

        Raises:
            BatchStructureError: Each label is the next token already: no loss curve would show a second shift.
        """
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        if labels.shape == tokens.shape and labels.ndim == 2:
            is_label = same & (labels[:, :-1] != self._ignore_index)
            current = labels[:, :-1][is_label]
            is_next = (current == tokens[:, 1:][is_label]).all()
            if current.size and is_next and (current != tokens[:, :-1][is_label]).any():
                raise BatchStructureError(
                    f"SequenceSplit: the field {self._labels!r} is shifted already: each label is the next token of "
                    "its document, as Packed(labels=) makes them. Leave labels= out of SequenceSplit, or of Packed."
                )
        dtype = labels.dtype if labels.dtype.kind == "i" else np.int64
        shifted = np.full(labels.shape, self._ignore_index, dtype)
        shifted[:, :-1][same] = labels[:, 1:][same]
        return shifted

    def _padded_lengths(
        self, fields: Mapping[str, Any], length: int, padded_length: int
    ) -> Arrays:
        """Return `cu_seqlens` and `max_seqlen` with the padding of a row as a sequence of its own."""
        ends = np.array(fields["cu_seqlens"])
        if padded_length > length:
            is_repeated = np.cumsum(ends == length, axis=1) > 1
            ends[is_repeated] = padded_length
            ends[:, -1] = padded_length
        lengths: Arrays = {"cu_seqlens": ends}
        if "max_seqlen" in fields:
            longest = np.asarray(fields["max_seqlen"])
            most = np.diff(ends, axis=1).max(axis=1).astype(longest.dtype)
            lengths["max_seqlen"] = most.reshape(longest.shape)
        return lengths

    def placements(self, *fields: str, **rows: int) -> dict[str, dict[str, int]]:
        """Return `placements=` for fields that are split.

        Args:
            fields: Names of the fields that the model takes, such as "input_ids", "labels", "position_ids".
            rows: The axis that splits the rows, as `dp=0`; none if rows are not split.

        Examples:
            >>> SequenceSplit("sep", 2).placements("input_ids", "labels", dp=0)["labels"]
            {'dp': 0, 'sep': 1}
        """
        return {name: {**rows, self.axis: 1} for name in fields}

    def unsplit(self, outputs: Any, token_index: Any) -> Any:
        """Return outputs in the order of the rows. It is collective over the axis, and no gradient goes through it.

        Args:
            outputs: `[rows, length, ...]`, such as logits or losses of tokens: a distributed tensor that is split like
                the tokens, or all of its tokens as an array. On the CPU, of a dtype for which Paddle has kernels.
            token_index: The batch's field.

        Returns:
            The same kind of tensor; a distributed one is no longer split over the axis.

        Raises:
            AxisError: The mesh has no such axis.
        """
        if isinstance(outputs, np.ndarray):
            index = np.argsort(token_index, axis=1)
            index = index.reshape(*index.shape, *[1] * (outputs.ndim - 2))
            return np.take_along_axis(outputs, index, axis=1)
        with paddle.no_grad():
            values = self._gathered(outputs)
            index = self._gathered(token_index)._local_value().argsort(axis=1)
            index = index.reshape([*index.shape, *[1] * (outputs.ndim - 2)])
            ordered = values._local_value().take_along_axis(index, 1)
            return from_local(ordered, values.process_mesh, values.placements)

    def _gathered(self, tensor: Any) -> Any:
        """Return a distributed tensor that is not split over the axis."""
        mesh = tensor.process_mesh
        if self.axis not in mesh.dim_names:
            raise AxisError(
                f"unsplit: the mesh has the axes {mesh.dim_names}, and no {self.axis!r}."
            )
        placements = list(tensor.placements)
        placements[mesh.dim_names.index(self.axis)] = dist.Replicate()
        return dist.reshard(tensor, mesh, placements)

    def _order(self, segments: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the tokens of a row in the order of the ranks; `segments` numbers its documents."""
        length = len(segments)
        if self.layout == "plain":
            return np.arange(length)
        ends = np.array([length])
        if self.layout == "documents":
            ends = np.append(np.flatnonzero(np.diff(segments)) + 1, length)
        return balanced_order(ends, self.num_ranks)

    def _segments(
        self, fields: Mapping[str, Any], shape: tuple[int, int]
    ) -> npt.NDArray[np.int64]:
        """Return the number of each token's document, int64 [rows, length]; 0 for padding."""
        if "segment_ids" in fields:
            segments = np.asarray(fields["segment_ids"]).astype(np.int64)
            starts_at_0 = (segments[:, 0] == 0) & (segments > 0).any(axis=1)
            if starts_at_0.any() or not segments.any():
                raise BatchStructureError(
                    "SequenceSplit: segment_ids begin at 0, which means padding, as Packed makes them: the tokens of "
                    "the first document would get no labels. Number the documents of a row from 1."
                )
            return segments
        if "cu_seqlens" in fields:
            find = partial(np.searchsorted, v=np.arange(shape[1]), side="right")
            return np.stack([find(ends) for ends in np.asarray(fields["cu_seqlens"])])
        if self.layout == "documents":
            raise BatchStructureError(
                f"SequenceSplit: layout='documents' needs a field segment_ids or cu_seqlens, got {sorted(fields)}. "
                "Pack the rows with Packed or Stream.pack."
            )
        return np.ones(shape, np.int64)
