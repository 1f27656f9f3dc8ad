"""`paddle-shard lint`: can each file be read to its end, and would its samples make batches with others?"""

from __future__ import annotations

import argparse
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from paddle_shard.cli.answer import Answer, Command, Hazard, Progress, with_hazards
from paddle_shard.collate import collate
from paddle_shard.errors import ArgumentError, MissingDependencyError, ShardReadError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.parts import check_count
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.sources.files import base_name, matched, shown
from paddle_shard.sources.parquet import parquet_source
from paddle_shard.sources.shards import ShardSource
from paddle_shard.sources.text import CSV_DICTS, JSON_LINES, LINES, text_source
from paddle_shard.sources.webdataset import Decode, expand, webdataset_source
from paddle_shard.stages.stage import Opening, Unreadable

_MOST_FORMS, _MOST_SHOWN = 64, 20
_PACKED = (".gz", ".bz2", ".xz")
_KEY = "__key__"
"""Field of a WebDataset sample; those that begin with two underscores tell where it is from."""

KINDS: dict[str, tuple[tuple[str, ...], Callable[[str], ShardSource]]] = {
    "webdataset": ((".tar", ".tgz"), partial(webdataset_source, index=False)),
    "jsonl": ((".jsonl", ".ndjson", ".json"), partial(text_source, form=JSON_LINES, counts=False)),
    "csv": ((".csv",), partial(text_source, form=CSV_DICTS, counts=False)),
    "lines": ((".txt",), partial(text_source, form=LINES, counts=False)),
    "parquet": ((".parquet",), partial(parquet_source, shuffle_shards=False)),
}
"""Sources of files by name: how their files end, and what reads one."""


@dataclass
class _Shard:
    """What a file holds."""

    name: str
    samples: int = 0
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    """(number of the sample in the file, why it cannot be read)."""
    keys: array[int] = field(default_factory=lambda: array("Q"))
    """A hash of each sample's key, in the order of the samples."""
    numbers: array[int] = field(default_factory=lambda: array("Q"))
    """The number of each of these samples."""
    fields: Counter[frozenset[str]] = field(default_factory=Counter)
    """How many samples have these fields."""
    forms: Counter[tuple[str, Any]] = field(default_factory=Counter)
    """(field, shape and dtype of its value) -> how many samples have it."""
    examples: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    """One of `fields`, or of `forms` -> (number of the first sample that has it, a value of this form)."""

    def look(self, number: int, sample: Any, key: str) -> None:
        """Note what a sample is made of."""
        fields = sample if isinstance(sample, Mapping) else {"": sample}
        if key in fields:
            self.keys.append(derive_seed(str(fields[key])))
            self.numbers.append(number)
        values = {str(name): value for name, value in fields.items() if not str(name).startswith("__")}
        seen = [(frozenset(values), None), *(((name, _form(value)), value) for name, value in values.items())]
        for what, value in seen:
            counts: Counter[Any] = self.fields if isinstance(what, frozenset) else self.forms
            if what in counts or len(counts) < _MOST_FORMS * max(1, len(values)):
                counts[what] += 1
                if what not in self.examples:
                    self.examples[what] = number, _stand_in(value)


