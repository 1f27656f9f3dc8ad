import gc
import multiprocessing
import os
import random
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset

from paddle_shard import Stream
from paddle_shard.loader.step_pass import StepPass
from paddle_shard.reading import profile
from paddle_shard.reading.profile import (
    READING_AHEAD,
    WORKER,
    Profiler,
    describe_waits,
)
from tests.data.http_server import serving
from tests.deadlines import HANG
from tests.helpers import ONE, sharded

PAUSE = 0.03
NUM_SAMPLES = 10
"""Stacks that must be seen: a slow machine takes longer for them, and finds the same."""
DEADLINE = 60.0
NUM_ROWS = 100_000


class Digits(Dataset):
    def __init__(self, pause=0.0, pause_every=1, waits=time.sleep):
        self.pause = pause
        self.pause_every = pause_every
        self.waits = waits

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        if self.pause and index % self.pause_every == 0:
            self.waits(self.pause)
        return np.array([index])


def compute(seconds):
    """Keep the interpreter lock, as Python code does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def augment(number):
    time.sleep(PAUSE)
    return np.array([number])


def slow_collate(rows):
    time.sleep(PAUSE)
    return np.stack(rows)


class SlowSampler(BatchSampler):
    def __init__(self):
        self.batch_size = 2
        self.drop_last = True

    def __iter__(self):
        for first in range(0, NUM_ROWS, 2):
            time.sleep(PAUSE)
            yield [first, first + 1]

    def __len__(self):
        return NUM_ROWS // 2


PLANTED = {
    "a slow data set": (
        lambda: DataLoader(Digits(PAUSE), batch_size=2),
        "Digits.__getitem__",
    ),
    "a data set that computes": (
        lambda: DataLoader(Digits(PAUSE, waits=compute), batch_size=2),
        "Digits.__getitem__",
    ),
    "a stall each 50th step": (
        lambda: DataLoader(Digits(10 * PAUSE, 100), batch_size=2),
        "Digits.__getitem__",
    ),
    "a slow map function": (
        lambda: DataLoader(
            Stream.of(range(NUM_ROWS)).map(augment), batch_size=2
        ),
        "augment",
    ),
    "a slow collate_fn": (
        lambda: DataLoader(Digits(), batch_size=2, collate_fn=slow_collate),
        "slow_collate",
    ),
    "a slow sampler": (
        lambda: DataLoader(Digits(), batch_sampler=SlowSampler()),
        "SlowSampler.__iter__",
    ),
}


def named(code_name):
    """The name of a function as this version of Python tells it."""
    return (
        code_name
        if hasattr(describe_waits.__code__, "co_qualname")
        else code_name.rpartition(".")[2]
    )


def watch_reading_ahead(profiler):
    for thread in threading.enumerate():
        if thread.name == "paddle_shard-ahead":
            profiler.watch(thread.ident, READING_AHEAD)


def num_explained(profiler):
    """The number of samples; on a busy machine, workers may take long until they say what they do."""
    counts = profiler.counts()
    return sum(counts.values()) - counts[profile.TRANSPORT]


def largest_cause(loader, after_step=watch_reading_ahead):
    """Go through a loop until enough was sampled; return what it waits for most."""
    profiler = Profiler()
    profiler.start()
    deadline = time.monotonic() + DEADLINE
    batches = iter(loader)
    while num_explained(profiler) < NUM_SAMPLES and time.monotonic() < deadline:
        next(batches)
        time.sleep(0.001)
        after_step(profiler)
    batches.close()
    profiler.stop()
    counts = profiler.counts()
    assert counts, "nothing was sampled"
    return counts.most_common(1)[0][0]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("planted", PLANTED)
def test_profiler_names_a_planted_cause(planted, prefetch):
    make_loader, name = PLANTED[planted]
    assert largest_cause(
        sharded(make_loader(), ONE, prefetch=prefetch)
    ).startswith(named(name))


def test_profiler_names_a_slow_file_system():
    # So short that one request for a block, of 5 MB in fsspec, does not take many seconds.
    rows = "".join(f"{row:8000}\n" for row in range(100)).encode()
    with serving({"rows.txt": rows}) as server:
        server.slow["rows.txt"] = PAUSE / 2
        stream = Stream.lines([f"{server.url}/rows.txt"], counts=False).map(int)
        assert (
            largest_cause(sharded(DataLoader(stream, batch_size=1), ONE))
            == profile.READING
        )


def test_profiler_names_what_forked_workers_do():
    snapshots = multiprocessing.SimpleQueue()
    of_worker = Profiler()

    def start_profiler(worker):
        of_worker.start(role=WORKER)

    def collate_and_send(rows):
        snapshots.put(of_worker.snapshot())
        return np.stack(rows)

    def merge(profiler):
        while not snapshots.empty():
            profiler.merge(snapshots.get())

    given = DataLoader(
        Digits(PAUSE),
        batch_size=4,
        num_workers=2,
        worker_init_fn=start_profiler,
        collate_fn=collate_and_send,
    )
    name = largest_cause(sharded(given, ONE), merge)
    assert name.startswith(named("Digits.__getitem__"))


def test_profiler_counts_nothing_while_the_loop_works():
    profiler = Profiler()
    profiler.start()
    batches = iter(sharded(DataLoader(Digits(), batch_size=2), ONE))
    next(batches)
    before = sum(profiler.counts().values())
    compute(0.2)
    time.sleep(0.2)
    assert sum(profiler.counts().values()) == before
    batches.close()
    profiler.stop()


def test_profiler_samples_nothing_while_nothing_waits():
    profiler = Profiler()
    profiler.is_waiting = False
    profiler.start()
    batches = iter(sharded(DataLoader(Digits(PAUSE), batch_size=10), ONE))
    next(batches)
    batches.close()
    profiler.stop()
    assert not profiler.counts()


def sampling_threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "paddle_shard-profile"
    ]


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_profiler_has_one_thread_and_can_start_again():
    assert wait_until(lambda: not sampling_threads())
    profiler = Profiler()
    for _ in range(2):
        profiler.start()
        profiler.start()
        assert len(sampling_threads()) == 1
        profiler.stop()
        profiler.stop()
        assert wait_until(lambda: not sampling_threads())


def test_profiler_ends_with_no_effect_on_a_forked_child():
    profiler = Profiler()
    profiler.start()
    for _ in range(20):
        pid = os.fork()
        # a thread that held a lock at the fork would hang this child
        if not pid:
            profiler.counts()
            profiler.snapshot()
            profiler.merge(["reading"])
            profiler.stop()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    profiler.stop()


def test_profiler_forgets_a_thread_that_has_ended():
    profiler = Profiler()
    profiler.start()
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()
    profiler.watch(thread.ident, READING_AHEAD)
    assert wait_until(lambda: list(profiler._roles) == [threading.get_ident()])
    profiler.stop()


def go_deep(depth, *more):
    return depth and go_deep(depth - 1, depth, *more[:4])


def start_threads():
    while True:
        go_deep(40)
        go_deep(30, 1, 2, 3, 4)
        threading.Thread(target=go_deep, args=(3,)).start()


def look_at_a_thread(seconds):
    """Look at a thread that runs, while what the collector calls in this thread lets the others run."""
    looking = threading.get_ident()
    gc.callbacks.append(
        lambda *_: threading.get_ident() == looking and time.sleep(0.0)
    )
    thread = threading.Thread(target=start_threads, daemon=True)
    thread.start()
    profiler = Profiler()
    profiler.watch(thread.ident, READING_AHEAD)
    sys.setswitchinterval(1e-5)
    gc.set_threshold(20)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert profiler._stacks()
        time.sleep(0.0002)
    os._exit(not gc.isenabled())


def test_profiler_looks_at_a_thread_while_nothing_is_collected():
    """Python 3.11 crashed, or stopped for ever."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=look_at_a_thread, args=(1.0,), daemon=True)
    child.start()
    child.join(HANG)
    child.kill()
    assert child.exitcode == 0


