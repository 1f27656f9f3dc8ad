"""`placements`: fields that are split over other dims than the rows."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Balanced
from paddle_shard.errors import ArgumentError, AxisError, BatchStructureError
from paddle_shard.testing.simulated import on_each_rank

MESH = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "sep"])


class Tokens(paddle.io.Dataset):
    def __init__(self, length=8):
        self.length = length

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {
            "input_ids": 100 * index + np.arange(self.length),
            "label": np.array(index),
        }


def first(placements, mesh=MESH, length=8):
    def run():
        given = paddle.io.DataLoader(Tokens(length), batch_size=2)
        batch = next(
            iter(
                paddle_shard.shard_dataloader(
                    given, mesh, shard_dims="dp", placements=placements
                )
            )
        )
        ids = batch["input_ids"]
        on_mesh = dist.get_rank() in mesh.process_ids
        local = ids._local_value().numpy().tolist() if on_mesh else None
        return (
            local,
            list(ids.shape),
            [str(p) for p in ids.placements],
            list(batch["label"].shape),
        )

    return on_each_rank(range(5), run)


def test_sequence_is_split_over_its_axis():
    got = first({"input_ids": {"dp": 0, "sep": 1}})

    assert [got[rank][0] for rank in range(4)] == [
        [[0, 1, 2, 3]],
        [[4, 5, 6, 7]],
        [[100, 101, 102, 103]],
        [[104, 105, 106, 107]],
    ]
    for rank in range(5):
        assert got[rank][1:] == ([2, 8], ["Shard(dim=0)", "Shard(dim=1)"], [2])


def test_balanced_sequence_has_the_layout_of_ring_attention():
    got = first({"input_ids": {"dp": 0, "sep": Balanced(dim=1)}})

    assert [got[rank][0] for rank in range(2)] == [
        [[0, 1, 6, 7]],
        [[2, 3, 4, 5]],
    ]
    assert all(got[rank][1] == [2, 8] for rank in range(5))


def test_field_may_be_split_over_columns_only():
    got = first({"input_ids": {"dp": 1}})

    assert [got[rank][0] for rank in range(4)] == [
        [[0, 1, 2, 3], [100, 101, 102, 103]],
        [[0, 1, 2, 3], [100, 101, 102, 103]],
        [[4, 5, 6, 7], [104, 105, 106, 107]],
        [[4, 5, 6, 7], [104, 105, 106, 107]],
    ]
    assert got[0][1] == [2, 8]


def test_several_axes_on_one_dim_act_as_one():
    got = first({"input_ids": {"dp": 1, "sep": 1}})

    assert [got[rank][0][0] for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


@pytest.mark.parametrize(
    ("placements", "error", "text"),
    [
        (
            {"input_ids": {"seq": 1}},
            AxisError,
            r"placements: .* no axis 'seq'; its axes are \['dp', 'sep'\]",
        ),
        (
            {"input_ids": {"sep": -1}},
            ArgumentError,
            r"placements\['sep'\] must be a tensor dim >= 0",
        ),
        (
            {"input_ids": {"sep": Balanced(dim=0)}},
            ArgumentError,
            r"Balanced\(dim=\.\.\.\) of a dim >= 1",
        ),
        (
            {"input_ids": {"dp": 1, "sep": Balanced(dim=1)}},
            ArgumentError,
            "both plainly and Balanced",
        ),
        (
            {"input_ids": "sep"},
            ArgumentError,
            "placements must map a field's key",
        ),
        (
            {"ids": {"sep": 1}},
            BatchStructureError,
            r"placements names \['ids'\], but the fields",
        ),
        (
            {"label": {"dp": 0, "sep": 1}},
            BatchStructureError,
            r"field \['label'\]: placements splits dim 1, but its shape is \[1\]",
        ),
    ],
)
def test_placements_that_cannot_be_are_refused(placements, error, text):
    with pytest.raises(error, match=text):
        first(placements)


def test_sequence_that_cannot_be_cut_is_refused_with_sizes():
    with pytest.raises(
        BatchStructureError,
        match=r"dim 1 of shape \[1, 6\] cannot be cut into 4 equal chunks. .*: 4 or 8",
    ):
        first({"input_ids": {"dp": 0, "sep": Balanced(dim=1)}}, length=6)


@pytest.mark.parametrize(
    "kind", ["plain", "rows", "transposed by the collate_fn"]
)
def test_sequence_cut_gives_contiguous_local_tensors(
    kind,
):
    def transposed(samples):
        ids = paddle.to_tensor(
            np.stack([sample["input_ids"] for sample in samples], axis=1)
        ).t()
        return {"input_ids": ids, "label": np.zeros(len(samples))}

    placements = (
        None
        if kind == "rows"
        else {
            "input_ids": {"dp": 0}
            if "transposed" in kind
            else {"dp": 0, "sep": 1}
        }
    )

    def run():
        given = paddle.io.DataLoader(
            Tokens(),
            batch_size=2,
            collate_fn=transposed if "transposed" in kind else None,
        )
        batch = next(
            iter(
                paddle_shard.shard_dataloader(
                    given, MESH, shard_dims="dp", placements=placements
                )
            )
        )
        return batch["input_ids"]._local_value().is_contiguous()

    assert on_each_rank(range(4), run) == dict.fromkeys(range(4), True)
