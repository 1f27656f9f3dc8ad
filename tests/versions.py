"""Run all tests in some environments, one after the other, and keep what came out in the table of docs/guarantees.md.

    python tests/versions.py .venv-oldest .venv-python3.10 -- -n 4

What follows `--` is pytest's. `make test-oldest` and `make test-pythons` call it; commit what has changed.
"""

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guarantees.md"
HEAD = "| Python | Paddle | numpy | tests that passed | on |\n|---|---|---|---|---|\n"
FACTS = """
import importlib.metadata, json, platform
print(json.dumps([platform.python_version(), *map(importlib.metadata.version, ("paddlepaddle", "numpy"))]))
"""


def tested(environment, options):
    """Run the tests, and return (Python, Paddle, numpy, tests that passed), or None if one has failed."""
    python, results = (
        ROOT / environment / "bin/python",
        ROOT / f"log/versions/{Path(environment).name}.xml",
    )
    results.parent.mkdir(parents=True, exist_ok=True)
    print(f"== {environment}", flush=True)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", *options, f"--junit-xml={results}"],
        cwd=ROOT,
    )
    if done.returncode:
        return None
    suite = ElementTree.parse(results).getroot()[0].attrib
    facts = subprocess.run(
        [python, "-c", FACTS], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return (*json.loads(facts), int(suite["tests"]) - int(suite["skipped"]))


def put(page, row, on):
    """Return the text of a page whose table has a row, in the place of an older one of these versions.

    >>> page = HEAD + "| 3.10.1 | 3.3.1 | 2.1 | 5 | 2026-01-01 |\\nMore"
    >>> page = put(page, ("3.10.2", "3.3.1", "2.2", 6), "2026-02-01")
    >>> print(put(page, ("3.9.1", "3.0.0", "1.26", 7), "2026-02-02"))
    | Python | Paddle | numpy | tests that passed | on |
    |---|---|---|---|---|
    | 3.9.1 | 3.0.0 | 1.26 | 7 | 2026-02-02 |
    | 3.10.2 | 3.3.1 | 2.2 | 6 | 2026-02-01 |
    More
    """
    head, _, rest = page.partition(HEAD)
    rows = re.match(r"(?:\|.*\n)*", rest)[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rows.splitlines()
    ]
    minor = {
        (one[0].rpartition(".")[0], one[1]): one
        for one in [*cells, [*map(str, row), on]]
    }
    lines = sorted(
        minor.values(),
        key=lambda one: [
            [int(part) for part in text.split(".")] for text in one[:2]
        ],
    )
    return (
        head
        + HEAD
        + "".join(f"| {' | '.join(one)} |\n" for one in lines)
        + rest[len(rows) :]
    )


def main(environments, options):
    failed = []
    for environment in environments:
        row = tested(environment, options)
        if row is None:
            failed.append(environment)
        else:
            PAGE.write_text(
                put(PAGE.read_text(encoding="utf-8"), row, str(date.today())),
                encoding="utf-8",
            )
    return f"failed: {' '.join(failed)}" if failed else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    sys.exit(main(given[:at], given[at + 1 :]))
