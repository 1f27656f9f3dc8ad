import itertools
import random
import threading
import time

import pytest

from paddle_shard.errors import ArgumentError, DifferentDataError, PeerLostError
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.decision import END, OK
from paddle_shard.ranks.protocol import WINDOW
from paddle_shard.ranks.reports import AgreementConfig
from tests.deadlines import HANG
from tests.ranks.local_network import coordinators, end

MADE = []


@pytest.fixture(autouse=True)
def no_coordinator_left():
    """One that is left goes on asking the others, many times a second: hundreds of them slow all that comes after."""
    yield
    close_all()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name == "paddle_shard-agree"
    ]


def close_all():
    while MADE:
        end(MADE.pop())


def pair(size=2, **options):
    made = coordinators(size, **options)
    MADE.extend(made)
    return made


def together(*functions):
    """What each function returns, or the exception that it raises, when all run at once."""
    results = [None] * len(functions)

    def run(i):
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    return results


def iterate(agreement, steps=10**6, step_time=0.0):
    """Deliver up to `steps` steps of data that never ends; return how many were."""
    for step in range(steps):
        while agreement.progress.step < agreement.wanted(step):
            agreement.announce()
        if not agreement.deliver(step):
            return step
        time.sleep(step_time)
    agreement.close()
    return steps


@pytest.mark.parametrize(
    ("taken", "told"),
    [(4, None), (3, None), (1, "left by global rank 1 after 1 steps")],
)
def test_agreement_survives_a_rank_that_leaves_after_its_end(taken, told):
    """Four steps. One rank takes all of them; the other announces the steps up to the one after the last it takes."""
    first, second = pair()
    left = threading.Event()

    def to_the_end():
        agreement = first.open(AgreementConfig(ends_must_agree=True))
        left.wait(HANG)
        for step in range(5):
            if step == 0:
                agreement.announce(steps=4)
                agreement.announce(END)
            if not agreement.deliver(step):
                return step
        return None

    def leaves():
        agreement = second.open(AgreementConfig(ends_must_agree=True))
        agreement.announce(steps=4 if taken > 2 else 2)
        left.set()
        for step in range(taken):
            assert agreement.deliver(step)
        agreement.close()

    found, _ = together(to_the_end, leaves)

    if told is None:
        assert found == 4
    else:
        assert isinstance(found, PeerLostError)
        assert told in str(found)


def test_training_waits_for_no_one_in_steady_state(monkeypatch):
    wait = Agreement._wait
    waits = []

    def counted(agreement, step):
        waits.append(step)
        return wait(agreement, step)

    monkeypatch.setattr(Agreement, "_wait", counted)

    def run(coordinator):
        agreement = coordinator.open(AgreementConfig())
        for step in range(60):
            while agreement.progress.step < agreement.wanted(step):
                agreement.announce()
            agreement.deliver(step)
            time.sleep(0.01)
        agreement.close()

    def num_waits():
        waits.clear()
        # as slow as a round over a busy network
        coordinators = pair(size=4, delay=1e-3)
        together(*(lambda c=c: run(c) for c in coordinators))
        return sum(step >= 10 for step in waits)

    # A machine that is shared with others may pause any thread. An agreement that has to be waited for never passes.
    assert any(num_waits() <= 4 for _ in range(8))


def test_reading_ahead_is_spread_over_the_steps():
    agreement = pair(size=1)[0].open(AgreementConfig())
    reads = []
    for step in range(30):
        reads.append(0)
        while agreement.progress.step < agreement.wanted(step):
            agreement.announce()
            reads[-1] += 1
        assert agreement.deliver(step)

    assert reads[0] == 1
    assert max(reads) <= 2
    assert set(reads[WINDOW:]) == {1}
    assert agreement.progress.step == 29 + WINDOW


