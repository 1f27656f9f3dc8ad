"""`paddle-shard show`: what do the samples of a step, or a sample, hold? It opens the data set."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from paddle_shard.cli.answer import EPOCH, RECORD, Answer, Command, cell, leg_of, run_of, sample_of
from paddle_shard.errors import ArgumentError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.record.places import samples_at

_MOST_TEXT = 2000
_MOST_VALUES = 16


def named(path: str, what: str) -> Any:
    """Return an object that a user names by module:name; modules in the current folder are found, too.

    Raises:
        ArgumentError: There is no such object, or its module cannot be imported.
    """
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the user's module raises
        raise_if_a_handlers(error)
        raise ArgumentError(
            f"{what} {path}: {described(error)}. Give module:name, such as my_module:dataset."
        ) from error
    return found


def shown(value: Any) -> str:
    """Return a sample as text, long arrays and texts cut."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple) and not all(isinstance(one, int | float) for one in value):
        return "[" + ", ".join(map(shown, value)) + "]"
    if not isinstance(value, str | bytes) and (hasattr(value, "__array__") or isinstance(value, list | tuple)):
        array = np.asarray(value)
        some = " ".join(map(str, array.reshape(-1)[:_MOST_VALUES].tolist()))
        return f"{array.dtype}{list(array.shape)} {some}{' ...' if array.size > _MOST_VALUES else ''}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def _show(options: argparse.Namespace) -> Answer:
    if (options.step is None) == (options.sample is None):
        raise ArgumentError("give --step, or --sample.")
    samples = [list(options.sample) if isinstance(options.sample, tuple) else options.sample]
    if options.step is not None:
        _, legs = leg_of(run_of(options.record), options.epoch, options.step)
        leg = legs[-1]
        samples = [one for one in samples_at(leg.plan, leg.epoch, options.step, leg.skips) if one is not None]
    dataset = named(options.open, "--open")
    if callable(dataset) and not hasattr(dataset, "__getitem__"):
        dataset = dataset()
    decode = None if options.decode is None else named(options.decode, "--decode")
    found = []
    for sample in samples:
        try:
            # A mixture's samples are those of its sources, which a dict of them serves as well.
            given = isinstance(sample, int)
            value = dataset[sample] if given else getattr(dataset, "sources", dataset)[sample[0]][sample[1]]
            text = shown(value if decode is None else decode(value))
        except Exception as error:  # whatever the user's data set raises
            raise_if_a_handlers(error)
            name = f"sample {cell([sample])} of {options.open}"
            raise ArgumentError(f"{name} cannot be read: {described(error)}") from error
        found.append({"sample": sample, "text": text})
    return Answer(found={"samples": found}, said=[f"{cell([one['sample']])}: {one['text']}" for one in found])


_OPEN = "the data set, or a function that returns it; of a mixture, also a dict of its sources"
_DECODE = "makes of a sample what is shown, such as its text"
COMMANDS = {
    "show": Command(
        does="What do the samples of a step hold?",
        example="run.jsonl --epoch 0 --step 3 --open my_module:dataset",
        arguments=[
            RECORD,
            ("--step", {"type": int, "help": "step of the epoch, from 0"}),
            EPOCH,
            ("--sample", {"type": sample_of, "help": "one sample instead: its index; of a mixture, source:index"}),
            ("--open", {"required": True, "metavar": "MODULE:NAME", "help": _OPEN}),
            ("--decode", {"metavar": "MODULE:FUNCTION", "help": _DECODE}),
        ],
        answer=_show,
    )
}
"""The command, by name."""