def test_profiler_keeps_no_variables_of_a_function_alive():
    class Held:
        pass

    gone = threading.Event()
    profiler = Profiler()
    profiler.start()
    for _ in range(5):
        held = Held()
        held.__class__.__del__ = lambda _: gone.set()
        time.sleep(0.05)
        del held
        assert gone.is_set()
        gone.clear()
    profiler.stop()


def test_stacks_leave_no_frame_to_the_collector():
    class Held:
        pass

    def sampled():
        held = Held()
        Profiler()._stacks()
        return weakref.ref(held)

    gc.disable()
    try:
        assert sampled()() is None
    finally:
        gc.enable()


def test_merge_attributes_only_what_was_waited_for():
    profiler = Profiler()
    profiler.merge(["reading"] * 5)
    assert not profiler.counts()
    profiler._num_unresolved = 4
    assert profiler.counts() == {profile.TRANSPORT: 4}
    profiler.merge([])
    profiler.merge(["reading"])
    assert profiler.counts() == {"reading": 4}


def test_merge_keeps_the_shares_and_the_users_generator():
    random.seed(0)
    state = random.getstate()
    profiler = Profiler()
    profiler._num_unresolved = 800
    profiler.merge(["reading", "reading", "reading", "augment"])
    counts = profiler.counts()
    assert sum(counts.values()) == 800
    assert 500 < counts["reading"] < 700
    assert random.getstate() == state