def test_agreement_ends_a_stuck_rank_if_on_lost_is_exit(monkeypatch, caplog):
    monkeypatch.setattr("paddle_shard.ranks.agreement.EXIT_SECONDS", 0.2)
    for exits, stuck in ((True, True), (True, False), (False, True)):
        ended = [threading.Event(), threading.Event()]
        one, two = pair(end_process=lambda rank, ended=ended: ended[rank].set())
        passes = [
            c.open(AgreementConfig(exit_when_lost=exits)) for c in (one, two)
        ]
        for agreement in passes:
            agreement.announce()
        assert together(*(lambda a=a: a.deliver(0) for a in passes)) == [
            True,
            True,
        ]
        caplog.clear()
        two.network.interrupt()
        if not stuck:  # its training thread comes by and hears of it
            passes[0].announce()
            with pytest.raises(PeerLostError):
                passes[0].deliver(1)
        assert ended[0].wait(1.5) == (exits and stuck)
        assert "Global rank 1 died" in caplog.text
        assert ("on_lost='exit'" in caplog.text) == exits


def test_whoever_leaves_alone_is_named_with_its_step():
    first, second, third = pair(size=3)
    told = together(
        lambda: iterate(first.open(AgreementConfig())),
        lambda: iterate(second.open(AgreementConfig()), steps=5),
        lambda: iterate(third.open(AgreementConfig())),
    )

    assert told[1] == 5
    for error in (told[0], told[2]):
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
        assert "global rank 1 after 5 steps" in str(error)
    assert str(told[0]) == str(told[2])  # at the same step, too


def test_agreement_ignores_a_rank_that_leaves_after_the_end():
    first, second = pair()

    def leaves():
        agreement = first.open(AgreementConfig())
        iterate(agreement, steps=5)
        return agreement.progress.step

    def ends():
        agreement = second.open(AgreementConfig())
        for step in range(100):
            while agreement.progress.step < agreement.wanted(step):
                agreement.announce(
                    END
                ) if agreement.progress.step == 7 else agreement.announce()
            if not agreement.deliver(step):
                return step
        return None

    announced, delivered = together(leaves, ends)

    assert announced > 7
    assert delivered == 7


@pytest.mark.parametrize("seed", range(5))
def test_passes_that_overlap_are_kept_apart(seed):
    coordinators = pair(size=3, delay=1e-3)
    ends = {0: [6, 9, 30], 1: [12, 4, 30]}  # of each pass, by rank

    def run(rank):
        passes = [
            coordinators[rank].open(AgreementConfig(label={"loop": i}))
            for i in range(2)
        ]
        steps, over = [0, 0], [False, False]
        rng = random.Random(10 * seed + rank)
        while not all(over):
            for i, agreement in enumerate(passes):
                while agreement.progress.step < agreement.wanted(steps[i]):
                    at_end = agreement.progress.step == ends[i][rank]
                    agreement.announce(END) if at_end else agreement.announce()
            # no rank knows another's order
            for i in rng.sample(
                [i for i in range(2) if not over[i]], 2 - sum(over)
            ):
                over[i] = not passes[i].deliver(steps[i])
                steps[i] += not over[i]
        return steps

    assert together(*(lambda r=r: run(r) for r in range(3))) == [[6, 4]] * 3


