"""Signals at any moment: what a handler saves, how a process ends, and what it leaves."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time

import pytest

import paddle_shard
from paddle_shard.errors import PaddleShardError
from tests.deadlines import HANG
from tests.faults.feeds import drawn_options, loader_of, numbers, the_rest
from tests.faults.traces import alive, children, gone

LENGTH = 4000
ALL = list(range(LENGTH))
KINDS = ["map", "stream", "cut"]
OPTIONS = [{}, {"prefetch": 2}]


@contextlib.contextmanager
def forked(work, path):
    """A forked process in a session of its own that runs `work(path)`; killed in the end, with its children."""

    def go():
        os.setsid()
        with open(f"{path}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115, pytest has another
        faulthandler.dump_traceback_later(HANG - 5.0, file=2)
        sys.unraisablehook = sys.__unraisablehook__
        work(path)

    child = multiprocessing.get_context("fork").Process(target=go)
    child.start()
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # one that has no session of its own yet
        child.join()
        child.close()


def ended(child, seconds):
    """The exit code of a process, and which of its workers live on."""
    workers = children(child.pid)
    child.join(seconds)
    return child.exitcode, gone(workers, HANG)


def log_of(path):
    with open(f"{path}.log") as log:
        return log.read()[-3000:]


def started(path, seconds=HANG):
    deadline = time.monotonic() + seconds
    while not os.path.exists(f"{path}.started") and time.monotonic() < deadline:
        time.sleep(0.005)


def training(loader, path, received):
    """A loop that goes through its epoch, a step taking some time."""
    for batch in loader:
        if not received:
            open(f"{path}.started", "w").close()
        received += batch._local_value().numpy()[:, 0].tolist()
        time.sleep(0.002)


@pytest.mark.parametrize("kind", KINDS)
def test_sigterm_handler_saves_what_was_delivered(kind, rng, tmp_path):
    for trial, asks_later in enumerate((False, True)):
        workers, options = rng.choice([0, 1, 2]), drawn_options(rng)

        def work(path, workers=workers, options=options, asks_later=asks_later):
            loader, received = (
                loader_of(kind, LENGTH, workers=workers, **options),
                [],
            )

            def save():
                with open(f"{path}.json", "w") as file:
                    read = [
                        number
                        for batch in received
                        for number in batch._local_value()
                        .numpy()[:, 0]
                        .tolist()
                    ]
                    json.dump([os.getpid(), loader.state_dict(), read], file)

            def handler(number, frame):
                if asks_later:
                    asked.append(1)
                    return
                save()
                os._exit(0)

            asked = []
            signal.signal(signal.SIGTERM, handler)
            for batch in loader:
                received.append(batch)  # no handler runs between the two
                if len(received) == 1:
                    open(f"{path}.started", "w").close()
                time.sleep(0.002)
                if asked:
                    save()
                    break
            loader.close()

        path = tmp_path / str(trial)
        with forked(work, path) as child:
            started(path)
            time.sleep(rng.uniform(0.0, 0.6))
            pid = child.pid
            # as schedulers do: the workers hear it, too
            to_all = rng.random() < 0.5
            (os.killpg if to_all else os.kill)(pid, signal.SIGTERM)
            code, left = ended(child, HANG)
        assert code == 0, log_of(path)
        assert left == set()
        saver, state, received = json.loads(
            (tmp_path / f"{trial}.json").read_text()
        )
        assert saver == pid, "a worker must not run the handler"
        assert state["steps"] == len(received) // 8
        assert received + the_rest(state, kind, LENGTH, batch_size=8) == ALL


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_workers_ignore_a_signal_to_all_that_the_loop_handles(kind, tmp_path):
    def work(path):
        heard, received = [], []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        training(loader_of(kind, LENGTH, workers=2), path, received)
        with open(f"{path}.json", "w") as file:
            json.dump([len(heard), sorted(received)], file)

    path = tmp_path / "run"
    with forked(work, path) as child:
        started(path)
        os.killpg(child.pid, signal.SIGTERM)
        code, left = ended(child, HANG)
    assert code == 0, log_of(path)
    assert left == set()
    assert json.loads((tmp_path / "run.json").read_text()) == [1, ALL]


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("options", OPTIONS)
def test_state_is_right_at_every_line_of_next(kind, options):
    loader = loader_of(kind, LENGTH, **options)
    batches, wrong, received = iter(loader), set(), 0

    def at_line(frame, event, _):
        path = frame.f_code.co_filename
        if not path.startswith(os.path.dirname(paddle_shard.__file__)):
            return None
        # No handler runs between an assignment and a `return` behind it.
        if event == "line" and not lines(path)[
            frame.f_lineno - 1
        ].lstrip().startswith("return"):
            sys.settrace(None)
            state = loader.state_dict()
            sys.settrace(at_line)
            counted = (
                sum(total[1] for *_, total in state["certificate"])
                if kind == "map"
                else 8 * received
            )
            if (state["steps"], state["samples"], counted) != (
                received,
                8 * received,
                8 * received,
            ):
                wrong.add(f"{os.path.basename(path)}:{frame.f_lineno}")
        return at_line

    while received < 3:
        sys.settrace(at_line)
        try:
            next(batches)
        finally:
            sys.settrace(None)
        received += 1
    batches.close()
    assert wrong == set()


def lines(path, known={}):  # noqa: B006
    if path not in known:
        with open(path) as file:
            known[path] = file.read().splitlines()
    return known[path]


@pytest.mark.parametrize("workers", [0, 2])
def test_handler_that_exits_ends_the_process_amid_a_read(workers, tmp_path):
    def work(path):
        def slow(number):
            time.sleep(0.01)

        own = {"prefetch": 0} if workers == 0 else {}  # on this thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        training(
            loader_of("map", LENGTH, workers=workers, fault=slow, **own),
            path,
            [],
        )

    path = tmp_path / "run"
    with forked(work, path) as child:
        started(path)
        time.sleep(0.3)
        os.kill(child.pid, signal.SIGTERM)
        code, left = ended(child, HANG)
    assert left == set()
    assert code == 7, log_of(path)


@pytest.mark.parametrize("to", ["process", "group"])
def test_ctrl_c_ends_a_process_at_any_moment_and_leaves_nothing(
    to, rng, tmp_path
):
    for trial in range(3):
        kind, workers, options = (
            rng.choice(KINDS),
            rng.choice([0, 1, 3]),
            drawn_options(rng),
        )

        def work(path, kind=kind, workers=workers, options=options):
            try:
                training(
                    loader_of(kind, LENGTH, workers=workers, **options),
                    path,
                    [],
                )
            except KeyboardInterrupt:
                os.write(1, b"interrupted\n")
                raise SystemExit(3) from None

        path = tmp_path / str(trial)
        with forked(work, path) as child:
            started(path)
            time.sleep(rng.uniform(0.0, 0.5))
            (os.killpg if to == "group" else os.kill)(child.pid, signal.SIGINT)
            code, left = ended(child, HANG)
        assert code == 3, (
            f"{kind}, {workers} workers, {options}, exit code {code}:\n{log_of(path)}"
        )
        assert left == set()


def test_worker_that_starts_does_not_run_the_users_handler(tmp_path):
    def work(path):
        def handler(*_):
            with open(
                f"{path}.saved", "w"
            ) as file:  # a worker's state, over that of its rank
                file.write(str(os.getpid()))

        signal.signal(signal.SIGTERM, handler)
        loader = loader_of("map", 400, workers=2)
        os.register_at_fork(
            after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM)
        )
        with contextlib.suppress(PaddleShardError):
            training(loader, path, [])

    path = tmp_path / "run"
    with forked(work, path) as child:
        code, left = ended(child, HANG)
    assert (code, left) == (0, set())
    assert not os.path.exists(f"{path}.saved")


def test_ctrl_c_while_workers_are_started_is_not_lost(tmp_path):
    def work(path):
        once = []

        def interrupt():
            if not once:
                once.append(1)
                os.kill(os.getpid(), signal.SIGINT)

        loader = loader_of("map", 400, workers=2)
        os.register_at_fork(before=interrupt)
        try:
            training(loader, path, [])
        except KeyboardInterrupt:
            raise SystemExit(3) from None

    path = tmp_path / "run"
    with forked(work, path) as child:
        code, left = ended(child, HANG)
    assert left == set()
    assert code == 3, log_of(path)


def test_process_of_multiprocessing_ends_with_its_workers(
    tmp_path,
):
    def work(path):
        held.append(iter(loader_of("map", LENGTH, workers=2)))
        next(held[0])
        open(f"{path}.started", "w").close()

    held, path = [], tmp_path / "run"
    with forked(work, path) as child:
        started(path)
        code, left = ended(child, HANG / 4)
    assert (code, left) == (0, set()), log_of(path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_of_a_process_that_is_ended_end_too(number, rng, tmp_path):
    def work(path):
        training(
            loader_of("map", LENGTH, workers=3, **drawn_options(rng)), path, []
        )

    path = tmp_path / "run"
    with forked(work, path) as child:
        started(path)
        time.sleep(rng.uniform(0.1, 0.6))
        workers = children(child.pid)
        assert len(workers) == 3
        os.kill(child.pid, number)
        assert gone(workers, HANG) == set()
        assert not alive(child.pid)


def test_loop_in_which_ctrl_c_is_handled_goes_on(rng):
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        loader = loader_of("map", 400, workers=2, **drawn_options(rng))
        at, found = rng.randrange(400), []
        batches = iter(loader)
        for batch in batches:
            found += batch._local_value().numpy()[:, 0].tolist()
            if at in found and not heard:
                signal.raise_signal(signal.SIGINT)
        assert heard
        assert found == list(range(400))
        assert numbers(iter(loader)) == found
    finally:
        signal.signal(signal.SIGINT, before)
