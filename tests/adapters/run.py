"""Run the tests and the demo of each library in its own virtual environment, and print one line for each.

    make test-adapters
    make test-adapters ADAPTERS="mds dali"

What a library's run prints is in log/adapters/<library>.log; its end is shown where it fails.
"""

import subprocess
import sys
import time
from os import environ
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "torchdata": ["torchdata", "torch"],
    "mds": ["mosaicml-streaming", "torch"],
    "dali": ["nvidia-dali-cuda130"],
    "ffcv": ["ffcv", "torch"],
    "ray": ["ray"],
    "visualdl": ["visualdl"],
}
"""Library -> the distributions whose versions are told, beside Paddle's and numpy's."""
DEMOS = {"ray": "demos/ray_readers.py"}
DEADLINE = 900.0
VERSIONS = "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"


def run(library):
    """Run a library's tests and demo and return whether all went well."""
    python = ROOT / f".venv-{library}/bin/python"
    logs = ROOT / "log/adapters" / library
    logs.mkdir(parents=True, exist_ok=True)
    results = logs / "results.xml"
    results.unlink(missing_ok=True)
    tests = [
        python,
        "-m",
        "pytest",
        f"tests/adapters/{library}",
        f"--junit-xml={results}",
    ]
    demo = [
        python,
        "launch/local.py",
        "--processes",
        "2",
        "--log-dir",
        logs / "ranks",
    ]
    demo += [DEMOS.get(library, f"demos/adapters/{library}_digits.py")]
    named = [*PACKAGES[library], "paddlepaddle", "numpy"]
    versions = subprocess.run(
        [python, "-c", VERSIONS, *named],
        text=True,
        capture_output=True,
        check=True,
    ).stdout.strip()
    seconds, codes = [], []
    with open(ROOT / f"log/adapters/{library}.log", "wb") as log:
        for command in (tests, demo):
            began = time.monotonic()
            env = {**environ, "PADDLE_SHARD_ADAPTER": library}
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
                timeout=DEADLINE,
            )
            seconds.append(time.monotonic() - began)
            codes.append(done.returncode)
    suite = (
        {}
        if not results.exists()
        else ElementTree.parse(results).getroot()[0].attrib
    )
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = int(suite.get("tests", 0)) - failed - int(suite.get("skipped", 0))
    fine = codes == [0, 0] and passed > 0
    print(
        f"{library}: {versions}, Python {'.'.join(map(str, sys.version_info[:2]))}: {passed} tests passed, {failed} "
        f"failed, {seconds[0]:.0f} s; demo {'ran' if codes[1] == 0 else 'FAILED'}, {seconds[1]:.0f} s",
        flush=True,
    )
    if not fine:
        print(f"--- the end of log/adapters/{library}.log ---", file=sys.stderr)
        print(
            (ROOT / f"log/adapters/{library}.log").read_text(errors="replace")[
                -6000:
            ],
            file=sys.stderr,
        )
    return fine


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PACKAGES)
    if unknown := set(chosen) - set(PACKAGES):
        sys.exit(f"unknown {sorted(unknown)}; there are {sorted(PACKAGES)}")
    fine = [run(library) for library in chosen]
    sys.exit(not all(fine))
