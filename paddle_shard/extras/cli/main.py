"""`paddle-shard`: which commands are there, and how is their answer shown?"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from inspect import cleandoc

from paddle_shard.errors import PaddleShardError, described
from paddle_shard.extras.cli import ask, doctor, index_shards, plan, show
from paddle_shard.record.lines import read

_COMMANDS = plan.plan, ask.verify, ask.where, ask.batch, show.show, index_shards.index, doctor.doctor
COMMANDS = {one.answer.__name__: one for one in _COMMANDS}
"""All commands, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Of the command line; None: those of this process.

    Returns:
        0; 1 if there is a hazard or a verification has failed; 2 if the arguments, or a file, are not right.
    """
    does = "Answers from the plan of a run, or from its record (shard_dataloader(record=))."
    parser = argparse.ArgumentParser(prog="paddle-shard", description=does)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        does, _, example = cleandoc(command.answer.__doc__ or "").partition("\n\n")
        of_command = commands.add_parser(name, help=does, description=does, epilog=example)
        of_command.add_argument("--json", action="store_true", help="print JSON")
        for argument, how in command.arguments:
            of_command.add_argument(*argument.split(), **how)
    options = parser.parse_args(arguments)
    try:
        answer = COMMANDS[options.command].answer(options)
    except KeyboardInterrupt:
        print(f"paddle-shard {options.command}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        said, record = str(error), getattr(options, "record", None)
        if not isinstance(error, PaddleShardError | OSError):  # an OSError: a file cannot be written
            if record is None or not read(record)[1]:
                raise
            said = f"{record} is damaged ({described(error)}); paddle-shard verify tells where"
        print(f"paddle-shard {options.command}: {said}", file=sys.stderr)
        return 2
    try:
        print(json.dumps(answer.found, indent=2) if options.json else answer, flush=True)
    except BrokenPipeError:  # whoever reads it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(answer.failed)
