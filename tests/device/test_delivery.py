"""Every kind of batch comes to the device, with the bytes that it has on the CPU."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from tests.device.devices import DEVICE, OTHER, needs_two, place

ROWS = np.random.default_rng(0).normal(size=(45, 8)).astype("float32")
pytestmark = pytest.mark.gpu
MESH = dist.ProcessMesh([0], dim_names=["dp"])
CPU, PLACE = paddle.CPUPlace(), place()


class Data(paddle.io.Dataset):
    def __getitem__(self, index):
        return ROWS[index], index

    def __len__(self):
        return len(ROWS)


class Nested(Data):
    def __getitem__(self, index):
        return {
            "x": ROWS[index],
            "more": {"y": index, "z": [ROWS[index, :2]]},
            "name": f"sample {index}",
        }


class HostTensors(Data):
    def __getitem__(self, index):
        return paddle.to_tensor(ROWS[index], place=CPU), index


class Drawing(Data):
    def __getitem__(self, index):
        return ROWS[index] * np.random.rand(), index


class AtOnce(Data):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Foreign:
    """A tensor of another library, in host memory."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **more):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __len__(self):
        return len(self.array)


def stacked(samples):
    return [
        np.stack([x for x, _ in samples]),
        np.array([y for _, y in samples]),
    ]


def host_tensors(samples):
    return [paddle.to_tensor(array, place=CPU) for array in stacked(samples)]


def device_tensors(samples):
    return [paddle.to_tensor(array) for array in stacked(samples)]


def foreign_tensors(samples):
    return [Foreign(array) for array in stacked(samples)]


def samples():
    return ((ROWS[index], index) for index in range(len(ROWS)))


def given(data=None, **more):
    return paddle.io.DataLoader(
        Data() if data is None else data, batch_size=8, **more
    )


KINDS = {
    "plain": lambda **how: (given(**how), {}),
    "shuffled": lambda **how: (given(shuffle=True, **how), {"seed": 3}),
    "prefetch 0": lambda **how: (given(**how), {"prefetch": 0}),
    "prefetch 2": lambda **how: (given(**how), {"prefetch": 2}),
    "workers": lambda **how: (given(num_workers=2, **how), {}),
    "workers, prefetch 2": lambda **how: (
        given(num_workers=2, **how),
        {"prefetch": 2},
    ),
    "unbuffered": lambda **how: (given(use_buffer_reader=False, **how), {}),
    "nested": lambda **how: (given(Nested(), **how), {}),
    "host tensors": lambda **how: (given(HostTensors(), **how), {}),
    "collated host tensors": lambda **how: (
        given(collate_fn=host_tensors, **how),
        {},
    ),
    "collated foreign tensors": lambda **how: (
        given(collate_fn=foreign_tensors, **how),
        {},
    ),
    "collated foreign tensors, workers": lambda **how: (
        given(collate_fn=foreign_tensors, num_workers=2, **how),
        {},
    ),
    "random": lambda **how: (given(Drawing(), **how), {}),
    "at once": lambda **how: (given(AtOnce(), **how), {}),
    "fill": lambda **how: (given(**how), {"tail": "fill"}),
    "verify": lambda **how: (given(**how), {"verify": 1}),
    "stream": lambda **how: (given(Stream.of(samples), **how), {}),
    "stream, workers": lambda **how: (
        given(Stream.of(samples), num_workers=2, **how),
        {},
    ),
    "whole batches": lambda **how: (
        paddle.io.DataLoader(
            Stream.of(lambda: (ROWS[i : i + 4] for i in range(0, 40, 4))),
            batch_size=None,
            **how,
        ),
        {},
    ),
}


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def shown(leaf):
    return (
        leaf._local_value().numpy().tolist()
        if isinstance(leaf, paddle.Tensor)
        else leaf
    )


