"""`paddle-shard lint`: can each file be read to its end, and would its samples make batches with others?"""

from __future__ import annotations

import argparse
import os
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from paddle_shard.checks import check_count
from paddle_shard.cli.answer import Answer, Progress, Rows, command, with_hazards
from paddle_shard.collate import collate, form_of, stand_in
from paddle_shard.errors import ArgumentError, MissingDependencyError, ShardReadError, described
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.sources.files import base_name, is_missing, matched, shown
from paddle_shard.sources.parquet import parquet_source
from paddle_shard.sources.shards import ShardSource
from paddle_shard.sources.text import CSV_DICTS, JSON_LINES, LINES, text_source
from paddle_shard.sources.webdataset import Decode, expand, webdataset_source
from paddle_shard.stages.stage import Opening, Unreadable

# Of each field in a file, so many forms are told apart; further ones by their type only.
_MOST_FORMS, _MOST_SHOWN = 64, 20
# A field of lists is ragged, as tokens are, if no length has so many of its samples; of a few, that is not known.
_USUAL, _FEW = 0.9, 16
# Field of a WebDataset sample; those that begin with two underscores tell where it is from.
_KEY = "__key__"

KINDS: dict[str, tuple[tuple[str, ...], Callable[[str], ShardSource]]] = {
    "webdataset": ((".tar", ".tgz"), partial(webdataset_source, index=False)),
    "jsonl": ((".jsonl", ".ndjson", ".json"), partial(text_source, form=JSON_LINES, counts=False)),
    "csv": ((".csv",), partial(text_source, form=CSV_DICTS, counts=False)),
    "lines": ((".txt",), partial(text_source, form=LINES, counts=False)),
    "parquet": ((".parquet",), partial(parquet_source, shuffle_shards=False)),
}
"""Sources of files by name: how their files end, and what reads one."""


# What may be wrong with a sample, and what helps.
_REMEDIES = {
    "unreadable": "Write the file anew; on_error='skip' leaves out a sample if those after it can be read",
    "missing": "Correct the path",
    "empty": "Leave the file out",
    "same key": "Keep one of them, or give them different keys",
    "other fields": "Samples of a batch need the same fields: write them anew, or map or filter them",
    "other form": "Make arrays of one shape and dtype of them by map, or pad them in a collate_fn",
}


@dataclass
class _Shard:
    """What a file holds."""

    name: str
    faults: list[dict[str, Any]] = field(default_factory=list)
    """What is wrong with its samples, one by one."""
    keys: array[int] = field(default_factory=lambda: array("Q"))
    """A hash of each sample's key; 0 if it has none."""
    forms: dict[str | None, dict[Any, list[Any]]] = field(default_factory=lambda: defaultdict(dict))
    """Field -> the form of its value -> [how many samples have it, number of the first one, a value of this form].

    Of None, the names of all fields are the form."""
    lengths: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """Field of lists -> how many samples have it with which length."""

    def look(self, sample: Any, key: str) -> None:
        """Note what the next sample is made of."""
        fields = sample if isinstance(sample, Mapping) else {"sample": sample}
        values = {str(name): value for name, value in fields.items() if not str(name).startswith("__")}
        for name, value in [(None, frozenset(values)), *values.items()]:
            if name is not None and (length := _length(value)) is not None:
                self.lengths[name][length] += 1
            forms, form = self.forms[name], value if name is None else form_of(value)
            if form not in forms and len(forms) >= _MOST_FORMS:
                form = type(value)  # stands for all further ones of this type
            if form not in forms:
                forms[form] = [0, len(self.keys), stand_in(value)]
            forms[form][0] += 1
        self.keys.append(derive_seed(str(fields[key])) if key in fields else 0)

    def fault(self, fault: str, number: int, why: str, samples: int = 1) -> dict[str, Any]:
        """Return what is wrong with a sample, and with how many like it."""
        return {"fault": fault, "file": self.name, "sample": number, "samples": samples, "why": why}


