"""The contract with `dist.to_static`, in one process: what it may ask of the loader, and what it gets."""

import collections
import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.auto_parallel.api import (
    ShardDataloader as PaddleShardDataloader,
)
from paddle.io import DataLoader

import paddle_shard
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.reading.executor import InlineExecutor
from tests import helpers
from tests.deadlines import HANG
from tests.helpers import ONE, Made
from tests.helpers import local as rows

MESH = dist.ProcessMesh([0], dim_names=["dp"])


@pytest.fixture(autouse=True)
def _dynamic_again():
    """A failed `train()` leaves the process in static mode, and a program is remembered."""
    yield
    paddle.disable_static()
    InlineExecutor.has_static_program = False


class Points(paddle.io.Dataset):
    def __init__(self, make, length=8):
        self.make, self.length, self.reads = make, length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        return self.make(
            np.full(4, index, "float32"), np.array([index], "float32")
        )


def as_list(x, y):
    return x, y


def sharded(make=as_list, length=8, workers=0, **options):
    given = paddle.io.DataLoader(
        Points(make, length), batch_size=4, shuffle=True, num_workers=workers
    )
    return paddle_shard.shard_dataloader(
        given, MESH, shard_dims="dp", **options
    )


class Sum(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = paddle.nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x)


def static_model(loader):
    layer = Sum()
    dist.shard_layer(layer, MESH)
    optimizer = paddle.optimizer.SGD(
        learning_rate=0.0, parameters=layer.parameters()
    )
    return layer, dist.to_static(layer, loader, paddle.nn.MSELoss(), optimizer)


@pytest.mark.parametrize("workers", [0, 2])
def test_to_static_describes_inputs_without_moving_the_order(workers):
    loader = sharded(workers=workers)
    loader.set_epoch(2)
    expected = [x._local_value().numpy().tolist() for x, _ in loader]
    loader.set_epoch(2)

    layer, model = static_model(loader)
    weight, bias = layer.linear.weight.numpy(), layer.linear.bias.numpy()
    model.train()

    assert loader.epoch == 2
    dispatched, losses = [], []
    for x, y in loader:
        dispatched.append(x._local_value().numpy().tolist())
        local_x, local_y = x._local_value().numpy(), y._local_value().numpy()
        losses.append(
            (
                float(model(x, y)),
                np.mean((local_x @ weight + bias - local_y) ** 2),
            )
        )
    assert dispatched == expected
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)


def test_describing_reads_one_batch():
    loader = sharded()

    static_model(loader)

    # and two samples twice, for the data's identity
    assert loader.dataset.reads == 4 + 4


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: {"x": x, "label": y},
        collections.namedtuple("Sample", "x label"),
        lambda x, y: collections.OrderedDict(x=x, label=y),
    ],
    ids=["dict", "namedtuple", "OrderedDict"],
)
def test_to_static_describes_every_structure(make):
    loader = sharded(make)

    _, model = static_model(loader)

    assert [list(spec.shape) for spec in model._engine._inputs_spec] == [[4, 4]]
    assert [list(spec.shape) for spec in model._engine._labels_spec] == [[4, 1]]


def test_class_is_one_of_paddles():
    assert isinstance(sharded(), PaddleShardDataloader)
    assert PaddleShardDataloader is dist.auto_parallel.api.ShardDataloader


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x, y: x, "this loader's are Tensor of Tensor"),
        (lambda x, y: [x], "this loader's are list of Tensor"),
        (lambda x, y: [x, "name", y], "this loader's are list of Tensor, str"),
    ],
)
def test_to_static_refuses_what_a_model_cannot_take(make, text):
    with pytest.raises(BatchStructureError, match=text):
        static_model(sharded(make))


def test_to_static_rejects_a_shorter_last_batch():
    with pytest.raises(
        ArgumentError, match="tail='pad': .* 2 rows and the others 4"
    ):
        static_model(sharded(length=6))
    for tail in ("fill", "drop"):
        static_model(sharded(length=6, tail=tail))


def test_bare_next_of_a_call_is_the_first_batch_of_a_pass():
    loader = sharded()
    called = loader()

    first = [next(called)[0]._local_value().numpy().tolist() for _ in range(2)]
    with pytest.raises(StopIteration):
        next(called)

    loader.set_epoch(0)
    assert first == [x._local_value().numpy().tolist() for x, _ in called]


def local(batch):
    return batch[0]._local_value().numpy().tolist()


def test_calling_a_loader_returns_it():
    loader = sharded(length=8)
    called = loader()

    assert isinstance(called, PaddleShardDataloader)
    assert called is loader
    called._input_keys = ["x"]  # as a trainer does
    assert loader._input_keys == ["x"]
    loader._input_keys = None

    next(called), next(called)
    assert called.state_dict() == loader.state_dict()
    assert len(list(called)) == len(called) == len(loader) == 2
    assert (called.epoch, loader.epoch) == (1, 1)

    first = [local(next(loader()))]
    assert first == [local(next(loader()))], "a call begins again"
    with pytest.raises(StopIteration):
        for _ in range(3):
            next(loader)
    next(loader)  # of a fresh pass


@pytest.mark.parametrize("loads", [0, 1, 2])
def test_to_static_look_at_a_stream_serves_a_later_load(loads):
    """The pass that was looked at is handed out: it is one of the run, whenever the position was loaded."""

    def made():
        given = paddle.io.DataLoader(
            paddle_shard.Stream.of(list(range(8))), batch_size=2
        )
        return paddle_shard.shard_dataloader(given, ONE, shard_dims="dp")

    state, loader = made().state_dict(), made()
    if loads > 1:
        loader.load_state_dict(state)
    described = loader._first_batch()
    if loads:
        loader.load_state_dict(state)
    batches = iter(loader)
    first = next(batches)

    assert rows(described) == rows(first) == [0, 1]
    assert loader.state_dict()["samples"] == 2
    assert [rows(batch) for batch in batches] == [[2, 3], [4, 5], [6, 7]]
    assert (loader.epoch, loader.state_dict()["epoch"]) == (1, 1)
    assert len(list(loader)) == 4, "the next epoch begins at its beginning"


@pytest.mark.parametrize("makes", [paddle.to_tensor, np.array])
def test_to_static_tensors_are_made_on_the_training_thread(makes, monkeypatch):
    """`DistModel` switches the process to static mode: a thread that makes a tensor then adds to the program."""
    threads = []

    def collate(samples):
        threads.append(threading.current_thread().name)
        return makes(np.stack(samples))

    def read():
        threads.clear()
        given = DataLoader(Made(length=40), batch_size=4, collate_fn=collate)
        for _ in helpers.sharded(given, ONE):
            # a loop that only takes batches reads them by itself
            time.sleep(2e-3)
        assert len(threads) >= 10
        return {*threads} == {"MainThread"}

    assert not read()
    monkeypatch.setattr(InlineExecutor, "has_static_program", True)
    assert read() == (makes is paddle.to_tensor)


@pytest.mark.parametrize("workers", [0, 1])
def test_to_static_look_at_a_closed_loader_loses_nothing(workers):
    given = DataLoader(Made(length=12), batch_size=4, num_workers=workers)
    loader = helpers.sharded(given, ONE)
    loader._first_batch()
    loader.close()
    found = []
    loop = threading.Thread(target=lambda: found.extend(loader), daemon=True)
    loop.start()
    loop.join(HANG)
    assert helpers.locals_of(found) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
