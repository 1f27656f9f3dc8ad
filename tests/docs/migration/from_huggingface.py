"""Lines for those who come from Hugging Face `datasets`."""

from fractions import Fraction

import pytest
from paddle.io import DataLoader

from paddle_shard.errors import SplitError
from tests.docs.migration import IDS, Side, case, flat, real, steps
from tests.docs.migration.claims import chooses_epochs, epochs_differ, resumes
from tests.helpers import DP2, ONE, local, sharded

HUGGING_FACE = "From Hugging Face datasets"


def library():
    """Its functions, as pages name them. A test that asks for them is skipped where it is not installed."""
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    names = {
        name: getattr(datasets, name)
        for name in ("Dataset", "interleave_datasets", "concatenate_datasets")
    }
    return {**names, "split_dataset_by_node": split_dataset_by_node}


def indexed(ids=IDS):
    return library()["Dataset"].from_dict({"id": list(ids)})


def streamed(ids=IDS):
    return indexed(ids).to_iterable_dataset(num_shards=8)


def web_and_code():
    return {"web": indexed(range(24)), "code": indexed(range(1000, 1010))}


def id_of(sample):
    return sample["id"]


def ids(samples):
    return [sample["id"] for sample in samples]


def drawn(mixture):
    """The ids that an epoch draws, in order, by a loader."""
    loader = sharded(DataLoader(mixture, batch_size=4), ONE)
    return flat(local(batch["id"]) for batch in loader)


@case(HUGGING_FACE, 'load_dataset(name, split="train", streaming=True)')
def each_once(new, old):
    stream = new(dataset=streamed()).map(id_of)
    assert (
        sorted(flat(steps(lambda: sharded(DataLoader(stream, batch_size=8)))))
        == IDS
    )


@case(HUGGING_FACE, 'load_dataset(name, split="train")')
def as_it_is(new, old):
    loader = sharded(new(dataset=indexed()), ONE)
    assert sorted(flat(local(batch["id"]) for batch in loader)) == IDS


@case(
    HUGGING_FACE,
    "split_dataset_by_node(dataset, rank=rank, world_size=world_size)",
)
def no_split(new, old):
    split = old(dataset=streamed(), rank=0, world_size=2, **library())
    assert len(ids(split)) == 12
    with pytest.raises(SplitError, match="Give it unsplit"):
        new(dataset=split)
    each_once(new, old)


@case(HUGGING_FACE, 'dataset.with_format("torch")')
def arrays(new, old):
    dataset = (
        library()["Dataset"]
        .from_dict({"x": [[1, 2], [3, 4]]})
        .to_iterable_dataset()
    )
    [batch] = sharded(
        DataLoader(
            Side("`Stream.huggingface(d)`")(d=new(dataset=dataset)),
            batch_size=2,
        ),
        ONE,
    )
    assert local(batch["x"]) == [[1, 2], [3, 4]]


@case(HUGGING_FACE, "dataset.shuffle(seed=7, buffer_size=1000)")
def windows(new, old):
    stream = new(dataset=streamed()).map(id_of)
    epochs_differ(lambda: DataLoader(stream, batch_size=8))
    orders = [
        steps(
            lambda seed=seed: sharded(DataLoader(stream, batch_size=8), **seed)
        )
        for seed in ({}, new(1))
    ]
    assert orders[0] != orders[1]
    assert sorted(ids(old(dataset=streamed()))) == IDS


@case(HUGGING_FACE, "interleave_datasets([web, code])")
def in_turns(new, old):
    assert drawn(new(**web_and_code())) == ids(
        old(**web_and_code(), **library())
    )


@case(
    HUGGING_FACE,
    'interleave_datasets([web, code], stopping_strategy="all_exhausted")',
)
def in_turns_to_the_last(new, old):
    assert drawn(new(**web_and_code())) == ids(
        old(**web_and_code(), **library())
    )


@case(
    HUGGING_FACE,
    'interleave_datasets([web, code], stopping_strategy="all_exhausted_without_replacement")',
)
def each_once_by_length(new, old):
    theirs, ours = (
        ids(old(**web_and_code(), **library())),
        drawn(new(**web_and_code())),
    )
    assert sorted(ours) == sorted(theirs) == [*range(24), *range(1000, 1010)]
    assert max(theirs[20:]) < 1000 <= max(ours[-2:]), (
        "theirs ends with one source alone"
    )


def off(rows, share=Fraction(1, 4)):
    """How far from its share the second source has been at most, in samples."""
    return max(
        abs(sum(row >= 1000 for row in rows[:end]) - end * share)
        for end in range(1, len(rows) + 1)
    )


@case(
    HUGGING_FACE,
    "interleave_datasets([web, code], probabilities=[0.75, 0.25], seed=7)",
)
def exact_shares(new, old):
    assert off(drawn(new(**web_and_code()))) <= Fraction(1, 2)
    large = {"web": indexed(range(900)), "code": indexed(range(1000, 1300))}
    assert off(ids(old(**large, **library()))) > 2


@case(
    HUGGING_FACE,
    "interleave_datasets([web, code], probabilities=[0.75, 0.25]), streamed",
)
def exact_shares_of_streams(new, old):
    stream = (
        new(web=streamed(range(24)), code=streamed(range(1000, 1010)))
        .map(id_of)
        .in_parts(1)
    )
    rows = flat(real(sharded(DataLoader(stream, batch_size=4), ONE)))
    assert off(rows) <= Fraction(1, 2)


@case(HUGGING_FACE, "concatenate_datasets([web, code])")
def one_after_the_other(new, old):
    loader = sharded(new(**web_and_code(), **library()), ONE)
    assert sorted(flat(local(batch["id"]) for batch in loader)) == [
        *range(24),
        *range(1000, 1010),
    ]


case(HUGGING_FACE, "dataset.set_epoch(epoch)")(chooses_epochs)


@case(HUGGING_FACE, "dataset.load_state_dict(state)")
def nothing_is_lost(new, old):
    stream = Side("`Stream.huggingface(d).shuffle(2)`")(d=streamed()).map(id_of)
    resumes(
        new,
        make=lambda meshes=DP2: sharded(
            DataLoader(stream, batch_size=8), meshes
        ),
    )
    # Theirs leaves out what was in the buffer.
    dataset = streamed().shuffle(seed=1, buffer_size=6)
    begun = [
        next(samples)["id"] for samples in [iter(dataset)] for _ in range(8)
    ]
    again = streamed().shuffle(seed=1, buffer_size=6)
    old(dataset=again, state=dataset.state_dict())
    assert set(begun + ids(again)) < set(IDS)
