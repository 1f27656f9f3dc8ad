"""How many tokens does each document have, without reading all of them in every run and rank?"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from paddle_shard.errors import ArgumentError, StateError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.shuffle import Indices
from paddle_shard.sources.cache import held
from paddle_shard.stages.packed_rows import tokens_of

VERSION = 1
CHECKED = 32
"""Documents that are read again, to see that a file of lengths is of these documents."""
SLOW = 5.0
"""Seconds after which a line says what takes so long, if there is no bar."""


def count_lengths(documents: Any, key: str, path: str | os.PathLike[str] | None) -> Indices:
    """Return the number of tokens of each document: int64[number of documents].

    Args:
        documents: A data set with an index.
        key: Field of the tokens, in documents that are dicts.
        path: A file that keeps the lengths. The first process to come reads all documents and writes it; others wait.
            None: nothing is kept.

    Raises:
        StateError: The file is of other documents, or damaged.
    """
    if path is None:
        return _counted(documents, key)
    file = Path(path)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{file}.lock", "wb") as lock, held(lock):
            if not file.exists():
                _write(file, _counted(documents, key), key)
    return _read(file, documents, key)


def _counted(documents: Any, key: str) -> Indices:
    logger = logging.getLogger("paddle_shard")
    found, begun = np.empty(len(documents), np.int64), time.monotonic()
    said = False
    for number in _with_bar(range(len(documents))):
        try:
            found[number] = len(tokens_of(documents[number], key))
        except Exception as error:
            raise_if_a_handlers(error)
            raise ArgumentError(
                f"Packed: the tokens of document {number} cannot be counted: {described(error)}. Give lengths=, or "
                f"documents that are arrays or dicts with the field {key!r}."
            ) from error
        if not said and time.monotonic() - begun > SLOW:
            said = True
            logger.warning(
                "Packed reads all %d documents once, to count their tokens. Give lengths= an array, or a path that "
                "keeps them.",
                len(documents),
            )
    return found


def _with_bar(numbers: Iterable[int]) -> Iterable[int]:
    """Show a bar if tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return numbers
    bar: Iterable[int] = tqdm(numbers, desc="counting tokens", unit="document", delay=SLOW)
    return bar


def _write(file: Path, lengths: Indices, key: str) -> None:
    """Write the file at once, so that no half of it is ever read."""
    handle, part = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=file.parent)
    try:
        with open(handle, "wb") as target:
            np.savez(target, lengths=lengths, about=np.array(json.dumps({"version": VERSION, "key": key})))
        os.replace(part, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise


def _read(file: Path, documents: Any, key: str) -> Indices:
    way_out = f"Remove {str(file)!r} to count again, or give another path."
    try:
        with open(file, "rb") as source, np.load(source) as kept:
            lengths, about = kept["lengths"], json.loads(str(kept["about"]))
    except Exception as error:
        raise_if_a_handlers(error)
        raise StateError(f"Packed: {str(file)!r} is no file of lengths: {described(error)}. {way_out}") from error
    if about != {"version": VERSION, "key": key} or lengths.shape != (len(documents),):
        raise StateError(
            f"Packed: {str(file)!r} has {len(lengths)} lengths of the field {about.get('key')!r} (version "
            f"{about.get('version')}), but there are {len(documents)} documents with the field {key!r}. {way_out}"
        )
    for number in np.unique(np.linspace(0, len(documents) - 1, CHECKED).astype(np.int64)).tolist():
        found = len(tokens_of(documents[number], key))
        if found != lengths[number]:
            raise StateError(
                f"Packed: {str(file)!r} is of other documents: document {number} has {found} tokens, and "
                f"{lengths[number]} in the file. {way_out}"
            )
    return np.asarray(lengths, np.int64)
