"""Fields in which a collate_fn writes the row's place in the batch, such as `response_indexs` of preference pairs."""

import numpy as np
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.helpers import DP2, ONE, Made, local, mesh, sharded

SPLIT = {"index": "row index", "boxes": "row index"}
MP_DP = mesh([[0, 1], [2, 3]], "mp", "dp")


def numbered(samples):
    """Rows, their places, and two boxes for each: (place of the image, number of the box); one has -1."""
    places = np.arange(len(samples))
    boxes = np.stack(
        [np.repeat(places, 2), np.repeat(samples, 2)], axis=1
    ).astype("float32")
    boxes[0, 0] = -1
    return {"rows": np.array(samples), "index": places, "boxes": boxes}


def steps_of(loader):
    return [
        {key: np.array(local(leaf)) for key, leaf in batch.items()}
        for batch in loader
    ]


def given(workers=0, accumulation=1, stream=False, length=16):
    data = (
        paddle_shard.Stream.of(range(length)) if stream else Made(int, length)
    )
    found = DataLoader(
        data,
        batch_size=8 // accumulation,
        collate_fn=numbered,
        num_workers=workers,
    )
    found.batch_sampler._acc_steps = accumulation
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2}, {"stream": True}, {"length": 13}, {"workers": 2}],
)
@pytest.mark.parametrize("over", [DP2, MP_DP], ids=["dp", "mp x dp"])
def test_places_are_those_in_the_global_batch(over, options):
    tail = None if "stream" in options else "fill"

    def run():
        return steps_of(
            sharded(given(**options), over, placements=SPLIT, tail=tail)
        )

    ranks = on_each_rank(range(over.size), run)
    whole = steps_of(sharded(given(**options), ONE, tail=tail))

    for step, expected in enumerate(whole):
        for rank in ranks.values():
            found = rank[step]
            assert (expected["rows"][found["index"]] == found["rows"]).all(), (
                "a row is where its place says"
            )
            images = found["boxes"][:, 0].astype(int)
            assert images[0] == -1
            assert (expected["rows"][images[1:]] == found["boxes"][1:, 1]).all()
        joined = np.concatenate(
            [ranks[rank][step]["index"] for rank in over.process_ids[:2]]
        )
        assert sorted(joined) == list(range(len(joined)))


def test_stream_of_several_workers_counts_each_batch_once():
    assert steps_of(
        sharded(given(stream=True, workers=2), ONE, placements=SPLIT)
    )[1]["index"].tolist() == [*range(8)]


@pytest.mark.parametrize("shape", [[2], [2, 3], [2, 1, 4]])
def test_row_index_beyond_the_batch_names_the_field(shape):
    def beyond(samples):
        return {"rows": np.array(samples), "index": np.full(shape, 7)}

    with pytest.raises(
        PaddleShardError,
        match=r"field \['index'\]: .* 'row index', .* up to 7, and .* 2 rows",
    ):
        next(
            iter(
                sharded(
                    DataLoader(Made(int), batch_size=4, collate_fn=beyond),
                    placements={"index": "row index"},
                )
            )
        )


def said_of(data, caplog, collate_fn=numbered, **options):
    """What data rank 1 says in two passes about fields that count rows."""
    caplog.clear()
    with simulated_rank(1, 2):
        loader = sharded(
            DataLoader(data, batch_size=4, collate_fn=collate_fn),
            DP2,
            **options,
        )
        for _ in (*loader, *loader):
            pass
    return [
        record.getMessage()
        for record in caplog.records
        if "row index" in record.getMessage()
    ]


def test_row_index_is_not_guessed_from_labels(caplog):
    labels = np.random.default_rng(3).integers(0, 2, 200)
    labels[2:4] = 0, 1  # rows 2 and 3 are data rank 1's of the first batch

    def stacked(samples):
        return {"rows": np.array(samples), "label": labels[samples]}

    assert not said_of(Made(int, 200), caplog, stacked)


def in_a_list(samples):
    """As `[[rows, index], labels]`; a row's first number could be a place."""
    made = numbered(samples)
    return {
        "inputs": [
            np.stack([made["rows"] % 2, made["rows"]], axis=1),
            made["index"],
        ],
        "labels": made["rows"],
    }


def test_row_index_of_a_list_field_is_named_by_position():
    def run(**options):
        loader = sharded(
            DataLoader(Made(int), batch_size=4, collate_fn=in_a_list),
            DP2,
            **options,
        )
        return [
            [np.array(local(leaf)).tolist() for leaf in batch["inputs"]]
            for batch in loader
        ]

    ranks = on_each_rank(
        range(2), lambda: run(placements={"inputs": [None, "row index"]})
    )
    assert [ranks[rank][0] for rank in (0, 1)] == [
        [[[0, 0], [1, 1]], [0, 1]],
        [[[0, 2], [1, 3]], [2, 3]],
    ]

    for wanted, told in [
        (
            [None, "row index", None],
            r"field \['inputs'\] must be a list of 3 items, as its entry in .* placements is, got a list",
        ),
        (
            [None, "row"],
            "placements must map a field's key or position to .*a field that is a list, to a list of these",
        ),
    ]:
        with pytest.raises(PaddleShardError, match=told):
            on_each_rank(
                range(2),
                lambda wanted=wanted: run(placements={"inputs": wanted}),
            )
