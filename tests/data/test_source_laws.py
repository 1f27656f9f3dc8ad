"""Every source: its parts are all of its data, and any mesh and any stop give the batches of one process."""

import pickle
from collections import Counter
from itertools import chain

import pytest

from paddle_shard.data.stages.stage import Opening
from paddle_shard.data.stream import stage_of
from tests.data.source_laws import FILE_KINDS, TOTAL, check_laws, files, names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=FILE_KINDS)
def kind(request):
    return FILE_KINDS[request.param]


@pytest.fixture
def stage(kind, folder):
    return stage_of(kind.stream(names(folder, kind.ending)))


def read(stage, kind, num_parts, parts=None, **what):
    parts = tuple(range(num_parts)) if parts is None else parts
    opened = stage.open(
        Opening(parts=parts, num_parts=num_parts, seed=5, **what)
    )
    return [[kind.id_of(sample) for sample in part] for part in opened]


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_parts_together_are_every_sample_once(stage, kind, num_parts):
    parts = read(stage, kind, num_parts)
    lengths = stage.lengths(
        Opening(parts=tuple(range(num_parts)), num_parts=num_parts)
    )

    assert sorted(i for part in parts for i in part) == list(range(TOTAL))
    assert lengths is None or lengths == [len(part) for part in parts]


@pytest.mark.parametrize("num_parts", [1, 3])
def test_opening_after_some_samples_equals_dropping_them(
    stage, kind, num_parts
):
    straight = read(stage, kind, num_parts)

    for skip in (1, 2, 5, 6, 17, TOTAL):
        assert read(stage, kind, num_parts, skip=skip) == [
            part[skip:] for part in straight
        ]


def test_part_is_the_same_whichever_others_are_opened_with_it(stage, kind):
    together = read(stage, kind, 3)

    assert [*read(stage, kind, 3, (2,)), *read(stage, kind, 3, (0, 1))] == [
        together[2],
        *together[:2],
    ]


def test_source_epochs_differ_and_each_repeats_its_order(stage, kind):
    first, again, other = (
        read(stage, kind, 2, epoch=epoch) for epoch in (1, 1, 2)
    )

    assert first == again != other
    assert Counter(chain(*first)) == Counter(chain(*other))


def test_worker_may_be_sent_it(stage, kind):
    assert read(pickle.loads(pickle.dumps(stage)), kind, 3) == read(
        stage, kind, 3
    )


@pytest.mark.parametrize("name", FILE_KINDS)
def test_source_gives_the_batches_of_one_process_on_any_mesh(name, folder):
    # Counts of files do not matter to workers.
    workers_later = 0 if "counted" in name else 2
    check_laws(name, str(folder), 0, stops=[4], workers_later=workers_later)
