"""Writes `orders.json` and `states.json`, which hold for this and every later version. It overwrites nothing.

    python -m tests.golden.make

A new kind of order is a new case in `cases.py`: its lines are added, and those that are there stay as they are. States
are kept for each released version, in a file of its own.
"""

import json
import tempfile
from pathlib import Path

from paddle_shard.version import VERSION
from tests.golden.cases import large, orders, states

HERE = Path(__file__).parent


def add(path, found):
    """Add what the file does not have yet, a line for each case."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    both = kept | {
        name: value for name, value in found.items() if name not in kept
    }
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
        for name, value in both.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(
        f"{path.name}: {len(both) - len(kept)} cases are new, {len(kept)} stay as they are"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        add(
            HERE / "orders.json",
            json.loads(json.dumps(orders(folder) | large())),
        )
        add(
            HERE / f"states-{VERSION}.json",
            json.loads(json.dumps(states(folder))),
        )
