"""Builds the sdist and the wheel, and tries each as a user has it: in an empty environment, outside of this tree.

    make dist

The wheel is tried with its extra `cpu`, and with the README's first example; the sdist as it is, with numpy alone.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
NUMPY_ONLY = """
import sys
import paddle_shard
plan = paddle_shard.ShardPlan(num_samples=10, batch_size=4, num_data_ranks=2)
assert plan.indices(epoch=0, step=0, data_rank=1).tolist() == [2, 3]
assert "paddle" not in sys.modules
print("a plan with numpy alone:", plan)
"""
PLAN = "plan --samples 100 --batch-size 4 --mesh dp=2 --data-axes dp"


def run(*command, cwd=ROOT):
    print(
        "$",
        *(str(word).replace(str(ROOT), ".") for word in command),
        flush=True,
    )
    subprocess.run(
        [str(word) for word in command], cwd=cwd, check=True, timeout=900
    )


def example():
    """Return the README's first example, on a mesh of one process."""
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    mesh = "[[0, 1], [2, 3]]"
    assert code.count(mesh) == 1, (
        f"the README's first example has no mesh {mesh}"
    )
    return code.replace(mesh, "[[0]]") + "print(loader)\n"


def contents():
    """Say what is missing in what was built."""
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    packaged = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "paddle_shard").rglob("*.py")
    }
    packaged.add("paddle_shard/py.typed")
    assert packaged <= inside, sorted(packaged - inside)
    strays = {
        name
        for name in inside
        if not name.startswith(("paddle_shard/", "paddle_shard-"))
    }
    assert not strays, strays
    assert any(
        name.endswith("/LICENSE") and "dist-info" in name for name in inside
    )
    tracked = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    ).stdout.split()
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    hidden = {name for name in tracked if name.startswith(".")}
    assert set(tracked) - hidden <= there, sorted(set(tracked) - hidden - there)
    return wheel, sdist


def tried(built, extra, code):
    """Install what was built, in an empty environment, and run a program outside of this tree."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"== {built.name}{extra}", flush=True)
        venv.create(Path(folder, "env"), with_pip=True)
        python = Path(folder, "env/bin/python")
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            f"{built}{extra}",
            cwd=folder,
        )
        run(python, "-m", "pip", "check", cwd=folder)
        Path(folder, "example.py").write_text(code)
        run(python, "-W", "ignore", "example.py", cwd=folder)
        run(Path(folder, "env/bin/paddle-shard"), *PLAN.split(), cwd=folder)


def main():
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--quiet", "--outdir", DIST, ROOT)
    wheel, sdist = contents()
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    tried(sdist, "", NUMPY_ONLY)
    tried(wheel, "[cpu]", NUMPY_ONLY + example())
    print(f"good: {wheel.name} and {sdist.name}")


if __name__ == "__main__":
    main()
