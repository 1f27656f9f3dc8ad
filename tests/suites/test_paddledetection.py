"""What becomes of a collate function like PaddleDetection's on one rank; see `test_suites.py` for two."""

from paddle.io import DataLoader

from tests.helpers import sharded
from tests.suites.paddledetection import BatchCompose, Boxes


def test_collate_function_is_called_once_a_batch():
    collate, local = BatchCompose(lists=True), [[], [0, 1]]
    given = DataLoader(Boxes(sizes=(5,)), batch_size=4, collate_fn=collate)

    assert len(list(sharded(given, dense_tensor_idx=local))) == 4
    assert collate.calls == 4
