"""Why does the training wait, and what would help?

Each rank sums up its newest steps. The ranks exchange these summaries every few seconds, so that all of them say the
same two sentences.
"""

from __future__ import annotations

import math
import os
import socket
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.clock import (
    COLLATING,
    DEVICE,
    FUNCTION,
    LEADER,
    LOADER,
    MADE_BY_READERS,
    PLACING,
    RANKS,
    READING,
    SAMPLER,
    STARTING,
    TENSORS,
    TRANSPORT,
    Cause,
    Stretch,
)

TRAINING_THREAD = "training thread"
RECENT = 64
"""Steps that a summary is made of."""
TELLING_SECONDS = 0.1, 2.0
"""Seconds after which the ranks first tell each other their summaries anew, and at most; each time it is twice as many:
the first steps of a run are not like the others."""
FEWEST = 4
"""Steps of which something can be said."""
_MATTERS, _MATTERS_SECONDS = 0.05, 50e-6
"""Share of a step, and seconds, from which on a wait is worth a word."""
_SPARE = 1.1
"""Workers have to be so much faster than the loop: samples do not take the same time."""
_UNEVEN = 1.5
"""Steps are not alike if their mean is so many times the median."""
_RARE = 1.5
"""A few samples take long if the mean of the work of a step is so many times the median."""
_MOST_AHEAD = 64
"""The largest `prefetch_factor` that is advised."""
_IDLE = 50
"""A loop does little else if its own code takes so many times less than its data."""
_COPIED = 2e9
"""Bytes a second from which on making a batch is little more than copying it, which handing it over is, too."""
_BESIDE = 0.2
"""Share of a step for which a thread may compute beside the training loop before that is worth a word."""
_SMALL = 1e5
"""Bytes of a batch below which it matters little how large it is."""
_SLOWER, _OWN = 1.1, 2.0
"""The code of a rank is slow if it takes so many times as long as that of a quarter of the ranks, or more, and if what
it takes longer is so many times what any rank waits for its data: else it may be a collective in which it waits."""


class Taken(NamedTuple):
    """One step of a rank."""

    step: float
    """Seconds of the user's code before it; 0.0 for the first step of a pass."""
    waited: tuple[float, float]
    """When the user asked for its batch, and when it was there; by `time.perf_counter`."""
    wait: float
    """Seconds in the loader: also those in which the pass was begun, or what was delivered before was noted."""
    hidden: float
    """Of these, those in which a device was still busy with earlier steps, or would be if data came at once."""
    booked: tuple[Mapping[Cause, float], Mapping[Cause, float]]
    """Seconds of each cause in all of the pass: when the step before had its batch, and when this one had."""
    work: Mapping[Cause, float]
    cpu: float
    slowest: tuple[float, str]
    stretches: Sequence[Stretch]
    """As in `Spent`."""
    samples: int
    num_bytes: int

    @property
    def seconds(self) -> dict[Cause, float]:
        """The seconds in the loader, by cause."""
        before, after = self.booked
        spent = {cause: seconds - before.get(cause, 0.0) for cause, seconds in after.items()}
        return {cause: seconds for cause, seconds in spent.items() if seconds}

    @property
    def made(self) -> Mapping[Cause, float]:
        """What all readers together have done."""
        return self.work or self.seconds


class Summary(NamedTuple):
    """Where the time of a rank went in its newest steps; all times are seconds a step. JSON-able."""

    num_steps: int
    step: float
    """Of the user's code, and of the device where that is behind it: the median, as a step that saves or evaluates is
    not usual; if several steps are much longer, as where gradients are accumulated, the mean of all but the longest."""
    hidden: float
    """Of `step`, the time in the loader: the device was busy with earlier steps."""
    wait: float
    """For data that this rank makes itself."""
    others: float
    """For other ranks."""
    cause: Cause
    """What the largest part of `wait` was spent for."""
    cause_wait: float
    """How much of it."""
    cause_work: float
    """That this takes all readers together."""
    work: float
    """That reading, the user's functions and collating take all readers together: the median."""
    mean_work: float
    """The same, but the mean: it is more if some samples take long."""
    cpu: float
    """Of `mean_work`, that they have computed and not waited."""
    slowest: tuple[float, str]
    """Seconds and name of the slowest sample."""
    samples: float
    num_bytes: float
    num_workers: int
    most_workers: int | None
    """Workers that have something to read."""
    num_ahead: int
    """Batches that each of them reads ahead."""
    num_replicas: int
    num_cores: int
    cores: int
    """Which cores these are: the same for ranks of a host that share them."""
    host: str

    @property
    def whole(self) -> float:
        """What a step takes."""
        return self.step + self.wait + self.others


