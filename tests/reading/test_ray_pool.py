"""Whatever becomes of actors, requests are answered in their order. Ray is a fake here, real in tests/adapters/ray."""

import os
import pickle
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

import paddle_shard
from paddle_shard import RayReaders
from paddle_shard.errors import (
    ArgumentError,
    DataReadError,
    MissingDependencyError,
)
from paddle_shard.extras import ray_readers
from paddle_shard.extras.ray_readers import RayPool
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.serialization import pickled
from paddle_shard.reading.workers import WorkersLostError
from tests.deadlines import HANG
from tests.helpers import ONE, Made, sharded
from tests.reading.fake_ray import Pickler, all_answer, faked

WORKERS, AHEAD = 3, 2
READING_ACTOR = ray_readers.ReadingActor


class FakeActor:
    """Answers each request with itself, and notes what it was asked."""

    log = []

    def __init__(self, number, settings, seed, folder):
        self.mine = []
        FakeActor.log.append(self.mine)

    def read(self, request):
        asked, _ = pickle.loads(request)
        self.mine.append(asked)
        return [
            np.asarray(piece)
            for piece in pickled((asked, np.arange(3)), Pickler)
        ]


@pytest.fixture(autouse=True)
def fake_actor(monkeypatch):
    monkeypatch.setattr(ray_readers, "ReadingActor", FakeActor)
    monkeypatch.setattr(FakeActor, "log", [])


def pool_of(*, timeout=HANG, persistent=False, **readers):
    settings = SimpleNamespace(
        _persistent_workers=persistent,
        num_workers=0,
        prefetch_factor=AHEAD,
        worker_init_fn=None,
        timeout=0,
    )
    reader = SimpleNamespace(dataset=None, num_threads=0)
    options = RayReaders(num=WORKERS, **readers)
    return RayPool(
        options,
        settings,
        reader,
        WORKERS,
        worker_timeout=timeout,
        reads_all=False,
    )


def answers(pool, count, first=0):
    """The answers to requests in the executor's turns: each worker has at most `AHEAD` of them."""
    found, sent = [], first
    for number in range(first, first + count):
        while sent < first + count and (sent - number) // WORKERS < AHEAD:
            pool.send(sent % WORKERS, sent)
            sent += 1
        answer, array = pool.receive(number % WORKERS)
        array += 1  # nobody else has it
        found.append(answer)
    return found


class History:
    """Places, answers and deaths at random, but of no request's readers more than two in a row."""

    def __init__(self, seed):
        self.random, self.deaths = random.Random(seed), {}
        self.most = 0

    def __call__(self, ray):
        for actor in ray.living:
            self.most = max(self.most, len(actor.unanswered))
            happens = self.random.random()
            if happens < 0.3:
                actor.place()
            elif happens < 0.7:
                actor.answer()
            elif happens < 0.75 and actor.made is not None:
                head = actor.queue[0].call if actor.queue else None
                key = head[1][0] if head and head[0] == "read" else None
                if key is not None and self.deaths.get(key, 0) < 2:
                    self.deaths[key] = self.deaths.get(key, 0) + 1
                    actor.die()


@pytest.mark.parametrize("seed", range(25))
def test_ray_pool_answers_requests_in_order_whatever_dies(seed, monkeypatch):
    history = History(seed)
    with faked(monkeypatch, history) as ray:
        pool = pool_of()
        pool.start()
        assert answers(pool, 100) == list(range(100))
        assert history.most <= AHEAD
        pool.shut_down()
        assert not ray.living
    for log in FakeActor.log:
        assert len({request % WORKERS for request in log}) <= 1, (
            "an actor is one worker"
        )
        assert log == sorted(log)


