import itertools
import random
import threading
import time

import pytest

from paddle_shard.errors import ArgumentError, DifferentDataError, PeerLostError
from paddle_shard.ranks import agreement as agreements
from paddle_shard.ranks.agreement import WINDOW, Agreement, Coordinator
from paddle_shard.ranks.group import PASSES, ProgressTable, TwoLevelGroup
from paddle_shard.ranks.verdict import END, NEVER, OK, REPORT_LIMIT, Outlook, Terms
from tests.deadlines import HANG
from tests.ranks.simulated_group import SimulatedGroup, World, end
from tests.ranks.trial import Script, ahead, led_script, outcome, random_script, run_job
from tests.trials import trials


def run_trial(seed, barrier=None, table=None, **settings):
    """One random job of one to three passes; the oracle knows nothing of windows, rounds or threads."""
    rng = random.Random(seed)
    size = rng.randint(1, 8)
    scripts = [random_script(rng, size) for _ in range(rng.choice([1, 1, 2, 3]))]
    settings |= {
        "barrier": rng.random() < 0.4 if barrier is None else barrier,
        "pause": rng.choice([0, 0, 1e-4, 1e-3]),
        "delay": rng.choice([0, 0, 1e-3]),
        "table": rng.random() < 0.5 if table is None else table,
    }
    ranks = run_job(size, scripts, rng, **settings)
    expected = [outcome(script, size) for script in scripts]
    for rank in ranks:
        assert rank.results == expected, f"seed {seed}, rank {rank.rank} of {size}: {scripts}"


@pytest.mark.parametrize("batch", range(6))
def test_all_ranks_deliver_the_same_steps_and_end_or_fail_as_the_oracle_says(batch):
    for seed in range(80 * batch, 80 * batch + trials(80)):
        run_trial(seed)


@pytest.mark.parametrize("table", [True, False])
def test_ranks_that_leave_at_the_same_step_are_told_nothing_though_some_stop_reading_with_their_leader(table):
    for seed in range(trials(80)):
        rng = random.Random(seed)
        scripts = [led_script(rng) for _ in range(5)]
        ranks = run_job(4, scripts, rng, table=table, pause=rng.choice([0, 1e-3]), delay=rng.choice([0, 1e-3]))

        for rank in ranks:
            assert rank.results == [outcome(script, 4) for script in scripts], (seed, rank.rank, scripts)


@pytest.mark.parametrize("batch", range(4))
def test_survivors_name_the_killed_rank_or_had_ended_before(batch):
    for seed in range(40 * batch, 40 * batch + trials(40)):
        rng = random.Random(seed)
        size = rng.randint(2, 8)
        scripts = [random_script(rng, size) for _ in range(2)]
        expected = [outcome(script, size) for script in scripts]
        number = rng.randint(0, 1)
        victim, step = rng.randrange(size), rng.randint(0, expected[number][0])
        ranks = run_job(
            size, scripts, rng, kill=(victim, number, step), delay=rng.choice([0, 1e-3]), table=rng.random() < 0.5
        )

        for rank in ranks:
            if rank.rank == victim:
                continue
            *before, last = rank.results
            assert before == expected[: len(before)]
            if last[1] == "lost":
                assert last[2] == [victim], f"seed {seed}: {rank.results}"
                assert last[0] <= expected[len(before)][0]
            else:
                assert rank.results == expected, f"seed {seed}: {rank.results}"


class DeliversUnasked(Agreement):
    """A planted defect: what this rank itself can serve is delivered, agreed or not."""

    def _may_deliver(self, step):
        return super()._may_deliver(step) or (self._verdict is None and step < self.outlook.step)


