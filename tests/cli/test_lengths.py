"""`paddle-shard lengths` writes the file that `Packed(lengths=)` reads, also after a kill, and counts nothing twice."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from paddle_shard import Packed
from paddle_shard.sources.packed import read_lengths
from tests.deadlines import HANG
from tests.record.runs import asked, asked_elsewhere

pytestmark = pytest.mark.processes

MODULE = """
import os, time
import numpy as np

class Documents:
    def __len__(self):
        return {number}
    def __getitem__(self, at):
        with open("read.txt", "a") as file:
            file.write(f"{{at}}\\n")
        {does}
        return {{"input_ids": np.arange(at * 7 % 50)}}

documents = Documents()
def made():
    return documents
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module with documents, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name, number=300, does="pass"):
        (tmp_path / f"{name}.py").write_text(MODULE.format(number=number, does=does))
        return f"{name}:documents"

    return write


def lengths_of(number):
    return [at * 7 % 50 for at in range(number)]


def reads(tmp_path):
    return Counter(map(int, (tmp_path / "read.txt").read_text().split()))


def test_documents_that_packed_refuses_have_no_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_documents.py").write_text(
        "import numpy as np\n"
        "pairs = [([1, 2], [3]), ([1], [2])]\n"
        "tables = [np.zeros((3, 4), int)] * 2\n"
        "floats = [[1.5, 2.5]] * 2\n"
    )
    for name in ("pairs", "tables", "floats"):
        said = asked("lengths", "--open", f"odd_documents:{name}", "-o", tmp_path / "a.npz", "--workers", 1, code=1)
        assert "the tokens of document 0 cannot be counted" in said
        assert not (tmp_path / "a.npz").exists()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_file_is_what_packed_writes_itself_and_reads(workers, tmp_path, module):
    name = module("documents_of_lengths")
    found = asked("lengths", "--open", name, "-o", "ours.npz", "--workers", workers, "--json")

    documents = [np.arange(length) for length in lengths_of(300)]
    Packed(documents, 64, lengths="theirs.npz")
    (ours, about), (theirs, wanted) = read_lengths("ours.npz"), read_lengths("theirs.npz")
    assert ours.tolist() == theirs.tolist() == lengths_of(300)
    assert about == wanted
    assert found == {"documents": 300, "tokens": sum(lengths_of(300))}
    assert len(Packed(documents, 64, lengths="ours.npz")) == len(Packed(documents, 64))
    assert not list(tmp_path.glob("*.part"))
    before = sum(reads(tmp_path).values())
    assert "ours.npz: 300 documents" in asked("lengths", "--open", name, "-o", "ours.npz")
    assert sum(reads(tmp_path).values()) - before == 32  # it is there: some are read to see that it is of them


def test_a_run_that_is_killed_goes_on_and_its_processes_end(tmp_path, module):
    name = module("slow_documents", does="time.sleep(0.01)")
    command = [sys.executable, "-m", "paddle_shard", "lengths", "--open", name, "-o", "found.npz", "--workers", "2"]
    killed = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    part, deadline = tmp_path / "found.npz.input_ids.part", time.monotonic() + HANG
    while not (part.exists() and (np.load(part) >= 0).sum() > 60):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    known = np.flatnonzero(np.load(part) >= 0)
    assert len(known) < 300
    while True:  # until the processes that it has forked are gone, too
        before = reads(tmp_path)
        time.sleep(0.3)
        if reads(tmp_path) == before:
            break
        assert time.monotonic() < deadline

    asked("lengths", "--open", name, "-o", "found.npz")

    assert read_lengths("found.npz")[0].tolist() == lengths_of(300)
    again = reads(tmp_path) - before
    checked = 32  # documents that are read once more, to see that the file is of them
    assert sum(again[at] for at in known.tolist()) <= checked


def test_documents_that_cannot_be_counted_are_named_and_the_others_are_kept(tmp_path, module):
    name = module("bad_documents", does="assert at not in (7, 150) or os.path.exists('mended'), 'broken'")
    shown = asked("lengths", "--open", name, "-o", "found.npz", code=1)
    for number in (7, 150):
        assert f"document {number} cannot be counted: AssertionError: broken" in shown
    assert not (tmp_path / "found.npz").exists()
    (tmp_path / "mended").touch()
    asked("lengths", "--open", "bad_documents:made", "-o", "found.npz")
    assert read_lengths("found.npz")[0].tolist() == lengths_of(300)
    assert max(reads(tmp_path)[at] for at in range(200, 205)) <= 2  # once, and perhaps to check the file