def test_ray_pool_gives_up_a_request_that_kills_its_readers(
    monkeypatch, caplog
):
    def turn(ray):
        for actor in ray.living:
            actor.place()
            if (
                actor.unanswered
                and pickle.loads(actor.unanswered[0].call[1][0])[0] == 7
            ):
                actor.die("killed by sample 7")
            actor.answer()

    with faked(monkeypatch, turn):
        pool = pool_of()
        pool.start()
        with pytest.raises(
            WorkersLostError,
            match="3 actors in a row died before they could read",
        ) as caught:
            answers(pool, 20)

    assert caught.value.worker == 7 % WORKERS
    assert "ActorDiedError: killed by sample 7" in str(caught.value)
    assert (
        caplog.text.count(
            "an actor that reads has died (ActorDiedError: killed by sample 7)"
        )
        == 2
    )


def test_actors_that_cannot_begin_are_given_up(monkeypatch):
    def turn(ray):
        for actor in ray.living:
            actor.die("no such package on the node")

    with faked(monkeypatch, turn) as ray:
        pool = pool_of()
        pool.start()
        with pytest.raises(
            WorkersLostError, match="3 actors in a row died .*no such package"
        ):
            answers(pool, 20)
        assert len(ray.actors) <= 5


def test_actors_that_died_between_two_passes_are_nobodys_fault(monkeypatch):
    with faked(monkeypatch) as ray:
        pool = pool_of(persistent=True)
        for first in (0, 10, 20, 30):
            pool.start()
            assert answers(pool, 1, first) == [first]
            for actor in ray.living:
                actor.die()


def test_ray_pool_blames_no_request_for_idle_actors(monkeypatch):
    with faked(monkeypatch) as ray:
        pool = pool_of()
        pool.start()
        assert answers(pool, 12) == list(range(12))
        for actor in ray.living:
            actor.die()
        assert answers(pool, 1, 12) == [12]


def test_actor_out_of_reach_is_replaced_and_ended(monkeypatch):
    lost = []

    def turn(ray):
        for actor in ray.living:
            actor.place()
            if len(lost) < 2 and actor.unanswered and actor not in lost:
                lost.append(actor)
                actor.lose()
            actor.answer()

    with faked(monkeypatch, turn) as ray:
        pool = pool_of()
        pool.start()
        assert answers(pool, 30) == list(range(30))
        assert len(lost) == 2
        assert len(ray.living) == WORKERS


def test_actor_that_is_late_is_waited_for_and_then_an_error(monkeypatch):
    with faked(monkeypatch, lambda ray: None):
        pool = pool_of(timeout=0.05)
        pool.start()
        pool.send(0, 0)
        with pytest.raises(
            WorkersLostError,
            match="for 0.05 s.*Each actor takes one CPU.*; 0 CPUs of the cluster are free",
        ):
            pool.receive(0)


def test_waiting_call_ends_when_it_is_interrupted(monkeypatch):
    with faked(monkeypatch, lambda ray: pool.interrupt()):
        pool = pool_of()
        pool.start()
        pool.send(0, 0)
        with pytest.raises(WorkersLostError, match="no reader has answered"):
            pool.receive(0)


def test_ray_pool_answers_with_failures_outside_of_reading(monkeypatch):
    with faked(monkeypatch):
        monkeypatch.setattr(FakeActor, "read", lambda *_: 1 / 0)
        pool = pool_of()
        pool.start()
        pool.send(0, 0)
        failure = pool.receive(0)

    assert isinstance(failure, ReadFailure)
    assert "ZeroDivisionError" in failure.cause


def test_ray_pool_reports_an_unreachable_cluster_at_once(monkeypatch):
    def fails(**_):
        raise ConnectionError("no running Ray")

    with faked(monkeypatch) as ray:
        ray.is_initialized, ray.init = bool, fails
        pool = pool_of()
        with pytest.raises(
            DataReadError,
            match="the actors cannot be started: ConnectionError: no running Ray",
        ):
            pool.start()


def test_ray_readers_outlive_the_connection_quietly(
    monkeypatch,
):
    """`ray.kill` without a connection makes one, to whatever cluster it finds."""
    with faked(monkeypatch) as ray:
        pool = pool_of(persistent=True)
        pool.start()
        assert answers(pool, 4) == list(range(4))
        ray.connected = False
        pool.shut_down()
        assert len(ray.living) == WORKERS, "nobody was asked to end them"


