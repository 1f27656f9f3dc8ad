import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import paddle.distributed as dist
import pytest

from paddle_shard.errors import ArgumentError, PeerLostError
from paddle_shard.ranks import rendezvous
from paddle_shard.ranks.network import network_of
from paddle_shard.ranks.rendezvous import rendezvous_of
from paddle_shard.testing.simulated import simulated_rank
from tests.deadlines import HANG
from tests.descriptors import open_files
from tests.jobs import processes_left, run_ranks, start_ranks
from tests.ranks.local_network import Meeting

WORKER = Path(__file__).parent / "lost_worker.py"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "loop", "victim", "workers"),
    [
        ("map", 1, 0, 0),
        ("map", 2, 1, 2),
        ("stream", 1, 1, 0),
        ("stream", 2, 0, 2),
    ],
)
def test_killed_rank_is_named_and_leaves_no_process(
    kind, loop, victim, workers, tmp_path
):
    args = ["lost", kind, str(workers), str(loop), str(victim)]
    with start_ranks(WORKER, 2, tmp_path, args=args, timeout=HANG) as job:
        [(done, ranks, seconds)] = job.reports([1 - victim], HANG)

        assert (done, ranks) == (loop - 1, [victim])
        assert seconds < HANG / 2, "not only when the timeout is over"
        assert processes_left(job) == set()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "call", "victim", "num_ranks"),
    [
        ("kill", "certificate", 1, 2),
        ("end", "certificate", 3, 4),
        ("kill", "loop", 0, 4),
        ("refuse", "loop", 1, 2),
    ],
)
def test_rank_that_ends_before_the_first_call_is_named_at_once(
    how, call, victim, num_ranks, tmp_path
):
    with start_ranks(
        WORKER,
        num_ranks,
        tmp_path,
        args=["early", how, call, str(victim)],
        timeout=HANG,
    ) as job:
        for ranks, seconds in job.reports(
            [rank for rank in range(num_ranks) if rank != victim], HANG
        ):
            assert ranks == [victim]
            assert seconds < HANG / 4, "not only when the timeout is over"


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 3])
def test_stopped_rank_is_named_after_the_timeout_of_its_loader(
    victim, tmp_path
):
    with start_ranks(
        WORKER, 4, tmp_path, args=["stopped", str(victim)], timeout=HANG
    ) as job:
        for ranks, seconds in job.reports(
            [rank for rank in range(4) if rank != victim], HANG
        ):
            assert ranks == [victim]
            assert 6.0 <= seconds < 6.0 + HANG / 4


@pytest.mark.multiprocess
def test_rank_may_exit_while_it_connects_to_the_others(tmp_path):
    assert (
        run_ranks(WORKER, 2, tmp_path, args=["unmet"], timeout=HANG)
        == ["ended"] * 2
    )


@pytest.mark.multiprocess
@pytest.mark.long
def test_ranks_that_paddle_spawns_meet(tmp_path):
    given = ("PADDLE_", "POD_", "MASTER_", "FLAGS_selected_")
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(given)
    }
    variables["PADDLE_SHARD_REPORT_DIR"] = str(tmp_path)
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-u", str(WORKER), "spawn"]
        ranks = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            code = ranks.wait(HANG)
        except subprocess.TimeoutExpired:
            code = "none in time"
        finally:
            ranks.kill()
            ranks.wait()

    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    first, second = (
        json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for rank in range(2)
    )
    for epoch in range(2):
        joined = [
            a + b for a, b in zip(first[epoch], second[epoch], strict=True)
        ]
        assert joined == [
            list(range(8 * step, 8 * step + 8)) for step in range(20)
        ]


# Where they meet


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (
            {
                "PADDLE_MASTER": "10.0.0.1:5",
                "PADDLE_TRAINER_ENDPOINTS": "10.0.0.2:6,10.0.0.2:7",
            },
            ("10.0.0.1", 5),
        ),
        # all that spawn sets
        (
            {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.2:6,10.0.0.2:7"},
            ("10.0.0.2", 6),
        ),
        # What Paddle reads, but not for its store.
        (
            {
                "MASTER_ADDR": "a",
                "MASTER_PORT": "8",
                "PADDLE_TRAINER_ENDPOINTS": "b:6,b:7",
            },
            ("b", 6),
        ),
        ({"PADDLE_MASTER": "[::1]:5"}, ("::1", 5)),
    ],
)
def test_store_is_looked_for_where_paddle_puts_it(
    variables, address, monkeypatch
):
    for name in (
        "PADDLE_MASTER",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PADDLE_TRAINER_ENDPOINTS",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with (
        simulated_rank(0, 2),
        mock.patch.object(dist, "is_initialized", lambda: True),
    ):
        found = rendezvous_of([0, 1])

    assert (found.host, found.port) == address