def summary_of(
    recent: Collection[Taken], num_workers: int, num_replicas: int, most_workers: int | None, num_ahead: int
) -> Summary | None:
    """Return the summary of some steps; None if they are too few."""
    if len(recent) < FEWEST:
        return None
    waits, work = defaultdict[Cause, float](float), defaultdict[Cause, float](float)
    made = [one.made for one in recent]
    for one, of_one in zip(recent, made, strict=True):
        late = 1.0 - one.hidden / one.wait if one.wait else 1.0
        for cause, seconds in one.seconds.items():
            waits[cause] += late * seconds / len(recent)
        for cause, seconds in of_one.items():
            work[cause] += seconds / len(recent)
    steps = sorted(one.step + one.hidden for one in recent if one.step) or [0.0]
    step, mean = float(np.median(steps)), float(np.mean(steps[:-1] or steps))
    cores = sorted(os.sched_getaffinity(0))
    others = sum(waits.pop(cause, 0.0) for cause in [(RANKS, ""), (LEADER, "")])
    cause = max(waits, key=waits.__getitem__, default=(LOADER, ""))
    return Summary(
        num_steps=len(recent),
        step=mean if mean > _UNEVEN * step else step,
        hidden=sum(one.hidden for one in recent) / len(recent),
        wait=sum(waits.values()),
        others=others,
        cause=cause,
        cause_wait=waits[cause],
        cause_work=max(work[cause], waits[cause]) if cause[0] in MADE_BY_READERS else waits[cause],
        work=float(np.median([sum(s for (kind, _), s in one.items() if kind in MADE_BY_READERS) for one in made])),
        mean_work=sum(seconds for (kind, _), seconds in work.items() if kind in MADE_BY_READERS),
        cpu=sum(one.cpu for one in recent) / len(recent),
        slowest=max(one.slowest for one in recent),
        samples=sum(one.samples for one in recent) / len(recent),
        num_bytes=sum(one.num_bytes for one in recent) / len(recent),
        num_workers=num_workers,
        most_workers=most_workers,
        num_ahead=num_ahead,
        num_replicas=num_replicas,
        num_cores=len(cores),
        cores=zlib.crc32(str(cores).encode()),
        host=socket.gethostname(),
    )


