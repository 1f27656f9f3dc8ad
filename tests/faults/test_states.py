"""Saved states that are cut short, damaged, or of another version."""

import copy
import json

import paddle
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Mixture
from paddle_shard.errors import StateError
from paddle_shard.plan.state import sealed
from tests.faults.feeds import Rows, loader_of, numbers, read_until, the_rest
from tests.helpers import ONE, places_in, sharded

LENGTH = 88
ALL = list(range(LENGTH))


def saved(rng, kind="map"):
    """A state in mid-epoch, and what was read before."""
    loader = loader_of(kind, LENGTH)
    read, *_ = read_until(iter(loader), steps=rng.randrange(1, 11))
    return loader.state_dict(), read


def refuses_and_stays_as_it_was(state, kind="map"):
    """Whether a loader refuses a state with a StateError; it must serve as before in any case."""
    loader = loader_of(kind, LENGTH)
    before = loader.state_dict()
    try:
        loader.load_state_dict(state)
    except StateError:
        assert loader.state_dict() == before
        assert numbers(iter(loader)) == ALL
        return True
    return False


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_state_file_cut_anywhere_is_an_error(kind, rng, tmp_path):
    state, read = saved(rng, kind)
    path = tmp_path / "state.json"
    text = json.dumps(state)
    for at in range(len(text)):
        path.write_text(text[:at])
        with pytest.raises(json.JSONDecodeError):
            json.loads(path.read_text())
    path = tmp_path / "state.pdparams"
    paddle.save({"data": state}, str(path))
    content, loader = path.read_bytes(), loader_of(kind, LENGTH)
    for at in sorted(rng.sample(range(len(content)), 25)):
        path.write_bytes(content[:at])
        with pytest.raises(Exception):  # noqa: B017, PT011, Paddle's own, which may also take it for a Program
            loader.load_state_dict(paddle.load(str(path))["data"])
    path.write_bytes(content)
    assert read + the_rest(paddle.load(str(path))["data"], kind, LENGTH) == ALL


def test_state_without_a_field_or_of_another_version_is_refused(rng):
    state, _ = saved(rng)
    for name in state:
        assert refuses_and_stays_as_it_was(
            {key: value for key, value in state.items() if key != name}
        ), name
    for version in (0, 1, 2, "3", None, rng.randrange(4, 1000)):
        assert refuses_and_stays_as_it_was({**state, "version": version})
    assert refuses_and_stays_as_it_was({**state, "more": 1})
    for junk in (None, [], "", 0, b"", {}, [state]):
        assert refuses_and_stays_as_it_was(junk)


JUNK = [
    None,
    -1,
    1.5,
    "x",
    [1],
    [[1]],
    [[1, 2, 3]],
    [None],
    [["a", "b"]],
    [[-1, 8]],
    [[0, 0]],
    True,
]


@pytest.mark.parametrize(
    "name", ["ended", "segments", "certificate", "fingerprint"]
)
def test_field_of_another_type_is_refused(name, rng):
    state, _ = saved(rng)
    junk = [value for value in JUNK if not (name == "ended" and value is True)]
    accepted = []
    for value in junk:
        try:
            fine = refuses_and_stays_as_it_was({**state, name: value})
        except (TypeError, ValueError) as error:
            fine, value = False, f"{value!r}: {type(error).__name__}"
        if not fine:
            accepted.append(value)
    assert accepted == []


@pytest.mark.parametrize("kind", ["map", "stream", "mixture", "cut"])
def test_state_changed_at_any_depth_is_refused_before_reading(kind, rng):
    """Most of such states would make sense by themselves: they would be of another position, or another order."""

    def make():
        if kind != "mixture":
            return loader_of(kind, LENGTH)
        weights = [(0, {"a": 0.7, "b": 0.3}), (24, {"a": 0.5, "b": 0.5})]
        mixture = Mixture(
            {"a": Rows(LENGTH), "b": Rows(LENGTH)}, weights, num_samples=LENGTH
        )
        return sharded(
            DataLoader(mixture, batch_size=8),
            ONE,
            verify=None,
            skip_steps=[(1, 2)],
        )

    loader = make()
    batches = iter(loader)
    read_until(batches, steps=3)
    if kind in ("map", "mixture"):
        loader.certificate()
    state, rest = json.loads(json.dumps(loader.state_dict())), numbers(batches)
    other = make()
    for way in places_in(state):
        # the one has its own message; the other is the sampler's
        if way[0] in (
            "version",
            "sampler",
        ):
            continue
        for junk in (*JUNK, 0, 3, 2**63, 10**40, "", {}, [], float("nan")):
            changed = copy.deepcopy(state)
            inside = changed
            for key in way[:-1]:
                inside = inside[key]
            if json.dumps(inside[way[-1]]) == json.dumps(junk):
                continue
            inside[way[-1]] = junk
            with pytest.raises(StateError):
                other.load_state_dict(changed)
    other.load_state_dict(state)
    assert numbers(iter(other)) == rest


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 1},
        {"samples": 8},
        {"steps": 1},
        {"samples": 10**6},
        {"steps": 10**6},
    ],
)
def test_counts_that_contradict_each_other_are_refused(change, rng):
    state, _ = saved(rng)
    [(name, more)] = change.items()
    assert refuses_and_stays_as_it_was({**state, name: state[name] + more})


def test_state_of_another_run_is_refused_with_both_values(rng):
    state, _ = saved(rng)
    for name in state["fingerprint"]:
        other = copy.deepcopy(state)
        other["fingerprint"][name] = 12345
        loader = loader_of("map", LENGTH)
        with pytest.raises(StateError, match=rf"{name}: saved 12345"):
            loader.load_state_dict(sealed(other))
        assert numbers(iter(loader)) == ALL


def test_tensor_of_which_any_byte_differs_is_refused(rng):
    state, read = saved(rng)
    tensor = paddle_shard.state_to_tensor(state)
    # Spaces fill the tensor up.
    num_bytes = len(tensor.numpy().tobytes().rstrip())
    loader = loader_of("map", LENGTH)
    for _ in range(60):
        content = tensor.numpy().copy()
        content[rng.randrange(num_bytes)] ^= 1 << rng.randrange(8)
        with pytest.raises(StateError):
            loader.load_state_dict(
                paddle_shard.state_from_tensor(paddle.to_tensor(content))
            )
    with pytest.raises(StateError):
        paddle_shard.state_from_tensor(tensor[: rng.randrange(1, num_bytes)])
    assert (
        read + the_rest(paddle_shard.state_from_tensor(tensor), "map", LENGTH)
        == ALL
    )
