"""Does the pretraining demo, run as a user runs it, show what it claims?"""

import re

import pytest

from tests.demos.test_resume import run_demo

pytestmark = pytest.mark.multiprocess


def test_pretrain_demo_killed_and_resumed_is_the_straight_run(
    tmp_path,
):
    code, text, left = run_demo([], tmp_path, "pretrain.py")

    print(text)
    assert code == 0, text
    assert left == []
    assert "parity: the losses of all 32 steps are the straight run's" in text
    assert (
        float(re.search(r"within ([0-9.]+) rows of its share", text)[1]) <= 1.5
    )
    assert re.search(r"english +\d+ rows of +\d+ tokens", text)
    assert "epoch 1: each of 128 draws of the mixture exactly once" in text