def _length(value: Any) -> int | None:
    """Return the length of a list, such as the tokens or the boxes of a sample; None if it is none."""
    return len(value) if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim == 1) else None


def _read(options: argparse.Namespace, decode: Decode | None, job: tuple[str, str]) -> _Shard:
    """Read a file to its end, or so many samples of it, and note what it holds; see `_jobs`."""
    name, kind = job
    found = _Shard(shown(name))
    try:
        (samples,) = KINDS[kind][1](name).open(Opening(parts=(0,), num_parts=1, skip_errors=True))
        for sample in islice(samples, options.limit):
            try:
                if isinstance(sample, Unreadable):
                    raise ShardReadError(sample.why)
                found.look(decode(sample) if decode is not None and kind == "webdataset" else sample, options.key)
            except ShardReadError as error:
                found.faults.append(found.fault("unreadable", len(found.keys), str(error)))
                found.keys.append(0)
    except MissingDependencyError:
        raise
    except Exception as error:  # whatever a file, a server or a store has to say
        if kind != "parquet" or not isinstance(error, ArgumentError) or "have no row" not in str(error):
            missing = is_missing(name)
            why = f"{described(error)}{'' if missing else ' (no sample from there on is read)'}"
            found.faults.append(found.fault("missing" if missing else "unreadable", len(found.keys), why))
    return found


def _doubled(shards: Sequence[_Shard]) -> Iterator[dict[str, Any]]:
    """Yield the samples whose key one before them has."""
    keys = np.concatenate([np.array(shard.keys, np.uint64) for shard in shards])
    begins = np.cumsum([0, *(len(shard.keys) for shard in shards)])
    _, firsts, numbers = np.unique(keys, return_index=True, return_inverse=True)
    first_of_key = firsts[numbers]  # [sample]
    again = np.flatnonzero((first_of_key < np.arange(len(keys))) & (keys != 0))
    for both in zip(first_of_key[again].tolist(), again.tolist(), strict=True):
        at, again_at = np.searchsorted(begins, both, "right") - 1
        why = f"the key of sample {both[0] - begins[at]} of {shards[at].name}"
        yield shards[again_at].fault("same key", both[1] - int(begins[again_at]), why)


def _ragged(shards: Sequence[_Shard]) -> dict[str, Counter[int]]:
    """Return the fields whose lists have no usual length, as the tokens of texts: field -> its lengths."""
    found = defaultdict[str, Counter[int]](Counter)
    for shard in shards:
        for name, lengths in shard.lengths.items():
            found[name].update(lengths)
    return {name: of for name, of in found.items() if of.total() > _FEW and max(of.values()) < _USUAL * of.total()}


