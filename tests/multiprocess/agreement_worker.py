"""One rank: `agreement_worker.py` runs every sound case, `agreement_worker.py CASE` one in which a rank goes wrong."""

import os
import signal
import sys
import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_shard.errors import DataReadError, PeerLostError
from paddle_shard.ranks.agreeing import _coordinator
from paddle_shard.ranks.decision import END, FAIL
from paddle_shard.ranks.reports import AgreementConfig, report_of
from paddle_shard.testing import report


class Job:
    def __init__(self):
        dist.init_parallel_env()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = float(os.environ.get("AGREEMENT_TIMEOUT", "60"))
        self.coordinator = _coordinator(tuple(range(self.size)), self.timeout)

    def run(self, *, announce=None, each=None, steps=10**6):
        """One pass; `announce(agreement)` says one step, `each(step)` trains. Returns what happened."""
        agreement = self.coordinator.open(AgreementConfig(timeout=self.timeout))
        step = 0
        try:
            while step < steps:
                while agreement.progress.step < agreement.wanted(step):
                    (announce or (lambda a: a.announce()))(agreement)
                if not agreement.deliver(step):
                    return [step, "ended"]
                if each is not None:
                    each(step)
                step += 1
            return [step, "left"]
        except DataReadError as error:
            return [step, "failed", str(error)]
        except PeerLostError as error:
            return [step, "lost", list(error.ranks), str(error), error.timeout]
        finally:
            agreement.close()

    # Cases. Each is called on all ranks.

    def ends(self):
        last = 20 + 3 * self.rank
        return self.run(
            announce=lambda a: (
                a.announce(END) if a.progress.step == last else a.announce()
            )
        )

    def exhausted(self):
        last = 5 + 4 * self.rank
        return self.run(
            announce=lambda a: (
                a.announce(exhausted=True)
                if a.progress.step >= last
                else a.announce()
            )
        )

    def fails(self):
        bad = 13 if self.rank == self.size - 1 else -1
        return self.run(
            announce=lambda a: (
                a.announce(FAIL, report=report_of(OSError("no disk")))
                if a.progress.step == bad
                else a.announce()
            )
        )

    def breaks(self):
        return [self.run(steps=steps) for steps in (4, 0, 11)] + [self.ends()]

    def collective(self):
        """The default group is in use all the while."""
        sums = []

        def each(step):
            x = paddle.to_tensor(np.array([step + self.rank], "int64"))
            dist.all_reduce(x)
            sums.append(x.item())

        ended = self.run(
            announce=lambda a: (
                a.announce(END) if a.progress.step == 60 else a.announce()
            ),
            each=each,
        )
        return [ended, sums]

    # Cases in which a rank goes wrong; they run alone.

    def killed(self):
        def each(step):
            if step == 9 and self.rank == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

        return self.run(each=each)

    def silent(self):
        def each(step):
            if step == 9 and self.rank == 1:
                time.sleep(2 * self.timeout)

        return self.run(each=each)

    def stopped(self):
        """Rank 1 is frozen as a whole: its background thread, too."""

        def each(step):
            if step == 9 and self.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.01)

        return self.run(each=each)

    def leaves(self):
        return self.run(
            steps=7 if self.rank == 1 else 10**6,
            each=lambda step: time.sleep(0.002),
        )

    # Measurements.

    def round_cost(self):
        agreement = self.coordinator.open(AgreementConfig(timeout=self.timeout))
        start = 0.0
        for step in range(600):
            if step == 100:
                start = time.perf_counter()
            agreement.announce()
            agreement.deliver(step)
        agreement.close()
        return (time.perf_counter() - start) / 500

    def step_time(self):
        """Seconds a step of 10 ms, with 8 ms of reading ahead in a thread: without and with agreement."""
        return [
            ReadAhead(
                self.coordinator.open(AgreementConfig(timeout=self.timeout))
            ).seconds_a_step(agreed)
            for agreed in (False, True)
        ]


class ReadAhead:
    """A thread that reads, and a loop that trains."""

    def __init__(self, agreement):
        self.agreement, self.changed = agreement, threading.Condition()
        self.step = self.read = 0
        self.over = False

    def reads(self):
        while not self.over:
            with self.changed:
                self.changed.wait_for(
                    lambda: (
                        self.over
                        or self.read < self.agreement.wanted(self.step)
                    )
                )
            time.sleep(0.008)
            self.agreement.announce()
            with self.changed:
                self.read += 1
                self.changed.notify_all()

    def seconds_a_step(self, agreed, steps=300, warm_up=20):
        thread = threading.Thread(target=self.reads)
        thread.start()
        for step in range(warm_up + steps):
            if step == warm_up:
                start = time.perf_counter()
            with self.changed:
                self.step = step
                self.changed.notify_all()
                self.changed.wait_for(lambda step=step: self.read > step)
            if agreed:
                self.agreement.deliver(step)
            time.sleep(0.01)
        taken = time.perf_counter() - start
        self.agreement.close()
        with self.changed:
            self.over = True
            self.changed.notify_all()
        thread.join()
        return taken / steps


SOUND = ("ends", "exhausted", "fails", "breaks", "collective", "ends")

if __name__ == "__main__":
    job = Job()
    if len(sys.argv) > 1:
        report(getattr(job, sys.argv[1])())
    else:
        report([[name, getattr(job, name)()] for name in SOUND])
        dist.barrier()
