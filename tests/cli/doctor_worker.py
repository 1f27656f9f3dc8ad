"""A rank that asks `paddle-shard doctor`, with arguments of its own."""

import contextlib
import io
import json
import os
import signal
import sys

from paddle_shard.extras.cli.main import main
from paddle_shard.testing import report

rank = int(os.environ["PADDLE_TRAINER_ID"])
flags = json.loads(sys.argv[1])
does = flags.pop("does", {}).get(str(rank))
if does == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
with contextlib.redirect_stdout(io.StringIO()) as printed:
    code = main(["doctor", "--json", *flags["all"], *flags.get(str(rank), [])])
report({"code": code, **json.loads(printed.getvalue())})