def advice(of_ranks: Mapping[int, Summary]) -> str:
    """Return in two sentences whether and why the training waits, and what would help.

    Args:
        of_ranks: Global rank -> its summary.
    """
    if not of_ranks:
        return "Nothing is known yet: it takes some steps of a loop."
    rank, worst = max(of_ranks.items(), key=lambda item: item[1].wait)
    late_rank, late = max(of_ranks.items(), key=lambda item: item[1].step)
    usual = float(np.quantile([one.step for one in of_ranks.values()], 0.25, method="lower"))
    late_by = late.step - usual if late.step > _SLOWER * usual else 0.0
    whole = worst.whole
    if _matters(worst.wait, whole) and worst.wait >= late_by / _OWN:
        would = f"would take {in_ms(worst.step)}"
        if late_by and late_rank != rank:
            by_itself = f"is what the code of {_named(late_rank, of_ranks, lambda one: one.step)} takes by itself"
            would += f" (or {in_ms(late.step)}, if that {by_itself}, and no wait for others in it)"
        whose = f"on {_named(rank, of_ranks, lambda one: one.wait)}, " if len(of_ranks) > 1 else ""
        of_all = worst.cause[0] in MADE_BY_READERS and "`" in worst.cause[1]  # not one source, nor one file
        each = worst.cause_work / max(worst.samples, 1.0)
        first = "first of all " if worst.cause_wait < worst.wait / 2 else ""
        per = f"{in_ms(each)} a sample" if of_all else f"{in_ms(worst.cause_work)} a step"
        return (
            f"Training waits for data {worst.wait / whole:.0%} of each step, which takes {in_ms(whole)} and {would}: "
            f"{whose}{first}{shown(worst.cause)}, {per}. {_remedy(worst, of_ranks.values())}"
        )
    waiting = max(of_ranks.values(), key=lambda one: one.others)
    if _matters(waiting.others, waiting.whole):
        share = f"Ranks wait for each other {waiting.others / waiting.whole:.0%} of each step, which takes "
        share += in_ms(waiting.whole)
        if late_by:
            ready = "Data is ready when it is asked for: look at what is done there besides."
            if _matters(worst.wait, whole):
                whose = f"On {_named(rank, of_ranks, lambda one: one.wait)}"
                ready = f"Look at what is done there besides. {whose} a step waits {in_ms(worst.wait)} for its data, "
                ready += f"too: {shown(worst.cause)}. {_remedy(worst, of_ranks.values())}"
            whose_time = "the device takes" if late.hidden > late.step / 2 else "the code between two batches takes"
            return (
                f"{share}: {whose_time} {in_ms(late.step)} on "
                f"{_named(late_rank, of_ranks, lambda one: one.step)}, and {in_ms(usual)} on others. {ready}"
            )
        return f"{share}. Data is ready when it is asked for: no rank's own data is late."
    said = f"Training waits for data {worst.wait / whole:.1%} of each step, which takes {in_ms(whole)}. "
    said += "Data is ready when it is asked for."
    if not worst.num_workers and worst.cpu >= max(_BESIDE * whole, 2 * worst.wait) and worst.cpu > worst.hidden:
        said += _READ_BESIDE.format(cpu=in_ms(worst.cpu))
    return said


def _matters(seconds: float, whole: float) -> bool:
    """Return whether a wait in a step that takes so long is worth a word."""
    return seconds >= max(_MATTERS * whole, _MATTERS_SECONDS)


_READ_BESIDE = (
    " A thread beside your loop computes it, {cpu} a step: as far as that is Python code, your loop stands still "
    "meanwhile, and would not with 1 worker (num_workers=)."
)


def _named(rank: int, of_ranks: Mapping[int, Summary], late: Callable[[Summary], float]) -> str:
    """Return the name of the rank that is latest; of its host, if all of its ranks are late and no others."""
    host = of_ranks[rank].host
    there = [late(one) for one in of_ranks.values() if one.host == host]
    elsewhere = [late(one) for one in of_ranks.values() if one.host != host]
    if not elsewhere:
        return f"global rank {rank}"
    if len(there) > 1 and max(elsewhere) * _SLOWER < min(there) and max(there) < 2 * min(there):
        return f"all {len(there)} ranks of host {host}"
    return f"global rank {rank} (host {host})"


