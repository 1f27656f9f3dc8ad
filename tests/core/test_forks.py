"""What keeps threads that read ahead and forks apart."""

import time

from paddle_shard.core.forks import MAX_WAIT, between_batches, reader_lock


def test_between_batches_does_not_wait_for_the_thread_that_forks():
    """A sample may begin workers of its own."""
    lock = reader_lock()
    start = time.monotonic()
    with lock, between_batches():
        pass
    assert time.monotonic() - start < MAX_WAIT / 2