def test_counts_follow_a_cause_that_changes():
    profiler = Profiler()
    for name in ("early", "late"):
        for _ in range(1_000):
            profiler._num_unresolved = 1
            profiler.merge([name])
    assert profiler.counts().most_common(1)[0][0] == "late"


def stack_of(*functions):
    """Code objects as a stack has them: (file of the package, or of the user, name of the function)."""
    codes = []
    for filename, name in functions:
        path = (
            filename
            if filename.startswith("/")
            else profile._PACKAGE + filename
        )
        namespace = {}
        exec(compile(f"def {name}(): pass", path, "exec"), namespace)
        codes.append(namespace[name].__code__)
    return codes


NEXT = ("loader/iteration.py", "__next__")


@pytest.mark.parametrize(
    ("functions", "category"),
    [
        ([NEXT], profile.LOADER),
        ([NEXT, ("placement/placer.py", "place")], profile.PLACING),
        (
            [NEXT, ("placement/placer.py", "place"), (np.__file__, "stack")],
            profile.PLACING,
        ),
        (
            [
                NEXT,
                ("ranks/agreement.py", "deliver"),
                (threading.__file__, "wait"),
            ],
            profile.OTHER_RANKS,
        ),
        (
            [NEXT, ("reading/reader.py", "read"), ("core/collate.py", "stack")],
            profile.COLLATING,
        ),
        (
            [NEXT, ("reading/reader.py", "read"), ("core/trees.py", "leaves")],
            profile.READING,
        ),
        ([NEXT, ("plan/orders.py", "block")], profile.ORDER),
        ([NEXT, ("reading/channel.py", "receive")], profile.TRANSPORT),
        (
            [
                ("/home/train.py", "main"),
                NEXT,
                ("reading/reader.py", "read"),
                ("/home/a.py", "decode"),
            ],
            "decode",
        ),
        (
            [
                NEXT,
                ("reading/reader.py", "read"),
                ("/home/a.py", "decode"),
                ("/home/b.py", "inner"),
            ],
            "decode",
        ),
    ],
)
def test_category_is_of_the_user_or_the_innermost_of_ours(functions, category):
    assert profile._category(stack_of(*functions)) == category


def test_describe_says_nothing_of_a_small_wait():
    assert describe_waits(0.0004, 0.01, 0.0, {"reading": 10}, 0) == ""
    assert describe_waits(0.0, 0.0, 0.0, {}, 0) == ""


def test_describe_does_not_count_what_the_device_hides():
    assert describe_waits(0.008, 0.002, 0.0078, {"reading": 10}, 0) == ""
    text = describe_waits(0.008, 0.002, 0.004, {"reading": 10}, 0)
    assert (
        text
        == "Rank 0 waits 40% of a step (4.0 ms of 10.0 ms) for data: 100% reading. The device hides another 4.0 ms."
    )


def test_describe_names_the_largest_causes():
    counts = {
        "Digits.__getitem__": 81,
        "collating": 12,
        "reading": 4,
        "placing": 3,
    }
    assert describe_waits(0.0041, 0.0067, 0.0, counts, 3) == (
        "Rank 3 waits 38% of a step (4.1 ms of 10.8 ms) for data: 81% in Digits.__getitem__, 12% collating."
    )
    assert describe_waits(0.0041, 0.0067, 0.0, {}, 3).endswith("for data.")


def test_profiler_names_the_function_in_which_a_thread_idles():
    assert callable(getattr(StepPass, profile._IDLE))
