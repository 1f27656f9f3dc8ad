"""How many samples does each tar have? Writes the index file that `webdataset_source(index=)` reads."""

from __future__ import annotations

import argparse
import os
import sys

from paddle_shard.errors import ArgumentError, described
from paddle_shard.extras.cli.answer import Answer, check_output, command
from paddle_shard.sources.counts import ShardEntry, count_file
from paddle_shard.sources.files import base_name, shown
from paddle_shard.sources.webdataset import check_base_names, expand, tar_starts, write_index


@command(
    ("urls", {"nargs": "+", "metavar": "URL", "help": "paths or URLs; braces and patterns: {00..99}.tar, '*.tar'"}),
    ("-o --output", {"required": True, "metavar": "FILE", "help": "the index file, such as index.json"}),
)
def index(options: argparse.Namespace) -> Answer:
    """Count the samples of WebDataset tars, each read once to its end, and write the index file.

    example: paddle-shard index 'train-*.tar' -o index.json
    """
    entries, names = dict[str, ShardEntry](), expand(options.urls)
    check_base_names(names)
    check_output(options.output)
    if os.path.exists(options.output):  # a shell makes `-o first.tar second.tar` of `-o *.tar`
        with open(options.output, "rb") as there:
            if there.read(1) not in (b"", b"{"):
                raise ArgumentError(f"--output {options.output} is there already, and is no index. Name another file.")
    try:
        for number, name in enumerate(names, 1):
            entry = entries[base_name(name)] = count_file(name, tar_starts)
            text = f"[{number}/{len(names)}] {shown(name)}: {entry.samples} samples, {entry.size} bytes"
            print(text, file=sys.stderr, flush=True)
    except Exception as error:  # whatever a tar, a server or a store has to say
        text = f"{shown(name)}: {described(error)}\nNothing is written."
        return Answer(found={"error": text}, said=[text], failed=True)
    write_index(options.output, entries)
    counts = {name: entry.samples for name, entry in entries.items()}
    return Answer(found=counts, said=[f"{options.output}: {sum(counts.values())} samples in {len(counts)} shards"])
