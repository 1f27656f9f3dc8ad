"""`paddle-shard show`: the contents of the samples of a step. It opens the data set."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from paddle_shard.core.checks import length_or_none
from paddle_shard.errors import ArgumentError, described
from paddle_shard.extras.cli.answer import (
    EPOCH,
    RECORD,
    STEP,
    Answer,
    argument,
    cell,
    command,
    deliveries_of,
    run_of,
)
from paddle_shard.extras.cli.places import samples_at
from paddle_shard.extras.cli.timeline import Timeline

_MOST_TEXT = 2000
_MOST_VALUES = 16


def import_object(path: str) -> Any:
    """Return the object at module:name; modules in the current folder are found, too.

    Raises:
        ArgumentError: There is no such object, or its module cannot be imported.
    """
    module, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # whatever the user's module raises
        raise ArgumentError(
            f"{path}: {described(error)}. Give module:name, such as my_module:dataset."
        ) from error


def text_of(value: Any) -> str:
    """Return a sample as text, long arrays and texts cut."""
    with np.printoptions(threshold=_MOST_VALUES, linewidth=_MOST_TEXT):
        text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


@command(
    RECORD,
    STEP,
    argument(
        "--open",
        "the data set, or a function that returns it; of a mixture, also a dict of its sources",
        metavar="MODULE:NAME",
        required=True,
    ),
    argument(
        "--decode",
        "makes of a sample what is shown, such as its text",
        metavar="MODULE:FUNCTION",
    ),
    EPOCH,
)
def show(options: argparse.Namespace) -> Answer:
    """Show what the samples of a step hold.

    example: paddle-shard show run.jsonl --epoch 0 --step 3 --open my_module:dataset
    """
    run = run_of(options.record)
    newest = deliveries_of(run, options.epoch, options.step)[-1]
    dataset = _open(options.open, run)
    decode = text_of if options.decode is None else import_object(options.decode)
    shown: list[dict[str, Any]] = []
    failed = False
    for sample in samples_at(
        newest.plan, newest.start.epoch, options.step, newest.skips
    ):
        if sample is None:  # padding, or skipped
            continue
        try:
            text = text_of(decode(_read(dataset, sample)))
        except Exception as error:  # whatever the user's data set raises
            failed = True
            text = f"cannot be read: {described(error)}"
        shown.append({"sample": sample, "text": text})
    lines = [f"{cell([item['sample']])}: {item['text']}" for item in shown]
    return Answer(values={"samples": shown}, text=lines, failed=failed)


def _open(path: str, run: Timeline) -> Any:
    """Return the data set that `--open` names, which must be as long as that of the run."""
    dataset = import_object(path)
    if callable(dataset) and not hasattr(dataset, "__getitem__"):
        dataset = dataset()
    recorded = run.last_job.facts["data"].get("length")
    length = None if isinstance(dataset, Mapping) else length_or_none(dataset)
    if None not in (length, recorded) and length != recorded:
        raise ArgumentError(
            f"--open {path} has {length} samples, and the data of the run {recorded}."
        )
    return dataset


def _read(dataset: Any, sample: Any) -> Any:
    """Return a sample; that of a mixture is read from its source, also if the data set is a dict of sources."""
    if isinstance(sample, int):
        return dataset[sample]
    source, index = sample
    return getattr(dataset, "sources", dataset)[source][index]
