"""How do actors of a Ray cluster read for a rank, and what if one dies, or has no place yet?

The order stays with the rank: it asks for the rows of a step, and an answer depends on the request alone. So an actor
may die, and another is asked the same again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import paddle
import paddle.io
from paddle.io.dataloader import worker as paddle_worker

from paddle_shard.checks import check_count
from paddle_shard.errors import ArgumentTypeError, described
from paddle_shard.reading.chunk_reader import ChunkReader
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.reader import Reader
from paddle_shard.reading.serialization import pickled
from paddle_shard.reading.worker import WorkerSettings, set_up
from paddle_shard.reading.workers import WorkerPool, WorkersLostError, drawn_seed
from paddle_shard.sources.files import needs

_LOOK_SECONDS = 0.2
"""Seconds after which a call that waits for an answer looks whether it was interrupted."""
_NODES_SECONDS = 2.0
"""Seconds between two looks for nodes that can take another actor."""
_PATIENCE_SECONDS = 10.0
"""Seconds without any actor after which the log says what is waited for."""
MOST_DEATHS = 3
"""Actors in a row that die while they read a request, before it is given up; and that die before they can read, for
each actor that is wanted."""

_left_to_the_parent: list[Any] = []
"""Handles in a forked child. Dropped there, they could end the actors of the parent."""

_CONNECT_SECONDS = 10.0
"""Seconds for which a cluster may not answer."""


def connect() -> None:
    """Connect this process to Ray, unless it is.

    Raises:
        ConnectionError: `RAY_ADDRESS` is no address, or nothing answers there. Ray itself would try for minutes.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    way_out = "Start one there (ray start --head), or correct or unset RAY_ADDRESS"
    if found := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address):
        try:
            socket.create_connection((found[1], int(found[2])), _CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"no Ray cluster answers at RAY_ADDRESS={address} ({error}). {way_out}.") from error
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto")
    except ValueError as error:
        raise ConnectionError(f"RAY_ADDRESS={address} names no Ray cluster ({error}). {way_out}.") from error
    if threading.current_thread() is threading.main_thread():  # Ray takes the signal; it is the user's
        signal.signal(signal.SIGTERM, ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayReaders:
    """Actors of a Ray cluster that read for a loader, in place of worker processes.

    Each rank that reads has its own; each takes one CPU of the cluster. They begin to read as soon as they are placed,
    be it later than others. `docs/readers.md` has more.

    Raises:
        ArgumentError: A number is not an int >= 1.
        MissingDependencyError: Ray is not installed.
    """

    num: int
    """Number of actors of each rank that reads."""
    per_node: int | None = None
    """Most of them on one node; None: Ray spreads them."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment of the actors, such as `{"working_dir": "."}` if the nodes do not have your code."""

    def __post_init__(self) -> None:
        check_count("RayReaders: num", self.num)
        if self.per_node is not None:
            check_count("RayReaders: per_node", self.per_node)
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise ArgumentTypeError(f"RayReaders: runtime_env must be a dict, got {self.runtime_env!r}.")
        with needs("ray", "RayReaders: "):
            import ray  # noqa: F401

    def pool(self, *args: Any, **options: Any) -> RayPool:
        """Return a pool of actors.

        Args:
            args: Those of `WorkerPool`.
            options: Those of `WorkerPool`.
        """
        return RayPool(self, *args, **options)


class ReadingActor:
    """What runs in an actor: a worker, or several if it stands in for others."""

    def __init__(self, settings: list[Any], seed: int, folder: str | None) -> None:
        """Prepare.

        Args:
            settings: Ray's reference to the pickled `WorkerSettings`, in a list, so that Ray does not resolve it.
            seed: Seed of the workers' random generators.
            folder: The rank's working directory, from which relative paths are meant; None: the actor's own, by its
                runtime environment.
        """
        import ray

        self._settings, self._seed = settings, seed
        self._workers: dict[int, tuple[Reader, ReadFailure | None, Any]] = {}
        self._where = f" on node {ray.util.get_node_ip_address()}"
        if folder is not None:
            try:
                os.chdir(folder)
            except OSError:
                os.chdir("/proc")  # where no file of a user has the name of one that is meant
                self._where += f" (where relative paths lead nowhere, as it has no folder {folder})"
        self._guard = paddle.base.dygraph.guard(place=paddle.CPUPlace())
        self._guard.__enter__()

    def where(self) -> str:
        """Return the address of its node."""
        return self._where

    def read(self, number: int, request: bytes, anew: bool) -> list[np.ndarray[Any, Any]]:
        """Return the answer to a request as worker `number`: a pickle, and the memory of each of its arrays.

        Args:
            number: Number of the worker.
            request: What is asked for, pickled.
            anew: True if what the worker has read so far, here, does not count.
        """
        from ray import cloudpickle  # which knows the classes of the user's script in both processes

        answer = self._answer(number, request, anew)
        try:
            pieces = pickled(answer, cloudpickle.CloudPickler)
        except Exception as error:
            what = "sending the batch"
            pieces = pickled(ReadFailure.of(error, what=what, worker=number, where=self._where))
        return [np.asarray(piece) for piece in pieces]

    def _answer(self, number: int, request: bytes, anew: bool) -> Any:
        try:
            if anew or number not in self._workers:
                import ray

                settings: WorkerSettings = pickle.loads(ray.get(self._settings[0]))
                failure = set_up(number, settings, self._seed)
                self._workers[number] = settings.reader, failure, paddle_worker._worker_info
            asked = pickle.loads(request)
        except Exception as error:
            return ReadFailure.of(error, what="receiving the request", worker=number, where=self._where)
        reader, failed, paddle_worker._worker_info = self._workers[number]
        found = failed or reader.read(asked[0], number, asked[1])
        return replace(found, where=self._where) if isinstance(found, ReadFailure) else found


@dataclass(slots=True, eq=False)
class _Asked:
    """A request, and at last its answer."""

    number: int
    """Number of the worker that was asked."""
    request: bytes
    done: bool = False
    answer: Any = None
    deaths: list[str] = field(default_factory=list)
    """Why actors have died that were reading it."""


@dataclass(slots=True, eq=False)
class _Actor:
    """An actor, as the rank sees it."""

    number: int
    handle: Any
    node: Any
    """Node that it must run on; None: any."""
    told: Any
    """Ray's reference to its answer where it is; None: it has answered."""
    where: str = ""
    asked: dict[Any, _Asked] = field(default_factory=dict)
    """Ray's reference -> a request that it has not answered, in order."""


class RayPool(WorkerPool):
    """Actors in place of worker processes.

    Of data with an index, any actor that has room reads the next request. Of a stream, a worker keeps parts open: each
    is with one actor, which has several while there are fewer actors than workers.
    """

    _broken: WorkersLostError | None = None

    def __init__(
        self,
        readers: RayReaders,
        settings: paddle.io.DataLoader,
        reader: Reader,
        num_workers: int,
        *,
        worker_timeout: float,
        reads_all: bool,
    ) -> None:
        """Set up; see `WorkerPool`."""
        super().__init__(settings, reader, num_workers, worker_timeout=worker_timeout, reads_all=reads_all)
        self._readers, self._keeps_parts, self._seed = readers, isinstance(reader, ChunkReader), drawn_seed()
        self._sent: Any = None
        self._actors: list[_Actor] = []
        self._holders: dict[int, _Actor] = {}
        """Of a stream: number of a worker -> the actor that it is with."""
        self._queues = [deque[_Asked]() for _ in range(num_workers)]
        """What each worker was asked for and is not taken yet, in order."""
        self._waiting: deque[_Asked] = deque()
        """Requests that no actor has yet, in order."""
        self._early_deaths: list[str] = []
        """Why actors have died before they could read, since one could."""
        self._wanted, self._looked = 1, 0.0
        """How many are asked for: the first one, and all once it reads. So no rank takes a whole cluster that is small
        before others have one; and when Ray was last asked."""

    def start(self) -> None:
        """Ask for the actors. What fails is told as the failure of the first batch, on all ranks."""
        self._broken = None
        if not self._actors:
            self._wanted = 1
        try:
            if self._sent is None:  # what all actors need
                connect()
                import ray
                from ray import cloudpickle

                self._sent = ray.put(cloudpickle.dumps(self._settings))
            self._add_actors()
        except Exception as error:
            self._broken = WorkersLostError(f"the readers cannot be started: {described(error)}", 0)
            self._broken.__cause__ = error

    def send(self, number: int, request: Any) -> None:
        """Ask a worker for something.

        Raises:
            Exception: Whatever pickling raises.
        """
        from ray import cloudpickle

        asked = _Asked(number, cloudpickle.dumps(request))
        self._queues[number].append(asked)
        self._waiting.append(asked)
        self._assign()

    def has_answer(self, number: int) -> bool:
        """See `WorkerPool`."""
        self._look(0)
        return self._queues[number][0].done or self._broken is not None

    def receive(self, number: int) -> Any:
        """See `WorkerPool`."""
        queue, began, said = self._queues[number], time.monotonic(), False
        while not queue[0].done:
            if self._broken is not None:
                raise self._broken
            waited = time.monotonic() - began
            if self.interrupted or waited >= self.worker_timeout:
                text = f"no reader has answered for {self.worker_timeout:g} s; the loader's timeout= says so"
                raise WorkersLostError(f"{text}. {self._shortage()}", number)
            if waited >= _PATIENCE_SECONDS and not (said or any(actor.told is None for actor in self._actors)):
                said = True
                logging.getLogger("paddle_shard").warning(self._shortage())
            self._look(min(_LOOK_SECONDS, self.worker_timeout - waited))
        return queue.popleft().answer

    def let_go(self) -> None:
        """End the actors: nothing more is asked of them."""
        self.shut_down()

    def shut_down(self) -> None:
        """End the actors, which are not waited for; safe to call again."""
        actors, self._actors, self._sent = self._actors, [], None
        for actor in actors:
            self._kill(actor)
        self._holders.clear()
        self._waiting.clear()

    def leave_to_the_parent(self) -> None:
        """See `WorkerPool`."""
        _left_to_the_parent.append((self._actors, self._holders, self._sent))
        self._actors, self._holders, self._sent = [], {}, None

    def _add_actors(self) -> None:
        """Ask Ray for the actors that are missing, as far as `per_node` allows."""
        import ray

        most, self._looked = self._readers.per_node, time.monotonic()
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        env = dict(self._readers.runtime_env or {})
        if env:
            options["runtime_env"] = env
        folder = None if "working_dir" in env else os.getcwd()
        there = Counter(actor.node for actor in self._actors)
        for number in sorted(set(range(self._wanted)) - {actor.number for actor in self._actors}):
            node = None
            if most is not None:
                nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU")]
                node = min(nodes, key=lambda one: there[one], default=None)
                if node is None or there[node] >= most:
                    return
                there[node] += 1
                strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
                options["scheduling_strategy"] = strategy
            handle = ray.remote(ReadingActor).options(**options).remote([self._sent], self._seed, folder)
            self._actors.append(_Actor(number, handle, node, handle.where.remote()))

    def _look(self, seconds: float) -> None:
        """Wait so long for answers, note them, replace actors that have died, and ask those that have room."""
        import ray

        try:
            if len(self._actors) < self._wanted and time.monotonic() - self._looked >= _NODES_SECONDS:
                self._add_actors()
            refs = {actor.told: actor for actor in self._actors if actor.told is not None}
            refs |= {ref: actor for actor in self._actors for ref in actor.asked}
            if not refs:
                time.sleep(seconds)
                return
            some = ray.wait(list(refs), num_returns=1, timeout=seconds)[0]
            for ref in ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if some else ():
                if refs[ref] in self._actors:  # else it has just died
                    self._note(refs[ref], ref)
            self._assign()
        except Exception as error:  # such as a connection to Ray that was ended
            self._broken = self._broken or WorkersLostError(f"Ray does not answer: {described(error)}", 0)

    def _note(self, actor: _Actor, ref: Any) -> None:
        """Note what an actor has answered, or that it has died."""
        import ray

        try:
            found = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            found = ReadFailure.of(error, what="reading", where=actor.where, worker=actor.number)
        except ray.exceptions.RayError as error:
            return self._replace(actor, error)
        if ref is actor.told:
            actor.told, actor.where = None, found
            self._early_deaths.clear()
            if self._wanted < self.num_workers:
                self._wanted = self.num_workers
                self._add_actors()
            return None
        asked = actor.asked.pop(ref)
        try:
            if isinstance(found, list):  # Ray's arrays are read-only, and take its memory as long as they exist
                text, *arrays = found
                found = pickle.loads(text, buffers=[one.copy() for one in arrays])
        except Exception as error:
            found = ReadFailure.of(error, what="receiving the batch", worker=asked.number)
        asked.done, asked.answer = True, found
        return None

    def _replace(self, actor: _Actor, error: Exception) -> None:
        """Put another actor in the place of one that has died; what it has not answered is asked again."""
        unanswered = list(actor.asked.values())
        actor.asked = {}
        self._actors.remove(actor)
        self._kill(actor)  # it may only be out of reach
        self._waiting.extendleft(reversed(unanswered))
        early = actor.told is not None or not unanswered
        deaths = self._early_deaths if early else unanswered[0].deaths
        whole = " ".join(str(error).split())
        _, because, reason = whole.partition("The actor is dead because ")  # behind ids and addresses
        reason = (reason if because else whole)[: 600 if early else 200]
        deaths.append(f"{actor.where.removeprefix(' on ') or 'not placed yet'}: {type(error).__name__}: {reason}")
        number = actor.number if early else unanswered[0].number
        if len(deaths) >= MOST_DEATHS * (self.num_workers if early else 1):
            doing = "before they could read" if early else "while they read the same rows"
            text = f"{len(deaths)} actors in a row died {doing}: {'; '.join(deaths[-MOST_DEATHS:])}"
            self._broken = WorkersLostError(text, number)
            return
        logging.getLogger("paddle_shard").warning(
            "an actor that reads has died (%s). Another takes its place, and is asked for the %d batches that it owes.",
            deaths[-1],
            len(unanswered),
        )
        for other in self._actors:  # its node may have died, too; those that read will tell
            if not other.asked and other.told is None:
                other.told = other.handle.where.remote()
        self._add_actors()

    def _assign(self) -> None:
        """Ask the actors that have room for what waits, in order."""
        ready, later = [actor for actor in self._actors if actor.told is None], list[_Asked]()
        held_back: set[int] = set()
        while self._waiting:
            asked = self._waiting.popleft()
            number, anew, actor = asked.number, False, None
            if ready and number not in held_back and self._keeps_parts:
                actor, anew = self._holder(number, ready)
            elif ready and number not in held_back:
                least = min(ready, key=lambda actor: len(actor.asked))  # the one that has least to read
                actor = least if len(least.asked) < self.num_ahead else None
            if actor is None:
                held_back.add(number)
                later.append(asked)
                continue
            of = number if self._keeps_parts else actor.number
            actor.asked[actor.handle.read.remote(of, asked.request, anew)] = asked
        self._waiting.extend(later)

    def _holder(self, number: int, ready: list[_Actor]) -> tuple[_Actor | None, bool]:
        """Return the actor that a worker's parts are with, and whether it is to open them.

        None if they are to move to an actor that has fewer, and the one that holds them has not answered yet.
        """
        holder, held = self._holders.get(number), Counter(self._holders.values())
        least = min(ready, key=lambda actor: held[actor])
        if holder in ready:
            assert holder is not None
            if held[holder] <= held[least] + 1:
                return holder, False
            if any(asked.number == number for asked in holder.asked.values()):
                return None, False
        self._holders[number] = least
        return least, True

    def _shortage(self) -> str:
        """Return in words what is missing."""
        there = sum(actor.told is None for actor in self._actors)
        text = f"{there} of {self.num_workers} actors that read have begun"
        with contextlib.suppress(Exception):
            import ray

            free, of_all = ray.available_resources().get("CPU", 0), ray.cluster_resources().get("CPU", 0)
            text += f". Each takes one CPU, and a while to start; of the cluster's {of_all:g} CPUs, {free:g} are free"
        others = "What other ranks take, and other loaders with persistent_workers, they keep"
        return f"{text}. {others}; a node that is added is used at once."

    def _kill(self, actor: _Actor) -> None:
        with contextlib.suppress(Exception):
            import ray

            if ray.is_initialized():  # else its actors have ended with it, and `kill` would connect to some cluster
                ray.kill(actor.handle)