def test_abandoned_pass_leaves_nothing_behind_for_the_next():
    coordinators = pair(size=3)

    def run(coordinator):
        return [
            iterate(coordinator.open(AgreementConfig()), steps=s)
            for s in (0, 3, 1, 7)
        ] + [len(coordinator.member.iterations) <= 4]

    assert (
        together(*(lambda c=c: run(c) for c in coordinators))
        == [[0, 3, 1, 7, True]] * 3
    )
    deadline = time.monotonic() + HANG
    while (
        any(c.member.iterations for c in coordinators)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert [c.member.iterations for c in coordinators] == [{}] * 3


def test_loops_in_another_order_are_an_error_that_names_both():
    first, second = pair()
    told = together(
        lambda: iterate(
            first.open(AgreementConfig(label={"loop": "training"}))
        ),
        lambda: iterate(
            second.open(AgreementConfig(label={"loop": "evaluation"}))
        ),
    )

    for error in told:
        assert isinstance(error, ArgumentError)
        assert (
            "loop: training on global rank 0, evaluation on global rank 1"
            in str(error)
        )


def test_exchange_reaches_all_and_refuses_a_loop_meanwhile():
    ranks = pair(size=3)
    said = [f"{'x' * 10**5} of {rank}" for rank in range(3)]
    for _ in range(3):
        heard = together(
            *(
                lambda c=c, s=s: c.open(AgreementConfig()).exchange(s)
                for c, s in zip(ranks, said, strict=True)
            )
        )
        assert heard == [said] * 3
    first, second = pair()
    told = together(
        lambda: first.open(
            AgreementConfig(label={"loop": "certificate()"})
        ).exchange("mine"),
        lambda: iterate(
            second.open(AgreementConfig(label={"loop": "training"}))
        ),
    )
    for error in told:
        assert isinstance(error, ArgumentError)
        assert (
            "loop: certificate() on global rank 0, training on global rank 1"
            in str(error)
        )


def test_silent_rank_is_named_on_all_ranks_at_the_deadline():
    terms = AgreementConfig(timeout=1.5)
    first, second, third = pair(size=3)
    silent = second.open(terms)
    silent.announce()  # and then nothing
    start = time.monotonic()
    errors = together(
        lambda: iterate(first.open(terms)), lambda: iterate(third.open(terms))
    )

    assert 1.5 <= time.monotonic() - start < 4.0
    for error in errors:
        assert error.ranks == (1,)
        assert error.timeout == 1.5
        assert "global rank 1 read up to step 1" in str(error)


def test_rank_that_opens_no_iteration_is_named_at_the_deadline():
    terms = AgreementConfig(timeout=0.5)
    first, second = pair()
    iterate(second.open(terms), steps=0)
    [error] = together(
        lambda: (
            iterate(first.open(terms), steps=0),
            iterate(first.open(terms)),
        )
    )

    assert error.ranks == (1,)
    assert "global rank 1 did not begin this loop" in str(error)


# What all should have read


def ahead(agreement, step, count):
    """Up to which step a rank announces that reads so many steps ahead, whatever it is asked for."""
    is_final = agreement.progress.kind != OK or agreement.is_decided
    return agreement.progress.step if is_final else step + count


def reads(
    coordinator,
    digests,
    *,
    prefetch,
    exhausted=False,
    real=None,
    first_step=0,
    pace=0,
    timeout=HANG,
):
    """Steps delivered, and how a pass ends in which each step is announced with what was read."""
    agreement = coordinator.open(
        AgreementConfig(
            same_data=True, name="words", first_step=first_step, timeout=timeout
        )
    )
    step = 0
    try:
        while True:
            # Some ranks read further ahead than they are asked to.
            while agreement.progress.step < max(
                agreement.wanted(step), ahead(agreement, step, prefetch)
            ):
                at = agreement.progress.step
                if at < (len(digests) if real is None else real):
                    agreement.announce(digest=digests[at])
                elif exhausted:  # it has read on to the end of the stream
                    digest = digests[min(at, len(digests) - 1)]
                    agreement.announce(exhausted=True, digest=digest)
                else:
                    agreement.announce(END)
            time.sleep(pace)
            if not agreement.deliver(step):
                return step, "ended"
            step += 1
    except DifferentDataError as error:
        return step, str(error)
    finally:
        agreement.close()


@pytest.mark.parametrize("exhausted", [False, True])
@pytest.mark.parametrize("at", [0, 1, 7, 39, None])
def test_agreement_names_the_step_of_different_data(at, exhausted):
    for prefetch in (1, 4, 9):
        same = [number * 7 for number in range(40)]
        others = (
            [*same[:at], *(digest + 1 for digest in same[at:])]
            if at is not None
            else same
        )
        coordinators = pair(size=3)
        told = together(
            *(
                lambda c=c, d=digests, p=prefetch: reads(
                    c, d, prefetch=p, exhausted=exhausted
                )
                for c, digests in zip(
                    coordinators, (same, others, same), strict=True
                )
            )
        )
        close_all()
        if at is None:
            assert told == [(40, "ended")] * 3
            continue
        assert len({text for _, text in told}) == 1
        for steps, text in told:
            assert (
                f"At step {at} of words, global ranks 0, 2 and global rank 1 have read different data"
                in text
            )
            assert at > 0 or steps == 0, (
                "what differs from the first on is never delivered"
            )


@pytest.mark.parametrize("exhausted", [False, True])
def test_agreement_stops_all_at_the_step_of_different_data(exhausted):
    rng = random.Random(7)
    for trial in range(60):
        at, longer, size = (
            rng.randint(0, 12),
            rng.choice([0, 0, 2, 5]),
            rng.choice([2, 3]),
        )
        same = [number * 7 for number in range(12)]
        other = [
            *same[:at],
            *(digest + 1 for digest in same[at:]),
            *range(100, 100 + longer),
        ]
        # it ends at the shorter
        if other == same or (at == 12 and not exhausted):
            continue
        ranks = zip(pair(size=size), (same, other, same), strict=False)
        how = [
            {
                "prefetch": rng.choice([1, 4, 9]),
                "pace": rng.choice([0, 0, 0.002]),
            }
            for _ in range(size)
        ]
        told = together(
            *(
                lambda c=c, d=d, k=k: reads(c, d, exhausted=exhausted, **k)
                for (c, d), k in zip(ranks, how, strict=True)
            )
        )
        close_all()
        assert all(
            "have read different data" in str(text) for _, text in told
        ), (
            trial,
            told,
        )
        assert len({steps for steps, _ in told}) == 1, (trial, at, longer, told)


def test_steps_in_messages_are_those_of_the_epoch():
    coordinators = pair()
    told = together(
        lambda: reads(coordinators[0], [1, 2, 3], prefetch=1, first_step=70),
        lambda: reads(coordinators[1], [1, 2, 4], prefetch=1, first_step=70),
    )
    assert all("At step 72 of words" in text for _, text in told)

    terms = AgreementConfig(first_step=70, timeout=1.5)
    first, second = pair()
    second.open(terms).announce()
    second.open(AgreementConfig(label={"call": "certificate()"}))
    (error,) = together(lambda: iterate(first.open(terms)))
    assert "to reach step 71 of" in str(error)
    assert "global rank 1 read up to step 71, then began certificate()" in str(
        error
    )


def test_single_rank_has_nobody_to_compare_with():
    assert reads(pair(size=1)[0], [1, 2, 3], prefetch=4) == (3, "ended")


def test_agreement_takes_a_longer_stream_for_other_data():
    same = [number * 7 for number in range(40)]
    for length, prefetch in itertools.product((1, 38), (1, 4)):
        one, two = pair(size=2)
        told = together(
            lambda one=one, prefetch=prefetch: reads(
                one, same, prefetch=prefetch, exhausted=True
            ),
            lambda two=two, prefetch=prefetch, n=length: reads(
                two, same[:n], prefetch=prefetch, exhausted=True
            ),
        )
        assert all(
            "have read different data" in str(text) for _, text in told
        ), (
            length,
            prefetch,
            told,
        )


def test_parts_of_one_stream_may_end_a_step_apart():
    same = [number * 7 for number in range(40)]
    for exhausted, prefetch in itertools.product((True, False), (1, 4)):
        one, two = pair(size=2)
        told = together(
            lambda one=one, prefetch=prefetch, e=exhausted: reads(
                one, same, prefetch=prefetch, exhausted=e
            ),
            lambda two=two, prefetch=prefetch, e=exhausted: reads(
                two, same, prefetch=prefetch, exhausted=e, real=39
            ),
        )
        assert told == [(40 if exhausted else 39, "ended")] * 2


def test_agreement_lets_an_unheard_rank_exit():
    one, two = pair()
    one.open(AgreementConfig()).close()
    two.open(AgreementConfig())  # and never comes to its end
    end(one)
    start = time.monotonic()
    one._leave()
    assert time.monotonic() - start < 0.5