class ReleasesItsWindow(Agreement):
    """A planted defect: where all have announced n steps, the rest of the window is thought to be safe."""

    def advance(self, decision, outlooks=()):
        news = super().advance(decision, outlooks)
        if self._verdict is None and self._released % (WINDOW // 2):
            self._released += WINDOW // 2 - self._released % (WINDOW // 2)
        return news


class NotesTooLate(Agreement):
    """A planted defect: what is noted is told once the step it is about may have been released."""

    def note(self, payload):
        super().note(payload)
        self.held, self.unsent = [*getattr(self, "held", []), *self.unsent], []

    def advance(self, decision, outlooks=()):
        self.unsent, self.held = [*self.unsent, *getattr(self, "held", [])], []
        return super().advance(decision, outlooks)


@pytest.mark.parametrize("defect", [DeliversUnasked, ReleasesItsWindow, NotesTooLate])
@pytest.mark.parametrize("table", [False, True])
def test_a_weaker_rule_is_caught(defect, table, monkeypatch):
    monkeypatch.setattr("paddle_shard.ranks.agreement.Agreement", defect)
    with pytest.raises(AssertionError, match=r"seed \d+, rank"):
        for seed in range(200):
            run_trial(seed, barrier=False, timeout=0.5, table=table)


class PostsWhatIsNotTold(Agreement):
    """A planted defect: steps are posted whose notes the others have not heard."""

    def _post(self):
        self._held = NEVER
        super()._post()


class PostsWhenTold(Agreement):
    """A planted defect: steps are posted when their notes were told, which others may still be reading."""

    def send_notes(self):
        found = super().send_notes()
        self._rounds_to_hear = min(self._rounds_to_hear, 1)
        return found


class PostsMadeUpRows(Agreement):
    """A planted defect: steps are posted that hold no real rows."""

    def _post(self):
        self._coordinator.table.post(self.number, min(self.outlook.step, self._held))


class PostsTheStepThatFails(Agreement):
    """A planted defect: what cannot be served is posted, too."""

    def _post(self):
        if self._coordinator.table is not None:
            self._coordinator.table.post(self.number, self.outlook.step + (self.outlook.kind != OK))


@pytest.mark.parametrize("defect", [PostsWhatIsNotTold, PostsWhenTold, PostsMadeUpRows, PostsTheStepThatFails])
def test_a_weaker_table_is_caught(defect, monkeypatch):
    monkeypatch.setattr("paddle_shard.ranks.agreement.Agreement", defect)
    with pytest.raises(AssertionError, match=r"seed \d+, rank"):
        for seed in range(400):
            run_trial(seed, barrier=False, timeout=0.5, table=True)


def test_ranks_with_a_table_need_no_rounds_while_nothing_happens():
    coordinators = pair(size=3, table=True)
    reached, rounds = threading.Barrier(3), []

    def run(coordinator):
        agreement = coordinator.open(Terms())
        for step in range(400):
            while agreement.outlook.step < agreement.wanted(step):
                agreement.announce()
            assert agreement.deliver(step)
            if step in (20, 399):
                reached.wait(HANG)
                rounds.append(coordinator.group.rounds)
                reached.wait(HANG)
        agreement.close()

    assert together(*(lambda c=c: run(c) for c in coordinators)) == [None] * 3
    # A rank that was paused has been waited for, now and then; 380 steps by rounds would be 190 rounds, at least.
    assert max(rounds) - min(rounds) < 40


def test_passes_beyond_the_table_go_on_by_rounds():
    coordinators = pair(table=True)

    def run(coordinator):
        agreements = [coordinator.open(Terms()) for _ in range(PASSES + 3)]
        for step in range(3):
            for agreement in agreements:
                while agreement.outlook.step < agreement.wanted(step):
                    agreement.announce()
                assert agreement.deliver(step)
        for agreement in agreements:
            agreement.close()

    assert together(*(lambda c=c: run(c) for c in coordinators)) == [None] * 2


def test_a_table_tells_what_all_have_posted_of_the_same_pass():
    words = [0] * (PASSES * 3)
    tables = [ProgressTable(words, rank, 3) for rank in range(3)]
    for rank, step in enumerate([5, 3, 9]):
        assert tables[0].least(7) == 0
        tables[rank].post(7, step)
    assert [table.least(7) for table in tables] == [3, 3, 3]
    tables[1].post(7 + PASSES, 100)
    assert tables[0].least(7) == tables[0].least(7 + PASSES) == 0
    tables[0].post(7 + PASSES, 4)
    tables[2].post(7 + PASSES, 6)
    assert tables[0].least(7 + PASSES) == 4


MADE = []


@pytest.fixture(autouse=True)
def no_coordinator_left():
    """One that is left goes on asking the others, many times a second: hundreds of them slow all that comes after."""
    yield
    close_all()
    assert not [thread for thread in threading.enumerate() if thread.name == "paddle_shard-agree"]


def close_all():
    while MADE:
        end(MADE.pop())


def end_nothing():
    """No test wants its process to end."""


def pair(timeout=HANG, size=2, table=False, **options):
    world = World(size, random.Random(0), **options)
    meet = SimulatedGroup.meet if table else lambda group: (None, {})
    made = [
        Coordinator(SimulatedGroup(world, r), timeout=timeout, meet=meet, end_process=end_nothing) for r in range(size)
    ]
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

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    return results


def iterate(agreement, steps=10**6, step_time=0.0):
    """Deliver up to `steps` steps of data that never ends; return how many were."""
    for step in range(steps):
        while agreement.outlook.step < agreement.wanted(step):
            agreement.announce()
        if not agreement.deliver(step):
            return step
        time.sleep(step_time)
    agreement.close()
    return steps


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(("taken", "told"), [(4, None), (3, None), (1, "left by global rank 1 after 1 steps")])
def test_a_rank_that_leaves_after_it_has_announced_all_steps_does_not_end_the_others_with_an_error(taken, told, table):
    """Four steps. One rank takes all of them; the other announces the steps up to the one after the last it takes."""
    first, second = pair(table=table)
    left = threading.Event()

    def to_the_end():
        agreement = first.open(Terms(ends_must_agree=True))
        left.wait(HANG)
        for step in range(5):
            if step == 0:
                agreement.announce(steps=4)
                agreement.announce(END)
            if not agreement.deliver(step):
                return step
        return None

    def leaves():
        agreement = second.open(Terms(ends_must_agree=True))
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


def test_training_waits_for_no_one_in_steady_state():
    def run(coordinator):
        agreement = coordinator.open(Terms())
        waits = []
        for step in range(60):
            while agreement.outlook.step < agreement.wanted(step):
                agreement.announce()
            before = agreement.waited
            agreement.deliver(step)
            waits.append(agreement.waited > before)
            time.sleep(0.01)
        agreement.close()
        return sum(waits[10:])

    def most_waits():
        coordinators = pair(size=4, delay=1e-3)  # as slow as a round over a busy network
        return max(together(*(lambda c=c: run(c) for c in coordinators)))

    # A machine that is shared with others may pause any thread. An agreement that has to be waited for never passes.
    assert any(most_waits() <= 1 for _ in range(8))


def test_reading_ahead_is_spread_over_the_steps():
    agreement = pair(size=1)[0].open(Terms())
    reads = []
    for step in range(30):
        reads.append(0)
        while agreement.outlook.step < agreement.wanted(step):
            agreement.announce()
            reads[-1] += 1
        assert agreement.deliver(step)

    assert reads[0] == 1
    assert max(reads) <= 2
    assert set(reads[WINDOW:]) == {1}
    assert agreement.outlook.step == 29 + WINDOW


def test_a_rank_stuck_elsewhere_when_another_is_lost_is_ended_if_that_is_wanted(monkeypatch, caplog):
    monkeypatch.setattr("paddle_shard.ranks.agreement.GRACE", 0.2)
    for exits, stuck in ((True, True), (True, False), (False, True)):
        world, ended = World(2, random.Random(0)), [threading.Event(), threading.Event()]
        one, two = (Coordinator(SimulatedGroup(world, r), timeout=2, end_process=ended[r].set) for r in range(2))
        passes = [c.open(Terms(exit_when_lost=exits)) for c in (one, two)]
        for agreement in passes:
            agreement.announce()
        assert together(*(lambda a=a: a.deliver(0) for a in passes)) == [True, True]
        caplog.clear()
        world.kill(1)
        if not stuck:  # its training thread comes by and hears of it
            passes[0].announce()
            with pytest.raises(PeerLostError):
                passes[0].deliver(1)
        assert ended[0].wait(1.5) == (exits and stuck)
        assert "Global ranks [1] died" in caplog.text
        assert ("on_lost='exit'" in caplog.text) == exits
        end(one)


def test_whoever_leaves_alone_is_named_with_its_step():
    first, second, third = pair(size=3)
    told = together(
        lambda: iterate(first.open(Terms())),
        lambda: iterate(second.open(Terms()), steps=5),
        lambda: iterate(third.open(Terms())),
    )

    assert told[1] == 5
    for error in (told[0], told[2]):
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
        assert "global rank 1 after 5 steps" in str(error)
    assert str(told[0]) == str(told[2])  # at the same step, too


def test_who_leaves_behind_the_end_disturbs_no_one():
    first, second = pair()

    def leaves():
        agreement = first.open(Terms())
        iterate(agreement, steps=5)
        return agreement.outlook.step

    def ends():
        agreement = second.open(Terms())
        for step in range(100):
            while agreement.outlook.step < agreement.wanted(step):
                agreement.announce(END) if agreement.outlook.step == 7 else agreement.announce()
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
        passes = [coordinators[rank].open(Terms(label=f"pass {i}")) for i in range(2)]
        steps, over = [0, 0], [False, False]
        rng = random.Random(10 * seed + rank)
        while not all(over):
            for i, agreement in enumerate(passes):
                while agreement.outlook.step < agreement.wanted(steps[i]):
                    at_end = agreement.outlook.step == ends[i][rank]
                    agreement.announce(END) if at_end else agreement.announce()
            for i in rng.sample([i for i in range(2) if not over[i]], 2 - sum(over)):  # no rank knows another's order
                over[i] = not passes[i].deliver(steps[i])
                steps[i] += not over[i]
        return steps

    assert together(*(lambda r=r: run(r) for r in range(3))) == [[6, 4]] * 3


def test_an_abandoned_pass_leaves_nothing_behind_for_the_next():
    coordinators = pair(size=3)

    def run(coordinator):
        return [iterate(coordinator.open(Terms()), steps=s) for s in (0, 3, 1, 7)] + [len(coordinator._passes) <= 4]

    assert together(*(lambda c=c: run(c) for c in coordinators)) == [[0, 3, 1, 7, True]] * 3
    deadline = time.monotonic() + HANG
    while any(c._passes for c in coordinators) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [c._passes for c in coordinators] == [{}] * 3


def test_loops_in_another_order_are_an_error_that_names_both():
    first, second = pair()
    told = together(
        lambda: iterate(first.open(Terms(label="training"))), lambda: iterate(second.open(Terms(label="evaluation")))
    )

    for error in told:
        assert isinstance(error, ArgumentError)
        assert "loader: training on global rank 0, evaluation on global rank 1" in str(error)


def test_what_each_rank_says_reaches_all_and_a_loop_at_that_time_is_an_error_that_names_both():
    for table in (False, True):
        ranks = pair(size=3, table=table)
        said = [f"{'x' * 10**5} of {rank}" for rank in range(3)]
        for _ in range(3):
            heard = together(*(lambda c=c, s=s: c.open(Terms()).exchange(s) for c, s in zip(ranks, said, strict=True)))
            assert heard == [said] * 3
    first, second = pair()
    told = together(
        lambda: first.open(Terms(label="certificate()")).exchange("mine"),
        lambda: iterate(second.open(Terms(label="training"))),
    )
    for error in told:
        assert isinstance(error, ArgumentError)
        assert "loader: certificate() on global rank 0, training on global rank 1" in str(error)


def test_a_silent_rank_is_named_at_the_deadline():
    first, second, third = pair(timeout=0.5, size=3)
    silent = second.open(Terms())
    silent.announce()  # and then nothing
    start = time.monotonic()
    told = together(lambda: iterate(first.open(Terms())), lambda: iterate(third.open(Terms())))

    assert 0.5 <= time.monotonic() - start < 2.0
    for error in told:
        assert error.ranks == (1,)
        assert error.timeout == 0.5
        assert "global rank 1 has read up to step 1" in str(error)


def test_a_rank_that_opens_no_pass_is_named_at_the_deadline():
    first, second = pair(timeout=0.5)
    iterate(second.open(Terms()), steps=0)
    told = together(lambda: (iterate(first.open(Terms()), steps=0), iterate(first.open(Terms()))))

    assert told[0].ranks == (1,)
    assert "global rank 1 has not started this loop" in str(told[0])


def test_a_rank_that_waits_is_told_in_which_call_another_waits_for_it():
    first, second = pair(timeout=0.5)

    def loops():
        iterate(first.open(Terms(name="the data")))

    def calls():
        agreement = second.open(Terms(name="the data"))
        try:
            agreement.announce()
            second.open(Terms(name="certificate()", is_call=True, timeout=1.5)).exchange("mine")
        finally:
            agreement.close()

    loop, call = together(loops, calls)

    assert "reach step 1 of the data: global rank 1 has read up to step 1, and waits in certificate()" in str(loop)
    assert "reach certificate(): global rank 0 has not made this call" in str(call)


@pytest.mark.parametrize("table", [True, False])
def test_a_rank_that_has_left_its_loop_logs_that_others_have_not_once_and_not_if_all_have(table, monkeypatch, caplog):
    monkeypatch.setattr(agreements, "LEFT", 0.05)
    first, second = pair(table=table)
    opened = [one.open(Terms(name="the data", first_step=10)) for one in (first, second)]

    def take_three(of_rank):
        of_rank.announce(steps=4)
        return [of_rank.deliver(step) for step in range(3)]

    assert together(*(lambda one=one: take_three(one) for one in opened)) == [[True] * 3] * 2
    opened[0].close()
    deadline = time.monotonic() + HANG
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    opened[1].close()
    ending, other = (one.open(Terms()) for one in (first, second))
    together(lambda: ending.announce(steps=3), lambda: other.announce(steps=3))
    ending.announce(END)
    ending.close()  # behind the last step: it keeps the others from nothing
    time.sleep(0.2)
    other.announce(END)

    [text] = caplog.messages
    assert text.startswith(
        "global rank 0 has left its loop before step 13 of the data, 0 s ago, and not all ranks have"
    )


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize(
    ("end", "steps", "told"),
    [
        (100, (4, 4, 4), None),
        (100, (4, 4, 5), "global rank 2 after 5 steps"),
        (100, (5, 4, 4), "global rank 0 after 5 steps"),
        (4, (4, 5, 4), None),  # behind the last step, and at the end
        (5, (4, 4, 4), None),
    ],
)
def test_ranks_that_leave_one_step_apart_are_told_and_those_that_leave_alike_are_not(end, steps, told, table, caplog):
    def run(coordinator, count):
        agreement = coordinator.open(Terms(name="the data"))
        for step in range(count):
            while agreement.outlook.kind == OK and agreement.outlook.step < agreement.wanted(step):
                agreement.announce(END) if agreement.outlook.step == end else agreement.announce()
            if not agreement.deliver(step):
                break
        agreement.close()

    for trial in range(20):
        caplog.clear()
        ranks = pair(size=3, table=table, delay=1e-3 * (trial % 2))
        assert together(*(lambda c=c, n=n: run(c, n) for c, n in zip(ranks, steps, strict=True))) == [None] * 3
        deadline = time.monotonic() + HANG
        while any(c._passes for c in ranks) and time.monotonic() < deadline:
            time.sleep(0.001)
        if told is None:
            assert caplog.messages == []
        else:
            assert any(told in text and "after 4 steps" in text for text in caplog.messages)


def test_a_failure_and_an_end_at_the_same_step_are_a_failure():
    for seed in range(20):
        script = Script(prefetch=4, ends={0: 5}, fails={2: 5})
        ranks = run_job(3, [script], random.Random(seed), pause=1e-3)
        assert [rank.results for rank in ranks] == [[(5, "failed", [2])]] * 3


def test_a_long_report_is_cut_and_says_so():
    got = Outlook(*Outlook(step=3, report="x" * 10**6).told())

    assert got.step == 3
    assert len(got.report) == REPORT_LIMIT
    assert got.report.endswith("[cut: a report holds 64 KB]")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda c: c.open(Terms()).deliver(1), "step=1 cannot be delivered: 0 comes next"),
        (lambda c: (a := c.open(Terms()), a.announce(exhausted=True), a.announce())[0], "Announce every later step"),
        (lambda c: Coordinator(c.group, timeout=0, end_process=end_nothing), "timeout must be positive, got 0"),
    ],
)
def test_wrong_use_is_named(use, message):
    coordinator = pair(size=2)[0]
    with pytest.raises(ArgumentError, match=message):
        use(coordinator)


