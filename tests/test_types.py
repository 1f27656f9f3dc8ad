"""What a type checker says of a user's script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_shard
from tests.optional import needs

needs("mypy")
ROOT = Path(paddle_shard.__file__).parents[1]
SCRIPT = """\
import paddle_shard
from paddle_shard import Stream, shard_dataloader

loader = shard_dataloader([1], None, shardims="dp")
stream = Stream.of([1], splits=True)
for key in shard_dataloader(stream, None, shard_dims="dp").state_dict():
    key.upper()
"""


@pytest.mark.processes
@pytest.mark.long
def test_public_names_are_typed(tmp_path):
    script = tmp_path / "script.py"
    shown = "".join(
        f"reveal_type(paddle_shard.{name})\n" for name in paddle_shard.__all__
    )
    script.write_text(SCRIPT + shown)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        "--follow-imports=silent",
    ]
    command += ["--cache-dir", tmp_path / "cache", script]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )

    said = [
        line.partition("script.py:")[2] for line in done.stdout.splitlines()
    ]
    errors = [line for line in said if " error: " in line]
    assert len(errors) == 2, done.stdout + done.stderr
    assert errors[0].startswith(
        '4: error: Unexpected keyword argument "shardims" for "shard_dataloader"'
    )
    assert errors[1].startswith(
        '5: error: Unexpected keyword argument "splits" for "of" of "Stream"'
    )
    types = dict(
        zip(
            paddle_shard.__all__,
            [line for line in said if "Revealed type is" in line],
            strict=True,
        )
    )
    assert {
        name for name, line in types.items() if line.endswith('"Any"')
    } == set()
