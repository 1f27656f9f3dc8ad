"""How does a run look in a viewer of Chrome traces, such as Perfetto?

The format is that of "Trace Event Format", with complete events ("X"): times are in microseconds, a process is a global
rank, and a row is its training thread, its prefetching thread or one of its workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from paddle_shard.clock import Cause, Stretch
from paddle_shard.delivery.advice import TRAINING_THREAD, Taken, shown


def events_of(recent: Iterable[Taken], rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank's newest steps, with times in whole nanoseconds since 1970; see `in_microseconds`.

    The causes of a stretch are shown one after the other below it, the longest first: their sums are known, and not
    their order.
    """
    to_epoch = time.time_ns() - time.perf_counter_ns()
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = [_named("process", f"global rank {rank}", rank, 0)]

    def event(who: str, name: str, began: float, ended: float, **args: Any) -> None:
        if who not in rows:
            rows[who] = len(rows)
            events.append(_named("thread", who, rank, rows[who]))
        first, last = (round(at * 1e9) + to_epoch for at in (began, ended))
        at = {"ts": first, "dur": last - first, "pid": rank, "tid": rows[who]}
        events.append({"name": name, "ph": "X", **at, "args": args})

    for one in recent:
        waiting = "waiting for the device" if one.hidden > one.wait / 2 else "waiting for data"
        if one.step:
            event(TRAINING_THREAD, "step", one.waited[0] - one.step, one.waited[0])
        for stretch in (*one.stretches, _last_of(one)):
            what = waiting if stretch.who == TRAINING_THREAD else "making a batch"
            event(stretch.who, what, stretch.began, stretch.ended, rows=one.samples, bytes=one.num_bytes)
            at = stretch.began
            causes: list[tuple[Cause, float]] = sorted(stretch.seconds.items(), key=lambda item: -item[1])
            for cause, seconds in causes:
                after = min(at + seconds, stretch.ended)
                event(stretch.who, shown(cause), at, after)
                at = after
    return events


def _last_of(one: Taken) -> Stretch:
    """Return the wait of the training thread; if the pass was begun for this step, that is a stretch before it."""
    seconds = one.seconds
    for stretch in one.stretches:
        if stretch.who == TRAINING_THREAD:
            seconds = {cause: took - stretch.seconds.get(cause, 0.0) for cause, took in seconds.items()}
    return Stretch(TRAINING_THREAD, *one.waited, {cause: took for cause, took in seconds.items() if took > 0})


def in_microseconds(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events of all ranks as viewers read them: microseconds, counted from the first one.

    As floats since 1970, events that follow each other would overlap a little, and viewers drop such. So would they if
    a float was a little too small, as Perfetto cuts it to a nanosecond.
    """
    first = min((event["ts"] for event in events if "ts" in event), default=0)

    def told(event: dict[str, Any]) -> dict[str, Any]:
        return {"ts": (event["ts"] - first + 0.5) / 1e3, "dur": (event["dur"] + 0.5) / 1e3} if "ts" in event else {}

    return [event | told(event) for event in events]


def _named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
