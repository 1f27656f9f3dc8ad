"""`paddle-shard`: which commands are there, and how is their answer shown?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from paddle_shard.cli import ask, change, doctor, index_shards, plan, show
from paddle_shard.cli.answer import Command
from paddle_shard.errors import PaddleShardError
from paddle_shard.version import VERSION

COMMANDS: dict[str, Command] = {
    **plan.COMMANDS,
    **ask.COMMANDS,
    **show.COMMANDS,
    **change.COMMANDS,
    **index_shards.COMMANDS,
    **doctor.COMMANDS,
}
"""All commands, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Of the command line; None: those of this process.

    Returns:
        0; 1 if there is a hazard or a verification has failed; 2 if the arguments, or a file, are not right.
    """
    parser = argparse.ArgumentParser(
        prog="paddle-shard",
        description="Answers from the plan of a run, or from its record (shard_dataloader(record=)).",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(
            name,
            help=command.does,
            description=command.does,
            epilog=f"example: paddle-shard {name} {command.example}",
        )
        of_command.add_argument("--json", action="store_true", help="print JSON")
        command.arguments(of_command)
    options = parser.parse_args(arguments)
    try:
        answer = COMMANDS[options.command].answer(options)
    except PaddleShardError as error:
        print(f"paddle-shard {options.command}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer.found, indent=2) if options.json else answer.text)
    return int(answer.failed)


if __name__ == "__main__":
    sys.exit(main())
