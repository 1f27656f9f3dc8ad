"""SECURITY.md says what is unpickled, and nothing else is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNPICKLED = {
    "reading/serialization.py": "worker processes, and ranks of the host",
    "extras/ray_readers.py": "Ray's own channels",
    "extras/checkpoints.py": "`paddle.load`",
    "extras/checkpoint_parts.py": "`paddle.load`",
    "extras/trainers/callback.py": "`paddle.load`, of a file that the trainer loads, too",
    "data/shared_list.py": "the list's own memory",
}


def test_pickle_is_read_only_where_the_threat_model_says():
    asks = re.compile(
        r"pickle\.loads?\(|Unpickler|paddle\.load\(|allow_pickle=True|marshal|shelve|\b(eval|exec)\("
    )
    files = sorted((ROOT / "paddle_shard").rglob("*.py"))
    found = {
        str(file.relative_to(ROOT / "paddle_shard"))
        for file in files
        if asks.search(file.read_text())
    }

    assert found <= set(UNPICKLED)
    assert {file for file in UNPICKLED if file in found} == set(UNPICKLED)
