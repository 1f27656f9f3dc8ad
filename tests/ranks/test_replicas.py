"""A rank that another one reads for delivers its steps, whatever the loops of both do."""

import itertools
import os
import socket
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_shard.data.generators import generators_of
from paddle_shard.errors import PeerLostError
from paddle_shard.loader import step_pass
from paddle_shard.loader.step_pass import Feed, StepPass
from paddle_shard.plan.step import Step
from paddle_shard.ranks.broadcast import Broadcast
from paddle_shard.ranks.replicas import Subscribing, _publish
from paddle_shard.ranks.reports import AgreementConfig
from paddle_shard.reading.executor import InlineExecutor
from paddle_shard.reading.profile import Profiler
from paddle_shard.reading.reader import HowToRead, IdReader
from tests.deadlines import HANG
from tests.ranks.local_network import coordinators, end

STEPS = 20
LONG, SHORT = 1.0, 0.0
NUMBERS = itertools.count()


class Rows:
    uses_rng = False

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return np.array([index])


def placed(batch):
    batch.value = np.array(batch.value)
    return batch


def steps_of(executor, agreement, place):
    steps = (
        Step(
            epoch=0,
            number=number,
            num_rows=1,
            micro_size=1,
            num_positions=1,
            ids=[number],
        )
        for number in range(STEPS)
    )
    messages = SimpleNamespace(
        compose=lambda _: None, apply=lambda batch, _: batch
    )
    return StepPass(
        Feed(steps, executor, STEPS, on_training_thread=False),
        agreement,
        place=place,
        messages=messages,
        num_ahead=2,
        profiler=Profiler(),
    )


@pytest.mark.parametrize("num_long", [(4, 0), (0, 4), (4, 7), (STEPS, 0)])
def test_replicas_leader_serves_short_steps_with_collectives(
    num_long, monkeypatch
):
    # Steps are as long as the test says.
    monkeypatch.setattr(
        step_pass, "time", SimpleNamespace(perf_counter=lambda: 0.0)
    )
    ranks = coordinators(2)
    agreements = [rank.open(AgreementConfig(timeout=HANG)) for rank in ranks]
    address = f"\0paddle_shard-test-shared-{os.getpid()}-{next(NUMBERS)}"
    publish = partial(_publish, Broadcast(address, 1, agreements[0]), placed)
    reader = IdReader(Rows(), None, HowToRead(generators=generators_of()))
    passes = [
        steps_of(InlineExecutor(reader), agreements[0], publish),
        steps_of(Subscribing(0, address, agreements[1]), agreements[1], placed),
    ]
    collective = threading.Barrier(2)
    delivered = [[], []]

    def train(rank):
        for step in range(STEPS):
            passes[rank]._longest_step = (
                LONG if step < num_long[rank] else SHORT
            )
            delivered[rank].append(int(next(passes[rank]).value[0, 0]))
            collective.wait(HANG)

    loops = [
        threading.Thread(target=train, args=[rank], daemon=True)
        for rank in (0, 1)
    ]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(HANG)
    for rank in ranks:
        end(rank)
    for steps in passes:
        steps.close()
    assert delivered == [list(range(STEPS))] * 2


def test_replicas_leader_killed_before_it_sends_a_batch_is_named():
    """It has announced the step already, so that all agree to deliver it."""
    ranks = coordinators(2)
    first, second = (rank.open(AgreementConfig()) for rank in ranks)
    address = f"\0paddle_shard-test-shared-{os.getpid()}-{next(NUMBERS)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leader:
        leader.bind(address)
        leader.listen(1)
        batches = steps_of(Subscribing(0, address, second), second, placed)
        first.announce(steps=2)
        threading.Thread(target=lambda: leader.accept()[0].close()).start()
        with pytest.raises(
            PeerLostError, match="rank 0 has ended or was"
        ) as info:
            next(batches)
    assert type(info.value) is PeerLostError
    assert info.value.ranks == (0,)
    for rank in ranks:
        end(rank)
