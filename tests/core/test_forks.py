"""What keeps threads that read ahead and forks apart."""

import sys
import threading
import time

from paddle_shard.core.forks import MAX_WAIT, between_batches, reader_lock


def test_between_batches_does_not_wait_for_the_thread_that_forks():
    """A sample may begin workers of its own."""
    lock = reader_lock()
    start = time.monotonic()
    with lock, between_batches():
        pass
    assert time.monotonic() - start < MAX_WAIT / 2


def test_between_batches_allows_other_threads_to_make_locks():
    is_over = threading.Event()
    kept = [reader_lock() for _ in range(30)]

    def make_locks():
        locks = []
        while not is_over.is_set():
            locks.append(reader_lock())
            del locks[50:]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=make_locks)
    thread.start()
    try:
        for _ in range(500):
            with between_batches():
                assert kept
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
