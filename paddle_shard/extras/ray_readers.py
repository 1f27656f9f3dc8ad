"""Actors of a Ray cluster that read for a rank, in place of worker processes.

The order stays with the rank: it requests the rows of a step, and an answer depends on the request alone. So an actor
may die, and another one gets its requests again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

import numpy as np
import paddle

from paddle_shard.core.checks import check_count
from paddle_shard.data.files.files import needs
from paddle_shard.errors import DataReadError, described
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.serialization import pickled
from paddle_shard.reading.worker import set_up
from paddle_shard.reading.workers import (
    WorkerPool,
    WorkersLostError,
    new_worker_seed,
)

_LOOK_SECONDS = 0.2
"""Seconds after which a call that waits for an answer checks whether it was interrupted."""
_PATIENCE_SECONDS = 10.0
"""Seconds without an answer after which the log names what the cluster may lack."""
_MOST_TEXT = 600
MOST_DEATHS = 3
"""Actors in a row that die without an answer before their worker is given up."""

_left_to_the_parent: list[Any] = []
"""Handles in a forked child. If they were dropped there, they could end the actors of the parent."""
_log = logging.getLogger("paddle_shard")


def connect_to_ray() -> None:
    """Connect this process to the Ray cluster of `RAY_ADDRESS`, or of its host, unless it is connected.

    Raises:
        ConnectionError, ValueError: There is no such cluster.
    """
    import ray

    if ray.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address="auto")
    # Ray installs a handler of its own
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayReaders:
    """Actors of a Ray cluster that read for a loader, in place of worker processes.

    Each rank that reads has its own; each takes one CPU of the cluster. `docs/readers.md` has more.

    Attributes:
        num: Number of actors of each rank that reads.
        runtime_env: Ray's runtime environment of the actors, such as `{"working_dir": "."}` if the nodes do not have
            your code.

    Raises:
        ArgumentError: `num` is not an int >= 1.
        MissingDependencyError: Ray is not installed.
    """

    num: int
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_count("RayReaders: num", self.num)
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
    """A worker in an actor."""

    def __init__(
        self, number: int, settings: list[Any], seed: int, folder: str | None
    ) -> None:
        """Set up the worker.

        Args:
            number: Number of the worker.
            settings: Ray's reference to the pickled `WorkerSettings`, in a list, so that Ray does not resolve it.
            seed: Seed of the workers' random generators.
            folder: Working directory of the rank, from which relative paths are meant; None: the actor's own, by its
                runtime environment.
        """
        import ray

        self._number = number
        self._where = f" on node {ray.util.get_node_ip_address()}"
        if folder is not None:
            if not os.path.isdir(folder):
                self._where += (
                    f" (which has no folder {folder} for relative paths)"
                )
                folder = "/proc"  # no file of a user is there
            os.chdir(folder)
        paddle.set_device("cpu")
        worker_settings = pickle.loads(ray.get(settings[0]))
        self._reader = worker_settings.reader
        self._failure = set_up(number, worker_settings, seed)

    def read(self, request: bytes) -> list[np.ndarray[Any, Any]]:
        """Return the answer to a pickled request: a pickle, and the memory of each of its arrays."""
        # pickles classes of the user's script by value
        from ray import cloudpickle

        what, is_first = pickle.loads(request)
        answer = self._failure or self._reader.read(
            what, self._number, is_first=is_first
        )
        if isinstance(answer, ReadFailure):
            answer = replace(answer, where=self._where)
        return [
            np.asarray(piece)
            for piece in pickled(answer, cloudpickle.CloudPickler)
        ]


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker, as the rank sees it."""

    handle: Any
    """Ray's handle of its actor."""
    requests: deque[tuple[bytes, Any]] = field(default_factory=deque)
    """Requests, each with Ray's reference to its answer, that are not taken yet, in order."""
    deaths: list[str] = field(default_factory=list)
    """Why actors died since the last answer."""

    def send(self, request: bytes) -> None:
        """Send its actor a pickled request."""
        self.requests.append((request, self.handle.read.remote(request)))


