"""The certificate says exactly once if, and only if, it was."""

import copy
import json
from collections import Counter, defaultdict
from itertools import islice
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paddle.io import BatchSampler

import paddle_shard
from paddle_shard.core.warn_once import _WARNED
from paddle_shard.testing.simulated import on_each_rank
from tests.orders_and_tails import BLOCKS
from tests.run.runs import (
    ONE,
    Counts,
    Draws,
    Ids,
    content,
    make,
    run_epoch,
)
from tests.trials import trials


def test_certificate_of_a_full_epoch_is_exact():
    assert (
        str(run_epoch(make(100, 8)))
        == "epoch 0: each of 100 samples exactly once"
    )
    assert run_epoch(make(100, 8, tail="drop")).num_samples == 96
    loader = make(100, 8)
    run_epoch(loader)
    assert str(run_epoch(loader)) == "epoch 1: each of 100 samples exactly once"


def test_certificate_counts_what_the_tail_drops():
    for size in (8, 12):
        left_out = 100 % size
        told = run_epoch(make(100, size, tail="drop"))
        assert (told.exact, told.num_samples, told.dropped) == (
            True,
            100 - left_out,
            left_out,
        )
        assert str(told) == (
            f"epoch 0: each of {100 - left_out} samples (of 100; tail='drop' leaves out {left_out}) exactly once"
        )
    assert (
        run_epoch(make(100, 10, tail="drop")).dropped
        == run_epoch(make(100, 8)).dropped
        == 0
    )


def test_certificate_counts_no_steps_another_schedule_skipped():
    loader = make(40, 8, skip_steps=[(1, 3)])
    run_epoch(loader)
    loader.set_epoch(0)
    other = make(40, 8, skip_steps=[(3, 4)])
    other.load_state_dict(loader.state_dict())
    next(iter(other))
    account = other.certificate()
    assert not account.exact
    # Steps 1 and 2 are missing; step 0 came twice, and step 3 is skipped by now.
    assert (account.missed, account.repeated, account.skipped) == (16, 16, 8)


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_certificate_of_a_loop_without_a_batch_is_not_exact(kind, caplog):
    class OneBatch(paddle.io.BatchSampler):
        batch_size, drop_last = 16, False

        def __init__(self):
            pass

        def __len__(self):
            return 1

        def __iter__(self):
            yield list(range(14))

    if kind == "sampler":
        given = paddle.io.DataLoader(Ids(14), batch_sampler=OneBatch())
    else:
        given = paddle.io.DataLoader(
            paddle_shard.Stream.of(lambda: iter(range(14))), batch_size=16
        )
    _WARNED.clear()
    loader = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", tail="drop"
    )
    assert [*loader] == [*loader] == []

    assert caplog.text.count("ended without a batch") == 1
    if kind == "sampler":
        told = loader.certificate()
        assert not told.exact
        assert "no sample was delivered" in str(told)


def test_certificate_counts_a_sample_missed_twice_as_two():
    class OneBad(Ids):
        def __getitem__(self, index):
            if index == 1:
                raise ValueError
            return super().__getitem__(index)

    given = paddle.io.DataLoader(OneBad(10), batch_size=5)
    loader = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", on_error="skip"
    )
    next(iter(loader))
    told = run_epoch(loader)

    assert (told.missed, told.repeated) == (2, 5)
    assert (
        told.delivered
        == 4 + 9
        == told.num_samples - told.missed + told.repeated
    )


def test_certificate_is_not_taken_back_by_an_older_iterator():
    loader = make(8, 4)
    older = iter(loader)
    assert len([*islice(older, 2)]) == 2
    run_epoch(loader)
    next(iter(loader))
    assert next(older, None) is None

    assert loader.certificate().epoch == 1


@pytest.mark.parametrize("steps", [0, 3, 13])
def test_certificate_after_set_epoch_is_the_same_after_a_load(
    steps,
):
    loader = make(100, 8)
    for _ in zip(range(steps), iter(loader), strict=False):
        pass
    before, state = loader.certificate().epoch, loader.state_dict()
    other = make(100, 8)
    other.load_state_dict(state)
    for one in (loader, other) if steps else (other,):
        one.set_epoch(5)
        assert one.certificate().epoch == before
        next(iter(one))
        assert one.certificate().epoch == 5


@pytest.mark.parametrize("shuffle", [True, BLOCKS])
def test_certificate_of_a_stopped_run_spans_its_stops(shuffle):
    state = None
    for size, steps in ((8, 3), (4, 5), (12, 99)):
        loader = make(100, size, shuffle=shuffle)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(steps):
            if next(batches, None) is None:
                break
        state = json.loads(json.dumps(loader.state_dict()))

    assert (
        str(loader.certificate()) == "epoch 0: each of 100 samples exactly once"
    )


def test_certificate_before_the_end_names_what_is_missing():
    loader = make(100, 8)
    next(iter(loader))

    certificate = loader.certificate()

    assert not certificate.exact
    assert (
        certificate.delivered,
        certificate.missed,
        certificate.repeated,
    ) == (
        8,
        92,
        0,
    )
    assert (
        str(certificate)
        == "epoch 0: 8 of 100 samples delivered once, 92 to come"
    )


