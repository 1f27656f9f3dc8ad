"""The table on which the ranks of a host post what they have announced."""

import os

from paddle_shard.ranks.host_memory import HostTable
from paddle_shard.ranks.progress import MAX_ITERATIONS


def tables(ranks):
    found = [HostTable(ranks, rank) for rank in ranks]
    for table in found:
        table.find(found[0].place)
    return found


def test_table_counts_the_steps_that_all_ranks_have_posted():
    one, other = tables((3, 7))
    one.post(0, 5, 0)
    assert one.least(0, {}) == -1, "the other has not posted"
    other.post(0, 2, 0)
    assert one.least(0, {}) == other.least(0, {}) == 2
    other.post(0, 1 << 31, 0)
    assert one.least(0, {}) == 5


def test_table_waits_for_the_notes_that_were_sent_before():
    one, other = tables((3, 7))
    for sent in (1, 1 << 15, (1 << 16) + 2):
        one.post(4, 9, 0)
        other.post(4, 9, sent)
        assert one.least(4, {7: sent - 1}) == 0
        assert one.least(4, {7: sent}) == one.least(4, {7: sent + 3}) == 9


def test_table_does_not_know_an_iteration_whose_place_is_taken():
    one, other = tables((3, 7))
    for table in (one, other):
        table.post(1, 9, 0)
    other.post(1 + MAX_ITERATIONS, 4, 0)
    assert one.least(1, {}) == one.least(1 + MAX_ITERATIONS, {}) == -1
    one.post(1 + MAX_ITERATIONS, 6, 0)
    assert one.least(1 + MAX_ITERATIONS, {}) == 4


def test_table_is_found_by_its_place_and_token(tmp_path):
    hub, member = HostTable((0, 2), 0), HostTable((0, 2), 2)
    path, token = hub.place.split()
    (tmp_path / "short").write_bytes(b"")
    # with the token, but not the memory of a process
    elsewhere = tmp_path / "proc"
    elsewhere.write_bytes(bytes.fromhex(token) + bytes(hub._size))
    hub.find(hub.place)
    hub.post(0, 3, 0)
    for place in (
        "",
        f"{path} {'0' * len(token)}",
        f"{tmp_path / 'short'} {token}",
        f"/proc/{os.getpid()}/fd/9999 {token}",
        f"{elsewhere} {token}",
    ):
        member.find(place)
        member.post(0, 4, 0)
        assert member.least(0, {}) == hub.least(0, {}) == -1
    member.find(hub.place)
    member.post(0, 4, 0)
    assert member.least(0, {}) == hub.least(0, {}) == 3
