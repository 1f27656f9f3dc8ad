"""Run the fault suite many times, each time with another seed; stop at the first red.

FAULT_ROUNDS=50 FAULT_SEED=0 python tests/faults/rounds.py [pytest's arguments]
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROUND_SECONDS = 900
"""A round that takes longer hangs."""


def main():
    rounds, first = (
        int(os.environ.get("FAULT_ROUNDS", "50")),
        int(os.environ.get("FAULT_SEED", "0")),
    )
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/faults",
        *sys.argv[1:],
    ]
    start = time.monotonic()
    for number, seed in enumerate(range(first, first + rounds), 1):
        began = time.monotonic()
        # The output goes to a file: a process that is left would keep a pipe open.
        log = root / "log" / f"faults-{seed}.txt"
        log.parent.mkdir(exist_ok=True)
        with open(log, "w") as output:
            paths = [str(root), os.environ.get("PYTHONPATH", "")]
            environment = {
                **os.environ,
                "FAULT_SEED": str(seed),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            }
            run = subprocess.Popen(
                command, cwd=root, env=environment, stdout=output, stderr=output
            )
            try:
                code = run.wait(ROUND_SECONDS)
            except subprocess.TimeoutExpired:
                code = f"none after {ROUND_SECONDS} s"
            finally:
                run.kill()
                run.wait()
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        print(
            f"round {number} of {rounds}, FAULT_SEED={seed}: {time.monotonic() - began:.0f} s {last}",
            flush=True,
        )
        if code:
            print(log.read_text(errors="replace")[-8000:])
            sys.exit(
                f"red in round {number} (exit code {code}): FAULT_SEED={seed} python -m pytest tests/faults"
            )
    print(f"{rounds} rounds green in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