@pytest.mark.parametrize("begun_again", [0, 1, 40])
def test_certificate_of_an_epoch_begun_again_counts_repeats(
    begun_again,
):
    loader = make(100, 8)
    for _ in range(begun_again):
        next(iter(loader))
    told = run_epoch(loader)

    assert (told.exact, told.delivered, told.repeated) == (
        not begun_again,
        100 + 8 * begun_again,
        8 * begun_again,
    )
    assert len(json.dumps(loader.state_dict())) < 1024
    loader.set_epoch(0)
    assert run_epoch(loader).repeated == 100 + 8 * begun_again, (
        "a second pass over all of it is a repetition, too"
    )


def test_certificate_after_a_load_continues_the_account():
    loader = make(100, 8)
    run_epoch(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()

    for other in (make(100, 8), loader):
        other.load_state_dict(state)
        assert (other.certificate().epoch, other.certificate().delivered) == (
            1,
            24,
        )
        assert other.state_dict()["certificate"][0][:4] == [
            -1,
            1,
            0,
            [[0, 24]],
        ], "of all ranks together"
        assert (
            str(run_epoch(other)) == "epoch 1: each of 100 samples exactly once"
        )


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("indices", (4, 20, 4, 20)),
        ("indices", (20, 2, 12)),
        ("estimate", (6, 6, 6)),
    ],
)
@pytest.mark.parametrize("length", [60, 100])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_certificate_takes_a_samplers_end_from_what_was_seen(
    kind, sizes, length, tail
):
    got, state = [], None
    for number, size in enumerate(sizes):
        loader = make(length, size, tail=tail, **KINDS[kind](length, size))
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _, batch in zip(
            range(2 if number < len(sizes) - 1 else length),
            batches,
            strict=False,
        ):
            valid = batches.valid._local_value().numpy()
            got += [
                i
                for i, real in zip(content(batch)[0], valid, strict=True)
                if real
            ]
        state = json.loads(json.dumps(loader.state_dict()))
        if state["ended"]:
            break

    assert len(set(got)) == len(got)
    assert len(got) == length or (tail == "drop" and length - len(got) < size)
    told = loader.certificate()
    assert (told.exact, told.num_samples) == (True, len(got)), str(told)
    assert "draws of the loader's" in str(told)


class Gathering(Exception):
    """Has what a rank would send to the others."""


