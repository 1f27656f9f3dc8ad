"""What the simulators share: trials by their seeds, failures that are shrunk, and planted defects."""

import argparse
import contextlib
import logging
import math
import sys
import time
from unittest import mock


class Failed(AssertionError):
    """What a trial has done wrong."""


def shrunk(candidates, run, smaller):
    """Return a smaller trial that fails too, and how.

    Args:
        candidates: Trials, of which one fails.
        run: Runs a trial.
        smaller: Returns trials with one thing less.
    """
    found = None
    candidates = list(candidates)
    while candidates:
        trial = candidates.pop(0)
        try:
            run(trial)
        except Failed as failure:
            found = trial, failure
            candidates = list(smaller(trial))
    return found


@contextlib.contextmanager
def planted(defects, name):
    """Run with one of some defects; None: without.

    Args:
        defects: Name -> (what is changed, attribute -> what replaces it).
        name: Of the defect.
    """
    if name is None:
        yield
        return
    target, changes = defects[name]
    with mock.patch.multiple(target, **changes):
        yield


def parser_of(module, defects):
    """Return the parser of a simulator's command line."""
    parser = argparse.ArgumentParser(
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="run one trial, and print its digest and counts",
    )
    parser.add_argument(
        "--trace", action="store_true", help="with --seed: print each action"
    )
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument(
        "--defect", choices=sorted(defects), help="run with a planted defect"
    )
    return parser


def main(options, module, defects, counted):
    """Run one seed, or many until one fails; ends the process with a code.

    Args:
        options: What the parser has found.
        module: Has `run`, which returns (digest, counts...), and `shrunk`.
        defects: See `planted`.
        counted: What the counts are.
    """
    logging.getLogger("paddle_shard").setLevel(logging.CRITICAL)
    with planted(defects, options.defect):
        if options.seed is not None:
            print(*module.run(options.seed, print if options.trace else None))
            return
        sys.exit(_run_many(options, module, counted))


def _run_many(options, module, counted):
    begun = time.monotonic()
    done = 0
    totals = [0] * len(counted)
    for seed in range(options.first, options.first + options.seeds):
        if time.monotonic() - begun > options.seconds:
            break
        try:
            totals = [
                total + count
                for total, count in zip(
                    totals, module.run(seed)[1:], strict=True
                )
            ]
        except Failed as failure:
            command = f"python -m {module.__spec__.name} --seed {seed} --trace"
            print(f"seed {seed}: {failure}\n  {command}", flush=True)
            print("  a smaller trial: {}\n  {}".format(*module.shrunk(seed)))
            return 1
        done += 1
        if done % 500 == 0:
            print(
                f"{done} trials, {time.monotonic() - begun:.0f} s", flush=True
            )
    counts = ", ".join(
        f"{total} {what}" for total, what in zip(totals, counted, strict=True)
    )
    print(
        f"{done} trials, {counts}, {time.monotonic() - begun:.0f} s: no failure"
    )
    return 0
