"""A state in a tensor of one size, beside a distributed checkpoint."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard.errors import StateError
from tests.run.runs import (
    content,
    make,
    rest,
)


def state_in_mid_epoch():
    loader = make()
    batches = iter(loader)
    next(batches)
    next(batches)
    loader.certificate()
    return loader.state_dict()


def test_state_tensor_has_one_size():
    state, fresh = state_in_mid_epoch(), make(length=10**6).state_dict()
    tensors = [paddle_shard.state_to_tensor(one) for one in (state, fresh)]

    assert [(list(tensor.shape), tensor.dtype) for tensor in tensors] == [
        ([4096], paddle.uint8)
    ] * 2
    assert [paddle_shard.state_from_tensor(tensor) for tensor in tensors] == [
        state,
        fresh,
    ]
    again = make()
    again.load_state_dict(paddle_shard.state_from_tensor(tensors[0]))
    assert again.state_dict() == state


def test_state_tensor_resumes_from_a_distributed_checkpoint(
    tmp_path, monkeypatch
):
    straight, layer = rest(make()), paddle.nn.Linear(2, 2)
    first = make()
    batches = iter(first)
    got = [content(next(batches)) for _ in range(2)]
    saved = {
        **layer.state_dict(),
        "data": paddle_shard.state_to_tensor(first.state_dict()),
    }
    dist.save_state_dict(saved, str(tmp_path))

    # Paddle 3.0 moves what it loads to a GPU even on one process; on the CPU wheel that ends the process.
    monkeypatch.setattr(paddle.Tensor, "cuda", lambda self: self)
    again = make()
    found = {
        **paddle.nn.Linear(2, 2).state_dict(),
        "data": paddle_shard.state_to_tensor(again.state_dict()),
    }
    dist.load_state_dict(found, str(tmp_path))
    again.load_state_dict(paddle_shard.state_from_tensor(found["data"]))

    np.testing.assert_array_equal(found["weight"].numpy(), layer.weight.numpy())
    assert got + rest(again) == straight


def test_state_tensor_with_any_other_byte_is_rejected():
    state = state_in_mid_epoch()
    whole = paddle_shard.state_to_tensor(state).numpy()
    loader = make()

    def load(content):
        tensor = paddle.to_tensor(content)
        loader.load_state_dict(paddle_shard.state_from_tensor(tensor))

    # What follows the text is no part of the state.
    num_bytes = len(whole.tobytes().rstrip())
    for at in range(num_bytes):
        damaged = whole.copy()
        damaged[at] ^= 1 << at % 8
        with pytest.raises(StateError, match="damaged|state must be|version"):
            load(damaged)
    for upto in range(0, num_bytes, 61):
        with pytest.raises(
            StateError, match="damaged, or holds no loader's state"
        ):
            load(whole[:upto])
        cut = np.concatenate(
            [whole[:upto], np.zeros(len(whole) - upto, "uint8")]
        )
        with pytest.raises(
            StateError, match="damaged, or holds no loader's state"
        ):
            load(cut)
    with pytest.raises(StateError, match="damaged, or holds no loader's state"):
        load(whole.astype("float32"))
    load(whole)
    assert loader.state_dict() == state


@pytest.mark.parametrize(
    ("sampler_state", "text"),
    [
        (
            {"order": list(range(2000))},
            r"state is 9\d\d\d bytes long as JSON, but a tensor holds 4096",
        ),
        (
            {"at": (1, 2)},
            r"state is not the same after JSON \(tuples become lists",
        ),
        ({1: 2}, "state is not the same after JSON"),
        ({"at": np.int64(3)}, r"state cannot be written as JSON \(.*int64"),
        ({"at": float("nan")}, r"state cannot be written as JSON"),
    ],
)
def test_state_tensor_cannot_hold_this_sampler(sampler_state, text):
    state = {**make().state_dict(), "sampler": sampler_state}

    with pytest.raises(
        StateError,
        match=text + r"(?s:.*)paddle.save\(loader.state_dict\(\), path\)",
    ):
        paddle_shard.state_to_tensor(state)