def _remedy(one: Summary, of_all: Collection[Summary]) -> str:
    """Return what would help a rank that waits for its data."""
    kind, size = one.cause[0], f"{one.num_bytes / 1e6:.3g} MB"
    if kind in MADE_BY_READERS:
        needed = math.ceil(_SPARE * one.work / max(one.step, 1e-6))
        (slow, name), had = one.slowest, f"instead of {one.num_workers} " if one.num_workers else ""
        in_all = math.ceil(_SPARE * one.mean_work / max(one.step, 1e-6))
        computes = 2 * one.cpu > one.mean_work
        if computes and one.work * _COPIED < one.num_bytes:
            return f"That is copying {size}, and workers would copy it once more: smaller dtypes make it cheaper."
        if one.step < one.wait / _IDLE and (not computes or max(1, one.num_workers) < one.num_cores):
            workers = f"up to {one.num_cores} workers make" if computes else "any number of workers makes"
            return f"The loop does little else: {workers} it faster (num_workers=)."
        if one.most_workers is not None and max(needed, in_all) > one.most_workers:
            return (
                f"The stream's {one.most_workers} parts on this rank are work for as many workers (num_workers=): more "
                "parts (in_parts()) or larger batches are work for more."
            )
        if needed <= one.num_workers or one.mean_work > _RARE * one.work or slow > one.wait * one.num_steps / 2:
            several = max(1, one.num_workers, in_all)
            ahead = min(_MOST_AHEAD, max(2, math.ceil(slow / max(one.step, 1e-6) / several)))
            more = (
                f"{several} worker{'s' * (several > 1)} {had}(num_workers=) with " if several > one.num_workers else ""
            )
            rare = name and slow * one.samples > 2 * one.mean_work
            differ = f"Samples differ: the slowest, {name}, took {in_ms(slow)}." if rare else "Steps differ."
            if rare and not more and 2 * ahead <= one.num_ahead:
                return (
                    f"{differ} prefetch_factor={one.num_ahead} should even that out: perhaps slow ones all come in one "
                    f"worker's turn. {one.num_workers + 1} workers (num_workers=) or shuffle=True spread them."
                )
            if not more and ahead <= one.num_ahead:  # it was not enough
                ahead = 2 * one.num_ahead
            return f"{differ} {more}prefetch_factor={ahead} evens that out."
        # Ranks that share cores compete for them.
        cpu = sum(other.cpu for other in of_all if (other.host, other.cores) == (one.host, one.cores))
        if _SPARE * cpu <= one.num_cores * one.step:
            return f"{needed} worker{'s' * (needed > 1)} {had}(num_workers=) would hide it."
        once = f", or replicas='leader', which reads once for {one.num_replicas} ranks" * (one.num_replicas > 1)
        more = f"{one.num_cores} workers (num_workers=) would hide a part. " if one.num_workers < one.num_cores else ""
        return (
            f"{more}All of it would keep {cpu / max(one.step, 1e-6):.1f} of this host's {one.num_cores} cores "
            f"busy: make it cheaper, or read on other hosts, too (readers=RayReaders(...)){once}."
        )
    small = kind in (TRANSPORT, TENSORS) and one.num_bytes < _SMALL
    remedy = _REMEDIES[LOADER if small else kind].format(size=size)
    if kind == TRANSPORT and not small and one.num_workers and one.work < one.cause_wait:
        remedy += f" Making it takes {in_ms(one.work)}; without workers (num_workers=0) it is not handed over."
    return remedy


_REMEDIES = {
    SAMPLER: "The training thread makes it: larger batches make it cheaper, and a quicker sampler, if it is yours.",
    STARTING: "persistent_workers=True starts them once, and not for each pass.",
    TRANSPORT: "A batch of {size} is handed over: smaller dtypes, such as uint8 for images, make it cheaper.",
    TENSORS: "A batch of {size} becomes tensors on the device: smaller dtypes make it cheaper.",
    PLACING: "Larger batches make it cheaper, and fewer fields.",
    LOADER: "Larger batches make it cheaper.",
}


def shown(cause: Cause) -> str:
    """Return a cause in words."""
    kind, name = cause
    if kind == READING:
        return f"reading {name}"
    if kind in (FUNCTION, COLLATING):
        return name
    return _WORDS[kind]


_WORDS = {
    SAMPLER: "the order of the samples",
    STARTING: "starting workers",
    TRANSPORT: "handing batches over",
    TENSORS: "making tensors",
    PLACING: "placing batches",
    RANKS: "waiting for other ranks",
    LEADER: "waiting for the rank that reads for this one",
    LOADER: "the loader itself",
    DEVICE: "waiting for the device",
}


def in_ms(seconds: float) -> str:
    """Return a time as text."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def of_told(told: Any) -> Summary:
    """Return the summary that a rank has sent as JSON."""
    found = Summary(*told)
    return found._replace(cause=(found.cause[0], found.cause[1]), slowest=(found.slowest[0], found.slowest[1]))
