"""How does a run look in a viewer of Chrome traces, such as Perfetto?

The format is that of "Trace Event Format", with complete events ("X"): times are in microseconds, a process is a global
rank, and a row is its training thread, its prefetching thread or one of its workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from paddle_shard.clock import Cause
from paddle_shard.delivery.advice import Taken, shown


def events_of(recent: Iterable[Taken], rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank's newest steps.

    The causes of a stretch are shown one after the other below it, the longest first: their sums are known, and not
    their order.
    """
    to_epoch = time.time() - time.perf_counter()
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = [_named("process", f"global rank {rank}", rank, 0)]

    def event(who: str, name: str, began: float, seconds: float, **args: Any) -> None:
        if who not in rows:
            rows[who] = len(rows)
            events.append(_named("thread", who, rank, rows[who]))
        at = {"ts": (began + to_epoch) * 1e6, "dur": seconds * 1e6, "pid": rank, "tid": rows[who]}
        events.append({"name": name, "ph": "X", **at, "args": args})

    for one in recent:
        waited = one.spent.stretches[-1]
        if one.step:
            event(waited.who, "step", waited.began - one.step, one.step)
        for stretch in one.spent.stretches:
            took = stretch.ended - stretch.began
            what = "waiting for data" if stretch.who == waited.who else "making a batch"
            event(stretch.who, what, stretch.began, took, rows=one.samples, bytes=one.num_bytes)
            at = stretch.began
            causes: list[tuple[Cause, float]] = sorted(stretch.seconds.items(), key=lambda item: -item[1])
            for cause, seconds in causes:
                event(stretch.who, shown(cause), at, seconds)
                at += seconds
    return events


def _named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
