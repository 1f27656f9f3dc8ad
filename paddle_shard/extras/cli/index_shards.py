"""`paddle-shard index`: write the index file of WebDataset tars that `webdataset_source(index=)` reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paddle_shard.data.files.counts import ShardEntry, count_file
from paddle_shard.data.files.files import base_name, redacted
from paddle_shard.data.files.webdataset import (
    check_base_names,
    expand,
    tar_starts,
    write_index,
)
from paddle_shard.errors import ArgumentError, described
from paddle_shard.extras.cli.answer import Answer, argument, command


@command(
    argument(
        "urls",
        "paths or URLs; braces and patterns: {00..99}.tar, '*.tar'",
        nargs="+",
        metavar="URL",
    ),
    argument(
        "-o --output",
        "the index file, such as index.json",
        required=True,
        metavar="FILE",
    ),
)
def index(options: argparse.Namespace) -> Answer:
    """Count the samples of WebDataset tars, each read once to its end, and write the index file.

    example: paddle-shard index 'train-*.tar' -o index.json
    """
    names = expand(options.urls)
    check_base_names(names)
    output = Path(options.output)
    # A shell makes `-o first.tar second.tar` of `-o *.tar`.
    if output.suffix != ".json" or not output.parent.is_dir():
        raise ArgumentError(
            f"--output must be a .json file in a folder that exists, got {output}."
        )
    entries: dict[str, ShardEntry] = {}
    for number, name in enumerate(names, 1):
        try:
            entry = count_file(name, tar_starts)
        except Exception as error:  # whatever a tar or a server raises
            raise ArgumentError(
                f"{redacted(name)}: {described(error)}\nNothing is written."
            ) from error
        entries[base_name(name)] = entry
        text = f"[{number}/{len(names)}] {redacted(name)}: {entry.samples} samples, {entry.bytes} bytes"
        print(text, file=sys.stderr, flush=True)
    write_index(options.output, entries)
    counts = {name: entry.samples for name, entry in entries.items()}
    return Answer(
        values=counts,
        text=[
            f"{options.output}: {sum(counts.values())} samples in {len(counts)} shards"
        ],
    )
