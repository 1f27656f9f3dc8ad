"""Another library's loader is resumed within an epoch only if the batches that were delivered can be found again."""

import itertools

import numpy as np
import pytest

from paddle_shard import ExternalLoader
from paddle_shard.errors import StateError
from tests.helpers import ONE, locals_of, sharded

LENGTH, ROWS = 48, 4


class Library:
    """Reads its data in another order each time, as what reads with many processes does, unless it is told not to."""

    def __init__(self, repeatable):
        self.repeatable, self.times = repeatable, itertools.count()

    def __call__(self, share):
        seed = share.epoch if self.repeatable else next(self.times)
        order = np.random.default_rng(seed).permutation(LENGTH)
        return Pass(order.reshape(-1, ROWS), share.state)


class Pass:
    def __init__(self, batches, at):
        self.batches, self.at = batches, at or 0

    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]


def loader_of(repeatable=False, *, says=None, save=None, **options):
    build = Library(repeatable)
    says = {} if says is None else {"repeatable": says}
    return sharded(
        ExternalLoader(build, name="other", save=save, **says),
        ONE,
        tail="pad",
        **options,
    )


def stopped(loader, steps):
    found = locals_of(itertools.islice(loader, steps))
    return found, loader.state_dict()


@pytest.mark.parametrize("options", [{}, {"num_batches": 30}])
@pytest.mark.parametrize("says", [None, False])
def test_external_loader_refuses_a_resume_that_loses_samples(says, options):
    _, state = stopped(loader_of(says=says, **options), 5)

    with pytest.raises(
        StateError, match=r"the other loader has no save=.*repeatable=True"
    ):
        loader_of(says=says, **options).load_state_dict(state)


def test_external_state_does_not_cover_data_read_again():
    def made(**options):
        return loader_of(
            True, save=lambda batches: batches.at, num_batches=30, **options
        )

    expected = locals_of(made())
    begun, state = stopped(made(), 20)

    with pytest.raises(
        StateError,
        match="is read again within an epoch, which its save= does not cover",
    ):
        made().load_state_dict(state)
    again = made(says=True)
    again.load_state_dict(state)
    assert begun + locals_of(again) == expected


def test_external_loader_that_is_repeatable_resumes_anywhere():
    expected = locals_of(loader_of(True))
    for steps in (1, 5, 11):
        begun, state = stopped(loader_of(True), steps)
        resumed = loader_of(True, says=True)
        resumed.load_state_dict(state)
        assert begun + locals_of(resumed) == expected


def test_between_two_epochs_any_loader_is_resumed():
    loader = loader_of()
    list(loader)
    resumed = loader_of()
    resumed.load_state_dict(loader.state_dict())

    assert resumed.epoch == 1
    assert sorted(np.concatenate(locals_of(resumed)).tolist()) == list(
        range(LENGTH)
    )


def test_loader_with_a_state_is_resumed_by_it():
    def made():
        return loader_of(True, save=lambda batches: batches.at)

    begun, state = stopped(made(), 5)
    resumed = made()
    resumed.load_state_dict(state)

    assert sorted(np.concatenate(begun + locals_of(resumed)).tolist()) == list(
        range(LENGTH)
    )