def test_forked_child_leaves_the_actors_to_its_parent(monkeypatch):
    with faked(monkeypatch) as ray:
        pool = pool_of()
        pool.start()
        assert answers(pool, 10) == list(range(10))
        if (child := os.fork()) == 0:
            pool.shut_down()
            os._exit(0 if len(ray.living) == WORKERS else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert answers(pool, 10, 10) == list(range(10, 20))


class Settings:
    """As `WorkerSettings`."""

    reader = SimpleNamespace(dataset=None, num_threads=0)
    init_fn, num_workers = None, 1


def test_actor_reads_from_the_folder_of_its_rank(monkeypatch, tmp_path):
    """Files that are called alike in the folder in which Ray was started are others."""
    monkeypatch.setattr(ray_readers, "ReadingActor", READING_ACTOR)
    here = tmp_path / "rank"
    here.mkdir()
    (here / "a.txt").write_text("mine")
    with faked(monkeypatch, all_answer) as ray:
        monkeypatch.chdir(here)
        for env, folder in ((None, str(here)), ({"working_dir": "."}, None)):
            pool = pool_of(**({} if env is None else {"runtime_env": env}))
            pool.start()
            assert ray.actors[-1].args[3] == folder
        settings = [ray.put(pickle.dumps(Settings()))]
        monkeypatch.chdir(tmp_path)
        READING_ACTOR(0, settings, 0, str(here))
        assert os.getcwd() == str(here)
        monkeypatch.chdir(tmp_path)
        gone = READING_ACTOR(0, settings, 0, str(tmp_path / "nowhere"))
        assert (
            f"which has no folder {tmp_path}/nowhere for relative paths"
            in gone._where
        )
        assert not os.path.exists("a.txt")


def test_ray_pool_without_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingDependencyError,
        match=r"RayReaders: ray cannot .* pip install 'paddle_shard\[ray\]'",
    ):
        RayReaders(num=2)


def test_readers_that_cannot_be_are_refused(monkeypatch):
    text = "RayReaders: num must be an int >= 1, got 0"
    with faked(monkeypatch), pytest.raises(ArgumentError, match=text):
        RayReaders(num=0)


def test_loader_refuses_readers_that_are_none(monkeypatch):
    loader = paddle.io.DataLoader(Made(), batch_size=4)
    with pytest.raises(
        ArgumentError,
        match="readers must be a paddle_shard.Threads, .* got 4",
    ):
        sharded(loader, ONE, readers=4)
    external = paddle_shard.ExternalLoader(
        lambda share: [[np.zeros(4)]], name="other"
    )
    with (
        faked(monkeypatch),
        pytest.raises(
            ArgumentError,
            match="another library reads, in processes of its own",
        ),
    ):
        sharded(external, ONE, readers=RayReaders(num=2))


def test_thread_may_wait_while_another_interrupts(monkeypatch):
    with faked(monkeypatch, lambda ray: None):
        pool = pool_of()
        pool.start()
        pool.send(0, 0)
        failed = []

        def wait():
            try:
                pool.receive(0)
            except WorkersLostError as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        pool.interrupt()
        thread.join(HANG)
        assert failed


def test_loader_reads_by_actors(monkeypatch):
    monkeypatch.setattr(ray_readers, "ReadingActor", Reads)
    with faked(monkeypatch, all_answer):
        loader = sharded(
            paddle.io.DataLoader(Made(), batch_size=4),
            ONE,
            readers=RayReaders(num=2),
        )
        assert [
            batch._local_value().numpy().tolist() for batch in loader
        ] == np.arange(16).reshape(4, 4).tolist()


class Reads:
    """An actor without what only a process of its own needs."""

    def __init__(self, number, settings, seed, folder):
        self.number, self.settings = number, pickle.loads(settings[0].value)

    def read(self, request):
        with paddle.base.dygraph.guard(paddle.CPUPlace()):
            asked, is_first = pickle.loads(request)
            return [
                np.asarray(one)
                for one in pickled(
                    self.settings.reader.read(
                        asked, self.number, is_first=is_first
                    )
                )
            ]
