"""Where ranks meet that Paddle has brought no store to."""

import time

import pytest

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.rendezvous import Rendezvous


def test_a_host_whose_name_nobody_knows_is_named_while_it_is_tried(caplog, monkeypatch):
    monkeypatch.setattr("paddle_shard.core.warn_once._SAID", set())
    until = time.monotonic() + 0.5
    place = Rendezvous(host="no-such-host.invalid", port=1, owner=3, early=True)

    with pytest.raises(
        PeerLostError,
        match=r"global rank 3.* cannot be reached at no-such-host.invalid:1",
    ):
        place.store(2, 1.0, wanted=lambda: time.monotonic() < until)

    said = "global rank 3 is where these ranks meet, and cannot be reached at no-such-host.invalid:1: "
    assert caplog.text.count(said) == 1
