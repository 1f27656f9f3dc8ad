"""Where ranks meet that Paddle has brought no store to."""

import pytest

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.rendezvous import Rendezvous


def test_rendezvous_names_a_host_that_nobody_knows(caplog, monkeypatch):
    monkeypatch.setattr("paddle_shard.core.warn_once._WARNED", set())
    monkeypatch.setattr("paddle_shard.ranks.rendezvous._NOTICE", 0.1)
    place = Rendezvous(
        host="no-such-host.invalid", port=1, owner=3, is_early=True
    )
    text = "global rank 3, which has the store where these ranks meet, cannot be reached at no-such-host.invalid:1"

    with pytest.raises(PeerLostError, match=text):
        place.connect(2, 0.5)

    assert caplog.text.count(text) == 1