def _unlike(shards: Sequence[_Shard], ragged: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield samples whose fields are not those of most, or that would make no batch with most."""
    kinds, usual = dict[tuple[str | None, Any], list[Any]](), dict[str | None, Any]()
    for shard in shards:
        for name, forms in shard.forms.items():
            for form, (num, number, value) in forms.items():
                kinds.setdefault((name, form), [0, shard, number, value])[0] += num
    by_number = sorted(kinds.items(), key=lambda one: (isinstance(one[0][1], type), -one[1][0]))
    for (name, _), (num, shard, number, value) in by_number:
        most, so_many = usual.setdefault(name, value), f" ({num} of this kind)"
        if name is None:
            differ = [f"no {one!r}" for one in sorted(most - value)] + [f"also {one!r}" for one in sorted(value - most)]
            if differ:
                yield shard.fault("other fields", number, f"{', '.join(differ)}{so_many}", num)
        elif name not in ragged or _length(value) is None:
            try:
                form, usual_form = (form_of(collate([most, one], path=f"[{name!r}]")) for one in (value, most))
                why = "" if form == usual_form else f"[{name!r}] makes batches of {form}, and most make {usual_form}"
            except (TypeError, ValueError) as error:
                why = str(error).partition(". ")[0]
            if why:
                yield shard.fault("other form", number, f"{why}{so_many}", num)


def _jobs(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield each file with what it holds."""
    for url in options.urls:
        ending = re.sub(r"\.(gz|bz2|xz)$", "", base_name(url).lower())
        kinds = [options.kind] if options.kind else [name for name, (ends, _) in KINDS.items() if ending.endswith(ends)]
        if os.path.isdir(url):
            raise ArgumentError(f"{url} is a folder. Give its files, such as '{url}/*.tar'.")
        if not kinds:
            what = f"{shown(url)}: its name does not tell what it holds"
            raise ArgumentError(f"{what}. Give --kind {' or '.join(KINDS)}.")
        for name in expand([url]) if kinds[0] == "webdataset" else matched([url]):
            yield name, kinds[0]


@command(
    ("urls", {"nargs": "+", "metavar": "URL", "help": "files or URLs; patterns; for tars also braces: {00..99}.tar"}),
    ("--kind", {"choices": list(KINDS), "help": "what the files hold; by default, their names tell"}),
    ("--key", {"metavar": "FIELD", "default": _KEY, "help": "a field that no two samples share"}),
    ("--decode", {"metavar": "HANDLER", "help": "also decode the images of tars, as WebDataset does: rgb8, pil, .."}),
    ("--limit", {"type": int, "help": "read at most so many samples of each file"}),
    ("--workers", {"type": int, "default": 8, "help": "files that are read at once"}),
)
def lint(options: argparse.Namespace) -> Answer:
    """Read files of samples, and name what is unreadable, doubled, missing or of another shape. Exits with 1 if any is.

    example: paddle-shard lint 'train-*.tar' --limit 100
    """
    check_count("--workers", options.workers)
    check_count("--limit", 1 if options.limit is None else options.limit)
    jobs, shards = list(_jobs(options)), list[_Shard]()
    progress = Progress("files read", len(jobs))
    tars = any(kind == "webdataset" for _, kind in jobs)
    if options.decode and not tars:
        raise ArgumentError(f"--decode {options.decode}: none of these files is a tar. Leave it out.")
    decode = Decode(*filter(None, [options.decode])) if tars else None
    with ThreadPoolExecutor(options.workers) as pool:
        for shard in pool.map(partial(_read, options, decode), jobs):
            shards.append(shard)
            progress.add()
    ragged = _ragged(shards)
    empty = [one.fault("empty", 0, "there is no sample") for one in shards if not one.keys and not one.faults]
    faults = [*chain(*(one.faults for one in shards)), *empty, *_doubled(shards), *_unlike(shards, ragged)]
    counts, total = Counter[str](), sum(len(shard.keys) for shard in shards)
    for one in faults:
        counts[one["fault"]] += one["samples"]
    often = {fault: "once" if num == 1 else f"{num} times" for fault, num in counts.items()}
    hazards = [(f"{times}: {fault}", _REMEDIES[fault]) for fault, times in often.items()]
    if total and options.key != _KEY and not any(any(shard.keys) for shard in shards):
        hazards.append((f"no sample has the field {options.key!r}", "Give another --key"))
    some = [one for kind in counts for one in [one for one in faults if one["fault"] == kind][:_MOST_SHOWN]]
    said: list[str | Rows] = [f"{total} samples in {len(shards)} files", "", some]
    said += [f"and {len(faults) - len(some)} more, which --json shows"] if len(faults) > len(some) else []
    for name, lengths in ragged.items():
        what = f"field {name!r} has {len(lengths)} lengths, from {min(lengths)} to {max(lengths)}"
        said.append(f"{what}: pad_to=, Packed or a collate_fn makes batches of such rows")
    files = {shard.name: len(shard.keys) for shard in shards}
    return with_hazards({"samples": total, "files": files, "faults": faults}, said, hazards)
