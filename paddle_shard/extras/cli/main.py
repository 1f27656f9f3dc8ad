"""The command line of `paddle-shard`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from inspect import cleandoc

from paddle_shard.errors import PaddleShardError, described
from paddle_shard.extras.cli import doctor, index_shards, plan, show, verify
from paddle_shard.run.record_lines import read_record

COMMANDS = {
    "plan": plan.plan,
    "verify": verify.verify,
    "show": show.show,
    "index": index_shards.index,
    "doctor": doctor.doctor,
}
"""All commands, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Arguments of the command line; None: those of this process.

    Returns:
        0; 1 if a verification has failed or the machine has a problem; 2 if an argument or a file is wrong.
    """
    options = _parser().parse_args(arguments)
    try:
        answer = COMMANDS[options.command].answer(options)
    except KeyboardInterrupt:
        print(f"paddle-shard {options.command}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except (PaddleShardError, OSError) as error:
        print(f"paddle-shard {options.command}: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        record = getattr(options, "record", None)
        if record is None or not read_record(record)[1]:
            raise
        text = f"{record} is damaged ({described(error)}); paddle-shard verify shows where"
        print(f"paddle-shard {options.command}: {text}", file=sys.stderr)
        return 2
    try:
        print(
            json.dumps(answer.values, indent=2) if options.json else answer,
            flush=True,
        )
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(answer.failed)


def _parser() -> argparse.ArgumentParser:
    about = "Answers from the plan of a run, or from its record (shard_dataloader(record=))."
    parser = argparse.ArgumentParser(prog="paddle-shard", description=about)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND"
    )
    for name, command in COMMANDS.items():
        summary, _, example = cleandoc(command.answer.__doc__ or "").partition(
            "\n\n"
        )
        subparser = commands.add_parser(
            name, help=summary, description=summary, epilog=example
        )
        subparser.add_argument("--json", action="store_true", help="print JSON")
        for flags, keywords in command.arguments:
            subparser.add_argument(*flags, **keywords)
    return parser