def passes(kind, places):
    dataloader, options = KINDS[kind](places=places)
    loader = paddle_shard.shard_dataloader(
        dataloader, MESH, shard_dims="dp", **options
    )
    return [[leaves(batch) for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_device_batches_of_all_kinds_have_the_bytes_of_the_cpu(kind):
    on_device, on_cpu = passes(kind, [PLACE]), passes(kind, [CPU])

    tensors = [
        t
        for batches in on_device
        for batch in batches
        for t in batch
        if isinstance(t, paddle.Tensor)
    ]
    assert {str(tensor.place) for tensor in tensors} == {str(PLACE)}
    assert [
        [list(map(shown, batch)) for batch in one] for one in on_device
    ] == [[list(map(shown, batch)) for batch in one] for one in on_cpu]


@pytest.fixture
def with_views():
    """The stand-in runs without views, as it lacks the kernels for those on a device."""
    before = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    yield
    paddle.set_flags(before)


def views(samples):
    """Tensors in host memory whose numbers do not lie in it in order, or begin in the middle."""
    rows = paddle.to_tensor(np.stack([x for x, _ in samples]), place=CPU)
    found = [
        rows.reshape([-1, 2, 4]).transpose([0, 2, 1]),
        rows[:, 2:6],
        paddle.concat([rows[:1], rows])[1:],
    ]
    assert [one.is_contiguous() for one in found] == [False, False, True]
    return found


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"prefetch": 2}], ids=str
)
def test_views_of_tensors_in_host_memory_come_with_their_numbers(
    options, with_views
):
    loader = paddle_shard.shard_dataloader(
        given(collate_fn=views, places=[PLACE]),
        MESH,
        shard_dims="dp",
        **options,
    )

    turned, cut, late = (
        np.concatenate(found)
        for found in zip(*map(arrays, loader), strict=True)
    )

    assert turned.tolist() == ROWS.reshape(-1, 2, 4).transpose(0, 2, 1).tolist()
    assert cut.tolist() == ROWS[:, 2:6].tolist()
    assert late.tolist() == ROWS.tolist()


def arrays(batch):
    return [leaf._local_value().numpy() for leaf in batch]


def nothing_in_a_row(samples):
    empty = np.empty([len(samples), 0], "float32")
    return [
        np.stack([x for x, _ in samples]),
        empty,
        paddle.to_tensor(empty, place=CPU),
        Foreign(empty),
    ]


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}], ids=str)
def test_empty_fields_are_on_the_device_of_the_batch(options, with_views):
    given_ = given(collate_fn=nothing_in_a_row, places=[PLACE])
    for batch in paddle_shard.shard_dataloader(
        given_, MESH, shard_dims="dp", **options
    ):
        assert [str(leaf.place) for leaf in batch] == [str(PLACE)] * 4
        assert [leaf.shape for leaf in batch[1:]] == [[len(batch[0]), 0]] * 3


def test_collate_fn_tensors_on_the_device_stay_there():
    loader = paddle_shard.shard_dataloader(
        given(collate_fn=device_tensors), MESH, shard_dims="dp"
    )

    batches = list(loader)

    assert {str(leaf.place) for batch in batches for leaf in batch} == {
        str(PLACE)
    }
    assert [
        i for batch in batches for i in batch[1]._local_value().numpy().tolist()
    ] == list(range(45))


def test_batch_that_the_user_holds_keeps_its_numbers():
    loader = paddle_shard.shard_dataloader(given(), MESH, shard_dims="dp")

    held = list(loader)  # all at once, while later batches are copied

    assert (
        np.concatenate([x._local_value().numpy() for x, _ in held]).tolist()
        == ROWS.tolist()
    )


class OneMemory(Data):
    """Gives the same array and the same tensor in host memory for every batch."""

    def __init__(self):
        self.array, self.tensor = (
            np.zeros([8, 8], "float32"),
            paddle.to_tensor(np.zeros([8, 8], "float32"), place=CPU),
        )

    def __getitems__(self, indices):
        self.array[: len(indices)] = ROWS[indices]
        paddle.assign(paddle.to_tensor(self.array, place=CPU), self.tensor)
        return self.array[: len(indices)], self.tensor[: len(indices)]


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"prefetch": 2}], ids=str
)
def test_data_set_may_use_its_memory_again_for_the_next_batch(options):
    loader = paddle_shard.shard_dataloader(
        given(OneMemory(), places=[PLACE]), MESH, shard_dims="dp", **options
    )
    found = [arrays(batch) for _ in range(5) for batch in loader]

    for field in range(2):
        assert (
            np.concatenate([batch[field] for batch in found]).tolist()
            == ROWS.tolist() * 5
        )


@needs_two
def test_valid_is_where_the_batch_is_and_counts_its_rows():
    loader = paddle_shard.shard_dataloader(
        given(places=[PLACE]), MESH, shard_dims="dp", tail="fill"
    )
    paddle.set_device(OTHER)  # after the DataLoader was made
    try:
        batches = iter(loader)
        for x, _ in batches:
            assert str(batches.valid.place) == str(x.place)
        assert (
            batches.valid._local_value().numpy().tolist()
            == [True] * 5 + [False] * 3
        )
    finally:
        paddle.set_device(DEVICE)
