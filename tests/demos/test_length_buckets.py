"""The recipe of demos/length_buckets.py: batches of similar lengths by a batch sampler of the user."""

import runpy
from itertools import chain, islice
from pathlib import Path

import numpy as np
import paddle
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard.testing import on_each_rank
from tests.helpers import Made, local, mesh, sharded

ROOT = Path(__file__).parents[2]
DEMO = runpy.run_path(str(ROOT / "demos/length_buckets.py"), run_name="demo")
LengthBuckets = DEMO["LengthBuckets"]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    max_tokens=st.integers(1, 100),
    multiple_of=st.integers(1, 4),
    window=st.integers(1, 20),
)
def test_length_buckets_draw_each_sample_once(lengths, max_tokens, multiple_of, window):
    sampler = LengthBuckets(lengths, max_tokens, multiple_of, window)
    batches = list(sampler)

    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(len(batch) % multiple_of == 0 for batch in batches[:-1])
    for batch in batches:
        longest = max(lengths[sample] for sample in batch)
        assert longest * len(batch) <= max_tokens or len(batch) <= multiple_of
    assert list(sampler) == batches
    sampler.set_epoch(1)
    assert sorted(np.concatenate(list(sampler)).tolist()) == list(range(len(lengths)))


def test_length_buckets_resume_on_another_mesh():
    lengths = np.random.default_rng(0).integers(1, 99, 100)

    def make(num_ranks):
        sampler = LengthBuckets(lengths, 400, multiple_of=4, window=8)
        given = paddle.io.DataLoader(Made(length=100), batch_sampler=sampler)
        return sharded(given, mesh(list(range(num_ranks))))

    def run(num_ranks, state, most):
        loader = make(num_ranks)
        if state is not None:
            loader.load_state_dict(state)
        with iter(loader) as batches:
            rows = [local(batch) for batch in islice(batches, most)]
            return rows, loader.state_dict()

    def together(num_ranks, state=None, most=None):
        ranks = on_each_rank(range(num_ranks), lambda: run(num_ranks, state, most))
        steps = zip(*(ranks[rank][0] for rank in range(num_ranks)), strict=True)
        return [[*chain(*step)] for step in steps], ranks[0][1]

    whole, _ = together(1)
    first, state = together(2, most=7)
    rest, _ = together(4, state)
    assert first + rest == whole


def test_length_buckets_of_the_page_are_those_of_the_demo():
    begin = "class LengthBuckets:"
    end = "yield from batches + short\n"
    texts = [
        (ROOT / name).read_text().partition(begin)[2].partition(end)[0]
        for name in ("docs/lengths.md", "demos/length_buckets.py")
    ]
    assert texts[0] == texts[1] != ""


def test_length_buckets_demo_runs():
    DEMO["main"]()
