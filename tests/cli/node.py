"""The page's code in node: what the page would show, without a browser."""

import json
import shutil
import subprocess

import pytest

from paddle_shard.cli.page import FILES
from tests.deadlines import HANG

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")

DRIVER = """
const vm = require("vm"), fs = require("fs");
for (const file of process.argv.slice(1)) vm.runInThisContext(fs.readFileSync(file, "utf8"));
const answers = JSON.parse(fs.readFileSync(0, "utf8")).map(([view, expression]) => {
  globalThis.plan = makePlan(view, drawing.blake2b);
  return vm.runInThisContext(expression);
});
console.log(JSON.stringify(answers));
"""


def evaluated(asked):
    """Evaluate JavaScript on plans: a list of (view, expression) with `plan` in it, as one process."""
    files = [str(FILES / "drawing.js"), str(FILES / "order.js")]
    done = subprocess.run(
        ["node", "-e", DRIVER, *files],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