def two_levels(sizes):
    """Hosts of these sizes: a TwoLevelGroup a rank, and the worlds that it stands on."""
    rng = random.Random(0)
    starts = [sum(sizes[:h]) for h in range(len(sizes))]
    across = World(len(sizes), rng, names=starts)
    hosts = [World(n, rng, names=range(s, s + n)) for n, s in zip(sizes, starts, strict=True)]
    groups = []
    for h, n in enumerate(sizes):
        for i in range(n):
            top = SimulatedGroup(across, h) if i == 0 else None
            local = SimulatedGroup(hosts[h], i)
            groups.append(TwoLevelGroup(local, top, rank=len(groups), names=range(sum(sizes))))
    return groups, hosts, across


@pytest.mark.parametrize("sizes", [[1], [4], [2, 3], [1, 1, 5], [3, 3, 3]])
def test_two_levels_answer_like_one(sizes):
    groups, _, _ = two_levels(sizes)
    total = sum(sizes)

    def run(group):
        r = group.rank
        return [group.minimum([r, -r, (r * 7) % total]), group.gather(bytes([r]) * r), group.minimum([-3])]

    expected = [[0, 1 - total, 0], [bytes([r]) * r for r in range(total)], [-3]]
    assert together(*(lambda g=g: run(g) for g in groups)) == [expected] * total


