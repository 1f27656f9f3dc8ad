"""`paddle-shard lengths`: how many tokens has each document? Writes the file that `Packed(lengths=)` reads."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from paddle_shard.checks import check_count
from paddle_shard.cli.answer import Answer, Progress, check_output, command, with_hazards
from paddle_shard.cli.show import OPEN, opened
from paddle_shard.errors import ArgumentError, described
from paddle_shard.plan.hazards import Hazard
from paddle_shard.plan.order import spread
from paddle_shard.sources.arrays import check_indexed
from paddle_shard.sources.files import replacing
from paddle_shard.sources.packed import check_lengths, write_lengths
from paddle_shard.stages.pack import PackedRows, tokens_of

# Documents that are counted at a time; those of an earlier run that are looked at again; failures that are shown.
_CHUNK, _LOOKED_AT, _MOST_SHOWN = 1024, 16, 20
_UNKNOWN = -1
# The documents and how they will be packed, for processes that are forked.
_given: dict[str, Any] = {}


def _begin() -> None:
    """In a worker: end when the process that has forked it has been killed."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _counted(first: int, end: int) -> tuple[int, list[int], list[str]]:
    """Return the first of some documents, the tokens of each, and why some could not be counted."""
    found, failed = list[int](), list[str]()
    for number in range(first, end):
        try:
            fields = _given["rows"].fields(_given["documents"][number], "it")  # refused as it will be when it is packed
            found.append(len(fields[_given["rows"].key]))
        except (Exception, SystemExit) as error:  # whatever the user's data set raises
            found.append(_UNKNOWN)
            failed.append(f"the tokens of document {number} cannot be counted: {described(error)}")
    return first, found, failed


def _count(documents: Any, key: str, path: str, workers: int) -> list[Hazard]:
    """Count the documents, and write the file when all are counted; return what was in the way."""
    number, part, anew = len(documents), f"{path}.{key}.part", "Remove it to count anew."
    check_output(path)
    if not os.path.exists(part):
        with replacing(part) as file:
            np.save(file, np.full(number, _UNKNOWN))
    known: Any = None
    with contextlib.suppress(OSError, EOFError, ValueError):
        known = np.load(part)  # whole, since a file that is cut short is filled up when it is mapped
    if known is None or known.ndim != 1 or known.dtype != np.int64:
        raise ArgumentError(f"{part}, what an earlier run has counted, is damaged. {anew}")
    if len(known) != number:
        raise ArgumentError(f"{part} is of {len(known)} documents, and there are {number}. {anew}")
    known = np.load(part, mmap_mode="r+")  # a kill leaves what is in it
    for at in spread(np.flatnonzero(known >= 0), _LOOKED_AT):
        if known[at] != len(tokens_of(documents[at], key)):
            what = f"{part} has another length of document {at}: it is damaged, or of other documents"
            raise ArgumentError(f"{what}. {anew}")
    _given.update(documents=documents, rows=PackedRows(length=1, most_pieces=1, key=key))
    size, hazards = max(1, min(_CHUNK, number // (8 * workers))), list[Hazard]()
    spans = [(at, min(at + size, number)) for at in range(0, number, size) if (known[at : at + size] < 0).any()]
    progress = Progress("documents counted", sum(end - first for first, end in spans))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin) as pool:
        try:
            for task in as_completed([pool.submit(_counted, *span) for span in spans]):
                first, counts, failed = task.result()
                known[first : first + len(counts)] = counts
                hazards += [(what, "Mend it, or name the field by --key, and run this again") for what in failed]
                progress.add(len(counts))
            if len(hazards) > _MOST_SHOWN:
                what = f"the tokens of {len(hazards) - _MOST_SHOWN} more documents cannot be counted"
                hazards[_MOST_SHOWN:] = [(what, "Mend the first ones, or name the field by --key, and run this again")]
        except BrokenProcessPool as error:
            due = [span for span in spans if (known[span[0] : span[1]] < 0).any()][:workers]
            what = f"a process that counts has died, among documents {due[0][0]} to {due[-1][1] - 1}: {error}"
            hazards.append((what, "Look whether one of them ends it; run this again: what was counted is kept"))
    if not hazards:
        write_lengths(path, np.array(known), key)
        os.remove(part)
    return hazards


@command(
    ("--open", OPEN),
    ("-o --output", {"required": True, "metavar": "FILE", "help": "the file of lengths, such as lengths.npz"}),
    ("--key", {"default": "input_ids", "help": "field of the tokens, in documents that are dicts"}),
    ("--workers", {"type": int, "default": os.cpu_count() or 1, "help": "processes that count"}),
)
def lengths(options: argparse.Namespace) -> Answer:
    """Count the tokens of all documents, in parallel, for Packed(lengths=). Run it again after a kill: it goes on.

    example: paddle-shard lengths --open my_module:documents -o lengths.npz
    """
    documents, key, path = opened(options.open), options.key, options.output
    check_indexed(f"--open {options.open}", documents, "A stream is packed by its stage pack().")
    check_count("--workers", options.workers)
    number = check_count(f"--open {options.open}: its length", len(documents))
    hazards = [] if os.path.exists(path) else _count(documents, key, path, options.workers)
    if hazards:
        return with_hazards({"documents": number}, [], hazards)
    tokens = int(check_lengths(path, documents, key).sum())
    said = f"{path}: {number} documents with {tokens} tokens"
    return Answer(found={"documents": number, "tokens": tokens}, said=[said])
