"""`paddle-shard lint` names each sample that is unreadable, doubled or unlike the others, and nothing else."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest

from tests.extras import needs
from tests.record.runs import asked, asked_elsewhere
from tests.sources.http_server import serving
from tests.sources.laws import FILE_KINDS, files, names
from tests.sources.s3_server import BUCKET, serving_s3

needs("webdataset", "pyarrow")


def npy(value):
    np.save(buffer := io.BytesIO(), value)
    return buffer.getvalue()


def tar(samples):
    """A tar of (key, {ending: bytes})."""
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w") as archive:
        for key, fields in samples:
            for ending, content in fields.items():
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def sample(number, shape=(4, 3), dtype=np.uint8, **more):
    return f"{number:04}", {"npy": npy(np.zeros(shape, dtype)), "cls": str(number % 10).encode(), **more}


def write(folder, **shards):
    for name, content in shards.items():
        (folder / f"{name}.tar").write_bytes(content if isinstance(content, bytes) else tar(content))
    return folder / "*.tar"


def faults(*arguments):
    """[fault: sample of file: why]; each kind of fault is a hazard."""
    found = asked("lint", *arguments, "--json", code=1)
    kinds = [one["fault"] for one in found["faults"]]
    assert sorted(hazard["what"] for hazard in found["hazards"]) == sorted(
        f"{'once' if kinds.count(kind) == 1 else f'{kinds.count(kind)} times'}: {kind}" for kind in set(kinds)
    )
    return [f"{one['fault']}: sample {one['sample']} of {one['file']}: {one['why']}" for one in found["faults"]]


@pytest.mark.parametrize("kind", sorted({kind.ending for kind in FILE_KINDS.values()}))
def test_files_of_every_source_that_are_fine_have_no_hazard_and_are_read_to_their_ends(kind, tmp_path):
    for name, content in files().items():
        if name.endswith(kind):
            (tmp_path / name).write_bytes(content)
    stream = next(one.stream for one in FILE_KINDS.values() if one.ending == kind)
    filled = [name for name in names(tmp_path, kind) if sum(1 for _ in stream([name]).in_parts(1))]

    found = asked("lint", *filled, "--json")

    assert found["hazards"] == []
    assert found["files"] == {name: sum(1 for _ in stream([name]).in_parts(1)) for name in filled}


def test_a_number_that_makes_batches_of_another_dtype_is_of_another_form(tmp_path):
    """Alone it can be stacked with the others; but the batch is of floats then, on this rank and not on others."""
    lines = [{"n": number, "x": 1.5} for number in range(40)]
    lines[7]["n"], lines[9]["x"] = 1.5, 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = faults(tmp_path / "a.jsonl")
    assert [one.split(" of ")[0] for one in found] == ["other form: sample 7"]
    assert "['n'] makes batches of ('float64', (2,)), and most make ('int64', (2,))" in found[0]


def test_a_folder_is_told_as_that(tmp_path):
    assert f"{tmp_path} is a folder. Give its files" in asked("lint", tmp_path, code=2)


def test_unreadable_samples_are_named_by_shard_and_number_with_the_reason(tmp_path):
    good = [sample(number) for number in range(6)]
    cut = tar([sample(number) for number in range(10, 16)])
    bad = [*(sample(number) for number in range(20, 23)), ("0023", {"npy": b"no array", "cls": b"3"}), sample(24)]
    urls = write(tmp_path, a=good, cut=cut[:6000], bad=bad)

    found = faults(urls)

    assert len(found) == 2
    assert any(f"sample 3 of {tmp_path}/bad.tar: " in one and "'npy'" in one for one in found)
    assert any(f"of {tmp_path}/cut.tar: " in one and "no sample from there on" in one for one in found)
    assert asked("lint", urls, "--json", code=1)["files"][f"{tmp_path}/bad.tar"] == 5


def test_a_line_that_is_not_json_is_named_and_the_lines_after_it_are_read(tmp_path):
    lines = [json.dumps({"id": number}) for number in range(8)]
    lines[3] = "{broken"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))

    (found,) = faults(tmp_path / "a.jsonl.gz")

    assert f"unreadable: sample 3 of {tmp_path}/a.jsonl.gz: " in found
    assert "line 4 is not JSON" in found
    assert asked("lint", tmp_path / "a.jsonl.gz", "--json", code=1)["samples"] == 8


def test_keys_that_are_doubled_within_a_shard_and_across_shards_are_named(tmp_path):
    a, b = [sample(number) for number in (0, 1, 2, 1)], [sample(number) for number in (5, 2, 6)]
    found = faults(write(tmp_path, a=a, b=b))

    assert found == [
        f"same key: sample 3 of {tmp_path}/a.tar: the key of sample 1 of {tmp_path}/a.tar",
        f"same key: sample 1 of {tmp_path}/b.tar: the key of sample 2 of {tmp_path}/a.tar",
    ]


def test_a_field_is_the_key_if_it_is_named(tmp_path):
    for name, ids in {"a": [1, 2, 3], "b": [4, 2]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"id": i}) + "\n" for i in ids))
    asked("lint", tmp_path / "*.jsonl")
    (found,) = faults(tmp_path / "*.jsonl", "--key", "id")
    assert found == f"same key: sample 1 of {tmp_path}/b.jsonl: the key of sample 1 of {tmp_path}/a.jsonl"
    assert "no sample has the field 'name'" in asked("lint", tmp_path / "*.jsonl", "--key", "name", code=1)


def test_fields_that_are_missing_or_there_besides_are_named(tmp_path):
    a, b = [sample(number) for number in range(5)], [sample(number) for number in range(5, 8)]
    del a[2][1]["cls"]
    b[1][1]["txt"] = b"more"
    found = faults(write(tmp_path, a=a, b=b))

    assert sorted(found) == [
        f"other fields: sample 1 of {tmp_path}/b.tar: also 'txt' (1 of this kind)",
        f"other fields: sample 2 of {tmp_path}/a.tar: no 'cls' (1 of this kind)",
    ]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"shape": (4, 4)}, "samples of different shapes cannot be stacked at field ['npy']: (4, 3), (4, 4)"),
        ({"dtype": np.int64}, "samples differ in their dtype at field ['npy']: uint8, int64"),
        ({"cls": b"7.5"}, None),
    ],
)
def test_shapes_and_dtypes_that_would_make_no_batch_are_named_and_others_not(odd, reason, tmp_path):
    a, b = [sample(number) for number in range(5)], [sample(number) for number in range(5, 8)]
    b[1] = sample(6, **odd)
    urls = write(tmp_path, a=a, b=b)
    if reason is None:  # as the file says it, not as an array: reading it fails
        assert "sample 1" in faults(urls)[0]
        return
    (found,) = faults(urls)
    assert found == f"other form: sample 1 of {tmp_path}/b.tar: {reason} (1 of this kind)"


def test_lists_of_different_lengths_make_no_batch(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [1, 2, 3]}\n{"ids": [4, 5]}\n')
    (found,) = faults(tmp_path / "a.jsonl")
    assert "other form: sample 1 of" in found
    assert "differ in their number of fields at field ['ids']: 2, 3" in found
    assert "pad them in a collate_fn" in asked("lint", tmp_path / "a.jsonl", code=1)


def test_tokens_are_ragged_and_what_is_wrong_among_them_is_still_found(tmp_path):
    """However many lengths there are."""
    lines = [json.dumps({"ids": list(range(1 + number * 7 % 900))}) for number in range(2000)]
    (tmp_path / "fine.jsonl").write_text("\n".join(lines) + "\n")
    assert "field 'ids' has 900 lengths, from 1 to 900: pad_to=, Packed or" in asked("lint", tmp_path / "fine.jsonl")
    lines[1500], lines[1600] = '{"ids": "oops"}', '{"id": [1]}'
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    found = faults(tmp_path / "bad.jsonl")
    assert len(found) == 2
    assert any("sample 1500 of" in one and "one of them is 'oops'" in one for one in found)
    assert any("sample 1600 of" in one and "no 'ids', also 'id'" in one for one in found)


@pytest.mark.parametrize("item", [7, "tag", [1, 2, 3, 4], {"role": "user", "content": "x"}], ids=str)
@pytest.mark.parametrize("lengths", [3, 30])
def test_lists_of_anything_are_ragged(item, lengths, tmp_path):
    lines = [json.dumps({"x": [item] * (1 + number % lengths)}) for number in range(90)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    assert f"field 'x' has {lengths} lengths, from 1 to {lengths}" in asked("lint", tmp_path / "a.jsonl")


def test_a_list_of_another_length_than_nearly_all_is_one(tmp_path):
    lines = [json.dumps({"x": [0.5] * (127 if number == 70 else 128)}) for number in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (found,) = faults(tmp_path / "a.jsonl")
    assert "sample 70 of" in found


def test_forms_beyond_those_that_are_looked_at_are_counted(tmp_path):
    urls = write(tmp_path, a=[sample(number, shape=(number + 1, 3)) for number in range(100)])
    found = asked("lint", urls, "--json", code=1)
    assert sum(one["samples"] for one in found["faults"]) == 99
    assert max(one["samples"] for one in found["faults"]) == 100 - 64
    assert "HAZARD: 99 times: other form." in asked("lint", urls, code=1)


def test_a_number_that_no_array_holds_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 5 + f'{{"a": {2**70}}}\n')
    (found,) = faults(tmp_path / "a.jsonl")
    assert "sample 5 of" in found


def test_a_parquet_file_without_rows_is_empty(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": pyarrow.array([], "int64")}), tmp_path / "a.parquet")
    assert faults(tmp_path / "a.parquet") == [f"empty: sample 0 of {tmp_path}/a.parquet: there is no sample"]


def test_where_nothing_was_read_no_key_is_missed(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert "Give another --key" not in asked("lint", tmp_path / "a.jsonl", "--key", "id", code=1)


def test_a_limit_reads_the_first_samples_of_each_shard_only(tmp_path):
    a = [sample(number) for number in range(6)]
    a[4] = sample(4, shape=(1,))
    urls = write(tmp_path, a=a)
    assert len(faults(urls)) == 1
    assert asked("lint", urls, "--limit", 4, "--json")["samples"] == 4


def test_an_empty_file_and_one_that_is_not_there_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("")
    found = faults(tmp_path / "a.txt", tmp_path / "none.txt")
    assert [one.partition(": ")[0] for one in found] == ["missing", "empty"]
    assert f"sample 0 of {tmp_path}/none.txt: " in found[0]
    assert f"sample 0 of {tmp_path}/a.txt: there is no sample" in found[1]


def test_of_many_faults_people_see_some_of_each_kind_and_programs_all(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n" * 50)
    (tmp_path / "b.jsonl").write_text('{"id": 1}\n{"id": 2}\n{"id": [1]}\n')
    assert "other form" in asked("lint", tmp_path / "*.jsonl", code=1)
    shown = asked("lint", tmp_path / "a.jsonl", code=1)
    assert shown.count("is not JSON") == 20
    assert "and 30 more, which --json shows" in shown
    assert "HAZARD: 50 times: unreadable" in shown
    assert len(faults(tmp_path / "a.jsonl")) == 50


def test_shards_are_read_over_http_and_a_broken_one_is_named_without_its_secrets():
    fine, bad = [sample(number) for number in range(4)], tar([sample(number) for number in range(9, 12)])[:3000]
    with serving({"a.tar": tar(fine), "b.tar": bad}) as server:
        assert asked("lint", f"{server.url}/a.tar", "--json")["samples"] == 4
        found = faults(f"{server.url}/a.tar?token=secret", f"{server.url}/b.tar?token=secret")
    assert [one.partition(": ")[0] for one in found] == ["unreadable"]
    assert "secret" not in str(found)


def test_shards_are_read_from_s3(monkeypatch):
    for name in ("moto", "s3fs", "flask"):
        pytest.importorskip(name)
    with serving_s3(files()) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        filled = names(f"s3://{BUCKET}", "parquet")[:2]
        assert asked("lint", *filled, "--json", code=0)["samples"] > 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["a.bin"], "its name does not tell what it holds. Give --kind webdataset or"),
        (["none-*.txt"], "this pattern matches no file"),
        (["a.txt", "--limit", "0"], "--limit must be an int >= 1"),
        (["a.txt", "--workers", "0"], "--workers must be an int >= 1"),
        (["a.tar", "--decode", "rgb9"], "'rgb9' is neither a function nor one of"),
        (["a.txt", "--decode", "rgb8"], "--decode rgb8: none of these files is a tar"),
        ([], "required: URL"),
    ],
)
def test_bad_arguments_exit_with_2(flags, text):
    assert text in asked("lint", *flags, code=2)


def test_it_needs_no_paddle(tmp_path):
    found = asked_elsewhere("lint", write(tmp_path, a=[sample(number) for number in range(3)]))
    assert found["samples"] == 3


def test_a_column_without_a_name_is_a_field_as_others(tmp_path):
    (tmp_path / "a.csv").write_text(",id\n1,2\n3,4\n")
    assert asked("lint", tmp_path / "a.csv", "--json")["samples"] == 2


def test_a_file_that_is_not_there_is_missing_and_not_damaged(tmp_path):
    (found,) = faults(tmp_path / "none.jsonl")
    assert found.startswith(f"missing: sample 0 of {tmp_path}/none.jsonl: ")
    assert "HAZARD: once: missing. Correct the path." in asked("lint", tmp_path / "none.jsonl", code=1)