def test_a_process_that_dies_is_told_and_nothing_hangs(module):
    name = module("deadly_documents", does="at == 40 and os._exit(3)")
    said = asked("lengths", "--open", name, "-o", "found.npz", "--workers", 2, code=1)
    first, last = map(int, re.search(r"a process that counts has died, among documents (\d+) to (\d+)", said).groups())
    assert first <= 40 <= last < 300


def test_documents_that_exit_are_told(module):
    name = module("leaving_documents", does="at == 40 and exit(3)")
    said = asked("lengths", "--open", name, "-o", "found.npz", code=1)
    assert "the tokens of document 40 cannot be counted: SystemExit: 3" in said


def test_it_needs_no_paddle(module):
    assert asked_elsewhere("lengths", "--open", module("plain_documents"), "-o", "found.npz")["documents"] == 300


def test_bad_arguments_exit_with_2(tmp_path, module):
    name = module("other_documents")
    assert "Give module:name" in asked("lengths", "--open", "none:none", "-o", "a.npz", code=2)
    assert "--workers must be an int >= 1" in asked("lengths", "--open", name, "-o", "a.npz", "--workers", 0, code=2)
    np.save("a.npz.input_ids.part.npy", np.full(7, -1))
    (tmp_path / "a.npz.input_ids.part.npy").rename(tmp_path / "a.npz.input_ids.part")
    assert "is of 7 documents, and there are 300" in asked("lengths", "--open", name, "-o", "a.npz", code=2)
    assert "--output" in asked("lengths", "--open", name, code=2)
    assert "its length must be an int >= 1" in asked("lengths", "--open", module("none", 0), "-o", "b.npz", code=2)


def test_a_file_of_other_documents_is_refused_and_counted_anew_when_it_is_removed(tmp_path, module):
    asked("lengths", "--open", module("old_documents"), "-o", "found.npz")
    longer = module("new_documents", does="at += 1")
    assert "'found.npz' is of other documents" in asked("lengths", "--open", longer, "-o", "found.npz", code=2)
    (tmp_path / "found.npz").unlink()
    asked("lengths", "--open", longer, "-o", "found.npz")
    assert read_lengths("found.npz")[0].tolist() == lengths_of(301)[1:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:9],
        lambda content: content[: len(content) // 2],
        lambda content: b"PK" + content,
        lambda content: content.replace(b"<i8", b"<f8"),
        lambda content: content.replace(b"(300,)", b"(300,1)").replace(b"1), }", b"1),}"),
    ],
)
def test_what_an_earlier_run_has_counted_is_told_by_name_if_it_is_damaged(damage, tmp_path, module):
    name, part = module("damaged_documents"), tmp_path / "a.npz.input_ids.part"
    with open(part, "wb") as file:
        np.save(file, np.full(300, -1))
    part.write_bytes(damage(part.read_bytes()))
    said = asked("lengths", "--open", name, "-o", "a.npz", code=2)
    assert "a.npz.input_ids.part, what an earlier run has counted, is damaged. Remove it" in said
    part.unlink()
    asked("lengths", "--open", name, "-o", "a.npz")


def test_a_part_of_other_documents_or_with_another_number_is_refused_before_anything_is_written(tmp_path, module):
    name, part = module("first_documents"), tmp_path / "a.npz.input_ids.part"
    with open(part, "wb") as file:
        np.save(file, np.array([*lengths_of(200), *[-1] * 100]))
    longer = module("other_documents_of_the_part", does="at += 1")
    said = asked("lengths", "--open", longer, "-o", "a.npz", code=2)
    assert "a.npz.input_ids.part has another length of document 0: it is damaged, or of other documents" in said
    assert not (tmp_path / "a.npz").exists()
    asked("lengths", "--open", name, "-o", "a.npz")
    assert read_lengths("a.npz")[0].tolist() == lengths_of(300)
    assert (tmp_path / "a.npz").stat().st_mode & 0o777 == 0o644


def test_of_many_documents_that_cannot_be_counted_some_are_shown(tmp_path, module):
    said = asked("lengths", "--open", module("texts", does="return 'text'"), "-o", "a.npz", code=1)
    assert said.count("the tokens of document") == 20
    assert "the tokens of 280 more documents cannot be counted" in said


def test_a_folder_that_is_not_there_is_named(module):
    said = asked("lengths", "--open", module("for_nowhere"), "-o", "nowhere/a.npz", code=2)
    assert re.search(r"--output nowhere/a.npz cannot be written: No such file or directory: .*/nowhere", said)
