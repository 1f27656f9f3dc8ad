"""Which room may import which, and what `import paddle_shard` loads."""

import ast
import importlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_shard

PACKAGE = Path(paddle_shard.__file__).parent
ROOMS = (
    "core",
    "plan",
    "data",
    "reading",
    "ranks",
    "placement",
    "run",
    "loader",
    "testing",
    "extras",
)
"""The rooms from the ground up: each imports only those before it. `ranks` and `placement` do not know each other."""
THIRD_PARTIES = {
    "core": {"numpy"},
    "plan": {"numpy"},
    "data": {
        "numpy",
        "paddle",
        "webdataset",
        "fsspec",
        "aiohttp",
        "pyarrow",
        "datasets",
        "torch",
        "typing_extensions",
    },
    "extras": {"numpy", "paddle", "ray", "prometheus_client"},
}
GROUND = {"errors", "version"}
"""Files beside the rooms that every room may import."""
FLOORS = {  # room -> what it may import of ours, and which third parties
    room: (
        GROUND | set(ROOMS[:floor]),
        THIRD_PARTIES.get(room, {"numpy", "paddle"}),
    )
    for floor, room in enumerate(ROOMS)
}
FLOORS["placement"][0].remove("ranks")
FLOORS["errors"] = (set(), set())
FLOORS["version"] = (set(), set())
FLOORS["__main__"] = ({"extras"}, set())
FLOORS["__init__"] = (GROUND | {"plan"}, set())


def test_extras_is_a_leaf():
    assert [room for room, (ours, _) in FLOORS.items() if "extras" in ours] == [
        "__main__"
    ]


def _checks_types(node):
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path):
    """Every module that a file imports, wherever in the file."""
    tree = ast.parse(path.read_text())
    if path.parent == PACKAGE:  # the public names, as type checkers see them
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and _checks_types(node))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "paddle_shard":
                yield from (
                    f"paddle_shard.{alias.name}" for alias in node.names
                )
            else:
                yield node.module


def circles(package):
    """Files that import each other in a circle, for types too, through however many others."""
    paths = {
        ".".join(
            (package.name, *path.relative_to(package).with_suffix("").parts)
        ).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    found = {}
    for name, path in paths.items():
        asked = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                asked |= {
                    name if name in paths else node.module for name in named
                }
        found[name] = asked & set(paths) - {name}
    # neither what imports nothing, nor what nobody imports, is in a circle
    while True:
        wanted = set().union(*found.values()) if found else set()
        kept = {
            name: asked & set(found)
            for name, asked in found.items()
            if name in wanted and asked & set(found)
        }
        if kept == found:
            return sorted(kept)
        found = kept


def test_imports_have_no_cycle():
    assert circles(PACKAGE) == []


@pytest.mark.parametrize("through", [["b"], ["b", "c"]])
def test_planted_circle_is_seen(through, tmp_path):
    package = tmp_path / "paddle_shard"
    package.mkdir()
    (package / "__init__.py").write_text("from paddle_shard.a import A\n")
    line = ["a", *through, "a"]
    for importer, imported in itertools.pairwise(line):
        (package / f"{importer}.py").write_text(
            f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from paddle_shard.{imported} import X\n"
        )
    (package / "leaf.py").write_text("from paddle_shard.a import A\n")

    assert circles(package) == [
        f"paddle_shard.{name}" for name in ("a", *through)
    ]


def violations(package):
    found = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room not in FLOORS:
            found.append(f"{path.relative_to(package)}: a room without a floor")
            continue
        ours, theirs = FLOORS[room]
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "paddle_shard":
                other = rest.split(".")[0]
                if other not in ours | {room}:
                    found.append(f"{path.relative_to(package)}: imports {name}")
            elif top not in sys.stdlib_module_names and not any(
                name == allowed or name.startswith(f"{allowed}.")
                for allowed in theirs
            ):
                found.append(f"{path.relative_to(package)}: imports {name}")
    return found


# of `ranks`: pure, so that it is simulated
AGREEMENT = (
    "decision",
    "progress",
    "protocol",
    "reports",
)


def impurities(package):
    """What the files of the agreement import besides each other, our errors, and modules without state."""
    mine = {f"paddle_shard.ranks.{name}" for name in AGREEMENT} | {
        "paddle_shard.errors"
    }
    stateless = {
        "__future__",
        "collections",
        "collections.abc",
        "dataclasses",
        "json",
        "logging",
        "typing",
    }
    return [
        f"{file}.py: imports {name}"
        for file in AGREEMENT
        for name in imports(package / "ranks" / f"{file}.py")
        if name not in mine | stateless
    ]


def test_agreement_is_pure():
    assert impurities(PACKAGE) == []


def test_planted_impurity_is_seen(tmp_path):
    (tmp_path / "ranks").mkdir()
    for file in AGREEMENT:
        (tmp_path / "ranks" / f"{file}.py").write_text(
            "import time\n" if file == "protocol" else "import json\n"
        )

    assert impurities(tmp_path) == ["protocol.py: imports time"]


def test_rooms_import_only_downwards():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plan/mesh.py", "import paddle"),
        ("plan/mesh.py", "from paddle_shard.loader import api"),
        ("core/trees.py", "def f():\n    import paddle.io"),
        ("reading/reader.py", "import torch"),
        ("placement/field.py", "from paddle_shard.ranks import passes"),
        ("core/collate.py", "import scipy"),
        ("newroom/file.py", "import os"),
    ],
)
def test_planted_violation_is_found(file, text, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)

    assert len(violations(tmp_path)) == 1


