"""Lines for those who train with PaddleNLP or PaddleFormers. `make test-trainers` runs their trainers themselves."""

from types import SimpleNamespace

import numpy as np
import paddle.distributed as dist
from paddle.io import DataLoader

import paddle_shard
from paddle_shard.testing.simulated import on_each_rank
from tests.docs.migration import DATA, IDS, ODD, case, cut, flat, steps
from tests.docs.migration.claims import RAGGED, counts_real_rows, padded
from tests.helpers import DP2, ONE, local

TRAINERS = "From the trainers of PaddleNLP and PaddleFormers"


def made_by_a_trainer(data=DATA, meshes=DP2, **settings):
    """A trainer gives its loader to Paddle's function, whose name it looks up."""
    return dist.shard_dataloader(
        DataLoader(data, batch_size=8, **settings), [meshes], shard_dims="dp"
    )


def patched(new, make=made_by_a_trainer, ranks=(0, 1), **names):
    with new(**names):
        return steps(make, ranks)


@case(TRAINERS, "from paddleformers.trainer import Trainer")
def their_loaders(new, old):
    with new():
        assert isinstance(made_by_a_trainer(), paddle_shard.ShardDataloader)
    assert patched(new) == cut(IDS)


@case(TRAINERS, "ignore_data_skip=False")
def nothing_is_read_twice(new, old):
    def trained(global_step, stop=3):
        """The rows of each step of a trainer that saves at each, and resumes from a step."""
        position, rows = new(1)(), []
        args = SimpleNamespace(
            output_dir=".", ignore_data_skip=False, resume_from_checkpoint=None
        )
        told = args, SimpleNamespace(global_step=global_step), None
        position.on_init_end(*told)
        position.on_train_begin(*told)
        with new():
            loader = made_by_a_trainer(meshes=ONE, shuffle=True)
        position.on_epoch_begin(*told, train_dataloader=loader)
        for batch in loader:
            rows.append(local(batch))
            told[1].global_step += 1
            position.on_save(*told, train_dataloader=loader)
            if told[1].global_step == stop:
                return rows
        raise AssertionError("an epoch has three steps")

    begun = trained(0, stop=1)
    assert sorted(flat(begun + trained(1))) == IDS


@case(TRAINERS, "dataloader_drop_last=True")
def dropped(new, old):
    assert not new.codes
    with paddle_shard.patch_paddle():
        assert (
            steps(lambda: made_by_a_trainer(ODD, drop_last=True))
            == cut(IDS)[:2]
        )


@case(
    TRAINERS,
    "an auto-parallel trainer that does not shuffle (not PaddleFormers 1.2.0)",
)
def shuffled_all_the_same(new, old):
    found = patched(new)
    assert sorted(flat(found)) == IDS
    assert found != cut(IDS)


@case(TRAINERS, "seed=7 of the training arguments")
def by_another_seed(new, old):
    orders = [
        patched(patch, lambda: made_by_a_trainer(shuffle=True))
        for patch in (paddle_shard.patch_paddle, new)
    ]
    assert orders[0] != orders[1]
    assert sorted(flat(orders[1])) == IDS


def padded_fields(rows):
    """A collate function of two fields, each padded to the longest row with a value of its own."""
    tokens = padded(rows)
    return {"input_ids": tokens, "labels": np.where(tokens, tokens, -100)}


@case(
    TRAINERS,
    "SFTAutoTrainer with a collate function that pads to the longest row of a batch",
)
def one_length_on_all_ranks(new, old):
    given = DataLoader(RAGGED, batch_size=8, collate_fn=padded_fields)

    def fields():
        batches = dist.shard_dataloader(given, [DP2], shard_dims="dp")
        return [
            (local(batch["input_ids"]), local(batch["labels"]))
            for batch in batches
        ]

    with new():
        found = on_each_rank((0, 1), fields)
    for batch in found[0] + found[1]:
        tokens, labels = map(np.array, batch)
        assert tokens.shape == (4, 24)
        assert (labels == np.where(tokens, tokens, -100)).all()


case(TRAINERS, "trainer.evaluate(), auto-parallel mode")(counts_real_rows)
