"""A rank that asks `paddle-shard doctor`, with arguments of its own."""

import contextlib
import io
import json
import os
import signal
import sys

from paddle_shard.extras.cli import doctor
from paddle_shard.extras.cli.main import main
from paddle_shard.testing import report

rank = int(os.environ["PADDLE_TRAINER_ID"])
flags = json.loads(sys.argv[1])
does = flags.pop("does", {}).get(str(rank))
if does == "other version":
    doctor.VERSION = "0.0.7"
if does == "no network":
    doctor._ALL_REDUCE = "raise OSError('no network')"
if does == "hangs":
    doctor._ALL_REDUCE = "import time; time.sleep(1000)"
if does == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
with contextlib.redirect_stdout(io.StringIO()) as printed:
    code = main(["doctor", "--json", *flags["all"], *flags.get(str(rank), [])])
report({"code": code, **json.loads(printed.getvalue())})