@pytest.mark.parametrize("victim", [0, 1, 3, 5])
def test_a_rank_that_dies_on_one_host_is_named_on_all(victim):
    groups, hosts, across = two_levels([3, 3])
    host, member = divmod(victim, 3)
    assert together(*(lambda g=g: g.minimum([1]) for g in groups)) == [[1]] * 6
    hosts[host].kill(member)
    if member == 0:
        across.kill(host)
    told = together(*(lambda g=g: [g.minimum([1]) for _ in range(2)] for g in groups if g.rank != victim))

    assert [error.ranks for error in told] == [(victim,)] * 5


# What all should have read


def reads(coordinator, digests, *, prefetch, exhausted=False, real=None, first_step=0, pace=0):
    """Steps delivered, and how a pass ends in which each step is announced with what was read."""
    agreement = coordinator.open(Terms(same_data=True, ends_apart=1, name="words", first_step=first_step))
    step = 0
    try:
        while True:
            # Some ranks read further ahead than they are asked to.
            while agreement.outlook.step < max(agreement.wanted(step), ahead(agreement, step, prefetch)):
                at = agreement.outlook.step
                if at < (len(digests) if real is None else real):
                    agreement.note_read(digests[at])
                    agreement.announce()
                elif exhausted:  # it has read on to the end of the stream
                    agreement.note_read(digests[min(at, len(digests) - 1)])
                    agreement.announce(exhausted=True)
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


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("exhausted", [False, True])
@pytest.mark.parametrize("at", [0, 1, 7, 39, None])
def test_ranks_that_have_read_different_data_are_told_the_step_on_all_and_others_are_not(at, exhausted, table):
    for prefetch in (1, 4, 9):
        same = [number * 7 for number in range(40)]
        others = [*same[:at], *(digest + 1 for digest in same[at:])] if at is not None else same
        coordinators = pair(size=3, table=table)
        told = together(
            *(
                lambda c=c, d=digests, p=prefetch: reads(c, d, prefetch=p, exhausted=exhausted)
                for c, digests in zip(coordinators, (same, others, same), strict=True)
            )
        )
        close_all()
        if at is None:
            assert told == [(40, "ended")] * 3
            continue
        assert len({text for _, text in told}) == 1
        for steps, text in told:
            assert f"At step {at} of words, global ranks 0, 2 and global rank 1 have read different data" in text
            assert at > 0 or steps == 0, "what differs from the first on is never delivered"


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("exhausted", [False, True])
def test_ranks_that_have_read_different_data_all_stop_at_the_same_step(exhausted, table):
    rng = random.Random(7)
    for trial in range(60):
        at, longer, size = rng.randint(0, 12), rng.choice([0, 0, 2, 5]), rng.choice([2, 3])
        same = [number * 7 for number in range(12)]
        other = [*same[:at], *(digest + 1 for digest in same[at:]), *range(100, 100 + longer)]
        if other == same:
            continue
        ranks = zip(pair(size=size, table=table), (same, other, same), strict=False)
        how = [{"prefetch": rng.choice([1, 4, 9]), "pace": rng.choice([0, 0, 0.002])} for _ in range(size)]
        told = together(
            *(lambda c=c, d=d, k=k: reads(c, d, exhausted=exhausted, **k) for (c, d), k in zip(ranks, how, strict=True))
        )
        close_all()
        assert all("have read different data" in str(text) for _, text in told), (trial, told)
        assert len({steps for steps, _ in told}) == 1, (trial, at, longer, told)