@pytest.mark.parametrize(
    "found", [None, "127.0.0.1:0", "127.0.0.1", "host:port", ":5"]
)
def test_rendezvous_without_an_address_is_refused_at_once(found, monkeypatch):
    for name in (
        "PADDLE_MASTER",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PADDLE_TRAINER_ENDPOINTS",
    ):
        monkeypatch.delenv(name, raising=False)
    if found is not None:
        monkeypatch.setenv("PADDLE_MASTER", found)

    with (
        simulated_rank(0, 2),
        pytest.raises(
            ArgumentError,
            match="start the ranks with python -m paddle.distributed",
        ),
    ):
        network_of([0, 1], "test", HANG)


@pytest.mark.parametrize("members", [(0, 1), (1, 2)])
def test_lost_store_is_named_before_the_ranks_have_met(members, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv(
            "PADDLE_MASTER", f"127.0.0.1:{probe.getsockname()[1]}"
        )
    with (
        simulated_rank(1, 3),
        mock.patch.object(dist, "is_initialized", lambda: True),
    ):
        start = time.monotonic()
        with pytest.raises(
            PeerLostError, match="global rank 0, which has the store"
        ) as raised:
            network_of(members, "test", 2 * HANG)

    assert raised.value.ranks == (0,)
    assert time.monotonic() - start < HANG


# Forked children


def sockets_in_a_child():
    """Which of this process's sockets of groups a forked child has open."""
    known = {
        os.fstat(one.fileno()).st_ino
        for one in list(rendezvous._sockets)
        if one.fileno() >= 0
    }
    assert known
    pid = os.fork()
    if pid == 0:
        os._exit(sum(one.inode in known for one in open_files()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def meeting():
    with Meeting((4, 5, 6)) as found:
        yield found


def until(condition):
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_come(meeting, *ranks):
    """Whether the hub knows that these ranks have come, and no other."""
    return lambda: (
        meeting.coordinators[4].network._missing == {4, 5, 6} - {*ranks}
    )


def test_slow_start_is_no_death(meeting):
    found = [meeting.start(4), meeting.start(5)]
    until(has_come(meeting, 4, 5))
    time.sleep(4.0)
    assert found == [[], []]
    found.append(meeting.start(6))
    until(lambda: found == [[["from 4", "from 5", "from 6"]]] * 3)


def test_rank_lost_before_the_meeting_is_named_to_early_and_late(
    meeting,
):
    first, _ = meeting.start(4), meeting.start(5)
    until(has_come(meeting, 4, 5))
    meeting.coordinators[5].close()
    until(lambda: first)
    late = meeting.start(6)
    until(lambda: late)
    for [error] in (first, late):
        assert (
            str(error)
            == "Global rank 5 has ended or was killed; its own log may say why."
        )
        assert error.ranks == (5,)


@pytest.mark.parametrize("has_waited", [True, False])
def test_coordinator_that_leaves_names_whom_it_has_waited_for(
    has_waited, meeting
):
    first, second = (
        meeting.start(4, timeout=2.0 if has_waited else HANG),
        meeting.start(5),
    )
    until(has_come(meeting, 4, 5))
    if not has_waited:
        meeting.coordinators[4].close()
    until(lambda: first and second)

    [error] = second
    assert error.ranks == ((6,) if has_waited else (4,))


def test_forked_child_closes_the_connections_of_its_rank():
    with Meeting((0, 1)) as meeting:
        found = [meeting.start(0)]
        until(lambda: meeting.store.counts)
        time.sleep(0.1)
        assert sockets_in_a_child() == 0
        found.append(meeting.start(1))
        meeting.join()
        assert sockets_in_a_child() == 0
        found += [meeting.start(0), meeting.start(1)]
        meeting.join()
        assert found == [[["from 0", "from 1"]]] * 4, (
            "the connections are this process's as before"
        )