def _form(value: Any) -> Any:
    """Return what has to be the same in all rows of a batch, if it may be: something that can be hashed."""
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape
    if isinstance(value, Mapping):
        return tuple((str(name), _form(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return len(value), tuple(dict.fromkeys(map(_form, value)))
    return type(value).__name__


def _stand_in(value: Any) -> Any:
    """Return a value of the same form that needs little memory."""
    if isinstance(value, np.ndarray):
        return np.broadcast_to(np.zeros((), value.dtype), value.shape)
    if isinstance(value, Mapping):
        return {name: _stand_in(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_stand_in(one) for one in value]
    return type(value)() if isinstance(value, str | bytes) else value


def _read(name: str, kind: str, options: argparse.Namespace, decode: Callable[[Any], Any] | None) -> _Shard:
    """Read a file to its end, or so many samples of it, and note what it holds."""
    found, number, key = _Shard(name), 0, options.key
    try:
        (samples,) = KINDS[kind][1](name).open(Opening(parts=(0,), num_parts=1, skip_errors=True))
        for number, sample in enumerate(islice(samples, options.limit)):
            found.samples = number + 1
            try:
                value = sample if decode is None or isinstance(sample, Unreadable) else decode(sample)
            except ShardReadError as error:
                value = Unreadable(str(error))
            if isinstance(value, Unreadable):
                found.unreadable.append((number, value.why))
            else:
                found.look(number, value, _KEY if key is None else key)
            number += 1
    except MissingDependencyError:
        raise
    except Exception as error:  # whatever a file, a server or a store has to say
        raise_if_a_handlers(error)
        found.unreadable.append((number, f"{described(error).rstrip('.')}. No sample from there on is read"))
    return found


def _doubled(shards: Sequence[_Shard], key: str) -> list[Hazard]:
    """Return the pairs of samples that have the same key."""
    keys = np.concatenate([np.array(shard.keys, np.uint64) for shard in shards])
    numbers = np.concatenate([np.array(shard.numbers, np.int64) for shard in shards])
    of_shard = np.repeat(np.arange(len(shards)), [len(shard.keys) for shard in shards])
    order = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    found = []
    for first, other in zip(order[again].tolist(), order[again + 1].tolist(), strict=True):
        both = " and ".join(f"sample {numbers[at]} of {shown(shards[of_shard[at]].name)}" for at in (first, other))
        found.append((f"{both} have the same {key}", "Keep one of them, or give them different keys"))
    return found


def _unlike(shards: Sequence[_Shard]) -> list[Hazard]:
    """Return the samples whose fields are not those of most, or would not make a batch with those of most."""
    found, fields, forms = list[Hazard](), Counter[Any](), Counter[Any]()
    examples: dict[Any, tuple[_Shard, int, Any]] = {}
    for shard in shards:
        fields.update(shard.fields)
        forms.update(shard.forms)
        for what, example in shard.examples.items():
            examples.setdefault(what, (shard, *example))
    for other, num in fields.most_common()[1:]:
        usual, (shard, number, _) = fields.most_common(1)[0][0], examples[other]
        differ = [f"no {name!r}" for name in sorted(usual - other)] + [
            f"{name!r} besides" for name in sorted(other - usual)
        ]
        what = f"{num} samples, first sample {number} of {shown(shard.name)}, have {' and '.join(differ)}"
        found.append((what, "Samples of a batch need the same fields: write them anew, or map or filter them"))
    usual_of: dict[str, Any] = {}
    for one, num in forms.most_common():
        shard, number, value = examples[one]
        usual_value = usual_of.setdefault(one[0], value)
        try:
            collate([usual_value, value], path=f"[{one[0]!r}]" if one[0] else "")
        except (TypeError, ValueError) as error:
            what, _, remedy = str(error).partition(". ")
            where = f"{num} samples, first sample {number} of {shown(shard.name)}, would make no batch with most others"
            found.append((f"{where}: {what}", remedy or "Make arrays of one shape and dtype of them, by map"))
    return found


def _lint(options: argparse.Namespace) -> Answer:
    check_count("--workers", options.workers)
    if options.limit is not None:
        check_count("--limit", options.limit)
    jobs = list[tuple[str, str]]()
    for url in options.urls:
        ending = base_name(url).lower()
        for packed in _PACKED:
            ending = ending.removesuffix(packed)
        kinds = [options.kind] if options.kind else [name for name, (ends, _) in KINDS.items() if ending.endswith(ends)]
        if not kinds:
            raise ArgumentError(
                f"{shown(url)}: its name does not tell what it holds. Give --kind {' or '.join(KINDS)}."
            )
        jobs += [(name, kinds[0]) for name in (expand([url]) if kinds[0] == "webdataset" else matched([url]))]
    handlers = [] if options.decode is None else [options.decode]
    decode = Decode(*handlers) if any(kind == "webdataset" for _, kind in jobs) else None
    shards, progress = list[_Shard](), Progress("files read", len(jobs))
    with ThreadPoolExecutor(options.workers) as pool:
        tasks = [pool.submit(_read, *job, options, decode if job[1] == "webdataset" else None) for job in jobs]
        for _ in as_completed(tasks):
            progress.add()
        shards = [task.result() for task in tasks]
    hazards: list[Hazard] = [
        (
            f"sample {number} of {shown(shard.name)} cannot be read: {why}",
            "Write the file anew, or pass on_error='skip'",
        )
        for shard in shards
        for number, why in shard.unreadable
    ]
    empty = [shown(shard.name) for shard in shards if not shard.samples and not shard.unreadable]
    hazards += [(f"{name} has no sample", "Leave it out") for name in empty]
    hazards += [*_doubled(shards, options.key or "key"), *_unlike(shards)]
    total, more = sum(shard.samples for shard in shards), len(hazards) - _MOST_SHOWN
    if options.key and not any(shard.keys for shard in shards) and total:
        hazards.append((f"no sample has the field {options.key!r}", "Give another --key"))
    said = [
        f"{total} samples in {len(shards)} files{'' if options.limit is None else f', at most {options.limit} of each'}"
    ]
    found = {"files": {shown(shard.name): shard.samples for shard in shards}, "samples": total}
    found["unreadable"] = sum(len(shard.unreadable) for shard in shards)
    answer = with_hazards(found, said, hazards)
    if more > 0 and not options.json:
        cut = with_hazards(found, said, hazards[:_MOST_SHOWN])
        return Answer(found=answer.found, said=[*cut.said, f"and {more} more hazards; --json shows all"], failed=True)
    return answer


_ARGUMENTS: Sequence[tuple[str, dict[str, Any]]] = [
    ("urls", {"nargs": "+", "metavar": "URL", "help": "files or URLs; patterns; for tars also braces: {00..99}.tar"}),
    ("--kind", {"choices": list(KINDS), "help": "what the files hold; by default, their names tell"}),
    ("--key", {"metavar": "FIELD", "help": "a field that no two samples share; of tars, the key of the sample"}),
    ("--decode", {"metavar": "HANDLER", "help": "also decode the images of tars, as WebDataset does: rgb8, pil, .."}),
    ("--limit", {"type": int, "help": "read at most so many samples of each file"}),
    ("--workers", {"type": int, "default": 8, "help": "files that are read at once"}),
]
_DOES = (
    "Read files of samples, and name what is unreadable, doubled, missing or of another shape. Exits with 1 if any is."
)
COMMANDS = {"lint": Command(_DOES, "'train-*.tar' --limit 100", _ARGUMENTS, _lint)}
"""The command, by name."""