class RayPool(WorkerPool):
    """Actors in place of worker processes, one for each worker."""

    def __init__(self, readers: RayReaders, *args: Any, **options: Any) -> None:
        """Set up; the other arguments are those of `WorkerPool`."""
        super().__init__(*args, **options)
        self._runtime_env = readers.runtime_env or {}
        self._seed = new_worker_seed()
        self._settings_ref: Any = None
        self._actors: list[_Worker] = []

    def start(self) -> None:
        """Create the actors.

        Raises:
            DataReadError: There is no cluster, or it takes no actors.
        """
        if self._actors:
            return
        try:
            connect_to_ray()
            import ray
            from ray import cloudpickle

            self._settings_ref = ray.put(cloudpickle.dumps(self._settings))
            self._actors = [
                _Worker(self._create(number))
                for number in range(self.num_workers)
            ]
        except Exception as error:
            raise DataReadError(
                f"RayReaders: the actors cannot be started: {described(error)}"
            ) from error

    def _create(self, number: int) -> Any:
        """Return the handle of a new actor for a worker."""
        import ray

        options = {
            "num_cpus": 1,
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        folder = None if "working_dir" in self._runtime_env else os.getcwd()
        return (
            ray.remote(ReadingActor)
            .options(**options)
            .remote(number, [self._settings_ref], self._seed, folder)
        )

    def send(
        self, number: int, request: Any, *, is_first: bool = False
    ) -> None:
        """Send a worker a request, the first of an epoch iterator if `is_first`.

        Raises:
            Exception: Whatever pickling raises.
        """
        from ray import cloudpickle

        self._actors[number].send(cloudpickle.dumps((request, is_first)))

    def receive(self, number: int) -> Any:
        """See `WorkerPool`."""
        import ray

        worker = self._actors[number]
        begun = time.monotonic()
        is_reported = False
        while True:
            answer_ref = worker.requests[0][1]
            if ray.wait([answer_ref], timeout=_LOOK_SECONDS)[0]:
                try:
                    answer = ray.get(answer_ref)
                    break
                except ray.exceptions.RayTaskError as error:
                    answer = ReadFailure.of(
                        error, what="reading", worker=number
                    )
                    break
                except ray.exceptions.RayError as error:
                    self._replace(number, error)
            waited = time.monotonic() - begun
            if self.interrupted or waited >= self.worker_timeout:
                text = f"no reader has answered for {self.worker_timeout:g} s, the loader's timeout="
                raise WorkersLostError(f"{text}. {self._free_cpus()}", number)
            if waited >= _PATIENCE_SECONDS and not is_reported:
                is_reported = True
                text = "worker %d has not answered for %g s. %s"
                _log.warning(text, number, waited, self._free_cpus())
        worker.requests.popleft()
        worker.deaths.clear()
        return self._unpickled(number, answer)

    def _unpickled(self, number: int, answer: Any) -> Any:
        if isinstance(answer, ReadFailure):
            return answer
        try:
            # Ray's arrays are read-only, and take its memory as long as they exist.
            text, *arrays = answer
            return pickle.loads(
                text, buffers=[array.copy() for array in arrays]
            )
        except Exception as error:
            return ReadFailure.of(
                error, what="receiving the batch", worker=number
            )

    def _replace(self, number: int, error: Exception) -> None:
        """Replace an actor that has died, and send its requests again.

        Raises:
            WorkersLostError: Too many have died without an answer.
        """
        worker = self._actors[number]
        reason = shorten(str(error), _MOST_TEXT)
        worker.deaths.append(f"{type(error).__name__}: {reason}")
        if len(worker.deaths) >= MOST_DEATHS:
            text = f"{MOST_DEATHS} actors in a row died before they could read the next rows"
            raise WorkersLostError(
                f"{text}: {'; '.join(worker.deaths)}", number
            )
        _log.warning(
            "an actor that reads has died (%s). Another one takes its place.",
            worker.deaths[-1],
        )
        self._kill(worker)  # it may only be out of reach
        worker.handle = self._create(number)
        requests = [request for request, _ in worker.requests]
        worker.requests.clear()
        for request in requests:
            worker.send(request)

    def _free_cpus(self) -> str:
        with contextlib.suppress(Exception):
            import ray

            free = ray.available_resources().get("CPU", 0)
            return f"Each actor takes one CPU, and some seconds to start; {free:g} CPUs of the cluster are free."
        return "Ray does not answer either."

    def shut_down(self) -> None:
        """End the actors without waiting for them; safe to call again."""
        for worker in self._actors:
            self._kill(worker)
        self._actors = []
        self._settings_ref = None

    def _kill(self, worker: _Worker) -> None:
        with contextlib.suppress(Exception):
            import ray

            # else `kill` would connect to some cluster
            if ray.is_initialized():
                ray.kill(worker.handle)

    def leave_to_the_parent(self) -> None:
        """See `WorkerPool`."""
        _left_to_the_parent.append((self._actors, self._settings_ref))
        self._actors = []
        self._settings_ref = None