def test_steps_in_messages_are_those_of_the_epoch():
    coordinators = pair(timeout=1.0)
    told = together(
        lambda: reads(coordinators[0], [1, 2, 3], prefetch=1, first_step=70),
        lambda: reads(coordinators[1], [1, 2, 4], prefetch=1, first_step=70),
    )
    assert all("At step 72 of words" in text for _, text in told)

    first, second = pair(timeout=0.5)
    second.open(Terms(first_step=70)).announce()  # and then nothing
    (error,) = together(lambda: iterate(first.open(Terms(first_step=70))))
    assert "to reach step 71 of" in str(error)
    assert "global rank 1 has read up to step 71" in str(error)


def test_a_single_rank_has_nobody_to_compare_with():
    assert reads(pair(size=1)[0], [1, 2, 3], prefetch=4) == (3, "ended")


def test_a_rank_whose_stream_goes_on_when_the_others_have_ended_has_read_other_data():
    same = [number * 7 for number in range(40)]
    for length, exhausted, prefetch, table in itertools.product((0, 38), (True, False), (1, 4), (True, False)):
        one, two = pair(size=2, table=table)
        told = together(
            lambda one=one, prefetch=prefetch, e=exhausted: reads(one, same, prefetch=prefetch, exhausted=e),
            lambda two=two, prefetch=prefetch, e=exhausted, n=length: reads(
                two, same, prefetch=prefetch, exhausted=e, real=n
            ),
        )
        assert all("have read different data" in str(text) for _, text in told), (length, exhausted, prefetch, told)


def test_the_parts_of_one_stream_may_end_a_step_apart():
    same = [number * 7 for number in range(40)]
    for exhausted, prefetch, table in itertools.product((True, False), (1, 4), (True, False)):
        one, two = pair(size=2, table=table)
        told = together(
            lambda one=one, prefetch=prefetch, e=exhausted: reads(one, same, prefetch=prefetch, exhausted=e),
            lambda two=two, prefetch=prefetch, e=exhausted: reads(two, same, prefetch=prefetch, exhausted=e, real=39),
        )
        assert told == [(40 if exhausted else 39, "ended")] * 2


def test_a_rank_that_others_do_not_hear_any_more_is_not_held_at_its_end():
    one, two = pair()
    one.open(Terms()).close()
    two.open(Terms())  # and never comes to its end
    end(one)
    start = time.monotonic()
    one._take_leave()
    assert time.monotonic() - start < 0.5
