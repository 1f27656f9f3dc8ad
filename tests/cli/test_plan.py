"""`paddle-shard plan`: what it shows is what loaders deliver, and each hazard is named with its remedy."""

import json
import random
import re
import subprocess
import sys
import tarfile
from collections import Counter

import numpy as np
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader

from paddle_shard import MeshLayout, Mixture, ShardPlan, Stream
from paddle_shard.delivery.replicas import replicas_of
from paddle_shard.extras.cli.hazards import hazards_of
from paddle_shard.extras.cli.main import COMMANDS, main
from paddle_shard.ranks.replicas import Replicas
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.deadlines import HANG
from tests.helpers import Made, sharded
from tests.record.runs import asked

MESHES = [
    ("dp=2,mp=2", "dp", [[0, 1], [2, 3]], ["dp", "mp"]),
    ("mp=2,dp=2", "dp", [[0, 1], [2, 3]], ["mp", "dp"]),
    ("dp=2,sharding=2", "dp,sharding", [[0, 1], [2, 3]], ["dp", "sharding"]),
    ("sep=2,dp=2@3,1,0,2", "dp", [[3, 1], [0, 2]], ["sep", "dp"]),
]


def planned(capsys, *arguments):
    code = main(["plan", *map(str, arguments), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == bool(found["hazards"])
    return found


def given_to_ranks(data, batch_size, accumulation, ids, names, dims, **options):
    """[(ids, None for what is not real) of each rank] of each step."""
    mesh, shuffles = dist.ProcessMesh(ids, dim_names=names), options.pop("shuffles")

    def rows():
        sampler = BatchSampler(data, batch_size=batch_size, shuffle=shuffles)
        sampler._acc_steps = accumulation
        batches = iter(sharded(DataLoader(data, batch_sampler=sampler), mesh, dims, **options))
        found = []
        for batch in batches:
            values, valid = (one._local_value().numpy().reshape(-1).tolist() for one in (batch, batches.valid))
            found.append([one if real else None for one, real in zip(values, valid, strict=True)])
        return found

    return on_each_rank(range(4), rows)


@pytest.mark.parametrize(("text", "axes", "ids", "names"), MESHES, ids=[mesh[0] for mesh in MESHES])
@pytest.mark.parametrize(
    ("samples", "batch_size", "accumulation", "tail", "shuffle"),
    [
        (43, 8, 1, "pad", "True"),
        (43, 4, 2, "fill", "False"),
        (43, 8, 1, "drop", "paddle"),
        (41, 8, 1, "pad", "paddle"),
        (42, 8, 1, "fill", "True"),
        (70, 16, 4, "fill", "True"),
        (33, 8, 2, "pad", "True"),
    ],
)
def test_the_plan_is_what_loaders_deliver(
    text, axes, ids, names, samples, batch_size, accumulation, tail, shuffle, capsys
):
    dims, how = axes.split(","), {"True": {}, "False": {}, "paddle": {"shuffle": "paddle"}}[shuffle]
    data = Made(lambda i: np.array([i]), samples)
    per_rank = given_to_ranks(
        data, batch_size, accumulation, ids, names, dims, tail=tail, shuffles=shuffle == "True", **how
    )
    flags = "--samples", samples, "--batch-size", batch_size, "--accumulation", accumulation, "--mesh", text
    flags = *flags, "--data-axes", axes, "--tail", tail, "--shuffle", shuffle

    found = planned(capsys, *flags)

    steps, real = len(per_rank[0]), found["plan"]
    groups = [group["ranks"] for group in found["meshes"]]
    assert real["steps of an epoch"] == steps
    for ranks in groups:
        assert all(per_rank[rank] == per_rank[ranks[0]] for rank in ranks)
    rows = [[row for ranks in groups for row in per_rank[ranks[0]][step]] for step in range(steps)]
    assert real["rows of the last step"] == len(rows[-1])
    assert real["rows of a data rank"] == len(per_rank[0][0])
    assert (
        real["rows of padding in an epoch"] == sum(row is None for of_step in rows for row in of_step) or tail == "drop"
    )
    served = sum(row is not None for of_step in rows for row in of_step)
    assert real["samples dropped in an epoch"] == (samples - served if shuffle != "paddle" else 4 * (tail == "drop"))
    assert real["reads of each row"] == len(groups[0])
    starved = [at for at, ranks in enumerate(groups) if not any(one is not None for one in per_rank[ranks[0]][-1])]
    told = [one["what"] for one in found["hazards"] if "nothing else" in one["what"]]
    micro = batch_size // len(groups) if shuffle != "paddle" else 99  # rows of a data rank in a micro-batch
    of_last = [per_rank[ranks[0]][-1] for ranks in groups]
    micro = min(micro, max(1, len(of_last[0]) // accumulation))
    cut = [rows[at : at + micro] for rows in of_last for at in range(0, len(rows), micro)]
    empty = sum(all(one is None for one in rows) for rows in cut)
    if starved:
        expected = [f"on {len(starved)} of its data ranks: {', '.join(map(str, starved))}"]
    else:
        expected = [f"in {empty} micro-batches of its data ranks"] * (empty > 0)
    assert [one.partition("nothing else ")[2] for one in told] == expected
    for step in {0, steps // 2, steps - 1}:
        for one in planned(capsys, *flags, "--step", step)["step"]:
            assert [per_rank[rank][step] for rank in one["ranks"]] == [one["samples"]] * len(one["ranks"])


def test_the_plan_of_a_mixture_is_what_a_loader_delivers(capsys):
    sources = {"web": 40, "code": 11}
    data = Mixture(
        {name: Made(lambda i, at=at: np.array([1000 * at + i]), n) for at, (name, n) in enumerate(sources.items())},
        {"web": 0.7, "code": 0.3},
        num_samples=48,
    )
    per_rank = given_to_ranks(data, 8, 1, [[0, 1], [2, 3]], ["dp", "mp"], "dp", shuffles=True)
    flags = "--source", "web=40:0.7", "--source", "code=11:0.3", "--samples", 48, "--batch-size", 8
    found = planned(capsys, *flags, "--mesh", "dp=2,mp=2", "--shuffle", "--step", 4)["step"]

    shown = [[1000 * list(sources).index(name) + at for name, at in one["samples"]] for one in found]
    assert shown == [per_rank[0][4], per_rank[2][4]]
    drawn = Counter(int(one) // 1000 for ranks in (per_rank[0], per_rank[2]) for of in ranks for one in of)
    told = planned(capsys, *flags, "--mesh", "dp=2,mp=2", "--shuffle")["sources"]
    assert {one["source"]: one["drawn"] for one in told} == {"web": drawn[0], "code": drawn[1]}
    assert "two of ['web', 'web', 'code'] have one name" in asked("plan", *flags[:2], *flags, "--mesh", "dp=2", code=2)


TOLD = {
    **{"--mesh": "dp=1", "--data-axes": "dp", "--batch-size": 4, "--samples": 8, "--source": "web=9:1"},
    **{"--tail": "pad", "--shuffle": "False", "--accumulation": 1, "--replicas": "each"},
}


FINE = ["--samples", "64", "--batch-size", "8", "--mesh", "dp=4"]


@pytest.mark.parametrize(
    ("flags", "what", "remedy"),
    [
        (["--samples", "64", "--batch-size", "6", "--mesh", "dp=4"], "6 cannot be split evenly over 4", "4 or 8"),
        (
            ["--samples", "64", "--batch-size", "10", "--accumulation", "2", "--mesh", "dp=4"],
            "a global batch of 20 cannot be split evenly over 4 data ranks times 2 accumulation steps",
            "16 or 24, micro-batches of 8 or 12 rows",
        ),
        ([*FINE[:4], "--mesh", "dp_replicate=2,dp_shard=2", "--replicas", "leader"], "'dp_shard' of 2 ranks", "dims"),
        (
            ["--samples", "1044", "--batch-size", "64", "--accumulation", "4", "--mesh", "dp=8"],
            "12 of 32 rows of padding, and nothing else in 12 micro-batches of its data ranks",
            "by their count",
        ),
        (
            [*FINE[:4], "--mesh", "dp=2,mp=2", "--mesh", "dp=2,mp=2@4,6,5,7", "--replicas", "leader"],
            "mesh 1: axis 'mp' is further apart than 'dp': ranks 4 and 6",
            "--mesh dp=2,mp=2@4,5,6,7",
        ),
        (["--samples", "3", "--batch-size", "8", "--mesh", "dp=4"], "1 of them get nothing but padding", "at most 3"),
        (
            [*FINE[:4], "--mesh", "dp=2,sharding=2", "--replicas", "leader"],
            "'sharding' of 2 ranks carries no data",
            "dims",
        ),
        (
            [*FINE[:4], "--mesh", "mp=4,dp=2", "--data-axes", "mp", "--replicas", "leader"],
            "axis 'dp' of 2 ranks carries no data",
            "shard_dims=['dp'] splits the rows over it instead of 'mp'; ['mp', 'dp'] over both",
        ),
        ([*FINE[:4], "--mesh", "dp=2,mp=2"], "2 ranks of each replica group all read", 'replicas="leader"'),
        ([*FINE, "--tail", "drop", "--samples", "70"], "drops 6 of 70 samples", "tail='pad'"),
        (
            ["--source", "web=100:0.5", "--source", "chat=2:0.5", *FINE],
            "source 'chat' has 2 samples, and an epoch draws 32: each 16 times",
            "is 4 times at most",
        ),
        (
            ["--source", "web=1000:0.7", "--source", "chat=10:0.3", "--samples", "32", *FINE[2:]],
            "source 'chat' has 10 samples: while the run reads 'web' once, each of them is drawn 43 times",
            "A share of 0.038 instead of 0.3, of weights that add up to 1, is 4 times at most",
        ),
        (
            [*FINE[:4], "--mesh", "mp=2,dp=2", "--replicas", "leader"],
            "axis 'mp' is further apart than 'dp': ranks 0 and 2 share the work on the same rows",
            "--mesh dp=2,mp=2",
        ),
        (
            [*FINE[:4], "--mesh", "dp=2,mp=2@0,2,1,3", "--replicas", "leader"],
            "axis 'mp' is further apart than 'dp': ranks 0 and 2 share the work on the same rows",
            "--mesh dp=2,mp=2",
        ),
        (
            [*FINE[:4], "--mesh", "dp=4", "--samples", "66"],
            "the last step of the epoch, 8, has 2 of 4 rows of padding, and nothing else on 2 of its data ranks: 2, 3",
            "tail='drop' leaves such a step out",
        ),
        ([*FINE, "--tail", "error", "--samples", "70"], "70 samples do not fill the last batch of 8", "tail='pad'"),
        ([*FINE, "--shuffle", "blocks"], "1 parts, which 4 data ranks cannot share evenly", "choose a batch size"),
    ],
)
def test_each_hazard_is_told_with_its_remedy(flags, what, remedy, capsys):
    (hazard,) = planned(capsys, *flags)["hazards"]
    assert what in hazard["what"]
    assert remedy in hazard["remedy"]
    assert f"HAZARD: {hazard['what'].rstrip('.')}" in asked("plan", *flags, code=1)


def test_a_plan_without_a_hazard_exits_with_0():
    assert "no hazard was found" in asked("plan", *FINE)


def test_files_of_very_different_sizes_are_a_hazard(capsys, tmp_path):
    def hazards(*sizes, mesh="dp=2", tail="pad"):
        for number, size in enumerate(sizes):
            (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
        flags = "--files", tmp_path / "*.txt", "--batch-size", 8, "--mesh", mesh, "--tail", tail
        return [hazard["what"] for hazard in planned(capsys, *flags)["hazards"]]

    assert hazards(100, 100, 100, 100) == []
    (uneven,) = hazards(100, 100, 100, 140)  # four parts: 440 of 560 bytes
    assert "about 21% of all rows are padding" in uneven
    assert f"The largest is {tmp_path / '3.txt'} with 140 bytes, the smallest {tmp_path / '0.txt'} with 100" in uneven
    (uneven,) = hazards(100, 100, 100, 140, tail="drop")  # 400 of 440 bytes
    assert "about 9% of the data is dropped" in uneven
    (uneven,) = hazards(100, 100, 100, 900)
    assert "in_parts() is missing: the stream's 4 files are not counted and differ so much" in uneven
    assert f"The largest is {tmp_path / '3.txt'} with 900 bytes, the smallest {tmp_path / '0.txt'} with 100" in uneven
    (few,) = hazards(100, 100, 100, 100, mesh="dp=8")
    assert "made of 4 shards, but 8 data ranks are to read it" in few


CACHE_MESHES = [  # mesh, ranks of a host, replicas, readers of a host: (data rank, data ranks)
    ("dp=2", 2, "each", [(0, 2), (1, 2)]),
    ("dp=2", 1, "each", [(0, 2)]),
    ("dp=2,mp=2", 2, "each", [(0, 2), (0, 2)]),
    ("dp=2,mp=2", 2, "leader", [(0, 2)]),
    ("dp=1,mp=4", 4, "each", 4 * [(0, 1)]),
]


def record_of(mesh, replicas, folder):
    """The record of a run that reads a stream in four parts, which has other files."""
    (folder / "a.txt").write_text("1\n" * 80)
    shape = {axis: int(size) for axis, size in (one.split("=") for one in mesh.split(","))}
    ids = np.arange(np.prod([*shape.values()])).reshape([*shape.values()])
    with simulated_rank(0, ids.size):
        stream = Stream.lines(folder / "a.txt").in_parts(4)
        options = {"record": folder / "run.jsonl", "replicas": replicas}
        sharded(DataLoader(stream, batch_size=4), dist.ProcessMesh(ids, list(shape)), "dp", **options).state_dict()
    return folder / "run.jsonl"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--mesh", "dp4"], "must be axes and sizes such as dp=4,mp=2, got 'dp4'"),
        (["--mesh", "dp=2@0,0"], "process_ids must be different ranks"),
        (["--mesh", "dp=2"], "give a record; or --mesh, --batch-size, and the data"),
        ([*FINE[:4], "--mesh", "mp=2"], "--data-axes is missing: which of mp split the rows"),
        ([*FINE, "--data-axes", "DP"], "the mesh has no axis 'DP'"),
        ([*FINE, "--step", "99"], "step must be in range"),
        ([*FINE, "--shuffle", "paddle", "--epoch", "-1", "--step", "0"], "--epoch must be an int >= 0"),
        (["none.jsonl"], "none.jsonl cannot be read"),
        (["--mesh", "dp=99999999999"], "has 99999999999 ranks; at most 10000000 are looked at"),
        (["--batch-size", str(2**64)], f"is {2**64}; at most 100000000 rows of a batch"),
        (["--accumulation", "1" + "0" * 20], "at most 100000000 rows of a batch"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_what_to_do(flags, text):
    assert text in asked("plan", *flags, code=2)


def test_files_that_a_stream_would_count_are_told_as_that_and_those_that_are_not_there(tmp_path):
    for number, size in enumerate((100, 900)):
        (tmp_path / f"{number}.jsonl").write_text("1\n" * size)
    flags = "--batch-size", "2", "--mesh", "dp=2"
    said = asked("plan", "--files", tmp_path / "*.jsonl", *flags, code=1)
    assert "Such files are counted when the stream is made, unless index=False or counts=False says not to" in said
    said = asked("plan", "--files", tmp_path / "0.jsonl", tmp_path / "none.jsonl", *flags, code=1)
    assert f"HAZARD: {tmp_path / 'none.jsonl'} does not exist. Correct the paths." in said
    assert said.count("HAZARD") == 1


def test_braces_are_those_of_tars_and_parts_are_as_many_as_were_asked_for(capsys, tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.tar").write_bytes(b"x" * 10240)
    flags = "--files", f"{tmp_path}/{{0..7}}.tar", "--batch-size", 8, "--mesh", "dp=2"
    assert planned(capsys, *flags)["files"] == 8
    for parts in (2, 4, 8):
        found = planned(capsys, *flags, "--parts", parts)
        assert found["parts"] == parts
        assert [len(one["parts"]) for one in found["bytes"]] == [parts // 2] * 2
    assert "--parts must be an int >= 1, got 0" in asked("plan", *flags, "--parts", 0, code=2)
    assert "--parts: of which files?" in asked("plan", *FINE, "--parts", 2, code=2)


def test_a_file_that_cannot_be_is_a_hazard():
    said = asked("plan", "--files", "a\0b", "--batch-size", "4", "--mesh", "dp=2", code=1)
    assert r"HAZARD: 'a\x00b': a path has no null bytes. Give another" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example(name):
    shown = asked(name, "--help")
    assert f"example: paddle-shard {name} " in shown.replace("\n", " ")
    assert "--json" in shown


@pytest.mark.parametrize(
    "command",
    [["plan", *FINE, "--html"], ["index", "some.tar", "-o"]],
)
def test_a_file_that_cannot_be_written_exits_with_2(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_of_this.py").write_text("texts = [[1, 2], [3]]")
    with tarfile.open("some.tar", "w") as archive:
        archive.add("data_of_this.py", "0.txt")
    assert "No such file or directory: " in asked(*command, "no/such/folder", code=2)


def test_whoever_stops_reading_a_long_answer_has_seen_enough():
    command = f"{sys.executable} -m paddle_shard plan --samples 5000 --batch-size 4000 --mesh dp=2000 --step 0 --json"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=HANG
    )
    assert (done.stdout, done.stderr) == ("{\n", "")
    assert done.returncode in (0, 1)


def test_no_samples_are_told_as_such():
    assert "num_samples" in asked("plan", "--samples", 0, "--batch-size", 4, "--mesh", "dp=2", code=1)


@pytest.mark.parametrize(("workers", "replicas", "processes"), [(0, "each", 8), (3, "each", 24), (3, "leader", 12)])
def test_who_reads_is_counted_with_workers(workers, replicas, processes, capsys):
    flags = "--samples", 64, "--batch-size", 8, "--mesh", "dp=4,mp=2", "--workers", workers, "--replicas", replicas
    assert planned(capsys, *flags)["reading processes"] == processes


LED = [  # meshes, their ids, ranks of a host
    (["dp=2,mp=4"], [[[0, 1, 2, 3], [4, 5, 6, 7]]], 2),
    (["mp=4,dp=2"], [[[0, 1], [2, 3], [4, 5], [6, 7]]], 2),
    (["mp=4,dp=2"], [[[0, 1], [2, 3], [4, 5], [6, 7]]], 4),
    (["dp=2,mp=3"], [[[0, 1, 2], [3, 4, 5]]], 4),
    (["dp=2,mp=2@7,1,2,4"], [[[7, 1], [2, 4]]], 3),
    (["dp=2,mp=2", "dp=2,mp=2@4,5,6,7"], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 8),  # stages of a pipeline
    (["dp=2,mp=2", "dp=2,mp=2@4,5,6,7"], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 4),
    (["dp=2,mp=2", "dp=4,mp=1"], [[[0, 1], [2, 3]], [[0], [1], [2], [3]]], 4),  # one rank, two kinds of rows
]


@pytest.mark.parametrize(("texts", "ids", "ranks_per_host"), LED)
def test_with_a_leader_one_rank_of_a_host_reads_for_all_of_it_that_want_the_same_rows(
    texts, ids, ranks_per_host, capsys, monkeypatch
):
    meshes = [
        dist.ProcessMesh(one, dim_names=[axis.split("=")[0] for axis in text.partition("@")[0].split(",")])
        for text, one in zip(texts, ids, strict=True)
    ]
    ranks = sorted({int(rank) for one in ids for rank in np.ravel(one)})
    hosts = [f"host-{rank // ranks_per_host}" for rank in range(max(ranks) + 1)]
    monkeypatch.setattr("paddle_shard.delivery.replicas.hosts_of_ranks", lambda: hosts)
    data, decided = DataLoader(Made(lambda i: (np.array([i]), np.array([i])), 64), batch_size=8), []

    def of_all_ranks(options, source, layouts, me):
        decided.append(replicas_of(options, source, layouts, ranks))
        return Replicas()  # this is the only process

    monkeypatch.setattr("paddle_shard.loader.assembly.replicas_of", of_all_ranks)

    def reads():
        sharded(data, meshes, "dp", replicas="leader")
        return not decided.pop().follows

    reading = [rank for rank, one in on_each_rank(ranks, reads).items() if one]
    flags = "--samples", 64, "--batch-size", 8, *(flag for text in texts for flag in ("--mesh", text))
    flags = *flags, "--ranks-per-host", ranks_per_host, "--replicas", "leader"
    for workers in (0, 3):
        found = planned(capsys, *flags, "--workers", workers)
        assert found["reading processes"] == max(1, workers) * len(reading)
    groups = [[one["ranks"] for one in found["meshes"] if one["mesh"] == number] for number in range(len(texts))]
    holders = [{rank for of in groups for rank in of[row * len(of) // 8]} for row in range(8)]  # of a global batch
    assert found["plan"]["reads of each row"] == max(len(of_row & {*reading}) for of_row in holders)
    said = asked("plan", *flags, code=int(bool(found["hazards"])))
    assert f"{len(reading)} processes read, one of the ranks of a host that get the same rows" in said
    assert f": {ranks_per_host} ranks share a host" in said


def test_without_the_ranks_of_a_host_a_plan_with_a_leader_says_that_it_counts_one_host():
    flags = "--samples", 64, "--batch-size", 8, "--mesh", "dp=4,mp=2", "--replicas"
    said = asked("plan", *flags, "leader")
    assert "4 processes read, one of the ranks of a host that get the same rows: all ranks share a host" in said
    assert "8 processes read\n" in asked("plan", *flags, "each", code=1)


def test_a_model_axis_whose_groups_are_each_on_one_host_is_not_far_apart(capsys):
    for ranks, apart in [(2, True), (4, False), (8, False)]:
        flags = [*FINE[:4], "--mesh", "pp=2,mp=2,dp=2", "--replicas", "leader", "--ranks-per-host", ranks]
        said = [one["what"] for one in planned(capsys, *flags)["hazards"]]
        assert any("'mp' is further apart than 'dp'" in one for one in said) == apart


def test_a_leader_is_advised_only_where_ranks_of_a_host_get_the_same_rows(capsys):
    flags = [*FINE[:4], "--mesh", "mp=2,dp=2", "--ranks-per-host"]
    for ranks, advised in [(1, False), (2, False), (3, True), (4, True)]:  # ranks 0 and 2 get the same
        said = [one["remedy"] for one in planned(capsys, *flags, ranks)["hazards"]]
        assert any("leader" in one for one in said) == advised


@pytest.mark.parametrize("command", ["plan"])
@pytest.mark.parametrize(
    "flags",
    [
        *(["--files", "a.tar", flag, value] for flag, value in TOLD.items() if flag in ("--samples", "--source")),
        ["--files", "a.tar", "--shuffle"],
    ],
)
def test_a_flag_that_says_nothing_here_is_refused(flags, command):
    said = asked(command, *FINE[2:], *flags, code=2)
    assert f"{flags[2]}: " in said
    assert "Give --files, too" in said or "Leave it out, or --files" in said


@pytest.mark.parametrize(
    ("flag", "value", "least"),
    [("--batch-size", 0, 1), ("--accumulation", -2, 1), ("--workers", -1, 0), ("--ranks-per-host", 0, 1)],
)
@pytest.mark.parametrize("data", [["--samples", 64], ["--files", __file__]])
def test_numbers_that_cannot_be_are_refused_by_the_name_of_their_flag(data, flag, value, least):
    assert f"{flag} must be an int >= {least}, got {value}" in asked("plan", *data, *FINE[2:], flag, value, code=2)


def test_parts_that_differ_are_refused_by_a_tail_that_refuses_what_is_left(capsys, tmp_path):
    for number, size in enumerate((10, 10, 22)):
        (tmp_path / f"{number}.txt").write_text("1\n" * size)
    flags = "--files", tmp_path / "*.txt", "--batch-size", 3, "--mesh", "dp=3", "--parts", 3, "--tail"
    [hazard] = planned(capsys, *flags, "error")["hazards"]
    assert hazard["what"].startswith("tail='error' is refused unless all parts end together, and they differ in size")
    [hazard] = planned(capsys, *flags, "fill")["hazards"]
    assert "tail must be one of" in hazard["what"]
    assert "The largest" not in hazard["what"]
    (tmp_path / "2.txt").write_text("1\n" * 10)
    assert planned(capsys, *flags, "error")["hazards"] == []


@pytest.mark.parametrize("samples", range(1, 7))
@pytest.mark.parametrize("tail", ["pad", "fill"])
def test_data_ranks_without_a_sample_are_counted_where_there_are_more_ranks_than_samples(samples, tail, capsys):
    flags = "--samples", samples, "--batch-size", 18, "--mesh", "dp=6", "--tail", tail
    found = planned(capsys, *flags, "--step", 0)
    empty = sum(all(one is None for one in of["samples"]) for of in found["step"])
    said = [one["what"] for one in found["hazards"] if "nothing but padding" in one["what"]]
    assert said == [f"6 data ranks share {samples} samples: {empty} of them get nothing but padding"] * (samples < 6)


def test_where_rows_are_dealt_or_another_mesh_has_read_them_as_many_ranks_have_nothing_as_there_are_no_samples_for():
    meshes = [(MeshLayout(shape=(4,), axes=("dp",), process_ids=range(4)), ["dp"])]
    how = {"num_samples": 3, "batch_size": 4, "num_data_ranks": 4}
    for plan, dealt in ((ShardPlan(**how), True), (ShardPlan(**how, segments=((0, 1), (1, 4))), False)):
        [(what, _)] = hazards_of(plan, meshes, "each", None, 0, dealt=dealt)
        assert what == "4 data ranks share 3 samples: 1 of them get nothing but padding"


def test_files_have_no_step_whose_samples_are_known(tmp_path):
    (tmp_path / "a.txt").write_text("1\n")
    assert "--step: which samples are where in files" in asked(
        "plan", "--files", tmp_path / "a.txt", *FINE[2:], "--step", 0, code=2
    )


def test_ranks_of_a_host_are_at_least_one():
    assert "--ranks-per-host must be an int >= 1, got 0" in asked("plan", *FINE, "--ranks-per-host", 0, code=2)


def test_workers_of_a_stream_get_its_parts_and_more_than_these_are_a_hazard(capsys, tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("x\n" * 10)
    flags = "--files", tmp_path / "*.txt", "--batch-size", 8, "--mesh", "dp=2"

    found = planned(capsys, *flags, "--workers", 3)
    for row, parts in zip(found["bytes"], ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
        shares = row["parts of each worker"]
        assert sorted(part for share in shares for part in share) == row["parts"] == parts
        assert sorted(map(len, shares)) == [1, 1, 2]
    assert not any("read nothing" in one["what"] for one in found["hazards"])
    found = planned(capsys, *flags, "--workers", 6)
    assert found["reading processes"] == 8
    (hazard,) = (one for one in found["hazards"] if "read nothing" in one["what"])
    assert hazard["what"] == "6 workers of each rank share 4 parts: 2 of them read nothing"
    assert "num_workers=4" in hazard["remedy"]


def test_parts_of_workers_are_told_of_remote_files_too_whose_sizes_are_not_asked_for(capsys):
    files = [f"https://host.invalid/{number}.jsonl" for number in range(8)]
    flags = "--files", *files, "--batch-size", 8, "--mesh", "dp=2"
    shares = planned(capsys, *flags, "--workers", 2)["bytes"]
    assert [share["parts of each worker"] for share in shares] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    assert [share["bytes"] for share in shares] == [None, None]
    assert "The sizes of the files are not known here" in asked("plan", *flags)


@pytest.mark.parametrize(("workers", "shares", "idle"), [(3, [1, 1, 2], 0), (4, [1] * 4, 0), (6, [1] * 4, 2)])
def test_workers_are_asked_about_a_record_as_well(workers, shares, idle, capsys, tmp_path):
    record = record_of("dp=1", "each", tmp_path)
    found = planned(capsys, record, "--workers", workers)
    (row,) = found["shares"]
    assert sorted(part for share in row["parts of each worker"] for part in share) == row["parts"] == [0, 1, 2, 3]
    assert sorted(map(len, row["parts of each worker"])) == shares
    assert found["reading processes"] == len(shares)
    told = [one["what"] for one in found["hazards"] if "read nothing" in one["what"]]
    assert told == [f"{workers} workers of each rank share 4 parts: {idle} of them read nothing"] * bool(idle)
    assert "parts of each worker" in asked("plan", record, "--workers", workers, code=int(bool(found["hazards"])))


@pytest.mark.parametrize("command", ["plan"])
@pytest.mark.parametrize("flag", TOLD)
def test_what_a_record_tells_cannot_be_asked_otherwise_without_a_word(flag, command, tmp_path):
    said = asked(command, record_of("dp=1", "each", tmp_path), flag, TOLD[flag], code=2)
    assert f"{flag}: the record tells that" in said


def test_the_seed_of_a_record_is_its_own_and_that_of_a_simulation_draws_its_restarts(tmp_path):
    assert "--seed: the record tells that" in asked("plan", record_of("dp=1", "each", tmp_path), "--seed", 0, code=2)


@pytest.mark.parametrize("seed", range(24))
def test_a_source_with_the_share_that_is_advised_is_no_longer_drawn_too_often(seed):
    draw = random.Random(seed)
    small, large = draw.randrange(2, 40), draw.randrange(400, 5000)
    share = draw.choice([0.3, 0.5, 0.7, 0.9])

    def said(share, code):
        sources = ["--source", f"large={large}:{1 - share:.9f}", "--source", f"small={small}:{share:.9f}"]
        return asked("plan", *sources, "--batch-size", "1", "--mesh", "dp=1", code=code)

    advised = re.search(r"A share of (\S+) instead of", said(share, 1))[1]

    assert "source 'small'" not in said(float(advised), 0)


def test_plan_page_draws_the_steps_from_the_one_that_was_asked_for(tmp_path):
    asked("plan", *FINE, "--step", "3", "--epoch", "2", "--html", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "epoch 2, step 3" in page
    assert "epoch 2, step 2" not in page
    assert "<script" not in page
