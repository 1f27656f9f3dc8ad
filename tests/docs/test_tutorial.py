"""The tutorial: its script is killed, resumes on other ranks, and its record is verified, with the printed output."""

import contextlib
import io
import re
import signal

import pytest

from paddle_shard.extras.cli.main import main
from tests.deadlines import HANG
from tests.docs.test_docs import ROOT
from tests.jobs import preload, start_ranks

PAGE = (ROOT / "docs/tutorial.md").read_text()


def blocks(language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL
    )


def run_script(script, num_ranks, folder, env):
    """Return the exit codes of the ranks, and what the first one printed."""
    with start_ranks(script, num_ranks, folder, env=env, timeout=HANG) as job:
        codes = job.wait(range(num_ranks), HANG)
    return codes, (folder / "workerlog.0").read_text()


@pytest.mark.multiprocess
def test_tutorial_is_killed_resumes_and_verifies(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    preload("sklearn.datasets", "sklearn.model_selection")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("\n\n".join(blocks("python")))
    killed, resumed, verified = blocks("text")
    [kill_at] = re.findall(r"KILL_AT=(\d+) python", PAGE)
    num_ranks = [
        int(number) for number in re.findall(r"_node (\d+) train", PAGE)
    ]

    codes, printed = run_script(
        script, num_ranks[0], tmp_path / "killed", {"KILL_AT": kill_at}
    )
    assert -signal.SIGKILL in codes.values(), printed
    assert 0 not in codes.values(), printed
    assert killed in printed

    codes, printed = run_script(script, num_ranks[1], tmp_path / "resumed", {})
    assert set(codes.values()) == {0}, printed
    assert resumed in printed
    [accuracy] = re.findall(r"accuracy (\S+)% of 360 images", printed)
    assert float(accuracy) > 95

    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        assert main(["verify", "run.jsonl"]) == 0
    assert verified in answer.getvalue()
    for epoch in range(6):
        assert (
            f"epoch {epoch}: each of 1437 samples exactly once"
            in answer.getvalue()
        )