class Job:
    """Loaders of simulated ranks, and all that each data rank was really given: the oracle of the certificate."""

    def __init__(self, kind, length, tail, data_ranks, replicas, size):
        self.kind, self.length, self.tail, self.size = kind, length, tail, size
        self.data_ranks, self.replicas = data_ranks, replicas
        mesh = dist.ProcessMesh(
            np.arange(data_ranks * replicas).reshape(data_ranks, replicas),
            dim_names=["dp", "mp"],
        )
        self.loaders = self.each(
            lambda rank: make(
                length, size, mesh, tail=tail, **KINDS[kind](length, size)
            )
        )
        self.given, self.ended, self.last = defaultdict(Counter), set(), None
        self.unknown, self.untold = set(), set()
        """Epochs of which some rank's account is lost; and those of which a rank may have its own account only."""

    def each(self, do):
        ranks = range(self.data_ranks * self.replicas)
        results = on_each_rank(ranks, lambda: do(dist.get_rank()))
        return [results[rank] for rank in ranks]

    def deliver(self, steps, at_once=1):
        """Let each rank take steps of as many iterators in turn; None: to their end."""

        def of_rank(rank):
            passes, got, ended = (
                [iter(self.loaders[rank]) for _ in range(at_once)],
                [],
                False,
            )
            for batches in passes * (len(passes) * (steps or 10**3)):
                batch = next(batches, None)
                if batch is None:
                    ended = True
                    break
                got.append(
                    (
                        batches.epoch,
                        content(batch)[0],
                        batches.valid._local_value().numpy().tolist(),
                    )
                )
            return got, ended, passes[0].epoch

        if self.data_ranks == 1:
            self.untold.clear()
        for rank, (got, ended, epoch) in enumerate(self.each(of_rank)):
            for of_epoch, ids, valid in (
                got if rank % self.replicas == 0 else ()
            ):
                self.given[of_epoch].update(
                    i for i, real in zip(ids, valid, strict=True) if real
                )
            if ended:
                self.ended.add(epoch)
            if got or ended:
                self.last = epoch
            if self.data_ranks > 1:
                self.untold |= {epoch, *(of_epoch for of_epoch, _, _ in got)}

    def set_epoch(self, epoch):
        self.each(lambda rank: self.loaders[rank].set_epoch(epoch))

    def certificate(self):
        def gathering(legs, *others):
            raise Gathering(legs)

        def sent(rank):
            with (
                mock.patch("paddle_shard.run.run.gathered", gathering),
                pytest.raises(Gathering) as it,
            ):
                self.loaders[rank].certificate()
            return it.value.args[0]

        accounts = json.loads(json.dumps(self.each(sent)))
        with mock.patch(
            "paddle_shard.run.run.gathered", lambda legs, *others: accounts
        ):
            found = self.each(lambda rank: self.loaders[rank].certificate())
        self.untold -= {found[0].epoch, self.loaders[0].state_dict()["epoch"]}
        assert len(set(map(str, found))) == 1, "all ranks say the same"
        return found[0]

    def check(self):
        told = self.certificate()
        assert told.epoch == (
            self.loaders[0].epoch if self.last is None else self.last
        )
        got, left = (
            self.given[told.epoch],
            self.length - len(self.given[told.epoch]),
        )
        once = all(times == 1 for times in got.values())
        ended = told.epoch in self.ended
        if told.epoch in self.unknown:
            assert not told.exact
            return
        own = self.kind in OWN
        complete = left == 0 or (
            self.tail == "drop" and (ended or left < self.size)
        )
        assert (
            told.delivered
            == sum(got.values())
            == told.num_samples - told.missed + told.repeated
        )
        if told.exact:
            assert once, (told, got)
            assert complete, (told, got)
            assert told.num_samples == len(got)
        elif (
            not own or ended
        ):  # a plan's end is known ahead; a sampler's has to be seen
            assert not (once and complete), (str(told), got)
        # whose order is that of the first batch size
        if self.kind != "blocks" and not own and self.tail != "drop":
            assert (told.missed, told.repeated) == (
                left,
                sum(got.values()) - len(got),
            )

    def resumed(self, how, data_ranks, replicas, size):
        """A job that goes on from this one's saved states."""
        if how == "merged":
            self.certificate()
        states = json.loads(
            json.dumps(self.each(lambda rank: self.loaders[rank].state_dict()))
        )
        epoch = states[0]["epoch"]
        assert (
            len(
                {
                    (state["epoch"], state["samples"], state["ended"])
                    for state in states
                }
            )
            == 1
        )
        assert len(json.dumps(states[0])) < 4096
        new = self.kind, self.length, self.tail, data_ranks, replicas, size
        other = self if how == "same loaders" else Job(*new)
        world = other.data_ranks * other.replicas
        held = (
            {0}
            if how == "one"
            else {rank % len(states) // self.replicas for rank in range(world)}
        )
        other.given = defaultdict(
            Counter, {epoch: copy.copy(self.given[epoch])}
        )
        known = (
            epoch not in self.untold
            or how == "same loaders"
            or len(held) == self.data_ranks
        )
        other.unknown = (
            {epoch}
            if self.given[epoch] and (epoch in self.unknown or not known)
            else set()
        )
        other.untold = self.untold & {epoch}
        other.ended, other.last = (
            ({epoch} if states[0]["ended"] else set()),
            epoch,
        )
        own = how != "one"
        other.each(
            lambda rank: other.loaders[rank].load_state_dict(
                states[rank % len(states) if own else 0]
            )
        )
        return other


KINDS = {
    "plain": lambda length, size: {"shuffle": True},
    "blocks": lambda length, size: {"shuffle": BLOCKS},
    "indices": lambda length, size: {
        "sampler": BatchSampler(
            sampler=list(range(length))[::-1], batch_size=size
        )
    },
    "draws": lambda length, size: {"sampler": Draws(length, 6)},
    "estimate": lambda length, size: {"sampler": Estimates(length, 6)},
    "counts": lambda length, size: {"sampler": Counts(length, 6)},
}


OWN = ("indices", "draws", "estimate", "counts")


class Estimates(Draws):
    """Has a length that is too small at first, too large later, as those that are made of sizes."""

    def __len__(self):
        return 2


MESHES = st.tuples(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([6, 6, 12, 18]),
)


ACTIONS = st.one_of(
    st.tuples(st.just("deliver"), st.sampled_from([1, 2, 3, None])),
    st.tuples(st.just("deliver"), st.sampled_from([1, 2, None]), st.just(2)),
    st.tuples(st.just("set_epoch"), st.integers(0, 1)),
    st.tuples(st.just("check")),
    st.tuples(
        st.just("resumed"),
        st.sampled_from(["merged", "own", "one", "same loaders"]),
        MESHES,
    ),
)


@settings(max_examples=trials(60))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    length=st.sampled_from([6, 17, 30, 36]),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    mesh=MESHES,
    actions=st.lists(ACTIONS, max_size=7),
)
@example(
    "blocks",
    6,
    "pad",
    (1, 1, 6),
    [("deliver", 1), ("check",), ("deliver", 1), ("resumed", "own", (1, 1, 6))],
)
@example(
    "blocks",
    17,
    "pad",
    (3, 1, 6),
    [("deliver", 1), ("resumed", "own", (3, 2, 6))] * 2,
)
def test_certificate_is_exact_if_and_only_if_each_came_once(
    kind, length, tail, mesh, actions
):
    if tail == "drop" and length < 18:
        length += 18
    job = Job(kind, length, tail, *mesh)
    for name, *how in actions:
        if name == "resumed":
            job = job.resumed(how[0], *how[1])
        else:
            getattr(job, name)(*how)
    job.deliver(None)
    job.check()
