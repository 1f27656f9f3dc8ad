"""What each rank's data does in a pass, and the outcome on all ranks: the oracle, which knows nothing of messages."""

import random
from dataclasses import dataclass, field

from paddle_shard.errors import (
    ArgumentError,
    DifferentDataError,
    PeerLostError,
    UnequalEndsError,
)
from paddle_shard.ranks.reports import report_of


@dataclass
class Script:
    """What happens in one pass."""

    prefetch: int = 2
    ends: dict = field(default_factory=dict)  # rank -> first step without data
    # rank -> step whose reading fails
    fails: dict = field(default_factory=dict)
    # rank -> first step of padding
    exhausted: dict = field(default_factory=dict)
    break_at: int | None = None  # all ranks leave before this step
    must_agree: bool = False
    noisy: float = 0.0  # how often a rank has a note
    # rank -> rank that reads for it, until that one leaves
    leaders: dict = field(default_factory=dict)
    # rank -> first step at which it has read other data than the rest
    differs: dict = field(default_factory=dict)
    same_data: bool = False
    # rank -> step before which it alone leaves
    leaves: dict = field(default_factory=dict)
    # rank -> what it iterates over, if that is not the same
    labels: dict = field(default_factory=dict)


def note_of(rank, step, script):
    """A rank's note on a step: on its first one and now and then. At odd steps, ranks that have one have the same."""
    if script.noisy < 0 or (
        step
        and random.Random(f"{rank} {step} {script.noisy}").random()
        >= script.noisy
    ):
        return None
    # The hub groups equal notes.
    return (
        f"step {step}"
        if step % 2
        else f"rank {rank}, step {step}" * (1 + 3 * rank)
    )


def outcome(script, size):
    """Return how many steps every rank delivers, how the pass ends, and details."""
    if script.labels:
        return 0, "other", None
    limits = [(step, "failed") for step in script.fails.values()] + [
        (step, "ended") for step in script.ends.values()
    ]
    if len(script.exhausted) == size:
        limits.append((max(script.exhausted.values()), "ended"))
    if script.break_at is not None:
        limits.append((script.break_at, "left"))
    differs = min(script.differs.values(), default=None)
    if (
        differs is not None
        and size > 1
        and differs < min(step for step, _ in limits)
    ):
        return differs, "differs", None
    step = min(step for step, _ in limits)
    kinds = {kind for at, kind in limits if at == step}
    kind = next(kind for kind in ("left", "failed", "ended") if kind in kinds)
    if kind == "failed":
        return (
            step,
            "failed",
            sorted(r for r, s in script.fails.items() if s == step),
        )
    if kind == "ended" and script.must_agree:
        ended = sorted(r for r, s in script.ends.items() if s == step)
        if 0 < len(ended) < size:
            return step, "unequal", ended
    return step, kind, None


def random_script(rng, size):
    script = Script(prefetch=rng.randint(1, 6))
    horizon = rng.choice([2, 5, 12])
    style = rng.choice(["drop", "error", "together", "pad", "pad"])
    if style == "together":  # all end at one step, or one of them fails there
        last = rng.randint(0, horizon)
        script.ends = dict.fromkeys(range(size), last)
        script.must_agree = True
        if rng.random() < 0.5:
            failing = rng.randrange(size)
            del script.ends[failing]
            script.fails = {failing: last}
    elif style == "pad":
        script.exhausted = {r: rng.randint(0, horizon) for r in range(size)}
    else:
        last = rng.randint(0, horizon)
        ranks = rng.sample(range(size), rng.randint(1, size))
        spread = rng.choice([0, horizon])
        script.ends = {r: last + rng.randint(0, spread) for r in ranks}
        script.must_agree = style == "error"
    if style != "together" and rng.random() < 0.3:
        ranks = rng.sample(range(size), rng.randint(1, size))
        script.fails = {r: rng.randint(0, horizon) for r in ranks}
        for r in ranks:  # a source that has ended reads nothing more
            if script.ends.get(r, horizon + 1) <= script.fails[r]:
                del script.fails[r]
    if rng.random() < 0.25:
        script.break_at = rng.randint(0, horizon)
    if rng.random() < 0.25:
        script.same_data = True
        if rng.random() < 0.5:
            script.differs = {rng.randrange(size): rng.randint(0, horizon)}
    script.noisy = rng.choice([-1, 0.1, 0.7, 1.0])
    return script


def short_script(rng, size):
    """A pass of few steps that ends, fails or has no real rows any more on some ranks, at steps close to each other."""
    script = Script(
        prefetch=rng.randint(1, 3), noisy=rng.choice([-1, 0.3, 0.5])
    )
    last = rng.choice([0, 1, 2, *range(3, 8)])
    steps = {rank: last + rng.randint(0, 2) for rank in range(size)}
    some = rng.sample(range(size), rng.randint(1, size))
    style = rng.choice(["drop", "error", "pad", "fail"])
    if style == "pad":
        script.exhausted = steps
    elif style == "fail":
        script.fails = {rank: steps[rank] for rank in some}
    else:
        script.ends = {rank: steps[rank] for rank in some}
        script.must_agree = style == "error"
    if rng.random() < 0.1:
        script.break_at = rng.randint(0, last)
    return script


def differing_script(rng, size, *, is_other):
    """One rank iterates over something else, or has other data."""
    script = Script(
        prefetch=rng.randint(1, 6),
        ends=dict.fromkeys(range(size), 12),
        noisy=-1,
    )
    odd = rng.randrange(size)
    if is_other:
        script.labels = {odd: "another loader"}
    else:
        script.same_data = True
        script.differs = {odd: rng.randint(0, 10)}
    return script


def leaving_script(rng, size):
    """One rank leaves its loop and the others go on."""
    step = rng.randint(0, 8)
    return Script(
        prefetch=rng.randint(1, 6),
        ends=dict.fromkeys(range(size), 40),
        leaves={rng.randrange(size): step},
        noisy=0.1,
    )


def led_script(rng):
    """Ranks of which two read for two others, that leave their loop before one of two streams has ended, or behind."""
    horizon = rng.choice([3, 10])
    ends = [rng.randint(0, horizon) for _ in range(2)]
    return Script(
        prefetch=rng.randint(1, 9),
        exhausted={rank: ends[rank % 2] for rank in range(4)},
        break_at=rng.randint(max(0, min(ends) - 3), max(ends) + 1),
        leaders={2: 0, 3: 1},
    )


def failure_of(rank):
    return report_of(OSError(f"report of {rank}"))


def result_of(step, error):
    """Return the outcome that a rank sees that has delivered so many steps and has got an error."""
    if isinstance(error, UnequalEndsError):
        return (
            step,
            "unequal" if error.step == step else f"wrongly: {error}",
            list(error.ended),
        )
    if isinstance(error, PeerLostError):
        return (
            step,
            "deserted" if "The loop was left by" in str(error) else "lost",
            sorted(error.ranks),
        )
    if isinstance(error, ArgumentError):
        return (
            step,
            "other"
            if "The ranks differ in a loop" in str(error)
            else f"wrongly: {error}",
            None,
        )
    if isinstance(error, DifferentDataError):
        return (
            step,
            "differs"
            if f"At step {step} of" in str(error)
            else f"wrongly: {error}",
            None,
        )
    return step, f"wrongly: {error!r}", None