def loaded_by(package_dir):
    script = "import sys; sys.path.insert(0, sys.argv[1]); import paddle_shard, paddle_shard.testing\n"
    script += "print(' '.join(m for m in sys.modules if '.' not in m))"
    command = [sys.executable, "-c", script, str(package_dir)]
    import numpy

    env = {"PYTHONPATH": str(Path(numpy.__file__).parents[1])}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=env
    )
    return set(done.stdout.split()) - set(sys.stdlib_module_names)


def test_importing_it_loads_numpy_only():
    assert {m for m in loaded_by(PACKAGE.parent) if not m.startswith("_")} == {
        "paddle_shard",
        "numpy",
    }


def test_planted_import_of_paddle_is_seen(tmp_path):
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / "paddle_shard" / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    mesh = tmp_path / "paddle_shard" / "plan" / "mesh.py"
    mesh.write_text(mesh.read_text() + "\nimport paddle\n")
    (tmp_path / "paddle.py").touch()  # the real one takes seconds

    assert "paddle" in loaded_by(tmp_path)


def test_public_names_load_on_first_use_and_others_are_unknown():
    assert callable(paddle_shard.shard_dataloader)
    assert set(dir(paddle_shard)) >= {
        "ShardPlan",
        "MeshLayout",
        "shard_dataloader",
        "patch_paddle",
    }
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = paddle_shard.nonsense


@pytest.mark.parametrize("folder", ["demos", "benchmarks", "launch"])
def test_demos_import_names_that_exist(folder):
    """Some of them run in environments of their own only, and so not in each run of the tests."""
    missing = []
    for path in (PACKAGE.parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "paddle_shard"
            ):
                module = importlib.import_module(node.module)
                names = [
                    one.name
                    for one in node.names
                    if not hasattr(module, one.name)
                ]
                missing += [(path.name, node.module, name) for name in names]
    assert missing == []


@pytest.mark.parametrize("folder", ["demos", "launch"])
def test_demos_import_public_modules_only(folder):
    """Users copy them."""
    public = {"paddle_shard", "paddle_shard.testing"}
    public |= {f"paddle_shard.{name}" for name in paddle_shard.__all__}
    private = {
        name
        for path in (PACKAGE.parent / folder).rglob("*.py")
        for name in imports(path)
        if name.partition(".")[0] == "paddle_shard" and name not in public
    }
    assert private == set()
