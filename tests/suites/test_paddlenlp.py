"""What the trainers of PaddleNLP and PaddleFormers do with a loader, without the packages; see `tests/trainers`."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard.errors import StateError
from paddle_shard.testing import on_each_rank
from tests.helpers import DP2, ONE, Made, local, sharded
from tests.suites.paddlenlp import (
    ConsumedSamples,
    MappingSampler,
    dpo_collate,
    resumed,
)

ROWS, BATCH, STEPS = 20, 2, 5


def of_rank(consumed=0, kind=ConsumedSamples):
    data = Made(length=ROWS)
    sampler = kind(data, BATCH, 2, dist.get_rank())
    sampler.set_epoch(consumed_samples=consumed)
    return DataLoader(data, batch_sampler=sampler)


@pytest.mark.parametrize("kind", [ConsumedSamples, MappingSampler])
@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("stop", [0, 2, 4])
def test_trainer_skips_consumed_samples_once(stop, says, kind):
    def run():
        given = of_rank(stop * BATCH * 2 * says, kind)
        with paddle_shard.patch_paddle():
            loader = dist.shard_dataloader(given, [DP2], shard_dims="dp")
        return [
            (epoch, local(rows))
            for epoch, rows in resumed(given, loader, kind, stop, STEPS, 2)
        ]

    def straight():
        sampler, found = of_rank(kind=kind).batch_sampler, []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found += [(epoch, rows) for rows in sampler]
        return found[stop:]

    assert on_each_rank(range(2), run) == on_each_rank(range(2), straight)


def test_batch_sampler_shows_the_class_that_was_given():
    class Mine(paddle.io.BatchSampler):
        """Of nobody's making."""

    for sampler in (
        of_rank(4).batch_sampler,
        Mine(Made(length=4), batch_size=4),
    ):
        loader = sharded(DataLoader(Made(length=4), batch_sampler=sampler))
        for seen in (loader.batch_sampler, loader._dataloader.batch_sampler):
            assert isinstance(seen, type(sampler))
            assert isinstance(seen, paddle.io.DistributedBatchSampler), (
                "as Paddle's loader has it"
            )
    loader.batch_sampler.set_epoch(3)
    assert loader.epoch == 3


def test_position_set_in_sampler_and_state_is_an_error():
    loader = sharded(of_rank())
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    batches.close()

    again = sharded(of_rank())
    again.load_state_dict(state)
    again.batch_sampler.set_epoch(consumed_samples=2 * BATCH * 2)
    with pytest.raises(StateError, match=r"not those that were delivered"):
        next(iter(again))


@pytest.mark.parametrize("packed", [1, 2])
def test_dpo_trainer_finds_packed_pairs_in_the_global_batch(
    packed,
):
    def pairs(index):
        return [
            (1 + 10 * index + part, 1, 2 + index % 3, 4 + index % 3)
            for part in range(packed)
        ]

    def run(mesh, **options):
        given = DataLoader(Made(pairs, 8), batch_size=4, collate_fn=dpo_collate)
        with paddle_shard.patch_paddle(**options):
            loader = dist.shard_dataloader(given, [mesh], shard_dims="dp")
        return [
            {key: np.array(local(leaf)) for key, leaf in batch.items()}
            for batch in loader
        ]

    whole = run(ONE)
    ranks = on_each_rank(
        range(2), lambda: run(DP2, placements={"response_indexs": "row index"})
    )
    for step, expected in enumerate(whole):
        for key, value in expected.items():
            assert np.array_equal(
                np.concatenate([ranks[rank][step][key] for rank in ranks]),
                value,
            )
