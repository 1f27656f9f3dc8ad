"""Does the elastic demo, run as a user runs it, show what it claims, and leave nothing behind?"""

import re
import shutil

import pytest

from tests.demos.test_resume import run_demo
from tests.optional import needs

needs("etcd3")
pytestmark = pytest.mark.multiprocess


def run_elastic(fault, seed, directory):
    """Run the demo; return what it printed. It fails unless each sample was trained once."""
    if not (shutil.which("etcd") or shutil.which("apt-get")):
        pytest.skip("there is no etcd, and no way to fetch Debian's package")
    code, text, left = run_demo(
        ["--fault", fault, "--seed", str(seed)], directory, "elastic.py"
    )
    if code and "no etcd: " in text:
        pytest.skip("there is no etcd, and Debian's package cannot be fetched")
    assert code == 0, text
    assert left == [], f"processes are left: {left}"
    assert list(directory.iterdir()) == []
    return text


def test_elastic_demo_trains_each_sample_once_despite_a_kill(tmp_path):
    text = run_elastic("node", 1, tmp_path)

    assert re.search(r"at step \d+, \d+ s: node of node [01]\n", text)
    assert int(re.search(r"the job was started (\d+) times", text)[1]) >= 2
    assert [*re.findall(r"epoch (\d): each sample exactly once", text)] == [
        "0",
        "1",
    ]
