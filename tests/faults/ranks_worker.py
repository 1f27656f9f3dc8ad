"""What real ranks see of faults on one of them: `ranks_worker.py soundly|leaves|killed|hung|told|stuck JSON`.

Faults are drawn by the test; every rank is told all of them.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import paddle
import paddle.distributed as dist

from paddle_shard.errors import PeerLostError
from paddle_shard.testing import report
from tests.deadlines import HANG
from tests.faults.feeds import loader_of, numbers, read_until
from tests.faults.traces import children, gone, waited_for

LENGTH = 400


class Fault:
    """Fails at a number, on one rank or on all."""

    def __init__(self, number, ranks, seconds=0.0):
        self.number, self.ranks, self.seconds = number, ranks, seconds

    def __call__(self, number):
        if number == self.number and dist.get_rank() in self.ranks:
            time.sleep(self.seconds)
            raise OSError("no disk")


def mesh():
    """All ranks in data parallel; or in pairs of replicas, if the test asks for that."""
    ranks = list(range(dist.get_world_size()))
    if "PAIRS_OF_REPLICAS" not in os.environ:
        return dist.ProcessMesh(ranks, dim_names=["dp"])
    return dist.ProcessMesh(
        [ranks[at : at + 2] for at in ranks[::2]], dim_names=["dp", "mp"]
    )


def told(failure):
    """A failure as the test compares it."""
    names = ("index", "step", "worker", "ranks")
    return [
        type(failure).__name__,
        *(getattr(failure, name, None) for name in names),
        str(failure)[:2000],
    ]


def each(case):
    """What the loop does at each step: nothing, or a collective, in which a rank that parts from the others hangs."""
    return lambda: (
        dist.all_reduce(paddle.to_tensor([1.0])) if case["together"] else None
    )


def fails(case):
    """A read fails; then the fault is over, and the rest is read by a loader that goes on."""
    kind, workers = case["kind"], case["workers"]
    fault = Fault(case["number"], case["ranks"])
    own = case["options"]
    loader = loader_of(
        kind, LENGTH, workers=workers, fault=fault, mesh=mesh(), **own
    )
    read, _, failure, waited = read_until(
        iter(loader), pause=case["pause"], each=each(case)
    )
    rest = loader_of(
        kind, LENGTH, workers=case["workers_later"], mesh=mesh(), **own
    )
    rest.load_state_dict(loader.state_dict())
    return [read, told(failure), waited, numbers(iter(rest))]


def loses_a_worker(case):
    """A worker of one rank is killed."""
    before = children()
    loader = loader_of(
        case["kind"],
        LENGTH,
        workers=case["workers"],
        mesh=mesh(),
        **case["options"],
    )
    batches = iter(loader)
    read, *_ = read_until(batches, steps=case["steps"], each=each(case))
    time.sleep(case["moment"])
    if dist.get_rank() in case["ranks"]:
        # none where all has been read ahead
        for worker in sorted(children() - before)[:1]:
            os.kill(worker, signal.SIGKILL)
    more, _, failure, waited = read_until(batches, each=each(case))
    rest = loader_of(case["kind"], LENGTH, mesh=mesh())
    rest.load_state_dict(loader.state_dict())
    return [read + more, told(failure), waited, numbers(iter(rest))]


def is_left(case):
    """All ranks leave at the same step; a second loader goes by turns with the first."""
    own = case["options"]
    loader = loader_of(
        case["kind"], LENGTH, workers=case["workers"], mesh=mesh(), **own
    )
    other = iter(
        loader_of("stream", LENGTH, workers=case["workers_later"], mesh=mesh())
    )
    batches = iter(loader)
    read, *_ = read_until(batches, steps=case["steps"], each=each(case))
    beside, *_ = read_until(other, steps=case["steps"])
    batches.close()
    beside += numbers(other)
    rest = loader_of(
        case["kind"], LENGTH, workers=case["workers_later"], mesh=mesh(), **own
    )
    rest.load_state_dict(loader.state_dict())
    return [read, beside, 0.0, numbers(iter(rest))]


def soundly(cases):
    """All that ranks survive, in one job."""
    dist.init_parallel_env()
    found = []
    before, threads = children(), None
    for number, case in enumerate(cases):
        found.append(
            {"fails": fails, "loses": loses_a_worker, "left": is_left}[
                case["what"]
            ](case)
        )
        if number == 0:
            threads = set(threading.enumerate())
    left = gone(children() - before)
    more = waited_for(lambda: set(threading.enumerate()) - threads, HANG)
    report(
        {
            "found": found,
            "processes": sorted(left),
            "threads": [t.name for t in more],
        }
    )
    dist.barrier()


def leaves(cases):
    """One rank leaves its loop after some steps, and the other goes on; then both read another loader."""
    dist.init_parallel_env()
    found = []
    for case in cases:
        made = [
            loader_of(
                case["kind"],
                LENGTH,
                workers=case["workers"],
                mesh=mesh(),
                **case["options"],
            )
        ]
        batches = iter(made[0])
        steps = case["steps"] if dist.get_rank() == case["leaves"] else None
        read, _, failure, waited = read_until(batches, steps=steps)
        batches.close()
        found.append(
            [
                len(read),
                told(failure),
                waited,
                numbers(iter(loader_of("map", LENGTH, mesh=mesh()))),
            ]
        )
    report(found)
    dist.barrier()


def when(name):
    return Path(os.environ["PADDLE_SHARD_REPORT_DIR"], name)


def killed(case):
    """One rank is killed while all read; the others report whom they miss, and where they stand."""
    dist.init_parallel_env()
    # a rank that dies while others still meet is Paddle's to report
    dist.barrier()
    own = case["options"]
    loader = loader_of(
        case["kind"],
        LENGTH,
        workers=case["workers"],
        mesh=mesh(),
        timeout=case["timeout"],
        **own,
    )
    if dist.get_rank() == case["victim"]:

        def kill():
            when("killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(case["moment"], kill).start()
    batches = iter(loader)
    read, _, failure, _ = read_until(batches, pause=0.03)
    report(
        [
            read,
            told(failure),
            time.time() - float(when("killed").read_text()),
            loader.state_dict(),
        ]
    )
    # as at the end of any script: a rank that leaves says for whom it has waited
    atexit._run_exitfuncs()
    os._exit(0)  # Paddle's own groups wait for the dead


def hung(case):
    """A worker of one rank never comes back from a sample."""
    dist.init_parallel_env()

    def fault(number):
        if number == case["number"]:
            time.sleep(1000)

    loader = loader_of(
        case["kind"],
        LENGTH,
        workers=2,
        fault=fault,
        mesh=mesh(),
        timeout=case["timeout"],
        **case["options"],
    )
    read, _, failure, waited = read_until(iter(loader))
    report([read, told(failure), waited])
    os._exit(0)


def asked_to_save(case):
    """SIGTERM at any moment; the handler asks the loop to save and leave, each rank by itself."""
    dist.init_parallel_env()
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    loader = loader_of(
        case["kind"],
        LENGTH,
        workers=case["workers"],
        mesh=mesh(),
        timeout=30.0,
        **case["options"],
    )
    read, why = [], "ended"
    when(f"started-{dist.get_rank()}").touch()
    try:
        for batch in loader:
            read += batch._local_value().numpy()[:, 0].tolist()
            time.sleep(0.02)
            if asked:
                why = "asked"
                break
    except PeerLostError:  # the other has heard it a step earlier, and left
        why = "left alone"
    report([read, why, loader.state_dict()])
    os._exit(0)


def asked_to_stop(case):
    """SIGTERM at any moment to some ranks, or to all their processes; all see it at the same step, save and leave."""
    dist.init_parallel_env()
    length = case["length"]
    train = loader_of(
        case["kind"],
        length,
        workers=case["workers"],
        mesh=mesh(),
        timeout=60.0,
        **case["options"],
    )
    other = loader_of("map", 16, mesh=mesh(), timeout=60.0)
    seen = []
    assert not train.stop_requested
    when(f"started-{dist.get_rank()}").touch()
    while not seen:
        batches = iter(train)
        for step, _ in enumerate(batches):
            time.sleep(0.01)
            if train.stop_requested:
                seen = ["train", train.epoch, step]
                break
            if case["evaluates"] and step % 8 == 7:
                for at, _ in enumerate(other):
                    if other.stop_requested:
                        seen = ["other", step, at]
                        break
                if seen:
                    break
    both = [train.stop_requested, other.stop_requested]
    time.sleep(0.3)  # the workers live on, as long as they are needed
    state = train.state_dict()
    more = [len(list(batches)) for batches in (batches, train)]
    report([seen, both, [state["epoch"], state["steps"]], more])
    os._exit(0)


def stuck(case):
    """One rank is killed while the other is in a call that nothing wakes, as a collective on a GPU."""
    dist.init_parallel_env()
    loader = loader_of(
        case["kind"],
        100_000,
        workers=0,
        mesh=mesh(),
        timeout=30.0,
        on_lost=case["on_lost"],
    )
    for step, _ in enumerate(loader):
        if step == case["steps"]:
            if dist.get_rank() == case["victim"]:
                when("killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)


if __name__ == "__main__":
    roles = {"soundly": soundly, "leaves": leaves}
    roles |= {
        "killed": killed,
        "hung": hung,
        "told": asked_to_save,
        "stuck": stuck,
        "stop": asked_to_stop,
    }
    roles[sys.argv[1]](json.loads(sys.argv[2]))
