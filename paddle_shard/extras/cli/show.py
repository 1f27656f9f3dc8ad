"""`paddle-shard show`: what do the samples of a step, or a sample, hold? It opens the data set."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from paddle_shard.checks import length_or_none
from paddle_shard.errors import ArgumentError, described
from paddle_shard.extras.cli.answer import EPOCH, RECORD, Answer, cell, command, legs_at, run_of, sample_of
from paddle_shard.extras.cli.places import samples_at
from paddle_shard.extras.cli.timeline import places_in

_MOST_TEXT = 2000
_MOST_VALUES = 16


def named(path: str) -> Any:
    """Return an object that a user names by module:name; modules in the current folder are found, too.

    Raises:
        ArgumentError: There is no such object, or its module cannot be imported.
    """
    module, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # whatever the user's module raises
        raise ArgumentError(f"{path}: {described(error)}. Give module:name, such as my_module:dataset.") from error


def opened(path: str) -> Any:
    """Return a data set that a user names by module:name, or the function that makes it; see `named`."""
    found = named(path)
    return found() if callable(found) and not hasattr(found, "__getitem__") else found


def shown(value: Any) -> str:
    """Return a sample as text, long arrays and texts cut."""
    with np.printoptions(threshold=_MOST_VALUES, linewidth=_MOST_TEXT):
        text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


OPEN = {"required": True, "metavar": "MODULE:NAME", "help": "the data set, or a function that returns it"}


@command(
    RECORD,
    ("--step", {"type": int, "help": "step of the epoch, from 0"}),
    ("--sample", {"type": sample_of, "help": "one sample instead: its index; of a mixture, source:index"}),
    ("--open", {**OPEN, "help": f"{OPEN['help']}; of a mixture, also a dict of its sources"}),
    ("--decode", {"metavar": "MODULE:FUNCTION", "help": "makes of a sample what is shown, such as its text"}),
    EPOCH,
)
def show(options: argparse.Namespace) -> Answer:
    """What do the samples of a step hold?

    example: paddle-shard show run.jsonl --epoch 0 --step 3 --open my_module:dataset
    """
    if (options.step is None) == (options.sample is None):
        raise ArgumentError("give --step, or --sample.")
    run, samples = run_of(options.record), [options.sample]
    if options.step is not None:
        leg = legs_at(run, options.epoch, options.step)[-1]
        rows = samples_at(leg.plan, leg.start.epoch, options.step, leg.skips)
        samples = [one for one in rows if one is not None]
    elif all(leg.job.unknown is None for leg, _ in run.passes):
        list(places_in(run, options.sample))  # refuses one that cannot be
    dataset, decode = opened(options.open), shown if options.decode is None else named(options.decode)
    lengths = run.last.facts["data"].get("length"), length_or_none(dataset)
    if None not in lengths and lengths[0] != lengths[1] and not isinstance(dataset, Mapping):
        raise ArgumentError(f"--open {options.open} has {lengths[1]} samples, and the data of the run {lengths[0]}.")
    found, failed = list[dict[str, Any]](), False
    for sample in samples:
        try:
            # A mixture's samples are those of its sources, which a dict of them serves as well.
            source, index = (None, sample) if isinstance(sample, int) else sample
            of = dataset if source is None else getattr(dataset, "sources", dataset)[source]
            found.append({"sample": sample, "text": shown(decode(of[index]))})
        except Exception as error:  # whatever the user's data set raises
            failed = True
            found.append({"sample": sample, "text": f"cannot be read: {described(error)}"})
    said = [f"{cell([one['sample']])}: {one['text']}" for one in found]
    return Answer(found={"samples": found}, said=said, failed=failed)
